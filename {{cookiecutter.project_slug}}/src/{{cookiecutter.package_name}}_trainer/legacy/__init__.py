"""Names and arguments of Lightning 1.x, so that its examples run when their imports are changed.

``from PACKAGE_trainer.legacy import LightningModule, Trainer``; the plugins and loggers are in
``legacy.plugins`` and ``legacy.loggers``, as they were. Deleting this folder removes them, and the
older arguments of ``Trainer``.
"""

from typing import Any

from ..callbacks import Callback, EarlyStopping
from ..data import seed_everything
from ..errors import ConfigurationError
from ..module import DataModule, TrainingModule, problems_of_names
from ..options.reading import older
from ..trainer import Trainer
from . import arguments
from .plugins import (
    DataParallelPlugin,
    DDP2Plugin,
    DDPPlugin,
    DDPShardedPlugin,
    DDPSpawnPlugin,
    DDPSpawnShardedPlugin,
    DeepSpeedPlugin,
    HorovodPlugin,
    RPCSequentialPlugin,
)

__all__ = [
    "Callback",
    "DDP2Plugin",
    "DDPPlugin",
    "DDPShardedPlugin",
    "DDPSpawnPlugin",
    "DDPSpawnShardedPlugin",
    "DataParallelPlugin",
    "DeepSpeedPlugin",
    "EarlyStopping",
    "HorovodPlugin",
    "LightningDataModule",
    "LightningModule",
    "RPCSequentialPlugin",
    "Trainer",
    "seed_everything",
]

older.types, older.translate = arguments.TYPES, arguments.translate


class LightningModule(TrainingModule):
    """:class:`~.module.TrainingModule` under its older name.

    Raises:
        ConfigurationError: A subclass overrides hooks that would not be called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if lines := problems_of_names(cls, TrainingModule):
            raise ConfigurationError(lines)


class LightningDataModule(DataModule):
    """:class:`~.module.DataModule` under its older name, with the same check."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if lines := problems_of_names(cls, DataModule):
            raise ConfigurationError(lines)
