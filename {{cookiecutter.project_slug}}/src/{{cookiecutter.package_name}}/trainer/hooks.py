"""Which hooks a module must overwrite for a command, checked before the command begins."""

from collections.abc import Sequence

from torch import nn

from .errors import ConfigurationError
from .module import TrainingModule

_RETURNS = {
    "training_step": "the loss of a batch",
    "validation_step": "None, and logs what is worth knowing of a batch",
    "test_step": "None, and logs what is worth knowing of a batch",
    "predict_step": "predictions for a batch, or forward, which it calls by default",
    "configure_optimizers": "the optimizers",
}


def missing(module: TrainingModule, names: Sequence[str]) -> list[str]:
    """One line for each hook that a module does not overwrite."""
    kind = type(module).__name__
    return [
        f"{kind} has no {name}: overwrite it; it returns {_RETURNS[name]}"
        for name in names
        if not _is_overwritten(module, name)
    ]


def check(module: TrainingModule, *names: str) -> None:
    """Raise ConfigurationError if a module does not overwrite a hook."""
    lines = missing(module, names)
    if lines:
        raise ConfigurationError(lines)


def _is_overwritten(module: TrainingModule, name: str) -> bool:
    found = getattr(getattr(module, name), "__func__", None)
    if name == "predict_step" and found is TrainingModule.predict_step:
        # nn.Module's own forward, under whatever name torch gives it.
        return getattr(module.forward, "__func__", None) is not nn.Module.forward
    return found is not getattr(TrainingModule, name)
