"""The processes of a pipeline, and the process groups in which they communicate."""

import datetime
from collections.abc import Iterable

import torch
import torch.distributed as dist


class Processes:
    """This process' place in its pipeline, and its groups; a device mesh may provide them.

    Rank 0 of a pipeline has the last stage, because it logs and returns predictions. ``position``:
    of this process in its pipeline; 0 has the first stage. ``replicas``: number of pipelines.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        count: Number of processes of a pipeline.
        rounds: Number of stages of a process.
        timeout_seconds: Timeout of collectives.
        are_neighbors: Whether the processes of a pipeline have neighboring ranks; if not, the
            processes of a stage have.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        count: int,
        rounds: int,
        timeout_seconds: float,
        *,
        are_neighbors: bool = True,
    ) -> None:
        ranks = torch.arange(world_size)
        lines = ranks.view(-1, count) if are_neighbors else ranks.view(count, -1).T
        self._ranks: list[list[int]] = lines.flip(1).tolist()
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.count, self.stages = count, count * rounds
        self.replicas = len(self._ranks)
        self.replica = next(index for index, own in enumerate(self._ranks) if rank in own)
        self.position = self._ranks[self.replica].index(rank)
        self.own_stages = range(self.position, self.stages, count)
        self.has_first, self.has_last = self.position == 0, self.position == count - 1

    def position_of(self, stage: int) -> int:
        """Position of the process that has a stage."""
        return stage % self.count

    def rank_at(self, position: int, replica: int | None = None) -> int:
        """Rank of the process at a position of a pipeline; by default, of this one."""
        return self._ranks[self.replica if replica is None else replica][position]

    def among(self, positions: Iterable[int]) -> dist.ProcessGroup | None:
        """Group of the processes at some positions of this pipeline.

        Created when first used: by all processes at once. ``None`` on other processes.
        """
        key = tuple(sorted(positions))
        group = self._group(key, [[own[place] for place in key] for own in self._ranks])
        return group if self.position in key else None

    def across_replicas(self) -> dist.ProcessGroup | None:
        """Group of the processes with the same stages; ``None`` if there is one pipeline."""
        if self.replicas == 1:
            return None
        return self._group((), [list(own) for own in zip(*self._ranks, strict=True)])

    def _group(self, key: tuple[int, ...], ranks: list[list[int]]) -> dist.ProcessGroup:
        if key not in self._groups:
            lines = [sorted(own) for own in ranks]
            self._groups[key], _ = dist.new_subgroups_by_enumeration(lines, timeout=self._timeout)
        return self._groups[key]

    def close(self) -> None:
        """Drop the groups, and so gloo's threads."""
        self._groups.clear()
