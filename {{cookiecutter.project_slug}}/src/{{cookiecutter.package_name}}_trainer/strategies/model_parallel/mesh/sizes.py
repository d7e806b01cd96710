"""The dimensions of a mesh, and their sizes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from ....errors import ConfigurationError
from . import styles

# Outermost first: neighboring ranks, on the same node, form a tensor group.
DIMENSIONS = ("pipeline", "data", "shard", "context", "tensor")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the dimensions of a mesh; one may be -1: all remaining processes.

    Args:
        data: Replicas of the model.
        shard: Shards of each replica's parameters, gradients and optimizer states, as in ``fsdp``.
        tensor: Ranks over which the layers of the module's ``parallelize_plan`` are sharded.
        pipeline: Stages of the model.
        context: Ranks over which sequences are split.
    """

    data: int = -1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    # So that plans import nothing of this family, which a project may leave out.
    styles = styles

    def problems(self) -> list[str]:
        """One line for each error that can be found without the number of processes."""
        lines = [
            f"strategy_options.{name}={size}: give a number above 0, or -1 for all remaining "
            "processes"
            for name, size in self
            if size < 1 and size != -1
        ]
        free = [name for name, size in self if size == -1]
        if len(free) > 1:
            lines.append(f"strategy_options: {' and '.join(free)} are -1; only one size may be")
        if self.pipeline != 1 and self.context != 1:
            lines.append(
                f"strategy_options: context={self.context} with pipeline={self.pipeline} is not "
                "supported: later stages do not know how a step has split its sequences; set one "
                "of them to 1"
            )
        return lines

    def on(self, processes: int) -> "Sizes":
        """The sizes on a number of processes, without -1.

        Raises:
            ConfigurationError: They do not multiply to it.
        """
        known = math.prod(size for _, size in self if size != -1)
        free = next((name for name, size in self if size == -1), None)
        whole = self if free is None else replace(self, **{free: processes // known})
        if math.prod(size for _, size in whole) == processes:
            return whole
        given = " x ".join(f"{name}={size}" for name, size in self if size != 1 or name == "data")
        if free is None:
            raise ConfigurationError(
                f"strategy_options: {given} is a mesh of {known} processes, and there are "
                f"{processes}; make one size -1, or change devices"
            )
        raise ConfigurationError(
            f"strategy_options: {given}: {processes} processes are not divisible by {known}"
        )

    def of_parameters(self, *, has_units: bool) -> "Sizes":
        """The sizes of the mesh of parameters, without ``context``.

        The ranks of a context group have the same parameters and other parts of their gradients:
        they are shards if there are units, and replicas otherwise.
        """
        name = "shard" if has_units else "data"
        return replace(self, context=1, **{name: getattr(self, name) * self.context})

    @property
    def replicas(self) -> int:
        """Number of parts into which a batch is split."""
        return self.data * self.shard

    def __iter__(self) -> Iterator[tuple[str, int]]:
        names = {field.name for field in fields(self)}
        return ((name, getattr(self, name)) for name in DIMENSIONS if name in names)
