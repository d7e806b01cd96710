"""What is measured. Imports nothing heavy: refusals come at once, and the first step is timed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A GPT: `bias` of all linear layers, `tied` where the last one is the first embedding."""

    vocabulary: int
    context: int
    width: int
    depth: int
    heads: int = 8
    bias: bool = False
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Numbers in the model: embeddings, blocks, a norm, and a last layer that is not tied."""
        block = 12 * self.width**2 + (13 if self.bias else 4) * self.width
        rows = self.vocabulary * (1 if self.tied else 2) + self.context + 2
        return rows * self.width + self.depth * block

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward; Chowdhery et al. 2022 (PaLM), appendix B."""
        return 6 * self.parameters + 12 * self.depth * self.width * self.context


SIZES = {
    "transformer": Size(256, 64, 192, depth=4, heads=4, bias=True),
    # 16 tokens: activations are small beside parameters, and a step is short.
    "memory": Size(16, 16, 1024, depth=8),
    "memory_quick": Size(16, 16, 256, depth=4),
    # 384 tokens: activations count.
    "LongGPT": Size(4096, 384, 640, depth=12),
    "gpt2": Size(50_304, 1024, 768, depth=12, heads=12, bias=True, tied=True),
    "gpt2_quick": Size(64, 16, 32, depth=2, heads=2, bias=True, tied=True),
}


@dataclass(frozen=True)
class Job:
    """One measurement of one of contestants.py: who trains what of subjects.py, and for how long.

    A variant is what it does besides training: `"bare"`, `"logging"`, … The bundled trainer saves
    at the end of each epoch of so many steps. `mixed` is in bf16, with clipping.
    """

    contestant: str
    variant: str = "bare"
    subject: str = "mlp"
    warmup: int = 10
    steps: int = 40
    epoch: int = 1000
    batch: int = 8
    fused: bool = False
    mixed: bool = False
    device: str = "cpu"

    @property
    def total(self) -> int:
        """All steps: the window ends when the step after it begins."""
        return self.warmup + self.steps + 1

    @property
    def size(self) -> Size:
        """Of a subject that is a GPT."""
        return SIZES[self.subject]
