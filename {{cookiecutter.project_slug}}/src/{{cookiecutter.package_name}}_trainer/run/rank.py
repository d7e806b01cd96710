"""One rank of a fit, validation, test or prediction."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from .. import launch
from ..callbacks import calls_of
from ..checkpoint import (
    DIRECTORY,
    Checkpoint,
    Chosen,
    RunLock,
    resolve,
    run_choice,
    run_directory,
    set_aside,
)
from ..data import Data, Feed, LoadersByName, randomness, sources
from ..errors import CheckpointError, UserError
from ..launch import collectives, files, forks, outcome, restarts
from ..launch.signals import Interrupted, Preempted
from ..logging import LoggedRun, Recorder
from ..loop import (
    FitLoop,
    ManualOptimization,
    compilation,
    evaluate,
    predict,
    saving,
    trials,
)
from ..memory import activation_checkpointing
from ..module import DataModule, Loaders, TrainingModule
from . import announcements, effects, initial_weights
from .assembly import Assembly
from .console import Console
from .interface import RunInterface
from .plan import Plan, check_created_layers
from .stages import StageName, prepared


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    ``value``: what its command returns; ``weights``: the module's, if another process trained it.
    """

    value: Any = None
    global_step: int = 0
    current_epoch: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    run_directory: Path | None = None
    weights: dict[str, Tensor] | None = None


