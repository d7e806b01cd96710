"""Keep the checkpoints with the best values."""

import operator
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import BEST, DIRECTORY, copy_linked, point, step_name
from ..errors import ConfigurationError
from ..launch import collectives
from ..module import Run, TrainingModule
from .base import Callback
from .monitor import Mode, Monitor


class BestCheckpoint(Callback):
    """Keep the checkpoints with the best values, beside the newest ones.

    They are in ``checkpoints/best`` of the run directory, and ``best`` there is a link to the best
    of them. Their files are hard links to those of the newest checkpoints where the file system
    supports it, so that nothing is written twice.

    Args:
        monitor: Name of the value, such as ``"val_loss"``.
        mode: ``"min"``: lower values are better; ``"max"``: higher ones.
        k: Number of checkpoints to keep.

    Raises:
        ConfigurationError: An argument is invalid.
        UserError: At the first validation: no such value is logged.
    """

    def __init__(self, monitor: str, mode: Mode = "min", k: int = 1) -> None:
        if k < 1:
            raise ConfigurationError(f"BestCheckpoint: k={k}: give at least 1")
        self._monitor = Monitor(monitor, mode, 0.0, "BestCheckpoint")
        self.monitored = monitor
        self.k = k
        self.kept: list[tuple[float, int]] = []
        """Value and step of each kept checkpoint, the best first."""

    def on_validation_end(self, trainer: Run, module: TrainingModule) -> None:
        value = self._monitor.read(trainer.metrics)
        folder = trainer.run_directory / DIRECTORY / BEST
        # Of another run, if this one resumed from it.
        kept = [each for each in self.kept if (folder / step_name(each[1])).is_dir()]
        self.kept = [(each[0], each[1]) for each in collectives.broadcast(kept)]
        better = [each for each in self.kept if not self._monitor.is_better(value, each[0])]
        if len(better) >= self.k or value != value:
            return
        rest = [each for each in self.kept if each not in better and each[1] != trainer.global_step]
        self.kept = [*better, (value, trainer.global_step), *rest][: self.k]
        trainer.save_checkpoint(lambda path: self._keep(path, folder, trainer.is_global_zero))

    def _keep(self, checkpoint: Path, folder: Path, is_main: bool) -> None:
        if not is_main:
            return
        folder.mkdir(exist_ok=True)
        names = {step_name(step) for _, step in self.kept}
        for each in folder.iterdir():
            if each.name not in names:
                shutil.rmtree(each)
        copy_linked(checkpoint, folder)
        point(folder.parent.parent / BEST, folder / step_name(self.kept[0][1]))

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(each) for each in self.kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = [(float(value), operator.index(step)) for value, step in state["kept"]]
