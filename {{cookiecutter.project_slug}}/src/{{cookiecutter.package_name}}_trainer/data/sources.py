"""What a command needs from a module: the hooks it overrides, and loaders."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from torch import nn

from ..errors import ConfigurationError, UserError
from ..module import (
    DataHooks,
    DataModule,
    Loader,
    TrainingModule,
    problems_of_names,
    problems_of_signatures,
)
from . import loaders

Data = DataModule | Loader | Mapping[str, Loader] | None
LoadersByName = Mapping[str, Loader]
"""Loaders of an evaluation; a single one has the name ``""``."""
_Evaluation = Literal["val", "test", "predict"]

_STEPS = {"val": "validation_step", "test": "test_step", "predict": "predict_step"}

_GIVEN = "the trainer was given"
_RETURNS = {
    "training_step": "the loss of a batch",
    "validation_step": "None, and logs the metrics of a batch",
    "test_step": "None, and logs the metrics of a batch",
    "predict_step": "predictions for a batch, or forward, which it calls by default",
    "configure_optimizers": "the optimizers",
}


def missing(module: TrainingModule, names: Sequence[str]) -> list[str]:
    """One line for each hook that a module does not override."""
    kind = type(module).__name__
    return [
        f"{kind} has no {name}: override it; it returns {_RETURNS[name]}"
        for name in names
        if not _is_overridden(module, name)
    ]


def check(module: TrainingModule, *names: str) -> None:
    """Raise ConfigurationError if a module does not override a hook, or one cannot be called."""
    lines = missing(module, names) + problems_of_signatures(module, DataHooks)
    lines += [line for name in names for line in _with_index(module, name, is_needed=True)]
    if lines:
        raise ConfigurationError(lines)


def _is_overridden(module: TrainingModule, name: str) -> bool:
    found = getattr(getattr(module, name), "__func__", None)
    if name == "predict_step" and found is TrainingModule.predict_step:
        # nn.Module's own forward is _forward_unimplemented.
        return getattr(module.forward, "__func__", None) is not nn.Module.forward
    return found is not getattr(TrainingModule, name)


def _with_index(module: TrainingModule, step: str, *, is_needed: bool) -> list[str]:
    """The line for a step that takes Lightning's index of a loader, which is not passed."""
    index = inspect.signature(getattr(module, step)).parameters.get("dataloader_idx")
    if index is None or (is_needed and index.default is not index.empty):
        return []
    return [
        f"{type(module).__name__}.{step} takes dataloader_idx, which is not passed: use "
        "self.dataloader_name"
    ]


def training_loader(data: Data, module: TrainingModule) -> Loader:
    """Get the training loader: the given one, or that of the data module or the module.

    Raises:
        UserError: There is none, or it is not an iterable of batches.
    """
    made, source = _made(data, module, "train")
    loaders.check(made, source)
    loaders.check_repeats(made, source)
    return cast(Loader, made)


def evaluation_loaders(data: Data, module: TrainingModule, stage: _Evaluation) -> LoadersByName:
    """Get the loaders of an evaluation: the given ones, or those of data module or module.

    Raises:
        UserError: There are none, or one is not an iterable of batches.
    """
    made, source = _made(data, module, stage)
    return _named(made, source, module, stage)


def validation_loaders(data: Data, module: TrainingModule, given: Data) -> LoadersByName:
    """Get the validation loaders of a fit, if any; they require a ``validation_step``."""
    source = _GIVEN
    if given is None and (data is None or isinstance(data, DataModule)):
        given, source = _called(data or module, "val")
    if given is None:
        return {}
    check(module, "validation_step")
    loaders.check_repeats(given, source)
    return _named(given, source, module, "val")


def check_given(data: Data, *, is_training: bool = False) -> None:
    """Check an argument: loaders of batches, or a data module without hooks of other trainers."""
    if isinstance(data, DataModule):
        lines = problems_of_names(type(data), DataModule) + problems_of_signatures(data, DataHooks)
        if lines:
            raise ConfigurationError(lines)
    elif data is not None:
        (loaders.check if is_training else loaders.by_name)(data, _GIVEN)
        if is_training:
            loaders.check_repeats(data, _GIVEN)


def _named(made: object, source: str, module: TrainingModule, stage: _Evaluation) -> LoadersByName:
    named = loaders.by_name(made, source)
    if "" not in named and (lines := _with_index(module, _STEPS[stage], is_needed=False)):
        raise ConfigurationError(lines)
    return named


def _made(data: Data, module: TrainingModule, stage: str) -> tuple[object, str]:
    """The loaders of a stage, and where they come from."""
    if data is not None and not isinstance(data, DataModule):
        return data, _GIVEN
    made, source = _called(data or module, stage)
    if made is None:
        raise UserError(f"no batches: {source} None, and no loader was given: return a DataLoader")
    return made, source


def _called(owner: DataModule | TrainingModule, stage: str) -> tuple[Any, str]:
    name = f"{stage}_dataloader"
    return getattr(owner, name)(), f"{type(owner).__name__}.{name} returned"
