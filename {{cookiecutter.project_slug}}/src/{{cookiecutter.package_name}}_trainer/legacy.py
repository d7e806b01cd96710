"""Names of Lightning 1.x, so that its examples run when their imports are changed.

``from PACKAGE_trainer.legacy import LightningModule, Trainer, DDPPlugin``. Plugins are declared by
the folders of their strategies, and are found here by name.
"""

from typing import Any

from .arguments import other_trainers
from .callbacks import Callback, EarlyStopping
from .data import seed_everything
from .errors import ConfigurationError, nearest
from .module import DataModule, TrainingModule, other_hooks
from .strategies import registry
from .trainer import Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "seed_everything",
]


class LightningModule(TrainingModule):
    """:class:`~.module.TrainingModule` under its older name.

    Raises:
        ConfigurationError: A subclass overrides hooks that would not be called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse(other_hooks.of_module(cls))


class LightningDataModule(DataModule):
    """:class:`~.module.DataModule` under its older name.

    Raises:
        ConfigurationError: A subclass overrides hooks that would not be called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse(other_hooks.of_data(cls))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigurationError(problems)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name in registry.plugin_names():
        return registry.plugin(name)
    # Python would replace the message of an AttributeError.
    about = other_trainers.about("loggers", name) or other_trainers.about_callback(name)
    raise ImportError(about or f"there is no {name}{nearest(name, __dir__())}", name=name)


def __dir__() -> list[str]:
    return sorted([*__all__, *registry.plugin_names()])
