"""Names and arguments of Lightning 1.x, so that its examples run when their imports are changed.

``from PACKAGE_trainer.legacy import LightningModule, Trainer``; the plugins and loggers are in
``legacy.plugins`` and ``legacy.loggers``, as they were. Deleting this folder removes all of it.
"""

from typing import Any

from ..errors import foreign, refuse
from ..module import DataModule, TrainingModule, hooks
from ..trainer import Trainer
from . import arguments, lightning, names
from .plugins import DDPPlugin, DeepSpeedPlugin, RPCSequentialPlugin

__all__ = [
    "DDPPlugin",
    "DeepSpeedPlugin",
    "LightningDataModule",
    "LightningModule",
    "RPCSequentialPlugin",
    "Trainer",
]

foreign.types, foreign.translate = arguments.TYPES, arguments.translate
foreign.keywords, foreign.methods = arguments.keywords, lightning.METHODS
foreign.advice = {(each.where, each.name): each.use for each in names.rows()}


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
