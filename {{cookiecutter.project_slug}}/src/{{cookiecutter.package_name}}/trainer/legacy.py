"""Names of Lightning 1.x, so that its examples run when their imports are changed.

``from PACKAGE.trainer.legacy import LightningModule, Trainer, DDPPlugin``. Plugins are declared by
the folders of their strategies, and are found here by name.
"""

from collections.abc import Mapping
from typing import Any

from .arguments import other_trainers
from .data import seed_everything
from .errors import ConfigurationError, nearest
from .module import DataModule, TrainingModule
from .strategies import registry
from .trainer import Trainer

__all__ = ["LightningDataModule", "LightningModule", "Trainer", "seed_everything"]

_EPOCH_END = "log in the step, or use on_{}_epoch_end"
_BATCH = "use the step itself"
_MANUAL = "use manual optimization: automatic_optimization = False"
_DATA = "move batches in the step, or collate them in the loader"
_CREATE = "create layers in __init__; for large models, with the trainer's meta_device"
_SAVED = "register a buffer: checkpoints contain all of them"
_IN_LOADER = "create the dataset in __init__ or in train_dataloader"
_STRATEGY = "override {} of a strategy, and give it as strategy=…"
# Hooks of LightningModule that are not called here, with what to use instead.
_MODULE_HOOKS: Mapping[str, str] = {
    **{
        f"{stage}_epoch_end": _EPOCH_END.format(hook)
        for stage, hook in (("training", "train"), ("validation", "validation"), ("test", "test"))
    },
    **dict.fromkeys(("on_train_start", "on_pretrain_routine_start"), "use on_fit_start"),
    **dict.fromkeys(("on_fit_end", "on_train_end"), "call it after trainer.fit"),
    **dict.fromkeys(("setup", "configure_sharded_model", "configure_model"), _CREATE),
    **dict.fromkeys(("teardown", "prepare_data"), "call it in your script"),
    **dict.fromkeys(
        (
            *("on_train_batch_start", "on_train_batch_end"),
            *("on_validation_batch_start", "on_validation_batch_end"),
            *("on_test_batch_start", "on_test_batch_end"),
        ),
        _BATCH,
    ),
    **{
        f"on_{stage}_{when}": f"use on_{stage}_epoch_end, or call it in your script"
        for stage in ("validation", "test")
        for when in ("start", "end", "epoch_start")
    },
    "optimizer_zero_grad": "gradients are set to None after each step; leave it out",
    **dict.fromkeys(("backward", "optimizer_step", "lr_scheduler_step"), _MANUAL),
    **dict.fromkeys(("toggle_optimizer", "untoggle_optimizer"), _MANUAL),
    **dict.fromkeys(
        (
            *("on_before_backward", "on_after_backward"),
            *("on_before_optimizer_step", "on_before_zero_grad"),
        ),
        _MANUAL,
    ),
    **dict.fromkeys(
        ("configure_gradient_clipping", "clip_gradients"),
        "use gradient_clip_val and gradient_clip_algorithm of the trainer",
    ),
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), _SAVED),
    **dict.fromkeys(("transfer_batch_to_device", "on_before_batch_transfer"), _DATA),
    "on_after_batch_transfer": _DATA,
    "configure_callbacks": "the trainer has no callbacks; use hooks of the module",
    "tbptt_split_batch": "split the batch in training_step, with manual optimization",
    "init_ddp_connection": _STRATEGY.format("init_process_group"),
    "configure_ddp": _STRATEGY.format("wrap"),
}
_DATA_HOOKS: Mapping[str, str] = {
    **dict.fromkeys(("prepare_data", "setup", "teardown"), _IN_LOADER),
    **dict.fromkeys(("transfer_batch_to_device", "on_before_batch_transfer"), _DATA),
    "on_after_batch_transfer": _DATA,
}
# Classes of other trainers whose work is done by arguments of the trainer.
_CLASSES = {
    "ModelCheckpoint": "checkpoints are saved by the trainer; see checkpoint_every_n_steps",
    "ModelSummary": "use print(module)",
    "LearningRateMonitor": "log the learning rate in training_step",
    "GradientAccumulationScheduler": "use accumulate_grad_batches",
    "EarlyStopping": "callbacks are not built; use max_epochs or max_steps",
    "Callback": "callbacks are not built; use hooks of the module",
}


class LightningModule(TrainingModule):
    """:class:`~.module.TrainingModule` under its older name.

    Raises:
        ConfigurationError: A subclass overrides hooks that would not be called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_hooks(cls, TrainingModule, _MODULE_HOOKS)


class LightningDataModule(DataModule):
    """:class:`~.module.DataModule` under its older name.

    Raises:
        ConfigurationError: A subclass overrides hooks that would not be called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_hooks(cls, DataModule, _DATA_HOOKS)


def _refuse_hooks(cls: type, base: type, hooks: Mapping[str, str]) -> None:
    problems = [
        f"{cls.__name__}.{hook} would not be called: {instead}"
        for hook, instead in hooks.items()
        if hasattr(cls, hook) and not hasattr(base, hook)
    ]
    if problems:
        raise ConfigurationError(problems)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name in registry.plugin_names():
        return registry.plugin(name)
    # Python would replace the message of an AttributeError.
    about = other_trainers.about("loggers", name)
    if about is None and name in _CLASSES:
        about = f"{name}: {_CLASSES[name]}"
    raise ImportError(about or f"there is no {name}{nearest(name, __dir__())}", name=name)


def __dir__() -> list[str]:
    return sorted([*__all__, *registry.plugin_names()])
