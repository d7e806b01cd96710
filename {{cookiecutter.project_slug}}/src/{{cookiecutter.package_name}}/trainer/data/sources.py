"""What a command needs from a module: the hooks it overrides, and loaders."""

from collections.abc import Sequence
from typing import Literal

from torch import nn

from ..errors import ConfigurationError, UserError
from ..module import (
    DataModule,
    Loader,
    StageHooks,
    TrainingModule,
    other_hooks,
    problems_of_signatures,
)
from . import loaders

Data = DataModule | Loader | None
_Stage = Literal["train", "val", "test", "predict"]

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
    lines = missing(module, names) + problems_of_signatures(module, StageHooks)
    if lines:
        raise ConfigurationError(lines)


def _is_overridden(module: TrainingModule, name: str) -> bool:
    found = getattr(getattr(module, name), "__func__", None)
    if name == "predict_step" and found is TrainingModule.predict_step:
        # nn.Module's own forward is _forward_unimplemented.
        return getattr(module.forward, "__func__", None) is not nn.Module.forward
    return found is not getattr(TrainingModule, name)


def loader(data: Data, module: TrainingModule, stage: _Stage) -> Loader:
    """Get the loader of a stage: the given one, or that of the data module or the module.

    Raises:
        UserError: There is none, or it is not an iterable of batches.
    """
    if data is not None and not isinstance(data, DataModule):
        return data
    made = _made_loader(data or module, stage)
    if made is None:
        owner = type(data or module).__name__
        raise UserError(
            f"no batches: {owner}.{stage}_dataloader returned None, and no loader was given: "
            "return a DataLoader"
        )
    return made


def validation_loader(data: Data, module: TrainingModule, given: Loader | None) -> Loader | None:
    """Get the validation loader of a fit, if any; it requires a ``validation_step``."""
    if given is None and (data is None or isinstance(data, DataModule)):
        given = _made_loader(data or module, "val")
    if given is not None:
        check(module, "validation_step")
    return given


def check_given(*given: Data) -> None:
    """Check that each argument is an iterable of batches, or a data module without other hooks."""
    for each in given:
        if isinstance(each, DataModule):
            lines = other_hooks.of_data(type(each)) + problems_of_signatures(each, StageHooks)
            if lines:
                raise ConfigurationError(lines)
        elif each is not None:
            loaders.check(each, "the trainer was given")


def _made_loader(owner: DataModule | TrainingModule, stage: _Stage) -> Loader | None:
    made: Loader | None = getattr(owner, f"{stage}_dataloader")()
    if made is not None:
        loaders.check(made, f"{type(owner).__name__}.{stage}_dataloader returned")
    return made
