"""What a strategy cannot do, said before anything starts."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """What a strategy cannot do, for checks before a run, for tables and for tests.

    Args:
        max_devices: of one node; ``None``: any number.
        max_nodes: ``None``: any number.
        accelerators: that it runs on.
        refused: what else is refused, each with its reason and a way out: names of precisions, and
            of :data:`FEATURES`.
        launched_by: the command that alone can start several processes of it, and so decides how
            many there are; ``None``: any way.
        sources: of the layout, that this command leads to.
        packages: that must be installed, each with the command that installs it.
    """

    max_devices: int | None = None
    max_nodes: int | None = None
    accelerators: tuple[str, ...] = ("cpu", "cuda")
    refused: Mapping[str, str] = field(default_factory=dict)
    launched_by: str | None = None
    sources: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)

    def problems(self, name: str, asked: "Asked") -> list[str]:
        """One line for each thing asked of the strategy that it cannot do."""
        lines = [
            f"strategy={name!r} needs the package {package}, which is not installed: {command}"
            for package, command in self.packages.items()
            if importlib.util.find_spec(package) is None
        ]
        lines += [
            f"strategy={name!r} takes no {FEATURES.get(each, repr(each))}: {reason}"
            for each, reason in self.refused.items()
            if each == asked.precision or each in asked.features
        ]
        if asked.accelerator not in self.accelerators:
            on = " or ".join(self.accelerators)
            lines.append(f"strategy={name!r} runs on {on}, not on {asked.accelerator}")
        if self.max_devices is not None and asked.devices > self.max_devices:
            lines.append(
                f"strategy={name!r} uses {self.max_devices} device and {asked.devices} were asked "
                "for; use strategy='ddp', or devices=1"
            )
        if self.max_nodes is not None and asked.nodes > self.max_nodes:
            lines.append(
                f"strategy={name!r} runs on {self.max_nodes} node and there are {asked.nodes}; "
                "use strategy='ddp'"
            )
        return lines


FEATURES = {
    "manual_optimization": "manual optimization",
    "sync_batchnorm": "sync_batchnorm",
    "learning_rate_scaling": "learning_rate_scaling",
    "compile": "compile",
    "activation_checkpointing": "activation_checkpointing",
}


@dataclass(frozen=True)
class Asked:
    """What a run asks of its strategy."""

    accelerator: str
    precision: str
    devices: int
    nodes: int = 1
    features: frozenset[str] = frozenset()
