"""The dimensions of a mesh, and their sizes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....errors import ConfigurationError
from . import styles

# Outermost first: neighboring ranks, on the same node, form a tensor group.
DIMENSIONS = ("data", "shard", "tensor")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the dimensions of a mesh, as in :class:`.strategy.Mesh`."""

    data: int = -1
    shard: int = 1
    tensor: int = 1

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
        return lines

    def on(self, processes: int) -> "Sizes":
        """The sizes on a number of processes, without -1; refused if they do not multiply to it."""
        known = math.prod(size for _, size in self if size != -1)
        free = next((name for name, size in self if size == -1), None)
        whole = self if free is None else replace(self, **{free: processes // known})
        if math.prod(size for _, size in whole) == processes:
            return whole
        given = " x ".join(f"{name}={size}" for name, size in self if size != 1 or name == "data")
        line = f"{given}: {processes} processes are not divisible by {known}"
        if free is None:
            line = (
                f"{given} is a mesh of {known} processes, and there are {processes}; make one size "
                "-1, or change devices"
            )
        raise ConfigurationError(f"strategy_options: {line}")

    @property
    def replicas(self) -> int:
        """Number of parts into which a batch is split."""
        return self.data * self.shard

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((name, getattr(self, name)) for name in DIMENSIONS)
