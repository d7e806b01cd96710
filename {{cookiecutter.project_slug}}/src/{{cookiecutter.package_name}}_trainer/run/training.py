"""A fit on one rank: creates the loop from the loaders, resumes, writes records, and trains."""

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..callbacks.calls import calls_of, start_fresh
from ..checkpoint import Checkpoint, Checkpoints, run_choice, run_directory
from ..checkpoint.left_out import LeftOut
from ..checkpoint.run_lock import RunLock
from ..checkpoint.writing import set_aside
from ..data import Feed, sources
from ..data.feed_creation import feed_overfit, feed_sanity_check
from ..data.sources import Data, LoadersByName
from ..errors import UserError, refuse
from ..launch import collectives, rank, reports
from ..launch.signals import Interrupted, Preempted
from ..logging import LoggedRun
from ..logging.logger import hyperparameters
from ..logging.outputs import Outputs
from ..logging.progress import Progress
from ..loop import hashes, saving
from ..loop.checks import trained_in_eval_mode
from ..loop.fit import FitLoop
from ..loop.parts import EVAL_MODE, FROZEN, TOTAL_STEPS, FitParts, frozen, in_eval_mode
from ..loop.position import scaled_rate, warmed_up_rate
from ..module import DataHooks, Loaders, TrainingModule
from ..module.hooks import with_own_mode
from ..strategies.optimizers import Optimization, configured, described, replace_kept
from . import record
from .plan import Plan, check_created_layers, check_loaders
from .rank import OTHERS, SHARED, RankRun

if TYPE_CHECKING:
    from ..loop.compilation import Compiled
    from .data_record import DataRecord

Validate = Callable[[], dict[str, float]]


def fit(run: RankRun, module: TrainingModule, data: Data, val_dataloader: Loaders | None) -> None:
    """Train a module on one rank; ``Trainer.fit`` describes the arguments."""
    plan, options = run.plan, run.plan.options
    if plan.layout.is_main:
        reports.remove_outcome()
    with contextlib.closing(RunLock()) as lock:
        chosen = _choose(plan, lock)
        run.directory = chosen.directory
        if "torchmetrics" in sys.modules:
            from ..logging import torchmetrics_state

            torchmetrics_state.sync_evenly(module)
            for metric in torchmetrics_state.metrics(module) if chosen.checkpoint is None else ():
                metric.reset()  # an earlier fit may have ended within an epoch
        with run.console.output_of(chosen.directory), run.running(module, "fit", data):
            check_created_layers(plan, module)
            saving.check_tensors(module)
            resumed = Checkpoint(chosen.checkpoint) if chosen.checkpoint else None
            run.start_from_weights(module, resumed)
            loader = sources.training_loader(data, module)
            feed = run.training_feed(loader, resumed)
            loaders: LoadersByName = {}
            if options.limit_val_batches:
                loaders = sources.validation_loaders(data, module, val_dataloader)
            if loaders and options.overfit_batches:
                loaders = {"": loader}
            divided = loaders if options.use_distributed_sampler else {}
            run.agree(lambda has: has.of_module(module) | has.of_data(feed, divided))
            check_loaders(plan, validates=bool(loaders), orders=feed.has_plan)
            code = {FROZEN: frozen(module), EVAL_MODE: in_eval_mode(module)}
            if resumed is not None and options.resume_options == "checkpoint":
                from ..loop import resuming

                resuming.freeze_as_at_start(module, resumed)
            layers: contextlib.AbstractContextManager[Compiled | None] = contextlib.nullcontext()
            if options.changes_layers:
                from ..loop import compilation

                layers = compilation.applied(module, options.compile, run.checkpointing)
            with layers as compiled:
                _Fit(run, module, data, feed, loaders, chosen, lock, code, compiled).train()


def _choose(plan: Plan, lock: RunLock) -> run_choice.Selection:
    """Select run directory and checkpoint; a restart by torchrun resumes its own run."""
    request, layout = plan.request, plan.layout
    if rank.restarts_expected(layout) and not plan.options.fast_dev_run:
        # Ranks that are there from the beginning tell it, also if others join.
        request = replace(request, launched=min(collectives.gather(rank.launched_at())))
        if request.resume in (None, "auto"):
            name, resume = rank.elastic_run_name(), None if request.overwrite else "auto"
            request = replace(request, name=request.name or name, resume=resume)
    return run_choice.choose(request, layout, lock)


