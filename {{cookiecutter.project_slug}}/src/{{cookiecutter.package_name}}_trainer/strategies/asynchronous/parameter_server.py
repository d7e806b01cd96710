"""``parameter_server``: workers send gradients to servers, which step and send weights back.

Each rank is a worker. The first ranks also run a server each, in threads: it holds its share of the
parameters and steps them with the optimizers of its rank. There is no process group: it would end
as a whole with one rank. Workers have a TCP connection to each server, and collectives go through
the first one, which leaves out lost workers.

Source: Dean et al. 2012 (https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks).
"""

import datetime
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint import Spread, stored_tensors
from ...errors import ConfigurationError, UserError
from ...launch import collectives, files, rendezvous
from ...launch.cluster import STORE, Layout
from ...launch.failures.watchdog import process_watchdog
from ...module import TrainingModule
from ...options import Options
from .. import elementwise
from ..base import Strategy
from ..clipping import clip_gradients
from ..gradients import sparse
from ..limits import Limits
from ..optimizer_state import group_names, load_optimizer_state, named_groups, parameter_names
from ..optimizers import Optimization
from ..precision import Precision
from .peers import Peers, ServerLostError
from .server import Server
from .wire import Packing

_NO_OTHER_NODES = "servers listen on this node only"


class ParameterServer(Strategy):
    """Workers send gradients to servers, which step and send weights back; no step waits for all.

    Each gradient is an optimizer step of its own, on the batch of one worker. A worker that is
    killed is left out; the others continue.

    Args:
        servers: Number of servers over which the parameters are spread, on the first ranks.
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
            "manual_optimization": "optimizers step on the servers; use strategy='ddp'",
            "parameter_averaging": "workers hold weights of different steps; use strategy='ddp'",
            "skipped_batches": "each step needs a gradient of each worker; use strategy='ddp'",
            "rollback": "optimizers step on the servers; use strategy='ddp'",
            "skipping": "optimizers step on the servers; use strategy='ddp'",
            "sync_batchnorm": "there is no process group over which to synchronize; use "
            "strategy='ddp'",
        },
    )
    lost_peer_errors = (ServerLostError.__name__,)

    def __init__(
        self, servers: int = 1, max_staleness: int | None = 8, timeout_seconds: float = 600.0
    ) -> None:
        if servers < 1:
            raise ConfigurationError(f"strategy_options.servers={servers}: give at least 1")
        if max_staleness is not None and max_staleness < 0:
            raise ConfigurationError(
                f"strategy_options.max_staleness={max_staleness}: give at least 0, or None for no "
                "limit"
            )
        self.servers, self.max_staleness = servers, max_staleness
        self.timeout_seconds = timeout_seconds
        self.steps_together = max_staleness == 0
        self._server: Server | None = None
        self._peers: Peers | None = None
        self._folder: Path | None = None
        self._reset()

    def _reset(self) -> None:
        self._parameters: list[Tensor] = []
        self._optimizers: list[Optimizer] = []
        self._own: dict[int, Tensor] = {}
        self._names: dict[int, str] = {}
        self._has_weights = self._has_sent = False
        self._factor, self._largest = 1.0, math.inf
        self._steps = 0

    # --- before any process is started ------------------------------------------------------------

    def problems(self, options: Options) -> list[str]:
        lines = []
        if options.async_checkpoints:
            lines.append(
                "async_checkpoints: strategy='parameter_server' carries the collectives of a save "
                "over the connections of the steps; leave it out"
            )
        if not self.steps_together and options.learning_rate_scaling != "none":
            lines.append(
                f"learning_rate_scaling={options.learning_rate_scaling!r}: each gradient of a "
                "worker is a step of its own, on the worker's batch; set max_staleness=0, or scale "
                "the rate in configure_optimizers"
            )
        return lines

    def problems_of(self, module: TrainingModule) -> list[str]:
        return sparse.problems_of(module, "workers send whole gradients")

    @staticmethod
    def local_processes(devices: int) -> int:
        return devices

    def check_processes(self, processes: int) -> None:
        if self.servers > processes:
            raise ConfigurationError(
                f"strategy_options.servers={self.servers}: each rank runs at most one server, and "
                f"there are {processes}; use fewer servers, or more devices"
            )

    def replicas(self, devices: int, num_nodes: int) -> int:
        return devices * num_nodes

    # --- connections -----------------------------------------------------------------------------

    def connect(
        self, layout: Layout, own_devices: Sequence[torch.device], precision: Precision
    ) -> None:
        super().connect(layout, own_devices, precision)
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        store = rendezvous.connect_store(layout, timeout)
        secret = self._share_secret(store)
        if layout.rank < self.servers:
            self._server = Server(
                layout.rank,
                layout.world_size,
                secret,
                self.max_staleness,
                self.timeout_seconds,
                self.servers,
            )
            store.set(f"server-{layout.rank}", str(self._server.port))
        ports = [int(store.get(f"server-{index}")) for index in range(self.servers)]
        self._peers = Peers(layout.rank, layout.world_size, ports, secret, self.timeout_seconds)
        if self._server is not None:
            server = self._server
            self._peers.own_failure = lambda: server.failure
        collectives.use(self._peers)
        process_watchdog.arm()

    def _share_secret(self, store: dist.Store) -> bytes:
        """Rank 0 writes the run's secret into a folder of this user alone; the others read it."""
        if self.layout.is_main:
            above = str(Path(os.environ[STORE]).parent) if STORE in os.environ else None
            self._folder = Path(tempfile.mkdtemp(prefix="trainer-server-", dir=above))
            files.write_private(self._folder / "secret", secrets.token_hex(32))
            store.set("folder", str(self._folder))
        folder = Path(store.get("folder").decode())
        rendezvous.check_private(folder)
        return bytes.fromhex((folder / "secret").read_text())

    @property
    def is_expendable(self) -> bool:
        return self.layout.rank >= self.servers

    def waits_for_peers(self) -> bool:
        return self._server is not None and self.layout.world_size > 1

    def teardown(self) -> None:
        process_watchdog.disarm()
        collectives.use(None)
        if self._peers is not None:
            self._peers.leave()
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._peers, self._server, self._folder = None, None, None
        self._reset()

    @property
    def _connected(self) -> Peers:
        if self._peers is None:
            raise RuntimeError("the strategy is not connected")
        return self._peers

    @property
    def data_replicas(self) -> int:
        return len(self._connected.living)

    @property
    def data_index(self) -> int:
        return self._connected.living.index(self.layout.rank)

    # --- parameters ------------------------------------------------------------------------------

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        self._start_equal((*module.parameters(), *module.buffers()))
        optimization = configure()
        if self.servers > 1:
            elementwise.check(optimization.optimizers, "parameters", self.device)
        self._parameters, self._optimizers = optimization.parameters, optimization.optimizers
        self._names = parameter_names(module)
        if not all(id(each) in self._names for each in self._parameters):
            raise UserError(
                "configure_optimizers gave an optimizer a parameter that the module does not have: "
                "make it an attribute of the module, so that servers and checkpoints can name it"
            )
        owners = _owners(self._parameters, self.servers)
        shares: list[list[Tensor]] = [[] for _ in range(self.servers)]
        for parameter, owner in zip(self._parameters, owners, strict=True):
            shares[owner].append(parameter)
        self._connected.share(shares)
        if self._server is not None:
            self._hold(self._server, shares[self.layout.rank])
        collectives.barrier()  # then all servers serve
        return optimization

    def _hold(self, server: Server, share: list[Tensor]) -> None:
        """Have this rank's server hold and step its share of the parameters.

        Its optimizers step copies, because this rank's worker computes on the originals.
        """
        packing = Packing(share)
        weights = packing.empty()
        copies: list[Tensor] = [
            nn.Parameter(view, requires_grad=True) for view in packing.views(weights)
        ]
        self._own = {id(each): copy for each, copy in zip(share, copies, strict=True)}
        self._copy_to_server()
        replaced = {
            id(each): self._own.get(id(each), nn.Parameter(each.new_empty(0)))
            for each in self._parameters
        }
        for each in self._parameters:
            self._names[id(replaced[id(each)])] = self._names[id(each)]
        for optimizer in self._optimizers:
            _replace_parameters(optimizer, replaced)
        server.serve(copies, weights, self._optimizers)

    def _copy_to_server(self) -> None:
        with torch.no_grad():
            for each in self._parameters:
                if id(each) in self._own:
                    self._own[id(each)].copy_(each)

    def _start_equal(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast rank 0's parameters and buffers."""
        if self.layout.world_size == 1:
            return
        packing = Packing(tensors)
        buffer = packing.empty()
        if self.layout.is_main:
            for view, each in zip(packing.views(buffer), tensors, strict=True):
                view.copy_(each.detach())
        content = buffer.numpy().tobytes() if self.layout.is_main else b""
        received = packing.read(bytearray(self._connected.exchange(content)[0]))
        for each, new in zip(tensors, received, strict=True):
            each.detach().copy_(new)

    def _refresh(self) -> None:
        """Fetch the weights, when all workers have made their steps and none makes another."""
        collectives.barrier()
        if self._parameters:
            self._connected.pull(to_train=False)
        collectives.barrier()

    def begin_evaluation(self) -> None:
        self._refresh()
        # BatchNorm statistics differ between workers after training; use those of rank 0.
        self._start_equal(list(self.module.buffers()))

    # --- a step ----------------------------------------------------------------------------------

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> None:
        if not self._has_weights:
            self._connected.pull(to_train=True)
            self._has_weights = True
        super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize)

    def clip_gradients(
        self, optimization: Optimization, value: float, algorithm: str
    ) -> Tensor | None:
        # Otherwise each gradient makes a step of its own, so that its worker can clip it.
        if not self.steps_together:
            return clip_gradients(self._parameters, value, algorithm)
        if algorithm == "value":
            self._largest = value
            return None
        self._send_gradients()
        norm = self._connected.norm()
        self._factor = min(1.0, value / (norm + 1e-6))  # as in torch.nn.utils.clip_grad_norm_
        return torch.tensor(norm)

    def optimizer_step(self, optimizer: Optimizer) -> None:
        # A server steps all its optimizers.
        if optimizer is not self._optimizers[-1]:
            return
        self._send_gradients()
        self._connected.step(self._factor, self._largest)
        self._factor, self._largest = 1.0, math.inf
        self._has_weights = self._has_sent = False
        self._steps += 1

    def _send_gradients(self) -> None:
        if not self._has_sent:
            self._connected.send_gradients()
            self._has_sent = True

    def zero_grad(self, optimizer: Optimizer) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def agreed_signal(self, received: int) -> int:
        peers = self._connected
        if received and not peers.stop[0]:
            peers.tell_signal(received)
        number, last = peers.stop
        return number if number and self._steps >= last else 0

    def step_values(self) -> dict[str, float]:
        if self.steps_together or self._server is None:
            return {}
        with self._server.locked():
            return self._server.steps.staleness.take()

    # --- checkpoints -----------------------------------------------------------------------------

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        self._refresh()
        return super().state(optimization)

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        super().load_state(state, optimization)
        collectives.barrier()  # then all servers have loaded it

    def load_model(self, saved: Mapping[str, Any]) -> None:
        super().load_model(saved)
        self._copy_to_server()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        names = group_names(optimizer, self._names)
        own = {id(each) for each in self._own.values()}
        state = {
            self._names[id(each)]: dict(values)
            for each, values in optimizer.state.items()
            if id(each) in own
        }
        return {
            "state": Spread(state),
            "param_groups": named_groups(optimizer.param_groups, names),
        }

    def load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        own = {self._names[id(each)] for each in self._own.values()}
        share = {
            name: stored_tensors.read_all(values)
            for name, values in saved["state"].items()
            if name in own
        }
        groups = saved["param_groups"]
        load_optimizer_state(optimizer, {"state": share, "param_groups": groups}, self._names)


def _owners(parameters: Sequence[Tensor], servers: int) -> list[int]:
    """The server of each parameter: the largest first, each to the server with the least."""
    sizes = [0] * servers
    owners = [0] * len(parameters)
    order = sorted(range(len(parameters)), key=lambda index: -parameters[index].numel())
    for index in order:
        owners[index] = sizes.index(min(sizes))
        sizes[owners[index]] += parameters[index].numel()
    return owners


def _replace_parameters(optimizer: Optimizer, replaced: Mapping[int, Tensor]) -> None:
    """Have an optimizer step other tensors, which have its initial state (Adagrad's), if any."""
    for group in optimizer.param_groups:
        group["params"] = [replaced[id(each)] for each in group["params"]]
    state = [
        (replaced[id(each)], values)
        for each, values in optimizer.state.items()
        if replaced[id(each)].numel()
    ]
    optimizer.state.clear()
    optimizer.state.update(state)
