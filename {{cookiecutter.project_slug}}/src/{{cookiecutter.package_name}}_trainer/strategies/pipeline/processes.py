"""The processes of a pipeline, and the process groups in which they communicate."""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass
class Processes:
    """This process' place in its pipeline, and its groups; a device mesh may provide them.

    Rank 0 of a pipeline has the last stage, because it logs and returns predictions.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        count: Number of processes of a pipeline.
        rounds: Number of stages of a process.
        timeout_seconds: Timeout of collectives.
        are_neighbors: Whether the processes of a pipeline have neighboring ranks; if not, the
            processes of a stage have.
    """

    rank: int
    world_size: int
    count: int
    rounds: int
    timeout_seconds: float
    are_neighbors: bool = True
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    links: dict[tuple[bool, bool], dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count == 1:
            return
        # NCCL matches the messages of two processes by their order, so each direction has its own
        # group; and so have the messages from the last process to the first one.
        for is_gradient in (False, True):
            for wraps in (False, True)[: 1 + (self.rounds > 1)]:
                self.links[is_gradient, wraps] = self._new_group(range(self.count))

    @property
    def replicas(self) -> int:
        """Number of pipelines."""
        return self.world_size // self.count

    @property
    def replica(self) -> int:
        """Index of this process' pipeline."""
        return self.rank // self.count if self.are_neighbors else self.rank % self.replicas

    @property
    def position(self) -> int:
        """Position of this process in its pipeline; 0 has the first stage."""
        neighbor = self.rank % self.count if self.are_neighbors else self.rank // self.replicas
        return self.count - 1 - neighbor

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.count * self.rounds

    @property
    def own_stages(self) -> Sequence[int]:
        """Stages of this process."""
        return range(self.position, self.stages, self.count)

    @property
    def has_first(self) -> bool:
        """Whether this process has the first stage."""
        return self.position == 0

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage."""
        return self.position == self.count - 1

    def position_of(self, stage: int) -> int:
        """Position of the process that has a stage."""
        return stage % self.count

    def rank_at(self, position: int, replica: int | None = None) -> int:
        """Rank of the process at a position of a pipeline; by default, of this one."""
        index = self.replica if replica is None else replica
        neighbor = self.count - 1 - position
        if self.are_neighbors:
            return index * self.count + neighbor
        return neighbor * self.replicas + index

    def among(self, positions: Iterable[int]) -> dist.ProcessGroup | None:
        """Group of the processes at some positions of this pipeline.

        Created when first used: by all processes at once. ``None`` on other processes.
        """
        key = tuple(sorted(positions))
        if key not in self._groups:
            self._groups[key] = self._new_group(key)
        return self._groups[key] if self.position in key else None

    def _new_group(self, positions: Iterable[int]) -> dist.ProcessGroup:
        """One for each pipeline; this process' own, if it is in one."""
        ranks = [
            sorted(self.rank_at(position, replica) for position in positions)
            for replica in range(self.replicas)
        ]
        return _own_group(ranks, self.timeout_seconds)

    def across_replicas(self) -> dist.ProcessGroup | None:
        """Group of the processes with the same stages; ``None`` if there is one pipeline."""
        if self.replicas == 1:
            return None
        if () not in self._groups:
            ranks = [
                [self.rank_at(position, replica) for replica in range(self.replicas)]
                for position in range(self.count)
            ]
            self._groups[()] = _own_group(ranks, self.timeout_seconds)
        return self._groups[()]

    def close(self) -> None:
        """Drop the groups, and so gloo's threads."""
        self._groups.clear()
        self.links.clear()


def _own_group(ranks: list[list[int]], timeout_seconds: float) -> dist.ProcessGroup:
    timeout = datetime.timedelta(seconds=timeout_seconds)
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
    own: dist.ProcessGroup = group
    return own
