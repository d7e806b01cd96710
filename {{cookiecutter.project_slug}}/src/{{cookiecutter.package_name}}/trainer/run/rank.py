"""One rank's part of a fit, validation, test or prediction."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..checkpoint import run_choice, run_directory
from ..checkpoint.reading import DIRECTORY, Checkpoint, resolve
from ..checkpoint.run_choice import Chosen
from ..checkpoint.run_lock import RunLock
from ..checkpoint.writing import Checkpoints, set_aside
from ..data import randomness, scaling, sources
from ..data.feed import Feed, Share, feed_evaluation, feed_training
from ..data.sources import Data
from ..errors import CheckpointError
from ..launch import collectives, forks, outcome, restarts
from ..launch.failures import nccl_watch
from ..launch.interruption import Interrupted
from ..launch.preemption import Preempted
from ..logging.loggers import make_loggers
from ..logging.metrics import Recorder
from ..logging.outputs import Outputs
from ..logging.progress import Progress
from ..loop import batch_size_trial, compilation
from ..loop.evaluation import evaluate, predict
from ..loop.fit import FitLoop
from ..loop.manual_optimization import ManualOptimization
from ..loop.schedule import Position
from ..memory import activation_checkpointing
from ..module import Loader, TrainingModule
from ..strategies import sync_batchnorm
from ..strategies.optimizers import Optimization, read_optimization
from . import announcements
from .plan import Arguments


@dataclass(frozen=True)
class Outcome:
    """What is left of a run when it is over.

    ``weights``: of the module, where it was trained in another process.
    """

    result: Any = None
    global_step: int = 0
    current_epoch: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    run_directory: Path | None = None
    weights: dict[str, Tensor] | None = None


class RankRun:
    """A run as one rank sees it, from the forming of its process group to the end.

    Args:
        checked: the trainer's arguments.
        configuration: the whole command line's, as YAML; ``None`` without one.
    """

    def __init__(self, checked: Arguments, configuration: str | None) -> None:
        self.checked = checked
        self.strategy = checked.strategy
        self.metrics: dict[str, float] = {}
        self.directory: Path | None = None
        self.manual: ManualOptimization | None = None
        self.optimization = Optimization([], [])
        self._configuration = configuration
        self._position = Position()
        self._given = checked.given

    def connect(self) -> None:
        """Take this process' place among its peers."""
        forks.freeze_garbage_in_children()
        checked = self.checked
        if checked.layout.source != "none":
            self._say(checked.layout.receipt())
        self.strategy.connect(checked.layout, checked.devices, checked.precision)
        # Each rank draws its own dropout masks.
        randomness.seed_everything(randomness.mix(self._given["seed"], checked.layout.rank))
        self._recorder = Recorder(self.strategy.reduce, checked.device)
        self.log = self._recorder.log

    def outcome(self, result: Any) -> Outcome:
        """What is left of the run."""
        return Outcome(result, self.global_step, self.current_epoch, self.metrics, self.directory)

    # --- what a module asks (module.Run) ---------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps made; batches, where a training step optimizes by hand."""
        return self._position.global_step

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0."""
        return self._position.epoch

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch of this training step is the epoch's last."""
        return self._position.is_last_batch

    @property
    def batch_samples(self) -> int:
        """Samples of the running batch that count; 0 if it only keeps this process in step."""
        return self._recorder.samples

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers of ``configure_optimizers``."""
        return [entry.scheduler for entry in self.optimization.schedules]

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.checked.layout.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.checked.layout.world_size

    @property
    def seed(self) -> int:
        """What fixes data order, workers, augmentation and weights."""
        seed: int = self._given["seed"]
        return seed

    # --- fit -------------------------------------------------------------------------------------

    def fit(self, module: TrainingModule, data: Data, val_dataloader: Loader | None) -> None:
        """Train."""
        if self.checked.layout.is_main:
            outcome.remove()
        with contextlib.closing(RunLock()) as lock:
            chosen = self._choose(lock)
            self.directory = chosen.directory
            nccl_watch.record_into(chosen.directory / "logs")
            names, given = self._given["activation_checkpointing"], self._given["compile"]
            compiled = compilation.applied(module, given, names)
            with self._output_of(chosen), self._attached(module), compiled:
                self._fit(module, data, val_dataloader, chosen)

    def _fit(
        self, module: TrainingModule, data: Data, val_dataloader: Loader | None, chosen: Chosen
    ) -> None:
        loop = self._make_loop(module, data, val_dataloader, chosen.directory)
        self.manual = loop.manual
        module.on_fit_start()
        self._say(*(f"note: {remark}" for remark in chosen.remarks))
        if chosen.checkpoint is not None:
            checkpoint = Checkpoint(chosen.checkpoint)
            remarks = loop.resume(checkpoint, self.checked.layout, chosen.is_same_run)
            self._say(f"resumed from {self.checked.shown(chosen.checkpoint)}")
            self._say(*(f"note: {remark}" for remark in remarks))
        if restarts.expected(self.checked.layout):
            restarts.count_attempt(chosen.directory, self.global_step, self.checked.layout)
        if self.checked.layout.is_main:
            self._begin(loop, chosen)
        self._say(*announcements.opening(self.checked, loop))
        self._say_where(chosen.directory)
        self._train(loop, chosen.directory)
        self.metrics = dict(loop.outputs.latest)
        self._say(*announcements.closing(loop, self.checked.shown(chosen.directory)))

    def _begin(self, loop: FitLoop, chosen: Chosen) -> None:
        """Write records and open logs: only now nothing can refuse the run any more."""
        directory = chosen.directory
        if chosen.checkpoint is not None and chosen.is_same_run:
            aside = set_aside(directory / DIRECTORY, chosen.checkpoint)
            shown = [self.checked.shown(path) for path in aside]
            self._say(*(f"note: later checkpoint set aside: {path}" for path in shown))
        else:
            run_directory.clear(directory, with_records=self._given["overwrite"])
        facts = {
            "resumed_from": str(chosen.checkpoint) if chosen.checkpoint else None,
            "strategy": self.checked.strategy_name,
            "precision": self.checked.precision.name,
            "device": str(self.checked.device),
            "seed": self._given["seed"],
            "samples_per_step": loop.feed.samples_per_step,
            "steps_per_epoch": loop.feed.steps,
        }
        run_directory.write_record(directory, self.checked.layout, facts, self._configuration)
        loop.log_to(make_loggers(self._given["loggers"], directory), chosen.is_same_run)

    def _train(self, loop: FitLoop, directory: Path) -> None:
        """Run the loop, and tell how it ended."""
        try:
            with loop.preemption.recording_signals():
                self._run(loop, directory)
        except Preempted as asked:
            if asked.signal != signal.SIGINT:
                raise
            is_command = self._configuration is not None
            shown = self.checked.shown(directory)
            raise Interrupted(self.global_step, str(shown), is_command) from None

    def _run(self, loop: FitLoop, directory: Path) -> None:
        try:
            with contextlib.closing(loop):
                loop.run()
        except Preempted as asked:
            name = asked.signal.name
            self._tell(f"preempted {name}", directory)
            if asked.signal != signal.SIGINT:
                self._say(f"saved after step {self.global_step} and ended, as {name} asked")
            # A rank that has gone would be taken for a failure, and the others ended.
            collectives.barrier()
            raise
        self._tell("finished", directory)

    def _tell(self, how: str, directory: Path) -> None:
        if self.checked.layout.is_main:
            restarts.reset(directory)
            outcome.write(f"{how} step {self.global_step}")

    def _choose(self, lock: RunLock) -> Chosen:
        request, layout = self.checked.request, self.checked.layout
        if restarts.expected(layout) and request.resume in (None, "auto"):
            name = request.name or restarts.run_name()
            request = replace(request, name=name, resume="auto")
        return run_choice.choose(request, layout, lock)

    def _make_loop(
        self,
        module: TrainingModule,
        data: Data,
        val_dataloader: Loader | None,
        directory: Path,
    ) -> FitLoop:
        strategy, given = self.strategy, self._given
        feed = feed_training(
            sources.loader(data, module, "train"),
            self._share(),
            accumulate=given["accumulate_grad_batches"],
            global_batch_size=given["global_batch_size"],
            in_global_order=given["use_distributed_sampler"],
            uneven=given["uneven_inputs"],
        )
        val_dataloader = sources.validation_loader(data, module, val_dataloader)
        self._prepare(module)
        self.optimization = strategy.setup(
            module, lambda: read_optimization(module.configure_optimizers())
        )
        return FitLoop(
            module,
            strategy,
            self.optimization,
            feed,
            self._validation(module, val_dataloader),
            Outputs(self._recorder, self._progress(feed)),
            Checkpoints(
                directory / DIRECTORY,
                given["keep_checkpoints"],
                given["async_checkpoints"],
                strategy.timeout_seconds,
            ),
            self.checked.schedule,
            self.checked.clip,
            self._position,
            self._rate(feed),
        )

    def _prepare(self, module: TrainingModule) -> None:
        if self._given["sync_batchnorm"]:
            sync_batchnorm.convert(module, self.checked.device.type)

    def _rate(self, feed: Feed) -> Callable[[int], float]:
        rate, own = self.checked.learning_rate, self.strategy.learning_rate_factor
        batch_size = feed.samples_per_step
        shares = self.strategy.data_replicas * feed.accumulate
        target = own * rate.target(batch_size, batch_size // shares if batch_size else None)
        return lambda step: rate.factor(target, step)

    def _validation(
        self, module: TrainingModule, loader: Loader | None
    ) -> Callable[[], dict[str, float]] | None:
        if loader is None:
            return None
        feed = self._feed_evaluation(loader)
        return lambda: evaluate(module, self.strategy, self._recorder, feed, "validation")

    # --- validate, test, predict -----------------------------------------------------------------

    def evaluate(
        self,
        stage: Literal["validation", "test"],
        module: TrainingModule,
        data: Data,
        checkpoint: str | None,
    ) -> dict[str, float]:
        """Validate or test, with the weights of a checkpoint if one is given."""
        feed = self._feed_evaluation(
            sources.loader(data, module, "val" if stage == "validation" else stage)
        )
        with self._attached(module):
            self._set_up_for_evaluation(module, checkpoint)
            self.metrics = evaluate(module, self.strategy, self._recorder, feed, stage)
        self._say(*(f"{name}: {value:.6g}" for name, value in self.metrics.items()))
        return self.metrics

    def predict(self, module: TrainingModule, data: Data, checkpoint: str | None) -> list[Any]:
        """Predict, with the weights of a checkpoint if one is given."""
        feed = self._feed_evaluation(sources.loader(data, module, "predict"))
        with self._attached(module):
            self._set_up_for_evaluation(module, checkpoint)
            return predict(module, self.strategy, feed)

    def _set_up_for_evaluation(self, module: TrainingModule, checkpoint: str | None) -> None:
        self.strategy.place(module)
        if checkpoint is not None:
            found = run_choice.whole(resolve(checkpoint))
            try:
                self.strategy.load_state(found.stored_state(), None)
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                reason = " ".join(str(error).split())[:300]
                raise CheckpointError(f"{found.path}: not of this model ({reason})") from None

    def find_batch_size(self, module: TrainingModule, data: Data) -> int:
        """The largest batch that a device can train on, the same for all."""
        names = self._given["activation_checkpointing"]
        with self._attached(module), activation_checkpointing.applied(module, names):
            found = batch_size_trial.find_batch_size(
                module,
                sources.loader(data, module, "train"),
                self.checked.device,
                self.checked.precision.name,
                self.strategy.data_replicas,
                self._use_manual,
            )
        self._say(f"the largest batch that fits on every device: {found}")
        return found

    def _use_manual(self, manual: ManualOptimization | None) -> None:
        self.manual = manual

    # --- parts -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _attached(self, module: TrainingModule) -> Iterator[None]:
        """The module knows its run for a while."""
        module.trainer_state = replace(module.trainer_state, run=self)
        try:
            yield
        finally:
            module.trainer_state = replace(module.trainer_state, run=None)

    @contextlib.contextmanager
    def _output_of(self, chosen: Chosen) -> Iterator[None]:
        """The main process prints where the user sees it, the others into the run's directory."""
        if self.checked.layout.is_main:
            yield
        else:
            log = chosen.directory / "logs" / f"rank-{self.checked.layout.rank}.log"
            with run_directory.output_to(log, keep=not self._given["overwrite"]):
                yield

    def _share(self) -> Share:
        return Share(self.strategy.data_index, self.strategy.data_replicas, self._given["seed"])

    def _feed_evaluation(self, loader: Loader) -> Feed:
        in_order = self._given["use_distributed_sampler"]
        together = self.strategy.shards_parameters
        return feed_evaluation(loader, self._share(), in_global_order=in_order, together=together)

    def _progress(self, feed: Feed) -> Progress:
        return Progress(
            self._given["enable_progress_bar"] and self.checked.layout.is_main,
            scaling.total_steps(feed.steps, *self.checked.schedule.ends),
            feed.samples_per_step,
        )

    def _say_where(self, directory: Path) -> None:
        """Name the run directory; a command says it even where it shows no progress."""
        is_command = self._configuration is not None
        if self.checked.layout.is_main and (self._given["enable_progress_bar"] or is_command):
            print(announcements.where(self.checked.shown(directory)), flush=True)

    def _say(self, *lines: str) -> None:
        if lines and self.checked.layout.is_main and self._given["enable_progress_bar"]:
            print(*lines, sep="\n", flush=True)
