"""What a training step needs in memory, and how a strategy divides it: :meth:`Strategy.memory`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

_PROCESS = 16 * 2**20  # of a process on CPUs in any step; GPUs' context is in plan's margin
Mark = Literal["measured", "derived", "unverified"]
"""``measured``: traced, a step of the strategy's own class; ``derived``: computed from a trace of
one process, by a formula that benchmarks have confirmed; ``unverified``: by another formula."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a training step of one process without peers, and where it is to run.

    ``moments``: pairs in ascending order: bytes of gradients that were alive at some moments of
    forward and backward, and the most bytes of all else that was, beside parameters, buffers and
    states: activations, batch, temporary results.
    """

    parameters: int  # and buffers
    gradients: int  # of all trained parameters
    optimizer: int  # the states of all optimizers
    moments: Sequence[tuple[int, int]]
    step: int  # the most of temporary results while the optimizers step
    numels: Sequence[int]  # elements of each trained parameter, in the module's order
    unit: int = 0  # the parameters of the largest unit that ``fsdp`` would gather
    devices: int = 1  # per node
    nodes: int = 1
    accelerator: str = "cpu"  # or "cuda", or an engine's

    @property
    def ranks(self) -> int:
        return self.devices * self.nodes

    @property
    def elements(self) -> int:
        return sum(self.numels)

    @property
    def largest(self) -> int:
        """Bytes of the gradient of the largest parameter."""
        return self.gradients * max(self.numels, default=0) // max(self.elements, 1)

    @property
    def activations(self) -> int:
        """The most bytes in forward and backward beside gradients."""
        return max((other for _, other in self.moments), default=0)

    @property
    def is_on_host(self) -> bool:
        """Whether it computes on CPUs: optimizers then step one parameter after another."""
        return self.accelerator == "cpu"

    def step_of(self, share: float) -> int:
        """Bytes of :attr:`step` for a share of the parameters, each whole."""
        return self.step if self.is_on_host else round(self.step * share)

    def computing(self, share: float) -> "Sizes":
        """The sizes of a rank that computes a share of the activations."""
        return replace(self, moments=[(grad, round(other * share)) for grad, other in self.moments])

    def work(self, share: float = 1.0) -> int:
        """The most bytes in forward and backward, if each rank keeps a share of each gradient."""
        return max((int(share * grad) + other for grad, other in self.moments), default=0)

    def largest_share(self, *, in_order: bool = False) -> float:
        """The largest share of a rank, if whole parameters are dealt out to all ranks.

        Each is given to the rank with the fewest elements: the largest first, or in their order.
        """
        ranks = [0] * self.ranks
        for numel in self.numels if in_order else sorted(self.numels, reverse=True):
            ranks[ranks.index(min(ranks))] += numel
        return max(ranks) / max(self.elements, 1)


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs the most."""

    peak: int  # the most at any moment of a step; the others are not alive all at once
    parameters: int  # and buffers
    gradients: int  # when they are whole
    optimizer: int  # the states, and an engine's copy of the parameters
    activations: int  # the most in forward and backward beside gradients
    buckets: int = 0  # an engine's buffers
    gathered: int = 0  # parameters and gradients that are whole for a time
    host: int = 0  # in the host's memory, if a strategy offloads
    mark: Mark = "derived"  # how the numbers were found
    note: str = ""  # what to know of them


def divided(
    sizes: Sizes, *, parameters: float = 1.0, gradients: float = 1.0, optimizer: float = 1.0
) -> Sizes:
    """The sizes of a rank that holds these shares; ``moments`` and ``step`` are unchanged."""
    return replace(
        sizes,
        parameters=round(sizes.parameters * parameters),
        gradients=round(sizes.gradients * gradients),
        optimizer=round(sizes.optimizer * optimizer),
    )


def memory(
    own: Sizes,
    *,
    work: int | None = None,
    step: int | None = None,
    buckets: int = 0,
    gathered: int = 0,
    mark: Mark = "derived",
    note: str = "",
) -> Memory:
    """The memory of a rank, which holds ``own`` parameters, gradients and states.

    ``work``: the most in forward and backward beside parameters, states and buckets, and with
    ``gathered``; default: all gradients as they come, and what else is alive then. ``step``:
    likewise while the optimizers step; default: gradients and temporary results.
    """
    work = own.work() if work is None else work
    step = own.gradients + own.step if step is None else step
    peak = _PROCESS * own.is_on_host + own.parameters + own.optimizer + buckets + max(work, step)
    kept = own.parameters, own.gradients, own.optimizer, own.activations
    return Memory(peak, *kept, buckets, gathered, mark=mark, note=note)
