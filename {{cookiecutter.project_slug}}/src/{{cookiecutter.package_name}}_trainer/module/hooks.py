"""Hooks that each rank calls at fixed points of a run, and checks of the classes with them."""

import difflib
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..errors import missing, nearest, shown

Loader = Iterable[Any]
Loaders = Loader | Mapping[str, Loader]  # a loader, or several by name
_LIKE_A_HOOK = (
    r"on_.*_(start|begin|end|step|checkpoint|eval|train|save|load)|on_(before|after|init)_.*"
)
_HOOK = re.compile(r"on_.*|.*_(step|step_end|dataloader)|configure_optimizers|prepare_data")
_OTHER_HOOKS = (  # other hooks of Lightning that are not called here
    *("training_epoch_end", "validation_epoch_end", "test_epoch_end", "tbptt_split_batch"),
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("configure_gradient_clipping", "configure_callbacks", "configure_model"),
    *("configure_sharded_model", "transfer_batch_to_device", "toggle_optimizer"),
    *("init_ddp_connection", "configure_ddp", "setup", "teardown", "on_keyboard_interrupt"),
    *("state_dict", "load_state_dict"),  # of a data module
    *("predict_step_end", "training_dataloader", "validation_dataloader", "dev_dataloader"),
)


class _OfClass:
    """What classes of other trainers have, and these have not."""

    def __get__(self, instance: object, cls: type) -> Any:
        return missing(cls, "load_from_checkpoint")


class DataHooks:
    """Loaders, and hooks around a command, of modules and data modules.

    A module's loaders are used if there is no data module. Hooks of data modules are called first.
    ``stage`` is ``"fit"`` (also for ``find_batch_size``), ``"validate"``, ``"test"`` or
    ``"predict"``. Each command calls them again.
    """

    hparams: Mapping[str, Any] = {}
    """Hyperparameters to record in ``run.json``, in checkpoints of a module, and for loggers."""

    if not TYPE_CHECKING:  # so that type checkers report unknown names
        load_from_checkpoint = _OfClass()

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)  # of nn.Module
            except AttributeError:
                run = getattr(vars(self).get("trainer_state"), "run", None)
                return run.logger if run and name == "logger" else missing(self, name)

    def prepare_data(self) -> None:
        """Called by one process per node while the others wait: download or convert data.

        Set no attributes here: the other processes would not have them.
        """

    def setup(self, stage: str) -> None:
        """Called on every rank, before the loaders are created and the module is placed.

        A module may create layers here. With ``meta_device``, their parameters are created on the
        meta device, as in ``__init__``. With ``ddp_spawn`` and ``ddp_fork``, layers must be created
        in ``__init__``, because the trained weights are returned into the module of the script.
        """

    def teardown(self, stage: str) -> None:
        """Called on every rank after the command; not if it fails."""

    def data_files(self) -> Iterable[str | os.PathLike[str]]:
        """The files, or directories of files, that data is read from, to record their hashes.

        Called on rank 0 once the loaders exist. By default: attributes that are paths of existing
        files and directories. Relative paths are those of the directory in which the run was
        started.
        """
        values = (value for value in vars(self).values() if isinstance(value, str | os.PathLike))
        return [value for value in values if value and os.path.exists(value)]  # noqa: PTH110

    def train_dataloader(self) -> Loader | None:
        """Loader of training batches."""
        return None

    def val_dataloader(self) -> Loaders | None:
        """Loader of validation batches, or a dict of loaders by name."""
        return None

    def test_dataloader(self) -> Loaders | None:
        """Loader of test batches, or a dict of loaders by name."""
        return None

    def predict_dataloader(self) -> Loaders | None:
        """Loader of prediction batches, or a dict of loaders by name."""
        return None


