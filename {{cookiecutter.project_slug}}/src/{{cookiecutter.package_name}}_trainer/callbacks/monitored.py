"""Callbacks that watch a logged value: stop training, and keep the best checkpoints."""

import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..checkpoint.run_directory import BEST, DIRECTORY, step_name
from ..checkpoint.writing import keep_copies
from ..errors import ConfigurationError, UserError, nearest
from ..launch import collectives, files, output
from ..module import Run, TrainingModule
from .callback import Callback, Check, check, checked

Mode = Literal["min", "max"]


class Monitored(Callback):
    """Base of callbacks that watch a logged value; a UserError says if none has that name.

    Args:
        monitor: Its name in the logs, such as ``"val_loss"``.
        mode: ``"min"``: lower values are better; ``"max"``: higher ones.
        min_delta: The least change that counts as an improvement.
        name: Of this callback, if another one of its class has the same monitor and mode.
        checks: Of other arguments, as in :func:`check`.
    """

    def __init__(
        self, monitor: str, mode: Mode, min_delta: float, name: str | None, *checks: Check
    ) -> None:
        check(
            type(self).__name__,
            *checks,
            (0 <= min_delta < math.inf, f"min_delta={min_delta!r}: give a number from 0 on"),
        )
        self.monitored = self._name = monitor
        self.mode, self.name = mode, name
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta

    def read(self, trainer: Run) -> float | None:
        """The latest value of the main rank, on every rank, so that all decide the same.

        ``None`` if it was not computed since the validation before.
        """
        name, metrics = self._name, trainer.metrics
        if name not in metrics:
            known = nearest(name, metrics) if metrics else "; nothing was logged"
            raise UserError(f"{type(self).__name__}: no value is logged as {name!r}{known}")
        value = metrics[name] if name in trainer.fresh_metrics else None
        fresh: float | None = collectives.broadcast(value)
        return fresh

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value improves on another one; ``None``, and NaN, are worse than any."""
        if than is None or math.isnan(than):
            return not math.isnan(value)
        return self._sign * (than - value) > self._min_delta


class EarlyStopping(Monitored):
    """Stop training when a logged value has not improved for ``patience`` validations.

    A run that resumes continues to count. ``verbose``: print improvements. ``strict``: a value that
    was never logged is an error. See :class:`Monitored` for the other arguments.
    """

    @checked
    def __init__(
        self,
        monitor: str,
        patience: int = 3,
        mode: Mode = "min",
        min_delta: float = 0.0,
        name: str | None = None,
        *,
        verbose: bool = False,
        strict: bool = True,
    ) -> None:
        at_least = (patience >= 1, f"patience={patience}: give at least 1")
        super().__init__(monitor, mode, min_delta, name, at_least)
        self.patience, self.verbose, self.strict = patience, verbose, strict
        self.best: float | None = None
        self.waited = 0
        """Number of validations since the best value."""

    def on_validation_end(self, trainer: Run, module: TrainingModule) -> None:
        value = self.read(trainer) if self.strict or self._name in trainer.metrics else None
        if value is None:
            return
        if self.is_better(value, self.best):
            if self.verbose and trainer.is_global_zero:
                output.print_lines(f"{self.monitored} improved from {self.best} to {value}")
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            than = "" if self.best is None else f" on {self.best}"
            what = f"{self.monitored} is nan: it" if math.isnan(value) else self.monitored
            trainer.stop(f"{what} has not improved{than} for {self.waited} validations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best = state["best"]
        self.best, self.waited = best if best is None else float(best), int(state["waited"])


class BestCheckpoint(Monitored):
    """Keep the ``k`` checkpoints with the best values, beside the newest ones.

    They are in ``checkpoints/best`` of the run directory, and ``best-VALUE`` there is a link to the
    best of them: ``best-val_loss``, or ``best-NAME`` with a ``name``. Several of these callbacks
    share the folder; ``best`` is the first one's. Their files are hard links to those of the newest
    checkpoints where the file system supports it, so that nothing is written twice. See
    :class:`Monitored` for the arguments.
    """

    @checked
    def __init__(
        self, monitor: str, mode: Mode = "min", k: int = 1, name: str | None = None
    ) -> None:
        super().__init__(monitor, mode, 0.0, name, (k >= 1, f"k={k}: give at least 1"))
        self.k = k
        self.link = f"{BEST}-{re.sub('[^A-Za-z0-9._-]+', '-', str(name or monitor))}"
        """Name of the link to the best checkpoint."""
        self.kept: list[tuple[float, int]] = []
        """Value and step of each kept checkpoint, the best first."""

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        if any(other.link == self.link for other in self._all(trainer) if other is not self):
            line = f"two would write the link {self.link}; give one a name"
            raise ConfigurationError(f"BestCheckpoint: {line}")

    def on_validation_end(self, trainer: Run, module: TrainingModule) -> None:
        if (value := self.read(trainer)) is None:
            return
        folder = trainer.run_directory / DIRECTORY / BEST
        kept = [pair for pair in self.kept if (folder / step_name(pair[1])).is_dir()]
        if kept[:1] != self.kept[:1] and trainer.is_global_zero:
            best, step = self.kept[0]
            line = f"note: {self.link}: the best {self.monitored} so far, {best:.4g} at step {step}"
            where = "is not in this run's directory, as after a resume from another one"
            output.print_lines(f"{line}, {where}; the best from here on is kept", error=True)
        self.kept = [(pair[0], pair[1]) for pair in collectives.broadcast(kept)]
        better = [pair for pair in self.kept if not self.is_better(value, pair[0])]
        if len(better) >= self.k or math.isnan(value):
            return
        rest = [pair for pair in self.kept if pair not in better and pair[1] != trainer.global_step]
        self.kept = [*better, (value, trainer.global_step), *rest][: self.k]
        trainer.save_checkpoint(lambda path: self._keep(path, folder, trainer))

    @staticmethod
    def _all(trainer: Run) -> list["BestCheckpoint"]:
        return [callback for callback in trainer.callbacks if isinstance(callback, BestCheckpoint)]

    def _keep(self, checkpoint: Path, folder: Path, trainer: Run) -> None:
        if not trainer.is_global_zero:
            return
        every = self._all(trainer)
        names = {step_name(step) for callback in every for _, step in callback.kept}
        keep_copies(checkpoint, folder, names)
        for link in [self.link, *[BEST] * (every[0] is self)]:
            files.point(folder.parent.parent / link, folder / step_name(self.kept[0][1]))

    def best_value(self, steps_per_epoch: int | None) -> str:
        [(value, step)] = self.kept[:1] or [(0.0, 0)]
        epoch = f", epoch {(step - 1) // steps_per_epoch}" if steps_per_epoch else ""
        return f"; best {self.monitored} {value:.4g} at step {step}{epoch}" if step else ""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(pair) for pair in self.kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = [(float(value), operator.index(step)) for value, step in state["kept"]]
