"""``sequential_fairscale``: FairScale's Pipe, a pipeline over the devices of one process.

Source: https://fairscale.readthedocs.io/en/stable/deep_dive/pipeline_parallelism.html, GPipe
(https://arxiv.org/abs/1811.06965)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...errors import ConfigurationError, Problems, nearest, shown
from ...launch.cluster import Layout
from ...launch.devices import choose_accelerator
from ...memory import meta_device
from ...module import TrainingModule
from ...options import Options
from ..base import Strategy
from ..limits import Limits
from ..optimizers import Optimization
from ..precision import Precision
from .sharded import PACKAGES

if TYPE_CHECKING:
    from .stages import Stages

ATTRIBUTE = "sequential_module"
BALANCES = ("parameters", "time", "memory")
CHECKPOINT = ("never", "except_last", "always")

_BALANCE = "strategy_options.balance"
_THREADS = "a thread per device runs the stages; use strategy='ddp'"


class FairScalePipe(Strategy):
    """FairScale's Pipe: one process, the layers of ``sequential_module`` divided over its devices.

    A batch is split into micro-batches, which pass through the devices one after another, so that
    several devices compute at a time. The module's ``sequential_module`` is an ``nn.Sequential``;
    what ``training_step`` computes before and after it is on the first device.

    Args:
        balance: Number of layers on each device, as a list; or how it is chosen: ``"parameters"``,
            about equal numbers of parameters; ``"time"`` or ``"memory"`` (GPUs only), about equal
            times or memory of the layers, which FairScale measures with the first batch.
        microbatches: Number of micro-batches per batch; fewer if it has fewer samples.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``: of which micro-batches stages
            keep only their inputs, and recompute activations in backward.

    Raises:
        ConfigurationError: Invalid options; one line each.
    """

    limits: Limits = Limits(
        max_nodes=1,
        refused={
            "compile": _THREADS,
            "sync_batchnorm": "there is one replica, whose BatchNorm statistics are those of the "
            "whole batch; leave it out",
            "activation_checkpointing": "Pipe recomputes activations itself; use "
            "strategy_options={'checkpoint': 'always'}",
        },
        packages=PACKAGES,
    )
    stages: "Stages | None" = None

    def __init__(
        self,
        balance: list[int] | str = "parameters",
        microbatches: int = 4,
        checkpoint: str = "never",
    ) -> None:
        problems = Problems()
        if isinstance(balance, str) and balance not in BALANCES:
            problems.add(f"{_BALANCE}={balance!r} is unknown{nearest(balance, BALANCES)}")
        if isinstance(balance, list) and (not balance or min(balance) < 1):
            problems.add(f"{_BALANCE}={shown(balance)}: give each device at least 1 layer")
        if microbatches < 1:
            problems.add(f"strategy_options.microbatches={microbatches}: give at least 1")
        if checkpoint not in CHECKPOINT:
            problems.add(
                f"strategy_options.checkpoint={checkpoint!r} is unknown"
                f"{nearest(checkpoint, CHECKPOINT)}"
            )
        problems.raise_any()
        self.balance, self.microbatches, self.checkpoint = balance, microbatches, checkpoint

    # --- before a run ----------------------------------------------------------------------------

    def problems(self, options: Options) -> list[str]:
        lines, devices = [], options.devices
        if self.balance == "memory" and choose_accelerator(options.accelerator) == "cpu":
            lines.append(
                f"{_BALANCE}='memory': FairScale measures the memory of GPUs; use 'parameters' or "
                "'time'"
            )
        if isinstance(devices, list):
            return lines + self._misfits(len(devices))
        return lines + (self._misfits(devices) if type(devices) is int and devices > 0 else [])

    def _misfits(self, devices: int) -> list[str]:
        if isinstance(self.balance, list) and len(self.balance) != devices:
            return [
                f"{_BALANCE}={shown(self.balance)} has {len(self.balance)} stages, and devices="
                f"{devices}: give each device one"
            ]
        return []

    def problems_of(self, module: TrainingModule) -> list[str]:
        name, found = type(module).__name__, getattr(module, ATTRIBUTE, None)
        if not isinstance(found, nn.Sequential):
            what = "has no" if found is None else f"has a {type(found).__name__} as"
            return [
                f"{name} {what} {ATTRIBUTE}: put the layers to divide into an nn.Sequential, as "
                f"self.{ATTRIBUTE}"
            ]
        if found.forward.__func__ is not nn.Sequential.forward:  # type: ignore[attr-defined]
            return [
                f"{name}.{ATTRIBUTE} overrides forward, which Pipe would not call; use an "
                "nn.Sequential"
            ]
        if len(set(map(id, found))) < len(found):
            return [f"{name}.{ATTRIBUTE} has a layer twice, which Pipe does not support"]
        lines = []
        if isinstance(self.balance, list) and sum(self.balance) != len(found):
            lines.append(
                f"{_BALANCE}={shown(self.balance)} sums to {sum(self.balance)}, and "
                f"{name}.{ATTRIBUTE} has {len(found)} layers"
            )
        return lines + [
            f"{each} is shared by layers that may be on different devices; use strategy='ddp'"
            for each in _shared(module, found)
        ]

    def connect(
        self, layout: Layout, own_devices: Sequence[torch.device], precision: Precision
    ) -> None:
        if problems := self._misfits(len(own_devices)):  # for devices=-1 and "auto"
            raise ConfigurationError(problems)
        super().connect(layout, own_devices, precision)

    # --- before the first step -------------------------------------------------------------------

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        optimization = super().setup(module, configure)
        if self.stages is not None:
            self.stages.optimizers = optimization.optimizers
        return optimization

    def place(self, module: TrainingModule) -> None:
        from .stages import Stages

        if problems := self.problems_of(module):  # without training, they were not checked
            raise ConfigurationError(problems)
        meta_device.materialize(module, module)
        self.precision.cast(module)
        sequential = getattr(module, ATTRIBUTE)
        # Never the whole model on the first device. An existing key keeps its place.
        module._modules[ATTRIBUTE] = None
        module.to(self.device)
        module._modules[ATTRIBUTE] = sequential
        self.module = module
        module.trainer_state = replace(module.trainer_state, device=self.device)
        self.stages = Stages(
            sequential, self.devices, self.balance, self.microbatches, self.checkpoint
        )

    def teardown(self) -> None:
        stages, self.stages = self.stages, None
        if stages is not None:
            stages.close()
            if len(set(self.devices)) > 1:  # usable afterward; it may not fit on one GPU
                self.module.to("cpu")
                state = replace(self.module.trainer_state, device=torch.device("cpu"))
                self.module.trainer_state = state
        super().teardown()


def _shared(module: nn.Module, sequential: nn.Sequential) -> list[str]:
    """Names of parameters and buffers that two layers share, or a layer and the module's rest."""
    inside: dict[int, set[int]] = {}
    for index, layer in enumerate(sequential):
        for part in layer.modules():
            inside.setdefault(id(part), set()).add(index)
    owners: dict[int, set[int]] = {}
    names: dict[int, str] = {}
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), set()).update(inside.get(id(part), {-1}))
                names.setdefault(id(tensor), f"{prefix}.{name}".lstrip("."))
    return [names[key] for key, found in owners.items() if len(found) > 1]