class Hooks(DataHooks):
    """Hooks of a module; override those that you need. Those of callbacks are called first."""

    def on_fit_start(self) -> None:
        """Called after the module is moved to its device, before the first step."""

    def on_fit_end(self) -> None:
        """Called after the last step, checkpoint and validation; not if the fit fails."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch; not if a run resumes within an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after the last batch of an epoch, before its values are reduced."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a micro-batch's forward."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a micro-batch's backward, and after the step that it ends.

        ``outputs`` is what ``training_step`` returned, without gradients; ``{"loss": loss}`` if
        that was the loss alone. Several replicas' or micro-batches' of a process are gathered. In a
        pipeline, it is ``None`` in a process without the last stage.
        """

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each optimizer's step, after gradients are averaged and clipped.

        Not with manual optimization, in which ``training_step`` steps. Gradients that an engine
        does not leave in the parameters cannot be used: docs/how-to/callbacks.md.
        """

    def on_after_optimizer_step(self) -> None:
        """Called after the step of all optimizers; in manual optimization after each batch."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch, before its values are reduced."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch, before its values are reduced."""

    def on_exception(self, error: BaseException) -> None:
        """Called if the fit fails on this rank, before the error is raised again."""


class DataModule(DataHooks):
    """Data loading. Override the loaders that you need; each returns a ``DataLoader``.

    For validation, test and prediction, it may return a dict of them by name: values are then
    logged by name, such as ``val_loss/clean``, each over the samples of its own loader.

    The trainer replaces the samplers: training data is reshuffled each epoch; validation and test
    data is read in order, each sample once, on any number of processes. It reads other loaders as
    they are (iterable datasets, own samplers): split their samples by :attr:`data_index`.
    """

    data_replicas: int = 1
    """Number of data-parallel replicas, which read different samples. The trainer sets it before
    :meth:`setup`."""
    data_index: int = 0
    """Index of the replica of this process. Several ranks of one replica, as in a pipeline, must
    read the same batches."""


def is_overridden(owner: object, base: type, name: str) -> bool:
    """Whether an object has its own version of a method of a base class."""
    method = getattr(owner, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def with_own_mode(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that override ``train``, the outer ones first."""
    return [part for part in module.modules() if is_overridden(part, nn.Module, "train")]


def problems_of_names(owner: object, base: type, others: str = "") -> list[str]:
    """One line for each function that looks like a hook, or as ``others`` says, but is none."""
    cls = owner if isinstance(owner, type) else type(owner)
    known = [name for name in dir(base) if _HOOK.fullmatch(name)]
    missing = [name for name in known if not is_overridden(owner, base, name)]
    return [
        f"{cls.__name__}.{name} would not be called: it is no hook{nearest(name, known, 'hook')}"
        for name in sorted({*dir(cls), *vars(owner)} - {*dir(base)})
        if not name.startswith("_") and callable(inspect.getattr_static(owner, name))
        if name in _OTHER_HOOKS
        or re.fullmatch(f"{_LIKE_A_HOOK}|{others}", name)
        or difflib.get_close_matches(name, missing, 1, 0.93)  # an s too many, letters swapped
    ]


def problems_of_signatures(owner: object, base: type) -> list[str]:
    """One line for each overridden hook that cannot be called with the hook's arguments."""
    lines = []
    for name, hook in vars(base).items():
        if name.startswith("_") or not callable(hook) or not is_overridden(owner, base, name):
            continue
        if not callable(method := getattr(owner, name)):
            lines.append(f"{type(owner).__name__}.{name} is {shown(method)}, not a method")
            continue
        expected = list(inspect.signature(hook).parameters)[1:]
        signature = inspect.signature(method)
        try:
            signature.bind(*expected)
        except TypeError:
            taken = signature.replace(return_annotation=signature.empty)
            advice = f"it is called with ({', '.join(expected)})"
            lines.append(f"{type(owner).__name__}.{name} takes {taken}; {advice}")
    return lines


def problems_of_lazy(module: nn.Module) -> list[str]:
    """A line if layers have no parameters yet, because no batch has passed them."""
    lazy = [
        f"{name} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if any(map(is_lazy, [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]))
    ]
    advice = "pass a batch through them in __init__ or in setup"
    return [f"{type(module).__name__}: {', '.join(lazy)}: not initialized; {advice}"] * bool(lazy)


def problems_of_max_norm(module: nn.Module) -> list[str]:
    """One line for each embedding that changes its weight in a forward, of a module on ranks."""
    return [
        f"{name or type(module).__name__}: max_norm changes the rows that a forward reads, in its "
        "process only: ranks would have other weights; renormalize the whole weight in "
        "on_train_batch_end (torch.renorm), or use devices=1"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None
    ]
