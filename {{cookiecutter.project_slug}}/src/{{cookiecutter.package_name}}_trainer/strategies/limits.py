"""What a strategy declares about itself, which is read before any process starts."""

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Launcher = Literal["subprocess", "spawn", "fork"]


@dataclass(frozen=True)
class Limits:
    """What a strategy does not support, and how it works; read by checks, tables and tests.

    Args:
        max_devices: Maximum number of devices per node; ``None``: unlimited.
        max_nodes: Maximum number of nodes; ``None``: unlimited.
        accelerators: Accelerators on which it runs.
        refused: Unsupported precisions and :data:`FEATURES`, with a reason and an alternative.
        launcher: How several processes are started, if nothing has started them.
        launched_by: The only command that can start several processes of it, and so determines
            their number; ``None``: any launcher.
        sources: Sources of the layout that belong to this command.
        packages: Required packages, each with the command that installs it.
        one_process_per_node: One process drives all devices of a node, instead of one each.
        shards_parameters: Parameters are sharded over processes. Then all processes take part in
            every forward, and after a fit the weights are in its checkpoints.
        always: What it always does. ``"compile"``: all operations of a step together, so that they
            must be the same ones in each step. ``"learning_rate_scaling"``: by the number of
            replicas. ``"asynchronous"``: steps without other ranks: nothing waits for them between
            the ends of epochs, validations and checkpoints but in the first step, and the logged
            values of a step are those of the main rank.
        needs_optimizers: The module must have a ``configure_optimizers``.
    """

    max_devices: int | None = None
    max_nodes: int | None = None
    accelerators: tuple[str, ...] = ("cpu", "cuda")
    refused: Mapping[str, str] = field(default_factory=dict)
    launcher: Launcher = "subprocess"
    launched_by: str | None = None
    sources: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    one_process_per_node: bool = False
    shards_parameters: bool = False
    always: tuple[Literal["compile", "learning_rate_scaling", "asynchronous"], ...] = ()
    needs_optimizers: bool = True

    def local_processes(self, devices: int) -> int:
        """Number of processes per node for a number of devices per node."""
        return 1 if self.one_process_per_node else devices

    def problems(
        self,
        name: str,
        accelerator: str,
        precision: str,
        devices: int,
        nodes: int = 1,
        features: Collection[str] = (),
    ) -> list[str]:
        """One line for each requested feature that the strategy does not support."""
        lines = [
            f"strategy={name!r} needs the package {package}, which is not installed: {command}"
            for package, command in self.packages.items()
            if importlib.util.find_spec(package) is None
        ]
        lines += [
            f"strategy={name!r} does not support {FEATURES.get(feature, repr(feature))}: {reason}"
            for feature, reason in self.refused.items()
            if feature == precision or feature in features
        ]
        if accelerator not in self.accelerators:
            on = " or ".join(self.accelerators)
            lines.append(f"strategy={name!r} runs on {on}, not on {accelerator}")
        if self.max_devices is not None and devices > self.max_devices:
            problem = f"uses {self.max_devices} device and {devices} were requested"
            lines.append(f"strategy={name!r} {problem}; use strategy='ddp', or devices=1")
        if self.max_nodes is not None and nodes > self.max_nodes:
            problem = f"runs on {self.max_nodes} node and there are {nodes}"
            lines.append(f"strategy={name!r} {problem}; use strategy='ddp'")
        return lines


FEATURES = {
    "manual_optimization": "manual optimization",
    **{name: name for name in ("sync_batchnorm", "learning_rate_scaling", "compile")},
    **{name: name for name in ("activation_checkpointing", "log_gradient_norm")},
    "skipping": "nonfinite_loss='skip'",
    "uneven_inputs": "uneven_inputs='join'",
    "skipped_batches": "may_skip_batches",
    "skipped_batches_of_a_step": "may_skip_batches with accumulate_grad_batches",
    "parameter_averaging": "averages of the parameters (EMA)",
    "trainable_weights": "checkpoint_weights='trainable'",
}