class RankRun(RunInterface):
    """One rank's run, from the creation of its process group to the end.

    Args:
        plan: The run's.
        configuration: The configuration of the command line, as YAML; ``None`` in a script.
        is_started: Whether this process was started for one command, and returns the weights.
    """

    def __init__(self, plan: Plan, configuration: str | None, *, is_started: bool = False) -> None:
        super().__init__(plan, Console(plan, is_command=configuration is not None))
        self._configuration = configuration
        self._is_started = is_started
        self._has_record = False

    def connect(self) -> None:
        """Join the process group, and seed this rank."""
        forks.freeze_garbage_in_children()
        plan = self.plan
        if plan.layout.source != "none":
            self._console.say(plan.layout.receipt())
        self._console.note(*plan.notes)
        self.strategy.connect(plan.layout, plan.devices, plan.precision)
        # Each rank draws its own dropout masks, unless it computes the same as another one.
        randomness.seed_everything(randomness.mix(self.seed, self.strategy.random_rank))
        if self.strategy.is_expendable:
            launch.allow_loss()
        self._recorder = Recorder(
            self.strategy.reduce,
            self.strategy.device,
            steps_together=self.strategy.steps_together,
        )
        self._assembly = Assembly(plan, self._recorder)
        self.log = self._recorder.log

    def result(self, value: Any) -> RunResult:
        """The result of the run, whose command returned a value."""
        return RunResult(value, self.global_step, self.current_epoch, self._metrics, self.directory)

    # --- fit -------------------------------------------------------------------------------------

    def fit(self, module: TrainingModule, data: Data, val_dataloader: Loaders | None) -> None:
        """Train."""
        if self.plan.layout.is_main:
            outcome.remove()
        options = self.plan.options
        with contextlib.closing(RunLock()) as lock:
            chosen = self._choose(lock)
            self.directory = chosen.directory
            output = self._console.output_of(chosen.directory)
            with output, self._attached(module, "fit", data):
                check_created_layers(self.plan, module)
                self._start_from_weights(module, chosen.checkpoint)
                feed, validation = self._read(module, data, val_dataloader)
                effects.check_read(
                    options,
                    self.plan.callbacks,
                    validates=bool(validation),
                    orders=feed.has_plan,
                )
                self._console.say(*self._assembly.count_flops(module, feed))
                if chosen.checkpoint is not None:  # before schedulers ask for total_steps
                    checkpoint = Checkpoint(chosen.checkpoint)
                    self._position.extra_steps = saving.extra_steps(checkpoint, feed)
                compiled = compilation.applied(
                    module, options.compile, options.activation_checkpointing
                )
                with compiled:
                    self._fit(module, feed, validation, chosen)

    def _fit(
        self, module: TrainingModule, feed: Feed, validation: LoadersByName, chosen: Chosen
    ) -> None:
        loop = self._make_loop(module, feed, validation, chosen.directory)
        self._loop = loop
        try:
            self._start(loop, chosen)
            self._train(loop, chosen.directory)
        except BaseException as error:
            if isinstance(error, Exception | Preempted | Interrupted):
                loop.fit.calls.failed(error)
            self._record_end(f"failed {type(error).__name__}", chosen.directory)
            raise
        self._metrics = dict(loop.fit.outputs.latest)
        self._console.note(*announcements.early_end(loop))
        closing = announcements.closing(loop, self.plan.shown(chosen.directory))
        self._console.say(*closing)

    def _choose(self, lock: RunLock) -> Chosen:
        """Select run directory and checkpoint; a restart by torchrun resumes its own run."""
        request, layout = self.plan.request, self.plan.layout
        is_restarted = restarts.expected(layout) and not self.plan.options.fast_dev_run
        if is_restarted and request.resume in (None, "auto"):
            name = request.name or restarts.run_name()
            request = replace(request, name=name, resume="auto")
        return run_choice.choose(request, layout, lock)

    def _read(
        self, module: TrainingModule, data: Data, val_dataloader: Loaders | None
    ) -> tuple[Feed, LoadersByName]:
        """The training batches of this rank, and the loaders of validations."""
        loader = sources.training_loader(data, module)
        feed = self._assembly.training_feed(loader)
        self._steps_per_epoch = feed.steps
        validation: LoadersByName = {}
        if self.plan.options.limit_val_batches:
            validation = sources.validation_loaders(data, module, val_dataloader)
        if validation and self.plan.options.overfit_batches:
            validation = {"": loader}
        return feed, validation

    def _make_loop(
        self, module: TrainingModule, feed: Feed, validation: LoadersByName, directory: Path
    ) -> FitLoop:
        calls = calls_of(self.plan.callbacks, self, module)
        fit = self._assembly.fit_parts(module, feed, self._position, calls)
        self.schedulers = [each.scheduler for each in fit.optimization.schedulers]
        return self._assembly.fit_loop(fit, validation, directory)

    def _start(self, loop: FitLoop, chosen: Chosen) -> None:
        """Resume, write records, and print what the run will do."""
        layout = self.plan.layout
        self.manual = loop.fit.manual
        for call in loop.fit.calls.on_fit_start:
            call()
        self._console.note(*chosen.remarks, *loop.fit.feed.remarks)
        if chosen.checkpoint is not None:
            checkpoint = Checkpoint(chosen.checkpoint)
            remarks = saving.resume(loop.fit, checkpoint, layout, chosen.is_same_run)
            self._console.note(f"resumed from {self.plan.shown(chosen.checkpoint)}", *remarks)
        if restarts.expected(layout):
            restarts.count_attempt(chosen.directory, self.global_step, layout)
        if layout.is_main:
            self._write_records(loop, chosen)
        self._console.say(*announcements.opening(self.plan, loop))
        self._console.say_where(chosen.directory)
        check, loop.check_validation = loop.check_validation, None  # and its workers
        if chosen.checkpoint is None and check is not None:
            entries = loop.fit.optimization.schedulers
            self._console.note(*effects.unlogged(self.plan.callbacks, entries, check()))

    def _write_records(self, loop: FitLoop, chosen: Chosen) -> None:
        """Write records and open logs: after the last check that can refuse the run."""
        directory, plan = chosen.directory, self.plan
        if chosen.checkpoint is not None and chosen.is_same_run:
            aside = set_aside(directory / DIRECTORY, chosen.checkpoint)
            shown = [plan.shown(path) for path in aside]
            self._console.note(*(f"later checkpoint set aside: {path}" for path in shown))
        else:
            run_directory.clear(directory, with_records=plan.options.overwrite)
        facts = {
            "resumed_from": str(chosen.checkpoint) if chosen.checkpoint else None,
            "weights": plan.options.weights if chosen.checkpoint is None else None,
            "strategy": plan.strategy_name,
            "precision": plan.precision.name,
            "device": str(plan.device),
            "seed": self.seed,
            "samples_per_step": loop.fit.feed.samples_per_step,
            "steps_per_epoch": loop.fit.feed.steps,
        }
        if run_directory.was_cut_off(directory):
            self._console.note("the previous attempt was killed, or a process called os._exit()")
        self._has_record = True
        run_directory.write_record(directory, plan.layout, facts, self._configuration)
        run = LoggedRun.of(directory, plan.options, self._configuration)
        resumed_at = self.global_step if chosen.is_same_run else None
        loop.fit.outputs.log_to(plan.loggers, run, resumed_at)

    def _train(self, loop: FitLoop, directory: Path) -> None:
        """Run the loop; Ctrl-C ends it with the command to resume."""
        try:
            with loop.preemption.recording_signals():
                self._run(loop, directory)
        except Preempted as asked:
            if asked.signal != signal.SIGINT:
                raise
            if self.plan.options.fast_dev_run:
                raise KeyboardInterrupt from None
            shown = str(self.plan.shown(directory))
            raise Interrupted(self.global_step, shown, self._console.is_command) from None

    def _run(self, loop: FitLoop, directory: Path) -> None:
        """Run the loop, and write its outcome."""
        try:
            with contextlib.closing(loop):
                loop.run()
        except Preempted as asked:
            name = asked.signal.name
            self._write_outcome(f"preempted {name}", directory)
            if asked.signal != signal.SIGINT:
                saved = "not saved" if self.plan.options.fast_dev_run else "saved"
                self._console.note(f"{saved} after step {self.global_step} and stopped by {name}")
            # If one rank ended first, it would be reported as a failure, and its peers ended.
            collectives.barrier()
            raise
        if self.plan.layout.is_main and not directory.is_dir():
            raise UserError(f"{directory}: the run directory was removed while the run trained")
        self._write_outcome("finished", directory)

    def _write_outcome(self, how: str, directory: Path) -> None:
        self._record_end(f"{how} step {self.global_step}", directory)
        if self.plan.layout.is_main:
            restarts.reset(directory)
            outcome.write(f"{how} step {self.global_step}")

    def _record_end(self, how: str, directory: Path) -> None:
        if self._has_record:
            run_directory.record_end(directory, how)

    # --- validate, test, predict -----------------------------------------------------------------

    def evaluate(
        self,
        stage: Literal["validation", "test"],
        module: TrainingModule,
        data: Data,
        checkpoint: str | None,
        averaged: bool,
    ) -> dict[str, float]:
        """Validate or test, with the weights of a checkpoint if one is given."""
        with self._attached(module, "validate" if stage == "validation" else stage, data):
            name: Literal["val", "test"] = "val" if stage == "validation" else stage
            loaders = sources.evaluation_loaders(data, module, name)
            feeds = self._assembly.evaluation_feeds(loaders, stage)
            self._set_up_for_evaluation(module, checkpoint, averaged)
            self._metrics = evaluate(module, self.strategy, self._recorder, feeds, stage)
        self._console.say(*(f"{name}: {value:.6g}" for name, value in self._metrics.items()))
        return self._metrics

    def predict(
        self, module: TrainingModule, data: Data, checkpoint: str | None, averaged: bool
    ) -> list[Any] | dict[str, list[Any]]:
        """Predict, with the weights of a checkpoint if one is given."""
        with self._attached(module, "predict", data):
            loaders = sources.evaluation_loaders(data, module, "predict")
            feeds = self._assembly.evaluation_feeds(loaders, "predict")
            self._set_up_for_evaluation(module, checkpoint, averaged)
            outputs = predict(module, self.strategy, self._recorder, feeds)
            return outputs.get("", outputs)

    def _set_up_for_evaluation(
        self, module: TrainingModule, checkpoint: str | None, averaged: bool
    ) -> None:
        self.strategy.place(module)
        if checkpoint is not None:
            found = run_choice.whole(resolve(checkpoint))
            weights, remarks = found.weights(averaged)
            self._console.note(*remarks)
            try:
                self.strategy.load_state({**found.stored_state(), "model": weights}, None)
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = " ".join(str(error).split())[:300]
                raise CheckpointError(
                    f"{found.path}: does not match this model ({reason})"
                ) from None

    def find_batch_size(self, module: TrainingModule, data: Data) -> int:
        """The largest batch that a device can train on, the same on all ranks."""
        names = self.plan.options.activation_checkpointing
        with self._attached(module, "fit", data):
            trial = trials.Trial(
                module,
                sources.training_loader(data, module),
                self.plan.device,
                self.plan.precision.name,
                self._use_manual,
            )
            with activation_checkpointing.applied(module, names):
                found, why = trials.find_batch_size(trial, self.strategy.data_replicas)
        self._console.say(f"the largest batch that fits on every device: {found}{why}")
        return found

    def find_learning_rate(self, module: TrainingModule, data: Data, sweep: trials.Sweep) -> float:
        """The rate at which the loss falls most steeply, the same on all ranks."""
        options, request = self.plan.options, self.plan.request
        with self._attached(module, "fit", data):
            self._start_from_weights(module)
            feed = self._assembly.training_feed(sources.training_loader(data, module))
            with activation_checkpointing.applied(module, options.activation_checkpointing):
                tried = trials.try_rates(module, feed, self.plan.device, options, sweep)
        if self.plan.layout.is_main:
            path = run_directory.create(request.root, request.name) / "learning_rates.csv"
            lines = [",".join(map(repr, each)) + "\n" for each in tried]
            files.write_atomically(path, "".join(["lr,loss,initial_loss\n", *lines]))
            self._console.say(f"learning rates and losses: {self.plan.shown(path)}")
        found = trials.suggest(tried)
        self._console.say(f"the loss falls most steeply at the learning rate {found:.3g}")
        return found

    def _start_from_weights(self, module: TrainingModule, resumed: Path | None = None) -> None:
        options = self.plan.options
        if resumed is None:
            self._console.note(*initial_weights.load(options, self.plan.started_in, module))
        elif options.weights is not None:
            self._console.note(f"weights={options.weights} is not used: the run is resumed")

    def _use_manual(self, manual: ManualOptimization | None) -> None:
        self.manual = manual

    # --- parts -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _attached(self, module: TrainingModule, stage: StageName, data: Data) -> Iterator[None]:
        """Make this run the module's ``trainer`` in this context, with its data prepared."""
        module.trainer_state = replace(module.trainer_state, run=self)
        if isinstance(data, DataModule):  # not the run: a loader with workers may pickle it
            data.data_replicas, data.data_index = self.data_replicas, self.data_index
        try:
            with prepared(self.plan, stage, module, data, is_started=self._is_started):
                yield
        finally:
            module.trainer_state = replace(module.trainer_state, run=None, weights={})
