"""Names and arguments of Lightning 1.x, so that its examples run when their imports are changed.

``from PACKAGE_trainer.legacy import LightningModule, Trainer``; the plugins and loggers are in
``legacy.plugins`` and ``legacy.loggers``, as they were. Deleting this folder removes all of it.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ConfigurationError, foreign, refuse, shown
from ..module import DataModule, TrainingModule, hooks
from ..trainer import Trainer
from . import arguments, names
from .plugins import DDPPlugin, DeepSpeedPlugin, RPCSequentialPlugin

__all__ = [
    "DDPPlugin",
    "DeepSpeedPlugin",
    "LightningDataModule",
    "LightningModule",
    "RPCSequentialPlugin",
    "Trainer",
]

_TOGGLED = "_toggled_optimizer"


class LightningModule(TrainingModule):
    """:class:`~.module.TrainingModule` by its older name, with a check of its hooks."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse(hooks.problems_of_names(cls, TrainingModule))


class LightningDataModule(DataModule):
    """:class:`~.module.DataModule` under its older name, with the same check."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse(hooks.problems_of_names(cls, DataModule))


# --- methods of Lightning's modules, which all modules have --------------------------------------


class AttributeDict(dict[str, Any]):
    """A dict whose keys are attributes, too."""

    __setattr__ = dict.__setitem__

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"there is no hyperparameter {name!r}")
        return self[name]


def save_hyperparameters(
    self: Any, *args: Any, ignore: str | Iterable[str] = (), logger: bool = True
) -> None:
    """Add arguments of ``__init__``, those of subclasses included, to ``self.hparams``.

    ``args``: names, by default all; or one mapping, or object, in their place.
    """
    if not logger:
        raise ConfigurationError("save_hyperparameters: logger=False: leave it out, or use ignore")
    hparams, frame = dict[str, Any](), inspect.currentframe()
    while frame := frame and frame.f_back:
        names, _, keywords, values = inspect.getargvalues(frame)
        is_init = frame.f_code.co_name == "__init__" and names
        if not is_init or values.get(names[0]) is not self:
            break
        hparams |= {name: values[name] for name in names[1:]} | values.get(keywords or "", {})
    if args and not isinstance(args[0], str):
        hparams = dict(args[0] if isinstance(args[0], Mapping) else vars(args[0]))
    elif unknown := [name for name in args if name not in hparams]:
        raise ConfigurationError(f"save_hyperparameters: no argument {shown(unknown[0])}")
    elif args:
        hparams = {name: hparams[name] for name in args}
    left_out = {ignore} if isinstance(ignore, str) else {*ignore}
    kept = {name: value for name, value in hparams.items() if name not in left_out}
    self.hparams = AttributeDict({**self.hparams, **kept})


def toggle_optimizer(self: Any, optimizer: Any) -> None:
    """Compute gradients only for an optimizer's parameters, until :func:`untoggle_optimizer`."""
    if self.automatic_optimization:
        raise ConfigurationError("toggle_optimizer: set automatic_optimization = False")
    untoggle_optimizer(self, optimizer)
    vars(self)[_TOGGLED] = optimizer.toggle_model()
    vars(self)[_TOGGLED].__enter__()


def untoggle_optimizer(self: Any, optimizer: Any) -> None:
    """Restore what :func:`toggle_optimizer` has changed."""
    if (toggled := vars(self).pop(_TOGGLED, None)) is not None:
        toggled.__exit__(None, None, None)


METHODS = {f.__name__: f for f in (save_hyperparameters, toggle_optimizer, untoggle_optimizer)}
foreign.types, foreign.translate = arguments.TYPES, arguments.translate
foreign.keywords, foreign.methods = arguments.keywords, METHODS
foreign.advice = {(row.where, row.name): row.use for row in names.rows()}
