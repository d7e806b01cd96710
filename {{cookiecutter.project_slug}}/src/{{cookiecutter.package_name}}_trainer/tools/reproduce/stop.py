"""End a run after a step, without a change of what depends on the number of its steps."""

from ...callbacks import Callback
from ...module import Run, TrainingModule
from ...run.rank import RankRun


class StopAfter(Callback):
    """Ends the fit after ``step``, on all ranks, as if it had been asked to stop."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_after_optimizer_step(self, trainer: Run, module: TrainingModule) -> None:
        if isinstance(trainer, RankRun) and trainer.global_step >= self.step:
            trainer.position.is_stopped = True