@dataclass
class _Fit:
    """A fit whose loaders are known; with ``overfit_batches``, that of training also validates."""

    _run: RankRun
    _module: TrainingModule
    _data: Data
    _feed: Feed
    _loaders: LoadersByName
    _chosen: run_choice.Selection
    _lock: RunLock
    _configured: dict[str, Any]
    _compiled: "Compiled | None"
    _user_optimizers: Sequence[Any] = ()  # an engine may have its own instead
    _is_recorded: bool = False  # whether this process has begun the record, and so ends it
    _data_record: "DataRecord | None" = None
    _check: Validate | None = None
    _checks_all: bool = False  # whether the check reads all validation loaders

    def __post_init__(self) -> None:
        self._plan, self._console = self._run.plan, self._run.console
        self._directory = self._chosen.directory

    def train(self) -> None:
        """Set the module up, resume, and run the loop; the record says how it ended."""
        loop = self._make_loop()
        self._run.metrics = loop.fit.outputs.latest
        self._run.fresh_metrics = loop.fit.outputs.fresh["validation"]
        self._run.loop = loop
        try:
            self._start(loop)
            self._run_until_interrupted(loop)
        except BaseException as error:
            loop.fit.calls.failed(error)
            loop.fit.outputs.close(error)  # before the first step, nothing else has
            self._record_end(f"failed {type(error).__name__}", error)
            self._note_overwritten()
            raise
        self._console.end(loop, self._directory)

    def _make_loop(self) -> FitLoop:
        options = self._plan.options
        fit = self._set_up()
        self._run.optimizers = tuple(fit.optimization.optimizers)
        self._run.schedulers = tuple(entry.scheduler for entry in fit.optimization.schedulers)
        kept = (options.keep_checkpoints, options.async_checkpoints)
        checkpoints = Checkpoints(self._directory / run_directory.DIRECTORY, *kept, lock=self._lock)
        validate = self._validation() if self._loaders else None
        self._check = self._validation_check()
        return FitLoop(fit, checkpoints, validate, self._rate_factor())

    def _rate_factor(self) -> Callable[[int], float] | None:
        """Factor of the learning rates at a step, counted from 0; ``None``: always 1."""
        options, always = self._plan.options, self._plan.strategy.limits.always
        scales = "learning_rate_scaling" in always
        if options.learning_rate_scaling == "none" and not scales:
            return None
        batch_size, replicas = self._feed.samples_per_step, self._plan.strategy.data.replicas
        of_device = batch_size // (replicas * self._feed.accumulate) if batch_size else None
        target = scaled_rate(options, batch_size, of_device) * (replicas if scales else 1)
        factor = partial(warmed_up_rate, target, options.learning_rate_warmup_steps)
        return None if target == 1.0 else factor

    def _set_up(self) -> FitParts:
        run, module, feed, options = self._run, self._module, self._feed, self._plan.options
        strategy, recorder = self._plan.strategy, self._run.recorder
        if options.sync_batchnorm:
            from ..strategies import sync_batchnorm

            sync_batchnorm.convert(module, self._plan.device.type)
        for child in with_own_mode(module):
            child.train(child.training)
        recorder.may_lack_names |= module.may_skip_batches  # a step may return before it logs
        left_out = LeftOut(module) if options.checkpoint_weights == "trainable" else None
        run.read_sample = lambda: next(iter(feed.epoch(0, 0))).data
        optimization = strategy.setup(module, self._configure)
        pairs = zip(self._user_optimizers, optimization.optimizers, strict=False)
        replace_kept(module, {id(old): new for old, new in pairs if new is not old})
        run.read_sample = None
        calls = calls_of(self._plan.callbacks, run, module, strategy.around_hooks)
        manual = None
        if not module.automatic_optimization:
            from ..loop.manual_optimization import ManualOptimization

            manual = ManualOptimization(strategy, optimization, lambda: recorder.context)
        shows = options.enable_progress_bar and self._plan.layout.is_main
        progress = Progress(shows, run.total_steps, feed.samples_per_step)
        outputs, position = Outputs(recorder, progress), run.position
        parts = (options, module, strategy, optimization, manual, feed, outputs, position, calls)
        if left_out is not None:
            left_out.begin(module)
        return FitParts(*parts, self._configured, self._compiled, left_out)

    def _configure(self) -> Optimization:
        optimization = configured(self._module)
        self._console.note(*trained_in_eval_mode(self._module, optimization))
        self._user_optimizers = optimization.optimizers
        self._configured |= described(optimization)
        if optimization.schedulers:
            self._configured[TOTAL_STEPS] = self._run.total_steps
        self._run.agree(lambda _: {name: str(value) for name, value in self._configured.items()})
        return optimization

    def _validation(self) -> Validate:
        from ..loop.evaluation import evaluate

        run, module = self._run, self._module
        options = self._plan.options
        if options.overfit_batches:
            share, together = run.share(), self._plan.strategy.limits.shards_parameters
            together |= options.uneven_inputs == "join"
            feeds = {
                name: feed_overfit(loader, share, training=self._feed, together=together)
                for name, loader in self._loaders.items()
            }
        else:
            feeds = run.evaluation_feeds(self._loaders, "val")
        self._even = {name: feed.is_even for name, feed in feeds.items()}
        args = module, run.strategy, run.recorder, feeds
        return lambda: evaluate(*args, "validation", run.metrics)

    def _validation_check(self) -> Validate | None:
        """A check of some validation batches before the first step, if there can be one."""
        run, options = self._run, self._plan.options
        order, number = options.use_distributed_sampler, options.sanity_check
        first = partial(feed_sanity_check, share=run.share(), in_global_order=order, batches=number)
        loaders = self._loaders if options.sanity_check else {}
        feeds = {name: feed for name, data in loaders.items() if (feed := first(data)) is not None}
        for name, feed in feeds.items():
            feed.is_even = self._even[name]
        self._checks_all = len(feeds) == len(loaders)
        if not feeds:
            return None
        from ..loop.evaluation import check_validation

        args = self._module, run.strategy, run.recorder, feeds
        return lambda: check_validation(*args, run.metrics)

    def _start(self, loop: FitLoop) -> None:
        """Resume, write records, and print what the run will do."""
        run, chosen, layout = self._run, self._chosen, self._plan.layout
        run.manual = loop.fit.manual
        start_fresh(self._plan.callbacks)
        for call in loop.fit.calls.on_fit_start:
            call()
        self._module.trainer_state = self._module.trainer_state  # of modules that a hook has added
        self._console.note(*chosen.remarks, *loop.fit.feed.remarks)
        if chosen.checkpoint is not None:
            from ..loop import resuming

            checkpoint = Checkpoint(chosen.checkpoint)
            remarks = resuming.resume(loop.fit, checkpoint, layout, chosen.is_same_run)
            self._console.note(f"resumed from {self._plan.shown(chosen.checkpoint)}")
            self._console.note(*remarks, on_each_rank=True)
            if loop.fit.position.is_end(self._plan.options):
                self._console.note("no step is left: max_epochs or max_steps is reached; set more")
        saving.check(loop.fit)
        if loop.fit.manual is None:
            refuse(loop.fit.optimization.too_short(run.total_steps))
            every = self._plan.options.log_every_n_steps
            self._console.note(*loop.fit.optimization.stepped_when_logged(every))
        if rank.restarts_expected(layout):
            rank.count_attempt(self._directory, run.global_step, layout)
        hosts = record.hosts(self._plan)
        if layout.is_main:
            self._write_records(loop, hosts)
        collectives.barrier()  # the hashes of a run that is replaced are removed
        loop.hashes.open(self._directory, run.total_steps)
        self._console.begin(loop, run.total_steps, self._directory)
        check, self._check = self._check, None  # and its workers
        if chosen.checkpoint is None and check is not None:
            run.is_in_sanity_check = True
            names = collectives.broadcast(sorted(check()))
            run.is_in_sanity_check = False
            is_complete = self._checks_all and not run.has_read_sanity_check
            from ..loop.evaluation import unmonitored

            self._console.note(*unmonitored(loop.fit, self._plan.callbacks, names, is_complete))
        if OTHERS.is_set():  # that may have seeded the generators
            raise UserError(SHARED)

    def _write_records(self, loop: FitLoop, hosts: list[dict[str, Any]]) -> None:
        """Write records and open logs: after the last check that can refuse the run."""
        directory, plan, chosen = self._directory, self._plan, self._chosen
        if chosen.checkpoint is not None and chosen.is_same_run:
            for path in set_aside(directory / run_directory.DIRECTORY, chosen.checkpoint):
                self._console.note(f"later checkpoint set aside: {plan.shown(path)}")
            hashes.truncate(directory, self._run.global_step)
        elif chosen.overwrites:
            run_directory.keep_overwritten(directory)
        else:
            run_directory.clear(directory, with_records=False)
        self._note_overwritten()
        if run_directory.was_cut_off(directory):
            why = "it was killed, its disk failed, or a process called os._exit()"
            self._console.note(f"the previous attempt did not record its end: {why}")
        if chosen.is_same_run and not (directory / "run.json").exists():
            self._console.note("run.json was removed: the new one begins with this attempt")
        configuration = self._run.configuration
        facts = {
            **record.attempt(plan, hosts),
            "first_step": self._run.global_step,
            "resumed_from": str(chosen.checkpoint) if chosen.checkpoint else None,
            "weights": plan.options.weights if chosen.checkpoint is None else None,
            "samples_per_step": self._feed.samples_per_step,
            "steps_per_epoch": self._feed.steps,
        }
        self._console.note(*record.other_code(plan.started_in))
        if facts["git_problem"]:
            self._console.note(f"run.json has no commit: {facts['git_problem']}")
        if (facts["git"] or {}).get("diff_cut"):
            self._console.note("run.json has only the first MiB of git diff")
        owners = [owner for owner in (self._data, self._module) if isinstance(owner, DataHooks)]
        paths = [plan.started_in / file for owner in owners for file in owner.data_files()]
        facts |= {} if paths else {"data": [], "data_cut": False}
        facts |= (hparams := hyperparameters(*owners))
        if (damage := run_directory.write_record(directory, facts, configuration)) is not None:
            self._console.note(damage)
        self._is_recorded = True
        if paths:
            from .data_record import DataRecord

            self._data_record = DataRecord(directory, paths)
        logged = LoggedRun.of(directory, plan.options, configuration)
        logged = replace(logged, configuration={**logged.configuration, **hparams})
        resumed_at = self._run.global_step if chosen.is_same_run else None
        loop.fit.outputs.check = self._lock.check
        loop.fit.outputs.log_to(plan.loggers, logged, resumed_at)

    def _note_overwritten(self) -> None:
        if (kept := self._directory / run_directory.OVERWRITTEN).is_dir():
            shown = self._plan.shown(kept)
            self._console.note(f"the run that was there is in {shown} until a checkpoint is saved")

    def _run_until_interrupted(self, loop: FitLoop) -> None:
        """Run the loop; Ctrl-C ends it with the command to resume."""
        try:
            with loop.preemption.recording_signals():
                self._run_loop(loop)
        except Preempted as asked:
            if asked.signal != signal.SIGINT:
                raise
            if self._plan.options.fast_dev_run:
                raise KeyboardInterrupt from None
            shown = str(self._plan.shown(self._directory))
            raise Interrupted(self._run.global_step, shown, self._console.is_command) from None

    def _run_loop(self, loop: FitLoop) -> None:
        try:
            with loop:
                loop.run()
        except Preempted as asked:
            name = asked.signal.name
            self._write_outcome(f"preempted {name}", asked)
            if asked.signal != signal.SIGINT:
                saved = "not saved" if self._plan.options.fast_dev_run else "saved"
                step = self._run.global_step
                self._console.note(f"{saved} after step {step} and stopped by {name}")
            collectives.barrier()  # one that ended first would be reported as a failure
            raise
        if self._plan.layout.is_main and not self._directory.is_dir():
            gone = "the run directory was removed while the run trained"
            raise UserError(f"{self._directory}: {gone}")
        self._write_outcome("finished")

    def _write_outcome(self, how: str, error: Preempted | None = None) -> None:
        line = f"{how} step {self._run.global_step}"
        self._record_end(line, error)
        if self._plan.layout.is_main:
            rank.reset_attempts(self._directory)
            reports.write_outcome(line)

    def _record_end(self, how: str, error: BaseException | None) -> None:
        if self._data_record is not None:
            self._data_record.end(wait=error is None)
        if self._is_recorded and not self._lock.is_lost():  # else the record is another attempt's
            facts = record.end(self._run.global_step, self._run.metrics, error)
            run_directory.record_end(self._directory, how, facts)
