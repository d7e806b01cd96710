"""``parameter_server``: workers send gradients to a server, which steps and sends weights back.

Each rank is a worker; rank 0 also runs the server, in threads.

Source: Dean et al. 2012 (https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UserError, refuse
from ...launch import collectives
from ...module import TrainingModule
from ...options import Options
from ...options.values import NonNegativeInt
from ..base import StepOutput
from ..engine_optimizers import EngineGroups, problems_of_code
from ..gradients import sparse
from ..gradients.averaging import reduce_used
from ..limits import Limits
from ..memory import Memory, Sizes, memory
from ..optimizer_state import load_optimizer_state, optimizer_state, parameter_names
from ..optimizers import Optimization
from ..process_group import ProcessGroupStrategy
from .server import MOST_TO_MEET, Clipping, RemoteServer, Server, pack, unpack

_ON_SERVER = "optimizers step on the server; use strategy='ddp'"


class ParameterServer(ProcessGroupStrategy):
    """Workers send gradients to a server, which steps and sends weights back.

    No step waits for all: each gradient is an optimizer step of its own, on one worker's batch.

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
            "log_gradient_norm": "each gradient is a step of its own; use strategy='ddp'",
            "learning_rate_scaling": "each gradient is a step of its own, on the batch of one "
            "worker; scale the rate in configure_optimizers",
            "parameter_averaging": "workers hold weights of different steps; use strategy='ddp'",
            "skipped_batches": "each step needs a gradient of each worker; use strategy='ddp'",
            "skipping": _ON_SERVER,
            "sync_batchnorm": "workers do not run each forward together; use strategy='ddp'",
        },
    )
    _server: Server | RemoteServer = RemoteServer((), None)
    _parameters: Sequence[Tensor] = ()
    _has_latest = True

    def __init__(
        self, max_staleness: NonNegativeInt | None = 8, timeout_seconds: float = 600.0
    ) -> None:
        super().__init__(timeout_seconds)
        self.max_staleness, self.is_synchronous = max_staleness, max_staleness == 0
        if not self.is_synchronous:
            self.limits = replace(self.limits, always=("asynchronous",))

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        return sparse.problems_of(module, "workers send whole gradients") if module else []

    def memory(self, sizes: Sizes) -> Memory:
        # Rank 0 has the server's parameters, and a gradient that it has received.
        kept = sizes.parameters + sizes.gradients
        return memory(sizes, buckets=kept, mark="unverified", note="of rank 0")

    @property
    def group_timeout(self) -> timedelta:
        return super().group_timeout if self.is_synchronous else MOST_TO_MEET

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        self.start_equal((*module.parameters(), *module.buffers()))
        optimization = configure()
        self._parameters, self._names = optimization.parameters, parameter_names(module)
        self._has_pulled, self._has_averaged, self._received = False, False, 0
        refuse(problems_of_code(optimization.optimizers, is_same=True))
        self._note_weights()
        self._clipping: Clipping = (0.0, 0.0)
        # Not the default one, which rank 0 uses while its server's threads use this one.
        group = dist.new_group(backend="gloo", timeout=MOST_TO_MEET)
        if self.layout.is_main:
            self._server = self._make_server(optimization)
            self._server.serve(group)
        else:
            self._server = RemoteServer(self._parameters, group)
            self.engine_groups = EngineGroups(optimization.optimizers)
        return optimization

    def _make_server(self, optimization: Optimization) -> Server:
        """Have optimizers step copies of the parameters: this rank computes on the originals."""
        copies = {
            id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in self._parameters
        }
        self._names |= {id(copies[key]): self._names[key] for key in copies if key in self._names}
        groups = [group for opt in optimization.optimizers for group in opt.param_groups]
        shown = [group["params"] for group in groups]
        self.engine_groups = EngineGroups(optimization.optimizers, shown)
        for group in groups:
            group["params"] = [copies[id(parameter)] for parameter in group["params"]]
        for optimizer in optimization.optimizers:
            state = [(copies[id(old)], values) for old, values in optimizer.state.items()]
            optimizer.state.clear()
            optimizer.state.update(state)
        size, most = self.layout.world_size, self.max_staleness
        server = Server(optimization, size, most, self.timeout_seconds)
        server.changed_weights = self._parameters if self.is_synchronous else ()
        return server

    def teardown(self) -> None:
        if server := vars(self).pop("_server", None):
            server.leave()
        self._parameters = ()
        super().teardown()

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        if not self._has_pulled:
            self._check_weights()
            content = self._server.pull(self.layout.rank, self._received)
            if not self._has_latest:
                self._load(unpack(content, self._parameters))
            self._has_pulled = True
        return super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize)

    @torch.no_grad()
    def _load(self, weights: Sequence[Tensor]) -> None:
        for parameter, new in zip(self._parameters, weights, strict=True):
            parameter.copy_(new)
        self._note_weights()

    def _note_weights(self) -> None:
        """Note that this worker has the latest weights, or, if there is none, which it has."""
        self._has_latest = self.is_synchronous
        self._loaded = None if self._has_latest else pack(self._parameters)

    def _check_weights(self) -> None:
        """Refuse changes of weights by user code that would be lost."""
        if self._loaded is not None and not torch.equal(self._loaded, pack(self._parameters)):
            reason = "which a worker of parameter_server only reads"
            advice = "set strategy_options={max_staleness: 0}, or use strategy='ddp'"
            raise UserError(f"training_step or a hook changed weights, {reason}; {advice}")

    @contextmanager
    def around_hooks(self, hook: str) -> Iterator[None]:
        if self.is_synchronous:  # otherwise a worker's gradient is a step of its own
            self._refresh()
            if hook == "on_before_optimizer_step" and not self._has_averaged:
                reduce_used(self._parameters, None, self.layout.world_size)
                self._has_averaged = True
        with self.engine_groups.showing() if self.engine_groups is not None else nullcontext():
            yield

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        # The server clips the gradient of the step.
        self._clipping = (value, 0.0) if algorithm == "norm" else (0.0, value)
        return None

    def step(self, optimization: Optimization, *, ends: bool = True) -> None:
        self._check_weights()
        if self.engine_groups is not None:
            self.engine_groups.check()
        gradients = [parameter.grad for parameter in self._parameters]
        self._signal = self._server.step(self.layout.rank, gradients, self._clipping)
        self._has_pulled = self._has_latest = self._has_averaged = False
        for parameter in self._parameters:
            parameter.grad = None

    def agree(self, request: Tensor) -> Tensor:
        self._received = int(request[0])  # the server is told when the next step starts
        return torch.tensor([self._signal, -1.0])  # after each step

    def _refresh(self) -> None:
        """Load the server's weights on all ranks, once all workers have made their steps."""
        if self._has_latest:  # perhaps changed by user code
            return
        collectives.barrier()
        self._load(self._server.parameters)
        self.start_equal(self._parameters)
        self._note_weights()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._refresh()
        with super().evaluating():
            yield

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        self._refresh()
        optimizers = optimization.optimizers if optimization else []
        states = [optimizer_state(optimizer, self._names) for optimizer in optimizers]
        return {**super().state(None), "optimizers": states}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        super().load_state(state, None)
        of_all = (optimization.optimizers, state["optimizers"]) if optimization else ([], [])
        for optimizer, saved in zip(*of_all, strict=True):
            values = saved["state"] if isinstance(self._server, Server) else {}
            load_optimizer_state(optimizer, {**saved, "state": values}, self._names)
        for copy, parameter in zip(self._server.parameters, self._parameters, strict=True):
            copy.copy_(parameter)
        self._note_weights()
        collectives.barrier()  # then the server has loaded it
