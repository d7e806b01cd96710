"""Training: epochs of steps, steps of micro-batches. Plain control flow; what is done with
parameters, gradients and data is the strategy's business."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Literal

from torch import Tensor

from ..checkpoint.dtensors import is_sharded
from ..checkpoint.reading import Checkpoint
from ..checkpoint.stored_tensors import read_all
from ..checkpoint.writing import Checkpoints
from ..data import randomness
from ..data.feed import Feed, MicroBatch
from ..errors import CheckpointError
from ..launch.cluster import Layout
from ..launch.preemption import Preempted, Preemption
from ..logging import metrics
from ..logging.loggers import Logger
from ..logging.outputs import Outputs
from ..module import TrainingModule
from ..strategies import Strategy
from ..strategies.optimizers import Optimization
from .finite import FiniteGuard
from .manual_optimization import ManualOptimization
from .schedule import Clip, Position, SavedPosition, Schedule, is_last_step

_NOT_OF_THIS_MODEL = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)


class FitLoop:
    """Trains a module that a strategy has set up.

    Args:
        module: the user's.
        strategy: has set it up.
        optimization: what it made of the user's optimizers.
        feed: gives the batches.
        validate: runs a validation; ``None`` without.
        outputs: where values go.
        checkpoints: writes them.
        schedule: when things happen.
        clip: how gradients are clipped; ``None``: not.
        position: where training stands; kept up to date.
        rate: what learning rates are multiplied by in a step, counted from 0.
    """

    def __init__(
        self,
        module: TrainingModule,
        strategy: Strategy,
        optimization: Optimization,
        feed: Feed,
        validate: Callable[[], dict[str, float]] | None,
        outputs: Outputs,
        checkpoints: Checkpoints,
        schedule: Schedule,
        clip: Clip | None,
        position: Position,
        rate: Callable[[int], float] = lambda step: 1.0,
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.optimization = optimization
        self.feed = feed
        self.validate = validate
        self.outputs = outputs
        self.checkpoints = checkpoints
        self.schedule = schedule
        self.clip = clip
        self.position = position
        self.rate = rate
        self.manual: ManualOptimization | None = None
        if not module.automatic_optimization:
            self.manual = ManualOptimization(
                strategy, optimization, lambda: rate(position.global_step)
            )
        self.preemption = Preemption()
        self.samples_per_second: float | None = None
        self._saved_at = self._validated_at = -1
        scaler = strategy.precision.scaler
        self._guard = FiniteGuard(strategy.device, scaler, position, checkpoints.newest)
        self._guard.is_on = schedule.stop_on_nonfinite_loss
        strategy.note_loss = self._guard.note
        # Of the epoch whose batches are done, until they are written.
        self._epoch_values: dict[str, float] = {}
        # Of the step that training ends with, if only that is why it is logged.
        self._last_values: dict[str, float] = {}
        self._log_positions: dict[str, int] = {}

    def run(self) -> None:
        """Train to the end, save, and leave everything written.

        Raises:
            Preempted: a signal has asked to end before; everything is saved.
        """
        started, first_step = time.monotonic(), self.position.global_step
        self.outputs.progress.start(first_step)
        try:
            if self.position.epoch_done:
                self.outputs.progress.begin_epoch(self.position.epoch, self.schedule.max_epochs)
                self._finish_epoch()
            while not self._is_done():
                self._run_epoch()
            self._guard.check()
            # Saved first: a run that is resumed from here must not see that training ended here.
            self._save_once()
            self._write_last_values()
            self._validate_once()
        finally:
            self.outputs.progress.stop()
        if self.feed.samples_per_step:
            steps = self.position.global_step - first_step
            seconds = max(time.monotonic() - started, 1e-9)
            self.samples_per_second = steps * self.feed.samples_per_step / seconds

    def close(self) -> None:
        """Wait for what is being written, and close the logs."""
        self.strategy.note_loss = None
        try:
            self.checkpoints.close()
        finally:
            for logger in self.outputs.loggers.values():
                logger.close()

    def _is_done(self) -> bool:
        epochs, steps = self.schedule.max_epochs, self.schedule.max_steps
        trained = self.position.epoch + self.position.epoch_done
        return (epochs is not None and trained >= epochs) or (
            steps is not None and self.position.global_step >= steps
        )

    def _run_epoch(self) -> None:
        position, recorder = self.position, self.outputs.recorder
        self.outputs.progress.begin_epoch(position.epoch, self.schedule.max_epochs)
        if position.batch == 0:
            self.module.on_train_epoch_start()
        for batch in self.strategy.batches(self.feed, position.epoch, position.batch):
            recorder.samples = batch.samples
            recorder.recording = self.schedule.logs(position.global_step + 1) or is_last_step(
                self.schedule, position, batch, self.feed
            )
            position.is_last_batch = batch.ends_epoch
            self._run_batch(batch)
            position.batch += 1
            if batch.ends_step:
                self._step()
                if not batch.ends_epoch and self._ends_here():
                    return
        self._end_epoch()
        self._ends_here()

    def _ends_here(self) -> bool:
        """Whether training is done; raises Preempted where it is not, and a signal has come."""
        if self._is_done():
            return True
        number = self.preemption.requested()
        if number:
            self._save_once()
            self.checkpoints.wait()
            raise Preempted(number)
        return False

    def _run_batch(self, batch: MicroBatch) -> None:
        if self.manual is None:
            self.strategy.forward_backward(
                batch.data, batch.number, weight=batch.weight, synchronize=batch.ends_step
            )
        else:
            self.manual.weight = batch.weight
            self.strategy.forward("training", batch.data, batch.number)
            self.manual.end_batch()

    def _step(self) -> None:
        if self.manual is None:
            self._optimize()
        self.position.global_step += 1
        self._after_step()

    def _optimize(self) -> None:
        strategy, optimization = self.strategy, self.optimization
        if self.clip is not None:
            strategy.clip_gradients(optimization, self.clip.value, self.clip.algorithm)
        factor = self.rate(self.position.global_step)
        with nullcontext() if factor == 1.0 else optimization.rates_multiplied(factor):
            for optimizer in optimization.optimizers:
                strategy.optimizer_step(optimizer)
        strategy.end_step()
        for optimizer in optimization.optimizers:
            strategy.zero_grad(optimizer)

    def _after_step(self) -> None:
        step, schedule, recorder = self.position.global_step, self.schedule, self.outputs.recorder
        if recorder.recording:
            self._guard.check()
            rates = self.optimization.learning_rates(self.rate(step - 1))
            self._log_step(recorder.take_step() | rates)
        self._step_schedules("step")
        self.outputs.progress.step(step, recorder.latest)
        if self.position.is_last_batch:
            return  # the epoch's end validates and saves, once
        if schedule.val_every_n_steps and step % schedule.val_every_n_steps == 0:
            self._validate_once()
        if schedule.checkpoint_every_n_steps and step % schedule.checkpoint_every_n_steps == 0:
            self._save_once()

    def _write_last_values(self) -> None:
        position = self.position
        # At an epoch's end the position is the next one's begin.
        epoch = position.epoch if position.batch else max(0, position.epoch - 1)
        self.outputs.write(position.global_step, epoch, self._last_values)

    def _log_step(self, values: dict[str, float]) -> None:
        step = self.position.global_step
        if self.schedule.logs(step):
            self.outputs.write(step, self.position.epoch, values)
        else:  # written when training has ended and is saved: a longer one does not log this step
            self._last_values = values

    def _end_epoch(self) -> None:
        self.module.on_train_epoch_end()
        self._epoch_values = self.outputs.recorder.take_epoch()
        self.position.epoch_done = True
        # Before validation, which may fail or take long: the epoch would be lost.
        self._save_once()
        self._finish_epoch()

    def _finish_epoch(self) -> None:
        """What comes after the save of an epoch's end; a resume from it does this again."""
        position, outputs = self.position, self.outputs
        outputs.write(position.global_step, position.epoch, self._epoch_values)
        if (position.epoch + 1) % self.schedule.check_val_every_n_epoch == 0:
            self._validate_once()
        self._step_schedules("epoch")
        outputs.progress.show(position.global_step, outputs.recorder.latest | outputs.validated)
        position.epoch += 1
        position.batch = 0
        position.epoch_done = False
        self._epoch_values = {}

    def _step_schedules(self, interval: Literal["step", "epoch"]) -> None:
        if self.manual is None:
            self.optimization.step_schedules(interval, self.outputs.latest)

    def _validate_once(self) -> None:
        position = self.position
        if self.validate is not None and self._validated_at != position.global_step:
            self._guard.check()
            self._validated_at = position.global_step
            self.outputs.validated = self.validate()
            self.outputs.write(position.global_step, position.epoch, self.outputs.validated)

    # --- checkpoints ---------------------------------------------------------------------------

    def _save_once(self) -> None:
        if self._saved_at != self.position.global_step:
            self._guard.check()
            state = self.state()
            self._guard.check_weights(state["model"], self.module)
            self._saved_at = self.position.global_step
            self.checkpoints.save(self.position.global_step, state, self.rank_local_state())

    def state(self) -> dict[str, Any]:
        """What is the same on every process."""
        return {
            **self.strategy.state(self.optimization),
            "schedules": [entry.scheduler.state_dict() for entry in self.optimization.schedules],
            "precision": self.strategy.precision.state(),
            "position": asdict(SavedPosition.of(self.position, self.feed, self._validated_at)),
            "epoch_values": self._epoch_values,
            "latest": dict(self.outputs.latest),
            "last_values": self._last_values,
            "logs": {name: each.position() for name, each in self.outputs.loggers.items()},
            "gradients": self._waiting(is_sharded),
        }

    def rank_local_state(self) -> dict[str, Tensor]:
        """What is this process' own: its random state, and its share of unfinished sums."""
        parts = {
            "random": randomness.full_state(self.strategy.devices),
            "log": self.outputs.recorder.state(),
            "torchmetrics": metrics.torchmetrics_state(self.module),
            "strategy": self.strategy.rank_local_state(),
            "gradients": self._waiting(lambda gradient: not is_sharded(gradient)),
        }
        return {
            f"{part}/{key}": value
            for part, values in parts.items()
            for key, value in values.items()
        }

    def _waiting(self, kind: Callable[[Tensor], bool]) -> dict[str, Tensor]:
        return self.manual.gradients(kind) if self.manual is not None else {}

    def resume(self, checkpoint: Checkpoint, layout: Layout, same_run: bool) -> list[str]:
        """Continue from a checkpoint, as if training had not been interrupted.

        Args:
            checkpoint: to read.
            layout: of this run; if the checkpoint's world size differs, random states are new.
            same_run: it is saved again only after a step.

        Returns:
            remarks, for what could not be restored exactly.

        Raises:
            CheckpointError: it does not belong to this model, or its values cannot be.
        """
        state = checkpoint.stored_state()
        try:
            return self._resume(checkpoint, state, layout, same_run)
        except _NOT_OF_THIS_MODEL as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(f"{checkpoint.path}: not of this model ({reason})") from None

    def _resume(
        self, checkpoint: Checkpoint, state: dict[str, Any], layout: Layout, same_run: bool
    ) -> list[str]:
        position = SavedPosition.read(state["position"], checkpoint.step)
        configured = self.optimization.configured_rates()
        self.strategy.load_state(state, self.optimization)
        for entry, saved in zip(self.optimization.schedules, state["schedules"], strict=True):
            entry.scheduler.load_state_dict(read_all(saved))
        self.strategy.precision.load_state(state["precision"])
        remarks = self.optimization.other_rates(configured)
        remarks += self._resume_position(position)
        self._epoch_values = state["epoch_values"] if position.epoch_done else {}
        self._saved_at = self.position.global_step if same_run else -1
        self.outputs.latest.update(state["latest"])
        if self._is_done():
            self._last_values = state["last_values"]
        self._log_positions = state["logs"]
        is_as_saved = checkpoint.world_size == layout.world_size
        if self.manual is not None:
            ranks = range(checkpoint.world_size)
            if is_as_saved and (state.get("gradients") or not self.strategy.shards_parameters):
                ranks = range(layout.rank, layout.rank + 1)
            own = [_part(checkpoint.own(rank), "gradients") for rank in ranks]
            self.manual.load_gradients(state.get("gradients", {}), own)
        if not is_as_saved:
            return [
                *remarks,
                f"saved by {checkpoint.world_size} processes, resumed on {layout.world_size}: "
                "random states (dropout) are new; the order of the data does not change",
            ]
        self._resume_own(checkpoint.own(layout.rank))
        return remarks

    def log_to(self, loggers: dict[str, Logger], resumes: bool) -> None:
        """Write values to loggers from now on.

        Args:
            loggers: by name.
            resumes: continue their logs from where they stood when the checkpoint was saved.
        """
        self.outputs.loggers = loggers
        for name, logger in loggers.items() if resumes else ():
            logger.resume(self._log_positions.get(name), self.position.global_step)

    def _resume_position(self, saved: SavedPosition) -> list[str]:
        position, samples = self.position, self.feed.samples_per_step
        position.epoch, position.global_step = saved.epoch, saved.global_step
        position.epoch_done = saved.epoch_done
        self._validated_at = saved.validated_at
        if position.epoch_done:
            return []
        steps, rest = saved.step_in_epoch, 0
        if samples and saved.samples_per_step:
            steps, rest = divmod(steps * saved.samples_per_step, samples)
        position.batch = steps * self.feed.accumulate
        if rest:
            return [f"another effective batch size: {rest} samples of this epoch are read again"]
        return []

    def _resume_own(self, own: Mapping[str, Tensor]) -> None:
        self.strategy.load_rank_local_state(_part(own, "strategy"))
        self.outputs.recorder.load_state(_part(own, "log"))
        metrics.load_torchmetrics_state(self.module, _part(own, "torchmetrics"))
        randomness.set_full_state(_part(own, "random"), self.strategy.devices)


def _part(own: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Of what :meth:`FitLoop.rank_local_state` gave."""
    start = f"{part}/"
    return {key.removeprefix(start): each for key, each in own.items() if key.startswith(start)}
