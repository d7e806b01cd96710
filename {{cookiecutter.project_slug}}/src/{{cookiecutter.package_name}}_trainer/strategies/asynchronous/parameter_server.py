"""``parameter_server``: workers send gradients to a server, which steps and sends weights back.

Each rank is a worker; rank 0 also runs the server, in threads.

Source: Dean et al. 2012 (https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks).
"""

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...launch import collectives, hangs, rendezvous
from ...launch.cluster import Layout
from ...module import TrainingModule
from ...options import Options
from ...options.fields import NonNegativeInt
from ..base import StepOutput
from ..gradients import sparse
from ..limits import Limits
from ..memory import Memory, Sizes, memory
from ..optimizer_state import load_optimizer_state, optimizer_state, parameter_names
from ..optimizers import Optimization
from ..process_group import ProcessGroupStrategy
from .server import MOST_TO_MEET, NO_CLIPPING, RemoteServer, Server, Stepped, unpack

_ON_SERVER = "optimizers step on the server; use strategy='ddp'"


class ParameterServer(ProcessGroupStrategy):
    """Workers send gradients to a server, which steps and sends weights back.

    No step waits for all: each gradient is an optimizer step of its own, on the batch of one
    worker.

    Args:
        max_staleness: Maximum number of optimizer steps made between computing a gradient's weights
            and applying it; workers that are further ahead wait. 0: all workers' gradients are
            averaged in each step, as under ddp; ``None``: no limit.
        timeout_seconds: Seconds in which all ranks must join, and a worker must compute a gradient.
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
            "skipping": _ON_SERVER,
            "sync_batchnorm": "workers do not run each forward together; use strategy='ddp'",
        },
    )

    def __init__(
        self, max_staleness: NonNegativeInt | None = 8, timeout_seconds: float = 600.0
    ) -> None:
        super().__init__(timeout_seconds)
        self.max_staleness = max_staleness
        self.limits = replace(self.limits, steps_together=max_staleness == 0)
        self._server: Server | RemoteServer | None = None
        self._reset()

    def _reset(self) -> None:
        self._parameters: list[Tensor] = []
        self._optimizers: list[Optimizer] = []
        self._copies: list[Tensor] = []
        """The server's parameters, on rank 0."""
        self._names: dict[int, str] = {}
        self._has_weights, self._clipping, self._last = False, NO_CLIPPING, Stepped(-1.0)
        self._steps = self._received = 0

    # --- before any process is started ------------------------------------------------------------

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        if module is not None:
            return sparse.problems_of(module, "workers send whole gradients")
        if self.limits.steps_together or options.learning_rate_scaling == "none":
            return []
        return [
            f"learning_rate_scaling={options.learning_rate_scaling!r}: each gradient of a worker "
            "is a step of its own, on the worker's batch; set max_staleness=0, or scale the rate "
            "in configure_optimizers"
        ]

    # --- setup -----------------------------------------------------------------------------------

    def init_process_group(self, layout: Layout, device: torch.device) -> None:
        seconds = datetime.timedelta(seconds=self.timeout_seconds)
        with hangs.limited(2 * self.timeout_seconds):  # to join, then to connect
            dist.init_process_group(
                "gloo",
                store=rendezvous.connect_store(layout, seconds),
                rank=layout.rank,
                world_size=layout.world_size,
                timeout=seconds if self.limits.steps_together else MOST_TO_MEET,
            )

    def memory(self, sizes: Sizes) -> Memory:
        # Rank 0 has the server's parameters, and a gradient that it has received.
        kept = sizes.parameters + sizes.gradients
        return memory(sizes, buckets=kept, mark="unverified", note="of rank 0")

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self._leave()
        self.place(module)
        self.start_equal((*module.parameters(), *module.buffers()))
        optimization = configure()
        self._parameters, self._optimizers = optimization.parameters, optimization.optimizers
        self._names = parameter_names(module)
        # Not the default one, which rank 0 uses while its server's threads use this one.
        group = dist.new_group(backend="gloo", timeout=MOST_TO_MEET)
        if self._layout.is_main:
            server = self._server = self._make_server()
            server.serve(group)
        else:
            self._server = RemoteServer(self._parameters, group)
        collectives.agree_by(self.agreed_signal)
        return optimization

    def _make_server(self) -> Server:
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
        size, most = self._layout.world_size, self.max_staleness
        return Server(self._copies, self._optimizers, size, most, self.timeout_seconds)

    @property
    def _served(self) -> Server | RemoteServer:
        if self._server is None:
            raise RuntimeError("the strategy is not set up")
        return self._server

    def _leave(self) -> None:
        collectives.agree_by(None)
        if self._server is not None:
            self._server.leave(self._layout.rank)
        self._server = None
        self._reset()

    def teardown(self) -> None:
        self._leave()
        super().teardown()

    # --- a step ----------------------------------------------------------------------------------

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        if not self._has_weights:
            self._load(self._served.pull(self._layout.rank, self._received))
            self._has_weights = True
        return super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize)

    @torch.no_grad()
    def _load(self, content: Tensor) -> None:
        for each, new in zip(self._parameters, unpack(content, self._parameters), strict=True):
            each.copy_(new)

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        # The server clips the gradient of the step, and tells its norm.
        self._clipping = self._clipping._replace(**{algorithm: value})
        return None

    def step(
        self, optimization: Optimization, *, ends: bool = True
    ) -> Callable[[], dict[str, float]]:
        gradients = [each.grad for each in self._parameters]
        self._last = self._served.step(self._layout.rank, gradients, self._clipping)
        self._has_weights, self._clipping = False, NO_CLIPPING
        self._steps += 1
        for parameter in self._parameters:
            parameter.grad = None
        return self._step_values

    def agreed_signal(self, received: int) -> int:
        """See :func:`~...launch.collectives.agreed_signal`."""
        self._received = received  # the server is told when the next step starts
        return self._last.signal if self._last.signal and self._steps >= self._last.last else 0

    def _step_values(self) -> dict[str, float]:
        norm = {"gradient_norm": self._last.norm} if self._last.norm >= 0 else {}
        if self.limits.steps_together or not isinstance(self._server, Server):
            return norm
        return norm | self._server.staleness()

    # --- evaluation and checkpoints --------------------------------------------------------------

    def _refresh(self) -> None:
        """Load the server's weights on all ranks, once all workers have made their steps."""
        collectives.barrier()
        with torch.no_grad():
            for each, copy in zip(self._parameters, self._copies, strict=False):
                each.copy_(copy)
        self.start_equal(self._parameters)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._refresh()
        with super().evaluating():
            yield

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
        state = saved["state"] if self._copies else {}
        load_optimizer_state(optimizer, {**saved, "state": state}, self._names)
