"""``mesh``: tensor parallelism, replicas and shards of a model, over one mesh.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random, debug
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._pytree import tree_map

from ....checkpoint import dtensors
from ....errors import UserError, refuse
from ....launch import collectives
from ....launch.collectives import How
from ....logging import torchmetrics_state
from ....module import TrainingModule
from ....options import Options
from ... import memory
from ...base import DataLayout, Stage
from ...fsdp.fsdp import FSDP
from ...fsdp.state import hooked
from ...gradients import sparse
from ...gradients.averaging import GradientAverage
from ...limits import Limits
from . import plan
from .plan import Sizes
from .styles import LossParallel


class Mesh(FSDP):
    """Tensor parallelism by the module's parallelize_plan, in a mesh of processes.

    The sizes of its dimensions multiply to the number of processes. Neighboring ranks form a
    tensor group; all of them read the same batches.

    Args:
        data: Number of replicas of the model; -1: all remaining processes.
        shard: Number of shards of each replica's parameters, gradients and optimizer states.
        tensor: Number of ranks over which layers are sharded.
        options: As in :class:`FSDP`. Given with ``shard=1``, or in mixed precision, they make
            units, whose gradients replicas average during backward; without, they do so after it.
    """

    limits: Limits = Limits(shards_parameters=True)
    whole_mesh: DeviceMesh
    _is_checked = False

    def __init__(self, data: int = -1, shard: int = 1, tensor: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.sizes = Sizes(data, shard, tensor)
        refuse(self.sizes.problems())
        self.has_units = shard != 1 or bool(options.keys() - {"timeout_seconds", "parameter_dtype"})
        self._until_teardown = contextlib.ExitStack()

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        if module is not None:
            return self._problems_of(options, module)
        # Autocast would keep its casts of all weights until backward, which units do not.
        mixed = str(options.precision).endswith("-mixed") and self.parameter_dtype is None
        self.has_units = self.has_units or mixed
        lines = super().problems(options, None)
        if self.find_unused_parameters and self.sizes.tensor != 1:
            lines.append(
                "strategy_options.find_unused_parameters is not supported with tensor parallelism; "
                "use shard=1 without options of fsdp, which needs it not (in mixed precision with "
                "parameter_dtype: float32), or strategy='fsdp'"
            )
        if options.sync_batchnorm and self.sizes.tensor != 1:
            problem = "sync_batchnorm would count a sample on each rank of a tensor group"
            lines.append(f"{problem}; use strategy='fsdp' or 'ddp'")
        return lines

    def _problems_of(self, options: Options, module: TrainingModule) -> list[str]:
        if self.has_units:
            lines = super().problems(options, module)
        else:
            lines = sparse.problems_of(module, "a mesh averages dense gradients") + hooked(module)
        unplanned = plan.problems_of(module, self.sizes)
        regional = isinstance(options.compile, dict) and options.compile.get("regional")
        if options.compile and not regional and not unplanned:
            lines += plan.problems_of_compiling(module, self.sizes)
        return lines + unplanned

    def replicas(self, devices: int, nodes: int) -> int:
        self.sizes = self.sizes.on(devices * nodes)
        return self.sizes.replicas

    def memory(self, sizes: memory.Sizes) -> memory.Memory:
        mesh = self.sizes.on(sizes.ranks)
        share = 1 / mesh.tensor
        sharded = memory.divided(sizes, parameters=share, gradients=share, optimizer=share)
        sharded = sharded.computing(share)
        if not self.has_units:
            step = replace(sharded, step=round(sizes.step * share))
            return memory.memory(step, mark="unverified")
        return self.sharded_memory(sharded, mesh.shard)

    @property
    def data(self) -> DataLayout:
        rank, tensor = self.layout.rank, self.sizes.tensor
        return replace(
            super().data,
            replicas=self.sizes.replicas,
            index=rank // tensor,
            is_first=rank % tensor == 0,
            random_rank=rank - rank % tensor,
        )

    def make_mesh(self) -> DeviceMesh:
        """Create the mesh of all dimensions, and return that over which units are sharded."""
        # Without units too: a later fit with them has groups of the same names, which torch caches.
        sizes = {name: size for name, size in self.sizes if size > 1 or name == "shard"}
        self.whole_mesh = self.new_mesh(sizes)
        return self.whole_mesh[tuple(name for name in sizes if name != "tensor")]

    def shard_units(self, module: TrainingModule) -> None:
        if self.sizes.tensor > 1:
            self._shard_layers(module, self.whole_mesh["tensor"])
        if self.has_units:
            super().shard_units(module)

    def _shard_layers(self, module: TrainingModule, mesh: DeviceMesh) -> None:
        """Shard layers over a tensor group, and prepare what their DTensors do in steps."""
        if problems := plan.problems_of(module, self.sizes):  # not checked yet without training
            raise UserError(problems)
        planned, stack = plan.layers(module, self.sizes), self._until_teardown
        plan.apply(planned, mesh, self.materialize)
        if mesh.device_type != "cpu":  # which has no tracker
            # torch's first random operation of a DTensor would broadcast rank 0's generator.
            stack.callback(setattr, _random, "_rng_tracker", _random._rng_tracker)
            _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
        if any(isinstance(layer.style, LossParallel) for layer in planned):
            stack.enter_context(loss_parallel())
        # torch's cache of compiled code takes a backward that slices a DTensor for the same on all
        # ranks: ranks would load that of another, and so have its slices as gradients.
        cache: Any = torch.compiler.config
        tag = f"{cache.cache_key_tag} rank {self.layout.rank}"
        stack.enter_context(cache.patch(cache_key_tag=tag))
        known = torchmetrics_state.metrics(module)
        metrics = [metric for metric in known if getattr(metric, "process_group", module) is None]
        if metrics:  # are reduced over one rank of each tensor group
            group = self.new_group(self.layout.world_size // mesh.size(), mesh.size())
        for metric in metrics:
            metric.process_group = group
            stack.callback(setattr, metric, "process_group", None)

    def whole_parameters(self) -> list[nn.Parameter]:
        if self.has_units:
            return super().whole_parameters()
        return [p for p in self.module.parameters() if not dtensors.is_sharded(p)]

    def watch_gradients(self) -> None:
        if self.has_units:
            super().watch_gradients()
        elif self.sizes.data > 1:
            group = self.whole_mesh.get_group("data")
            self.averaged = GradientAverage(self.module.parameters(), group)

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = super().forward(stage, batch, batch_idx)
        return tree_map(dtensors.full, outputs) if stage == "predict" else outputs

    def read_loss(self, outputs: Any) -> Tensor:
        loss: Tensor = dtensors.full(super().read_loss(outputs))
        return loss

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        # In manual optimization, units reduce gradients in each backward; so do replicas.
        synchronize = synchronize or not self.module.automatic_optimization
        super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)
        if synchronize and self.sizes.tensor > 1:
            self._complete_gradients()

    def _complete_gradients(self) -> None:
        """Sum gradients that are still partial sums on the ranks of a tensor group."""
        parameters: list[Any] = list(self.module.parameters())
        for tensor in parameters:
            if dtensors.is_sharded(tensor.grad) and tensor.grad.placements != tensor.placements:
                tensor.grad = tensor.grad.redistribute(placements=tensor.placements)
        if not self._is_checked:
            self._is_checked = True
            plan.compare_gradients(self.module, self.whole_mesh.get_group("tensor"))

    def reduce(self, tensor: Tensor, how: How) -> Tensor:
        # Over all ranks: those of a replica have the same values, and their sum counts once.
        reduced = collectives.all_reduce(tensor, how)
        return reduced / self.sizes.tensor if how == "sum" else reduced

    def teardown(self) -> None:
        if hasattr(self, "whole_mesh"):  # refers to groups, and so to gloo's threads
            getattr(self.whole_mesh, "_pg_registry", {}).clear()
            # torch's caches keep meshes, too: the next fit would use the groups of an equal one.
            debug._clear_python_sharding_prop_cache()
            debug._clear_fast_path_sharding_prop_cache()
        self._until_teardown.close()
        super().teardown()
