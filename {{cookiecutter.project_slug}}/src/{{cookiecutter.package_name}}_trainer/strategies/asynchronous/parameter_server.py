"""``parameter_server``: workers send gradients to a server, which steps and sends weights back.

Each rank is a worker; rank 0 also runs the server, in threads. A process group of all ranks would
end as a whole with one of them: each worker has a group with the server instead, and collectives
go through the server, which leaves out lost workers.

Source: Dean et al. 2012 (https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks).
"""

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint import stored_tensors
from ...errors import ConfigurationError
from ...launch import allow_loss, collectives, hangs, rendezvous, watch_for_hangs
from ...launch.cluster import Layout
from ...module import TrainingModule
from ...options import Options
from ..base import DataLayout, StepOutput, Strategy
from ..gradients import sparse
from ..limits import Limits
from ..optimizer_state import load_optimizer_state, optimizer_state, parameter_names
from ..optimizers import Optimization
from ..precision import Precision
from .links import NOTHING, WORKER, Link, Peers, pack, unpack
from .server import Server

_ON_SERVER = "optimizers step on the server; use strategy='ddp'"
_NO_CLIPPING = (-1.0, math.inf)


class ParameterServer(Strategy):
    """Workers send gradients to a server, which steps and sends weights back.

    No step waits for all: each gradient is an optimizer step of its own, on the batch of one
    worker. A worker that is killed is left out; the others continue.

    Args:
        max_staleness: Maximum number of optimizer steps made between computing a gradient's weights
            and applying it; workers that are further ahead wait. 0: all workers' gradients are
            averaged in each step, as under ddp; ``None``: no limit.
        timeout_seconds: Seconds after which a silent worker is lost, and a silent server ends the
            run.
    """

    limits: Limits = Limits(
        max_nodes=1,
        accelerators=("cpu",),
        refused={
            "16-mixed": "a gradient scaler must see the gradients of all workers before a step; "
            "use bf16-mixed",
            "manual_optimization": _ON_SERVER,
            "parameter_averaging": "workers hold weights of different steps; use strategy='ddp'",
            "skipped_batches": "each step needs a gradient of each worker; use strategy='ddp'",
            "rollback": _ON_SERVER,
            "skipping": _ON_SERVER,
            "sync_batchnorm": "there is no process group over which to synchronize; use "
            "strategy='ddp'",
        },
    )

    def __init__(self, max_staleness: int | None = 8, timeout_seconds: float = 600.0) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ConfigurationError(
                f"strategy_options.max_staleness={max_staleness}: give at least 0, or None for no "
                "limit"
            )
        self.max_staleness, self.timeout_seconds = max_staleness, timeout_seconds
        self.limits = replace(self.limits, steps_together=max_staleness == 0)
        self._server: Server | None = None
        self._peers: Peers | None = None
        self._reset()

    def _reset(self) -> None:
        self._parameters: list[Tensor] = []
        self._optimizers: list[Optimizer] = []
        self._copies: list[Tensor] = []
        self._names: dict[int, str] = {}
        self._has_weights, self._clipping, self._norm = False, _NO_CLIPPING, -1.0

    # --- before any process is started ------------------------------------------------------------

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        if module is not None:
            return sparse.problems_of(module, "workers send whole gradients")
        lines = []
        if options.async_checkpoints:
            lines.append(
                "async_checkpoints: strategy='parameter_server' carries the collectives of a save "
                "over the connections of the steps; leave it out"
            )
        if not self.limits.steps_together and options.learning_rate_scaling != "none":
            lines.append(
                f"learning_rate_scaling={options.learning_rate_scaling!r}: each gradient of a "
                "worker is a step of its own, on the worker's batch; set max_staleness=0, or scale "
                "the rate in configure_optimizers"
            )
        return lines

    # --- connections -----------------------------------------------------------------------------

    def connect(
        self, layout: Layout, devices: Sequence[torch.device], precision: Precision
    ) -> None:
        super().connect(layout, devices, precision)
        store = rendezvous.connect_store(layout, datetime.timedelta(seconds=self.timeout_seconds))
        rank, size, timeout = layout.rank, layout.world_size, self.timeout_seconds
        if layout.is_main:
            self._server = Server(store, size, self.max_staleness, timeout)
        self._peers = Peers(rank, size, Link(store, rank, WORKER, timeout))
        if self._server is not None:
            self._peers.server_failure, self._peers.ends_last = self._server.failed, size > 1
        else:
            allow_loss()
        collectives.use(self._peers)
        watch_for_hangs(math.inf)  # the servers detect a worker that hangs

    def teardown(self) -> None:
        hangs.timer.disarm()
        collectives.use(None)
        if self._peers is not None:
            self._peers.leave()
        if self._server is not None:
            self._server.close()
        self._peers = self._server = None
        self._reset()

    @property
    def _connected(self) -> Peers:
        if self._peers is None:
            raise RuntimeError("the strategy is not connected")
        return self._peers

    @property
    def data(self) -> DataLayout:
        living = self._connected.living
        index = living.index(self._layout.rank)
        return replace(super().data, replicas=len(living), index=index)

    # --- parameters ------------------------------------------------------------------------------

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        self._start_equal((*module.parameters(), *module.buffers()))
        optimization = configure()
        self._parameters, self._optimizers = optimization.parameters, optimization.optimizers
        self._names = parameter_names(module)
        if self._server is not None:
            self._hold(self._server)
        collectives.barrier()  # then the server serves
        return optimization

    def _hold(self, server: Server) -> None:
        """Have optimizers step copies of the parameters: this rank computes on the originals."""
        copies = {id(each): nn.Parameter(each.detach().clone()) for each in self._parameters}
        self._copies = list(copies.values())
        self._names |= {id(copies[key]): self._names[key] for key in copies if key in self._names}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [copies[id(each)] for each in group["params"]]
            state = [(copies[id(each)], values) for each, values in optimizer.state.items()]
            optimizer.state.clear()
            optimizer.state.update(state)
        server.hold(self._copies, self._optimizers)

    def _start_equal(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast rank 0's parameters or buffers."""
        own = pack(tensors) if self._layout.is_main else NOTHING
        received = unpack(self._connected.exchange(own)[0], tensors)
        for each, new in zip(tensors, received, strict=True):
            each.detach().copy_(new)

    def _refresh(self) -> None:
        """Fetch the weights, when all workers have made their steps and none makes another."""
        collectives.barrier()
        self._connected.pull(self._parameters, to_train=False)
        collectives.barrier()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._refresh()
        # BatchNorm statistics differ between workers after training; use those of rank 0.
        self._start_equal(list(self.module.buffers()))
        yield

    # --- a step ----------------------------------------------------------------------------------

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        if not self._has_weights:
            self._connected.pull(self._parameters, to_train=True)
            self._has_weights = True
        return super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize)

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        # The server clips the gradient of the step, and tells its norm.
        norm, largest = self._clipping
        self._clipping = (value, largest) if algorithm == "norm" else (norm, value)
        return None

    def step(
        self, optimization: Optimization, *, ends: bool = True
    ) -> Callable[[], dict[str, float]]:
        self._norm = self._connected.step(self._parameters, self._clipping)
        self._has_weights, self._clipping = False, _NO_CLIPPING
        for parameter in self._parameters:
            parameter.grad = None
        return self._step_values

    def _step_values(self) -> dict[str, float]:
        norm = {"gradient_norm": self._norm} if self._norm >= 0 else {}
        if self.limits.steps_together or self._server is None:
            return norm
        return norm | self._server.staleness()

    # --- checkpoints -----------------------------------------------------------------------------

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        self._refresh()
        return super().state(optimization)

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        super().load_state(state, optimization)
        with torch.no_grad():
            for copy, each in zip(self._copies, self._parameters, strict=False):
                copy.copy_(each)
        collectives.barrier()  # then the server has loaded it

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_state(optimizer, self._names)

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        state = stored_tensors.read_all(saved["state"]) if self._copies else {}
        load_optimizer_state(optimizer, {**saved, "state": state}, self._names)
