"""What a checkpoint contains of a fit; :mod:`.resuming` loads it."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import is_sharded, state_file, tensor_files, to_tensors
from ..data import randomness
from ..logging.logger import hyperparameters
from ..module import TrainingModule
from .parts import FitParts, frozen

OF_MODULE = "rank_state"


def state(fit: FitParts) -> dict[str, Any]:
    """State that is the same on every process."""
    outputs, found = fit.outputs, fit.strategy.state(fit.optimization)
    if fit.left_out is not None:
        texts = fit.left_out.texts(fit.module)
        found["model"].update({name: texts[name] for name in texts.keys() & found["model"].keys()})
    return {
        **found,
        "schedules": [each.scheduler.state_dict() for each in fit.optimization.schedulers],
        "precision": fit.strategy.precision.state(),
        "configured": fit.configured,
        "frozen": frozen(fit.module),
        "position": _position(fit),
        "epoch_values": outputs.epoch_values,
        "latest": dict(outputs.latest),
        "fresh": {kind: sorted(names) for kind, names in outputs.fresh.items()},
        "last_values": outputs.last_values,
        "logs": outputs.positions(),
        "gradients": fit.manual.gradients(is_sharded) if fit.manual else {},
        "callbacks": fit.calls.state(),
        **hyperparameters(fit.module),
    }


def check(fit: FitParts) -> None:
    """Try the types of all that user code gives a checkpoint, before the first step."""
    optimizers, own = fit.optimization.optimizers, fit.module.state_dict()
    groups = [[{**group, "params": []} for group in each.param_groups] for each in optimizers]
    state = {
        "optimizers": [{"param_groups": each} for each in groups],
        "schedules": [each.scheduler.state_dict() for each in fit.optimization.schedulers],
        "callbacks": fit.calls.state(),
        "model": {name: each for name, each in own.items() if not isinstance(each, Tensor)},
    }
    state_file.Packing().pack(state, "state", writes=False)


def check_tensors(module: TrainingModule) -> None:
    """As :func:`check`, of the module's tensors, before a strategy exchanges them."""
    for name, each in module.state_dict().items():
        if isinstance(each, Tensor):
            tensor_files.check(name, each)


def _position(fit: FitParts) -> dict[str, Any]:
    """In steps, not batches, because these depend on the layout."""
    position = fit.position
    return {
        "epoch": position.epoch,
        "step_in_epoch": position.batch // fit.feed.accumulate,
        "samples_per_step": fit.feed.samples_per_step,
        "global_step": position.global_step,
        "validated_at": position.validated_at,
        "epoch_done": position.epoch_done,
        "seconds": position.seconds,
    }


def rank_local_state(fit: FitParts) -> dict[str, Tensor]:
    """Rank-local state: random states, and this process' part of unfinished sums."""
    own, manual = fit.module.rank_state(), fit.manual
    parts = {
        "random": randomness.full_state(fit.strategy.data.devices),
        "share": {"of": share(fit)},
        "log": fit.outputs.recorder.state(),
        "torchmetrics": _metrics_state(fit.module, fit.outputs.recorder.metrics),
        "module": to_tensors(own, OF_MODULE) if own else {},
        "strategy": fit.strategy.rank_local.state(),
        "gradients": manual.gradients(lambda each: not is_sharded(each)) if manual else {},
        "loader": fit.feed.state(fit.position.batch, ends_epoch=fit.position.epoch_done),
    }
    return {
        f"{part}/{key}": value for part, values in parts.items() for key, value in values.items()
    }


def share(fit: FitParts) -> Tensor:
    """Whose batches this rank's sums are of: replica, replicas, and whether they count."""
    data = fit.strategy.data
    return torch.tensor([data.index, data.replicas, data.counts])


def _metrics_state(module: TrainingModule, logged: Mapping[str, Any]) -> dict[str, Tensor]:
    found, known = dict[str, Tensor](), set[int]()
    if "torchmetrics" in sys.modules:  # otherwise no metric is in the module
        from ..logging import torchmetrics_state

        found = torchmetrics_state.state(module)
        known = {id(metric) for metric in torchmetrics_state.metrics(module)}
    for name in [name for name, each in logged.items() if id(each) not in known]:
        warnings.warn(
            f"a resume within this epoch loses the values so far of the metric that is logged as "
            f"{name!r}: make it an attribute of {type(module).__name__}, of torchmetrics",
            stacklevel=2,
        )
    return found
