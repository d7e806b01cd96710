"""Hooks of other trainers that are not called here, with what to use instead."""

import re
from collections.abc import Iterable, Mapping

from ..errors import nearest
from .data_module import DataModule
from .training_module import TrainingModule

_EPOCH_END = "log in the step, or use on_{}_epoch_end"
_BATCH = "use the step itself"
_MANUAL = "use manual optimization: automatic_optimization = False"
_DATA = "move batches in the step, or collate them in the loader"
_CREATE = "create layers in __init__ or setup; for large models, with the trainer's meta_device"
_SAVED = "register a buffer: checkpoints contain all of them"
_STRATEGY = "override {} of a strategy, and give it as strategy=…"
_MODULE_HOOKS: Mapping[str, str] = {
    **{
        f"{stage}_epoch_end": _EPOCH_END.format(hook)
        for stage, hook in (("training", "train"), ("validation", "validation"), ("test", "test"))
    },
    **dict.fromkeys(("on_train_start", "on_pretrain_routine_start"), "use on_fit_start"),
    "on_train_end": "use on_fit_end",
    **dict.fromkeys(("configure_sharded_model", "configure_model"), _CREATE),
    **dict.fromkeys(
        (
            *("on_validation_batch_start", "on_validation_batch_end"),
            *("on_test_batch_start", "on_test_batch_end"),
        ),
        _BATCH,
    ),
    **{
        f"on_{stage}_{when}": f"use on_{stage}_epoch_{when}"
        for stage in ("validation", "test")
        for when in ("start", "end")
    },
    "optimizer_zero_grad": "gradients are set to None after each step; leave it out",
    **dict.fromkeys(("backward", "optimizer_step", "lr_scheduler_step"), _MANUAL),
    **dict.fromkeys(("toggle_optimizer", "untoggle_optimizer"), _MANUAL),
    "on_before_backward": "use the end of training_step",
    "on_after_backward": "use on_before_optimizer_step",
    "on_before_zero_grad": "use on_after_optimizer_step",
    **dict.fromkeys(
        ("configure_gradient_clipping", "clip_gradients"),
        "use gradient_clip_val and gradient_clip_algorithm of the trainer",
    ),
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), _SAVED),
    **dict.fromkeys(("on_hpc_save", "on_hpc_load"), _SAVED),
    "get_progress_bar_dict": "log values: the progress bar shows them",
    **{
        f"on_{stage}_model_{mode}": "override train() of the module"
        for stage in ("validation", "test", "predict")
        for mode in ("eval", "train")
    },
    **dict.fromkeys(("transfer_batch_to_device", "on_before_batch_transfer"), _DATA),
    "on_after_batch_transfer": _DATA,
    "configure_callbacks": "use callbacks of the trainer",
    "tbptt_split_batch": "split the batch in training_step, with manual optimization",
    "init_ddp_connection": _STRATEGY.format("init_process_group"),
    "configure_ddp": _STRATEGY.format("wrap"),
}
_DATA_HOOKS: Mapping[str, str] = {
    **dict.fromkeys(("transfer_batch_to_device", "on_before_batch_transfer"), _DATA),
    "on_after_batch_transfer": _DATA,
}
_CALLBACK = "callbacks are called in a fit only; use a hook of the module"
_CALLBACK_HOOKS: Mapping[str, str] = {
    **dict.fromkeys(("on_train_start", "setup"), "use on_fit_start"),
    **dict.fromkeys(("on_train_end", "teardown"), "use on_fit_end"),
    "on_after_backward": "use on_before_optimizer_step",
    "on_before_zero_grad": "use on_after_optimizer_step",
    "on_save_checkpoint": "use state_dict",
    "on_load_checkpoint": "use load_state_dict",
    "on_keyboard_interrupt": "catch KeyboardInterrupt around trainer.fit",
    **dict.fromkeys(("on_epoch_start", "on_batch_start"), "use on_train_epoch_start"),
    **dict.fromkeys(("on_epoch_end", "on_batch_end"), "use on_train_epoch_end"),
    **{
        f"on_{stage}_{when}": _CALLBACK
        for stage in ("test", "predict")
        for when in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    },
    "on_validation_epoch_start": "use on_validation_start",
    "on_validation_epoch_end": "use on_validation_end",
}
_LOOKS_LIKE_A_HOOK = re.compile("on_.*_(start|end)|on_(before|after)_.*")


def of_module(cls: type) -> list[str]:
    """One line for each hook of a module that would not be called."""
    return _lines(cls, TrainingModule, _MODULE_HOOKS)


def of_data(cls: type) -> list[str]:
    """One line for each hook of a data module that would not be called."""
    return _lines(cls, DataModule, _DATA_HOOKS)


def of_callback(cls: type, base: type) -> list[str]:
    """One line for each hook of a callback that would not be called."""
    return _lines(cls, base, _CALLBACK_HOOKS)


def _lines(cls: type, base: type, table: Mapping[str, str]) -> list[str]:
    known = [name for name in dir(base) if name.startswith("on_")]
    found = [name for name in table if hasattr(cls, name) and not hasattr(base, name)]
    lines = [f"{cls.__name__}.{name} would not be called: {table[name]}" for name in found]
    return lines + [
        f"{cls.__name__}.{name} would not be called: it is no hook{nearest(name, known)}"
        for name in _like_hooks(dir(cls))
        if name not in table and not hasattr(base, name)
    ]


def _like_hooks(names: Iterable[str]) -> Iterable[str]:
    return (name for name in names if _LOOKS_LIKE_A_HOOK.fullmatch(name))
