"""The interface of callbacks."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, get_type_hints

from torch.optim import Optimizer

from ..checkpoint import read_all
from ..errors import Problems, refuse
from ..module import Run, TrainingModule
from ..options import values
from ..options.reading import accepts_foreign

Check = tuple[bool, str]
P = ParamSpec("P")
T = TypeVar("T")


class Callback:
    """Hooks called at fixed points of a fit; override the methods that you need.

    Methods are called on every rank, in the order of ``Trainer(callbacks=…)``, and before the
    module's own hook. A method that is not overridden costs nothing. ``trainer`` is the run
    (:class:`~..module.Run`): it has ``global_step``, ``current_epoch``, ``metrics``, ``stop()``,
    ``save_checkpoint()`` and more.

    Example::

        class PrintStep(Callback):
            def on_train_epoch_end(self, trainer, module):
                if trainer.is_global_zero:
                    print(f"epoch {trainer.current_epoch}: step {trainer.global_step}")

    ``needs``: features that the strategy must support, such as ``"parameter_averaging"``.
    ``monitored``: name of a logged value that :meth:`on_validation_end` reads, for checks before
    training. ``name``: tells the state of this callback from those of others of its class; default:
    ``monitored`` and ``mode``.

    An object that is used for another fit starts it with the state with which it began the first
    one. What is not in :meth:`state_dict` is reset by :meth:`on_fit_start`, if you write that.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    monitored: str | None = None
    name: str | None = None

    def best_value(self, steps_per_epoch: int | None) -> str:
        """The end of a fit's last line: the best value, with its step and epoch."""
        return ""

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        """Called before the first step, before a checkpoint is loaded."""

    def on_fit_end(self, trainer: Run, module: TrainingModule) -> None:
        """Called after the last step, checkpoint and validation; not if the fit fails."""

    def on_train_epoch_start(self, trainer: Run, module: TrainingModule) -> None:
        """Called before the first batch of an epoch; not if a run resumes within an epoch."""

    def on_train_epoch_end(self, trainer: Run, module: TrainingModule) -> None:
        """Called after the last batch of an epoch, before its values are reduced."""

    def on_train_batch_start(
        self, trainer: Run, module: TrainingModule, batch: Any, batch_idx: int
    ) -> None:
        """Called before a micro-batch's forward."""

    def on_train_batch_end(
        self, trainer: Run, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a micro-batch's backward, and after the step that it ends.

        ``outputs`` is what ``training_step`` returned, as in the module's own hook.
        """

    def on_before_optimizer_step(
        self, trainer: Run, module: TrainingModule, optimizer: Optimizer
    ) -> None:
        """Called before each optimizer's step, after gradients are averaged and clipped.

        Refused with manual optimization, in which ``training_step`` steps. Gradients that an
        engine does not leave in the parameters cannot be used: docs/how-to/callbacks.md.
        """

    def on_after_optimizer_step(self, trainer: Run, module: TrainingModule) -> None:
        """Called after the step of all optimizers; in manual optimization after each batch."""

    def on_validation_start(self, trainer: Run, module: TrainingModule) -> None:
        """Called before a validation of the fit."""

    def on_validation_end(self, trainer: Run, module: TrainingModule) -> None:
        """Called after a validation of the fit; ``trainer.metrics`` has its values."""

    def on_exception(self, trainer: Run, module: TrainingModule, error: BaseException) -> None:
        """Called if the fit ends early on this rank, before the error is raised again.

        After a signal, ``error`` is a ``SystemExit`` or ``KeyboardInterrupt``, and all is saved.
        """

    def state_dict(self) -> dict[str, Any]:
        """Get the state to save in checkpoints: numbers, strings, tensors, dicts and lists.

        It must be the same on every rank, except what ``trainer.weights().state()`` returns.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, when a run resumes."""

    def load_stored_state(self, state: Mapping[str, Any]) -> None:
        """Load a state whose tensors are not read yet: override it to read a part of them."""
        self.load_state_dict(read_all(dict(state)))


def checked(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Decorate a constructor: its arguments have the declared types, or other trainers' names."""
    names = [*inspect.signature(init).parameters][1:]

    @functools.wraps(init)
    def __init__(self: T, /, *arguments: P.args, **kwargs: P.kwargs) -> None:
        given = {**dict(zip(names, arguments, strict=False)), **kwargs}
        problems, types = Problems(), get_type_hints(init, include_extras=True)
        plain = {name: values.plain_number(given[name]) for name in given if name in types}
        values.check(types, plain, problems, f"{init.__qualname__.partition('.')[0]}: ")
        problems.raise_any()
        init(self, *arguments, **kwargs)

    return accepts_foreign(__init__)


def check(name: str, *checks: Check) -> None:
    """Raise a ConfigurationError with the line of each check that is false."""
    refuse([f"{name}: {line}" for is_good, line in checks if not is_good])
