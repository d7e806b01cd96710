"""The training loop. Strategies define what is done with parameters, gradients and data.

Its events in order. ``<hook>`` calls the hooks of this name, of callbacks and then of the module;
``callbacks/callback.py`` says more of each::

    <on_fit_start>                           # in run/rank.py; then a checkpoint is loaded
    for each epoch:
        <on_train_epoch_start>               # not if a run resumes within the epoch
        for each micro-batch:
            <on_train_batch_start>
            strategy.forward_backward        # module.training_step, backward
            if it ends a step:
                strategy.clip
                <on_before_optimizer_step>   # each optimizer; not if nonfinite_loss skips the step
                strategy.step
                <on_after_optimizer_step>
            <on_train_batch_end>
            if it ends a step:
                log values and speed         # every log_every_n_steps
                step schedulers              # those with interval "step"
                validate, save               # val_every_n_steps, checkpoint_every_n_steps
        <on_train_epoch_end>
        save, log values of the epoch        # save: checkpoint_every_n_epochs
        validate                             # check_val_every_n_epoch
        step schedulers                      # those with interval "epoch"
    save, validate                           # unless done after the last step
    <on_fit_end>
    <on_exception>                           # if an error or a signal ends the fit

To validate: ``<on_validation_start>``, ``module.on_validation_epoch_start``, ``validation_step`` of
each batch, ``module.on_validation_epoch_end``, ``<on_validation_end>``.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoints, dtensors
from ..data import MicroBatch
from ..launch import collectives, output
from ..launch.signals import STOP, Preempted, Preemption
from ..logging import BatchContext
from ..logging.progress import peak_memory
from ..strategies import BatchSkipped
from ..strategies.optimizers import rates_to_log
from . import saving
from .checks import FirstGradients, NonfinitePolicy, explain, refuse_returned
from .hashes import StepHashes
from .parts import FitParts, gathered, read, speed_of


class FitLoop(AbstractContextManager["FitLoop"]):
    """Trains a module that a strategy has set up.

    ``validate`` runs a validation; ``rate_factor``: factor of the learning rates at a step, counted
    from 0. ``None``: no validation; always 1.
    """

    def __init__(
        self,
        fit: FitParts,
        checkpoints: Checkpoints,
        validate: Callable[[], dict[str, float]] | None,
        rate_factor: Callable[[int], float] | None,
    ) -> None:
        self.fit, self.checkpoints, self.rate_factor = fit, checkpoints, rate_factor
        self.validate = validate
        self.preemption = Preemption(fit.strategy.agree)
        self.samples_per_second: float | None = None
        self._speed = speed_of(fit)
        self._last_factor = 1.0  # factor of the learning rates in the last step
        self._gradient_norm: Tensor | None = None  # of the last step, if it was computed
        self._last_rates: list[float | Tensor | None] = []  # of the last step, where they were read
        self._has_gradients = False
        self._parameters: list[Tensor] = []  # of the module; an engine's optimizers have others
        parts = (fit.strategy, fit.optimization)
        self._first_gradients = fit.manual.first_gradients if fit.manual else FirstGradients(*parts)
        self._skipped_batches = 0
        self.after_save: list[Callable[[Path], None]] = []  # called with the complete checkpoint
        self._nonfinite = NonfinitePolicy(fit.strategy, fit.options, fit.position, checkpoints)
        self.hashes = StepHashes(fit)
        options, norm = fit.options, self._nonfinite.needs_norm
        self._clips = options.gradient_clip_val is not None or options.log_gradient_norm or norm

    def run(self) -> None:
        """Train to the end, save a checkpoint, and write all values; a signal raises Preempted."""
        position, outputs = self.fit.position, self.fit.outputs
        started, first_step = time.monotonic(), position.global_step
        # The same on every rank: the time in the checkpoint from which it was resumed.
        position.is_stopped = position.is_out_of_time(self.fit.options)
        position.started = started
        outputs.progress.start(first_step)
        self._speed.start(first_step)
        try:
            if position.epoch_done:
                outputs.progress.begin_epoch(position.epoch, self.fit.options.max_epochs)
                self._finish_epoch()
            while not position.is_end(self.fit.options):
                self._run_epoch()
            self._nonfinite.check()
            self._tell_skipped()
            if position.global_step > first_step and not (
                self._is_logged(position.global_step) or outputs.last_values
            ):  # the last step of a fit that was stopped
                outputs.last_values = self._step_values()
            self._save_once()  # first: a resume from here must not know that training ended here
            epoch, position.epoch = position.epoch, position.last_epoch
            self._write_last_values()
            self._validate_once()
            position.epoch = epoch
            outputs.recorder.enter(BatchContext(level="none"))
            for call in self.fit.calls.on_fit_end:
                call()
            self._save_if_requested()
        finally:
            outputs.progress.stop()
        if samples := self.fit.feed.samples_per_step:
            rate = (position.global_step - first_step) / max(time.monotonic() - started, 1e-9)
            self.samples_per_second = rate * samples

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the loggers, and wait for a pending save, after a failure only if it is alone."""
        has_failed = error is not None and not isinstance(error, Preempted | KeyboardInterrupt)
        try:
            if not (has_failed and self.checkpoints.waits_for_peers):
                self.checkpoints.close()
        finally:
            self.fit.outputs.close(error)

    def _run_epoch(self) -> None:
        fit, position = self.fit, self.fit.position
        fit.outputs.progress.begin_epoch(position.epoch, fit.options.max_epochs)
        if position.batch == 0:
            fit.outputs.recorder.enter(BatchContext(level="epoch"))
            for call in fit.calls.on_train_epoch_start:
                call()
        may_add = bool(fit.calls.on_train_epoch_start or fit.calls.on_fit_start)
        self._first_gradients.check_layers(only_used=not may_add or position.batch > 0)
        fit.calls.check()
        self._parameters = list(fit.strategy.module.parameters())
        # In no variable: the traceback of a step that raises would keep the loader's workers alive.
        for batch in read(fit.strategy, fit.feed, position.epoch, position.batch, self._speed):
            context = self._context(batch)
            fit.outputs.recorder.enter(context)
            for call in fit.calls.on_train_batch_start:
                refuse_returned(call(batch.data, batch.number))
            hashes, step = self.hashes, position.global_step + 1
            is_logged = context.is_recorded and hashes.is_moment(step, context.ends_epoch)
            hashes.is_due = hashes.is_open and (hashes.is_every or is_logged or step == hashes.last)
            if context.samples:
                outputs = self._run_batch(batch, context)
            else:  # this rank has none left: torchmetrics must not count them
                from ..logging import torchmetrics_state

                with torchmetrics_state.unchanged(fit.module):
                    outputs = self._run_batch(batch, context)
            position.batch += 1
            if context.ends_step:
                if fit.manual is None:
                    self._optimize(context)
                    # Before hooks that change them.
                    is_read = context.is_recorded or fit.optimization.schedulers
                    self._last_rates = fit.optimization.first_rates() if is_read else []
                else:
                    self._last_rates = fit.manual.rates
                position.global_step += 1
                for call in fit.calls.on_after_optimizer_step:
                    call()
            if fit.calls.on_train_batch_end:
                output = gathered(outputs, fit.strategy.device)
                for call in fit.calls.on_train_batch_end:
                    call(output, batch.data, batch.number)
            del outputs
            if context.ends_step:
                self._after_step(context)
                is_finished = not context.ends_epoch and self._is_finished()
                fit.outputs.progress.step(position.global_step, fit.outputs.recorder.latest)
                if is_finished:
                    return
        self._end_epoch()
        self._is_finished()

    def _context(self, batch: MicroBatch) -> BatchContext:
        options, position, step = self.fit.options, self.fit.position, self.fit.position.global_step
        ends = batch.ends_epoch and position.epoch + 1 == options.max_epochs
        return BatchContext(
            samples=batch.samples,
            counted=batch.counted,
            weight=batch.weight,
            ends_step=batch.ends_step,
            ends_epoch=batch.ends_epoch,
            is_recorded=ends or step + 1 == options.max_steps or self._is_logged(step + 1),
            rate_factor=1.0 if self.rate_factor is None else self.rate_factor(step),
        )

    def _is_logged(self, step: int) -> bool:
        """Whether to log a step, counted from 1, even if training does not end with it."""
        return step == 1 or step % self.fit.options.log_every_n_steps == 0

    def _is_finished(self) -> bool:
        """Whether training is done; raises Preempted if it is not, and a signal was received."""
        position, options = self.fit.position, self.fit.options
        if position.is_end(options):
            return True
        if options.max_time is not None and position.is_out_of_time(options):
            self.preemption.request_stop()
        number = self.preemption.requested()
        if number == STOP:
            position.is_stopped = True
        elif number:
            self._save_once()
            raise Preempted(number)
        return position.is_stopped

    def _end_epoch(self) -> None:
        self._tell_skipped()
        outputs, options, position = self.fit.outputs, self.fit.options, self.fit.position
        outputs.recorder.enter(BatchContext(level="epoch"))
        if calls := self.fit.calls.on_train_epoch_end:
            outputs.show_epoch(outputs.recorder.epoch_values())
            for call in calls:
                call()
        outputs.epoch_values = outputs.recorder.take_epoch()
        position.epoch_done = True
        # Before validation, which may fail or take long, and would lose the epoch.
        if position.is_due(options.checkpoint_every_n_steps, options.checkpoint_every_n_epochs):
            self._save_once()
        self._save_if_requested()
        self._finish_epoch()

    def _finish_epoch(self) -> None:
        """Finish an epoch after its checkpoint is saved; a resume from it repeats this."""
        position, outputs = self.fit.position, self.fit.outputs
        values, outputs.epoch_values = outputs.epoch_values, {}  # a later save has them in the log
        outputs.write_epoch(position.global_step, position.epoch, values)
        options = self.fit.options
        if position.is_due(options.val_every_n_steps, options.check_val_every_n_epoch):
            self._validate_once()
        position.is_stopped |= self.preemption.is_stop_requested()
        if self.fit.manual is None:
            self.fit.optimization.step_schedulers("epoch", outputs.take_fresh("epoch"))
            if self.validate is None or position.validated_at >= 0:
                self.fit.optimization.check_monitored(outputs.latest)
        latest = outputs.recorder.latest  # of this rank
        shown = {name: outputs.latest.get(name, value) for name, value in latest.items()}
        outputs.progress.show(position.global_step, shown | outputs.validated)
        position.epoch, position.batch, position.epoch_done = position.epoch + 1, 0, False

    def _run_batch(self, batch: MicroBatch, context: BatchContext) -> list[Any]:
        strategy, manual, args = self.fit.strategy, self.fit.manual, (batch.data, batch.number)
        if manual is None and not self._has_gradients:  # of a hook, or of a validation
            for parameter in self._parameters:
                parameter.grad = None
        if self.fit.compiled is not None:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            if manual is None:
                # The last batch of a step may be skipped, and so cannot average those before it.
                sync = context.ends_step or self.fit.module.may_skip_batches
                result = strategy.forward_backward(*args, weight=context.weight, synchronize=sync)
            else:
                result = manual.run(*args)
        except BatchSkipped:
            self._skipped_batches += 1
            return []
        except RuntimeError as error:
            explain(error, is_manual=manual is not None)
            raise
        self._has_gradients = True
        if self.fit.compiled is not None and not self.fit.compiled.is_checked:
            self.fit.compiled.check()
        if self._nonfinite.note_loss is not None and context.weight:
            for loss in result.losses:
                self._nonfinite.note_loss(loss)
        if self.hashes.is_due:
            self.hashes.note_batch(batch, result.losses)
        if manual is not None and self._first_gradients.is_waiting:
            self._first_gradients.check(together=False)
        return result.outputs

    def _tell_skipped(self) -> None:
        """Say how many batches of the epoch were skipped, or that no optimizer has stepped."""
        count, self._skipped_batches = self._skipped_batches, 0
        why = f"batches skipped because training_step returned None: {count}" if count else ""
        if (manual := self.fit.manual) is not None and self.fit.position.batch:
            why = manual.end_epoch()
        if why and collectives.rank() == 0:
            output.print_lines(f"note: epoch {self.fit.position.epoch + 1}: {why}", error=True)

    def _optimize(self, context: BatchContext) -> None:
        strategy, optimization = self.fit.strategy, self.fit.optimization
        has_gradients, self._has_gradients, self._gradient_norm = self._has_gradients, False, None
        if has_gradients:
            if self._first_gradients.is_waiting:
                self._first_gradients.note()
                self._first_gradients.check()
            if self._clips:
                self._clip(context.is_recorded)
        skips = self._nonfinite.needs_norm and self._nonfinite.skips(self._gradient_norm)
        if skips or not has_gradients:
            strategy.precision.has_skipped = True
            for parameter in self._parameters:
                parameter.grad = None
            return
        if calls := self.fit.calls.on_before_optimizer_step:
            strategy.precision.unscale(optimization.optimizers)
            for optimizer in optimization.optimizers:
                for call in calls:
                    call(optimizer)
        if self.hashes.is_due:
            self.hashes.note_gradients(optimization)
        if context.rate_factor == 1.0:
            strategy.step(optimization)
        else:
            with optimization.rates_multiplied(context.rate_factor):
                strategy.step(optimization)

    def _clip(self, is_recorded: bool) -> None:
        """Clip the gradients; keep their norm before that, if it is known or to be logged."""
        strategy, optimization, options = self.fit.strategy, self.fit.optimization, self.fit.options
        bound, algorithm = options.gradient_clip_val, options.gradient_clip_algorithm
        if bound is not None and algorithm == "norm":
            self._gradient_norm = strategy.clip(optimization, bound, algorithm)
            return
        if self._nonfinite.needs_norm or (options.log_gradient_norm and is_recorded):
            self._gradient_norm = strategy.clip(optimization, math.inf, "norm")
        if bound is not None:
            strategy.clip(optimization, bound, algorithm)

    def _after_step(self, context: BatchContext) -> None:
        step, options, outputs = self.fit.position.global_step, self.fit.options, self.fit.outputs
        outputs.last_values, self._last_factor = {}, context.rate_factor
        if self.hashes.is_due:
            self.hashes.write(step)
        if context.is_recorded:
            if "asynchronous" not in self.fit.strategy.limits.always:
                self._nonfinite.check()
            values = self._step_values()
            if self._is_logged(step):
                self._write_speed(self.fit.position.epoch)
                outputs.write(step, self.fit.position.epoch, values)
            else:  # written after the last checkpoint: a longer training would not log this step
                outputs.last_values = values
        if self.fit.optimization.schedulers and self.fit.manual is None:
            self.fit.optimization.step_schedulers("step", outputs.take_fresh("step"))
        if context.ends_epoch:
            return  # the end of the epoch validates and saves
        if self.after_save:
            self._save_if_requested()
        if options.val_every_n_steps and step % options.val_every_n_steps == 0:
            self._validate_once()
            self.fit.position.is_stopped |= self.preemption.is_stop_requested()
        if options.checkpoint_every_n_steps and step % options.checkpoint_every_n_steps == 0:
            self._save_once()

    def _step_values(self) -> dict[str, float]:
        """All values of the step that was made last, reduced over ranks."""
        first = self._last_rates or self.fit.optimization.first_rates()
        rates = rates_to_log(first, self._last_factor)
        values = self.fit.outputs.recorder.take_step()
        values |= rates | values  # of the same name, the value that the step logged
        if self._gradient_norm is not None:
            values.setdefault("gradient_norm", float(dtensors.full(self._gradient_norm)))
        return values

    def _write_speed(self, epoch: int) -> None:
        step = self.fit.position.global_step
        speed = self._speed.take(step) | peak_memory(self.fit.strategy.device)
        self.fit.outputs.write_speed(step, epoch, speed)

    def _write_last_values(self) -> None:
        position, outputs = self.fit.position, self.fit.outputs
        if not outputs.last_values:
            return
        if position.global_step > self._speed.since:  # not if all was trained before a resume
            self._write_speed(position.epoch)
        of_epoch = {} if position.batch else outputs.latest
        kept = {name: of_epoch[name] for name in of_epoch if f"{name}_epoch" in of_epoch}
        outputs.write(position.global_step, position.epoch, outputs.last_values)
        outputs.latest |= kept

    def _validate_once(self) -> None:
        position, outputs = self.fit.position, self.fit.outputs
        if self.validate is not None and position.validated_at != position.global_step:
            self._nonfinite.check()
            position.validated_at = position.global_step
            outputs.recorder.enter(BatchContext(level="none"))
            with self._speed.paused("validation"):
                for call in self.fit.calls.on_validation_start:
                    call()
                outputs.validated = self.validate()
                self.fit.feed.set_epoch(position.epoch)  # of data that both may read
                outputs.write(position.global_step, position.epoch, outputs.validated)
                for call in self.fit.calls.on_validation_end:
                    call()
            outputs.fresh["validation"].clear()
            if self.fit.manual is None:
                self.fit.optimization.step_plateaus(outputs.take_fresh("step"))
            self._save_if_requested()

    def _save_if_requested(self) -> None:
        if self.after_save:
            self._save_once()
            with self._speed.paused("checkpoint"):
                self.checkpoints.wait()
            actions, self.after_save = self.after_save, []
            for action in [] if self.fit.options.fast_dev_run else actions:
                action(self.checkpoints.path(self.fit.position.global_step))

    def _save_once(self) -> None:
        position = self.fit.position
        if position.saved_at == position.global_step:
            return
        self._nonfinite.check()
        self._first_gradients.check_layers(only_used=True)
        with self._speed.paused("checkpoint"):
            state = saving.state(self.fit)
            self._nonfinite.check_weights(state["model"])
            position.saved_at = position.global_step
            if not self.fit.options.fast_dev_run:
                local = saving.rank_local_state(self.fit)
                self.checkpoints.save(position.global_step, state, local)
