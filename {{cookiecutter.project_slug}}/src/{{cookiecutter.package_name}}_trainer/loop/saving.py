"""What a checkpoint contains of a fit; :mod:`.resuming` loads it."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import dtensors, state_file, tensor_files
from ..data import randomness
from ..errors import UserError
from ..launch import collectives
from ..logging.logger import hyperparameters
from ..module import TrainingModule
from ..strategies import Strategy
from .parts import FitParts, frozen, in_eval_mode

OF_MODULE = "rank_state"


def state(fit: FitParts) -> dict[str, Any]:
    """State that is the same on every process."""
    outputs, position, saved = fit.outputs, fit.position, fit.strategy.state(fit.optimization)
    if fit.left_out is not None:
        texts = fit.left_out.texts(fit.module)
        saved["model"].update({name: texts[name] for name in texts.keys() & saved["model"].keys()})
    return {
        **saved,
        "schedules": [s.scheduler.state_dict() for s in fit.optimization.schedulers],
        "precision": fit.strategy.precision.state(),
        "configured": fit.configured,
        "frozen": frozen(fit.module),
        "eval_mode": in_eval_mode(fit.module),
        "position": {
            "epoch": position.epoch,
            "step_in_epoch": position.batch // fit.feed.accumulate,  # batches depend on the layout
            "samples_per_step": fit.feed.samples_per_step,
            "global_step": position.global_step,
            "validated_at": position.validated_at,
            "epoch_done": position.epoch_done,
            "seconds": position.seconds,
        },
        "epoch_values": outputs.epoch_values,
        "latest": dict(outputs.latest),
        "fresh": {kind: sorted(names) for kind, names in outputs.fresh.items()},
        "last_values": outputs.last_values,
        "logs": outputs.positions(),
        "gradients": fit.manual.gradients(dtensors.is_sharded) if fit.manual else {},
        "callbacks": fit.calls.state(),
        **hyperparameters(fit.module),
    }


def check(fit: FitParts) -> None:
    """Check before the first step that the state of user code has types that can be saved."""
    optimizers, model = fit.optimization.optimizers, fit.module.state_dict()
    groups = [[{**group, "params": []} for group in opt.param_groups] for opt in optimizers]
    state = {
        "optimizers": [{"param_groups": group} for group in groups],
        "schedules": [s.scheduler.state_dict() for s in fit.optimization.schedulers],
        "callbacks": fit.calls.state(),
        "model": {name: value for name, value in model.items() if not isinstance(value, Tensor)},
    }
    state_file.Packing().pack(state, "state", writes=False)


def check_tensors(module: TrainingModule) -> None:
    """As :func:`check`, of the module's tensors, before a strategy exchanges them."""
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            tensor_files.check(name, value)
            steps = zip(value.stride(), value.shape, strict=True)
            if any(step == 0 and size > 1 for step, size in steps):
                raise UserError(f"{name} is an expanded tensor, into which none loads: clone it")


def rank_local_state(fit: FitParts) -> dict[str, Tensor]:
    """Rank-local state: random states, and this process' part of unfinished sums."""
    of_module, manual = fit.module.rank_state(), fit.manual
    parts = {
        "random": randomness.full_state(fit.strategy.data.devices),
        "share": {"of": share(fit)},
        "log": fit.outputs.recorder.state(),
        "torchmetrics": _metrics_state(fit.module, fit.outputs.recorder.metrics),
        "module": state_file.to_tensors(of_module, OF_MODULE) if of_module else {},
        "strategy": fit.strategy.rank_local.state(),
        "buffers": _own_buffers(fit.module, fit.strategy),
        "gradients": manual.gradients(lambda g: not dtensors.is_sharded(g)) if manual else {},
        "loader": fit.feed.state(fit.position.batch, ends_epoch=fit.position.epoch_done),
    }
    return {f"{name}/{key}": value for name, part in parts.items() for key, value in part.items()}


def _own_buffers(module: TrainingModule, strategy: Strategy) -> dict[str, Tensor]:
    """This rank's buffers that differ from those of rank 0, which the model's state has."""
    replicas, differing = strategy.data.replicas, dict[str, Tensor]()
    is_alone = replicas == 1 or "asynchronous" in strategy.limits.always
    if is_alone or replicas != collectives.world_size():
        return {}
    saved, named = module.state_dict(keep_vars=True), module.named_buffers()
    for name, buffer in [(name, buffer) for name, buffer in named if name in saved]:
        of_main = buffer.detach().clone()
        collectives.broadcast_in_place(of_main)
        if not torch.equal(buffer, of_main):
            differing[name] = buffer.detach()
    return differing


def share(fit: FitParts) -> Tensor:
    """Whose batches this rank's sums are of: replica, replicas, and whether they count."""
    data = fit.strategy.data
    return torch.tensor([data.index, data.replicas, data.counts])


def _metrics_state(module: TrainingModule, logged: Mapping[str, Any]) -> dict[str, Tensor]:
    states, known = dict[str, Tensor](), set[int]()
    if "torchmetrics" in sys.modules:  # otherwise no metric is in the module
        from ..logging import torchmetrics_state

        states = torchmetrics_state.state(module)
        known = {id(metric) for metric in torchmetrics_state.metrics(module)}
    for name in [name for name, metric in logged.items() if id(metric) not in known]:
        warnings.warn(
            f"a resume within this epoch loses the values so far of the metric that is logged as "
            f"{name!r}: make it an attribute of {type(module).__name__}, of torchmetrics",
            stacklevel=2,
        )
    return states
