"""``Trainer``: checks every argument together, picks the strategy, launches, runs the loop.

The only place that knows everybody.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch.optim import Optimizer

from . import announcements, arguments, launch, randomness, run_directory, scaling
from .checkpoint import Checkpoint, Checkpoints, resolve
from .errors import CheckpointError, ConfigurationError, UserError
from .evaluation import evaluate, predict
from .feed import Feed, Share, feed_evaluation, feed_training
from .loggers import make_loggers
from .loop import FitLoop, Outputs, Position
from .metrics import Recorder
from .module import DataModule, Loader, TrainingModule
from .optimization import read_optimization
from .progress import Progress
from .strategies import SingleDevice

Result = TypeVar("Result")
Data = DataModule | Loader | None
_Stage = Literal["train", "val", "test", "predict"]


class Trainer:
    """Trains a module under any strategy.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``.
        devices: how many, or which: ``2``, ``"0,2"``, ``[0, 2]``, ``-1`` or ``"auto"`` for all. On
            CPUs, processes.
        num_nodes: to check what srun or torchrun has started; by default whatever that is.
        strategy: a registered name, ``"auto"``, or a strategy.
        strategy_options: arguments of a strategy that is given by name.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        max_epochs: passes over the data; ``None``: until ``max_steps``.
        max_steps: optimizer steps; ``None``: until ``max_epochs``.
        global_batch_size: samples of an optimizer step over all devices; replaces the batch size
            of the training loader, so that the same run fits any number of devices.
        accumulate_grad_batches: micro-batches of an optimizer step.
        gradient_clip_val: bound of the gradients; ``None``: no clipping.
        gradient_clip_algorithm: ``"norm"`` (of all together) or ``"value"`` (each).
        seed: fixes data order, workers, augmentation and, where the module is made after the
            trainer, its weights.
        deterministic: use only kernels that give the same bits each time.
        use_distributed_sampler: put in the trainer's order of samples. False: loaders are read
            as they are.
        log_every_n_steps: write single steps' values so often.
        check_val_every_n_epoch: validate at the end of every so many epochs.
        val_every_n_steps: validate after every so many steps too.
        checkpoint_every_n_steps: save after every so many steps too, not only after each epoch.
        keep_checkpoints: how many to keep, at least 2.
        async_checkpoints: write them while training goes on.
        resume: a run's directory or a checkpoint to go on from; ``"auto"``: from the newest of
            ``run_name`` if there is one.
        default_root_dir: where runs lie.
        run_name: directory of the run in it; by default the time.
        loggers: ``"csv"``, ``"tensorboard"``.
        enable_progress_bar: show step, loss, rate and time left.

    Raises:
        ConfigurationError: one line for every mistake in the arguments.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int | None = None,
        strategy: str | SingleDevice = "auto",
        strategy_options: dict[str, Any] | None = None,
        precision: str = "32-true",
        max_epochs: int | None = None,
        max_steps: int | None = None,
        global_batch_size: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        seed: int = 0,
        deterministic: bool = False,
        use_distributed_sampler: bool = True,
        log_every_n_steps: int = 50,
        check_val_every_n_epoch: int = 1,
        val_every_n_steps: int | None = None,
        checkpoint_every_n_steps: int | None = None,
        keep_checkpoints: int = 2,
        async_checkpoints: bool = False,
        resume: str | None = None,
        default_root_dir: str | os.PathLike[str] = "runs",
        run_name: str | None = None,
        loggers: Sequence[str] = ("csv", "tensorboard"),
        enable_progress_bar: bool = True,
    ) -> None:
        given = dict(locals())
        del given["self"]
        self._checked = arguments.check(given)
        self._given = given
        self._position = Position()
        self._optimizers: list[Optimizer] = []
        self.run_directory: Path | None = None
        self.metrics: dict[str, float] = {}
        self.log: Callable[..., None] = _ignore
        self.configuration: str | None = None
        randomness.use_deterministic_algorithms(deterministic)
        randomness.seed_everything(seed)

    # --- what a user calls -----------------------------------------------------------------------

    def fit(
        self, module: TrainingModule, data: Data = None, val_dataloader: Loader | None = None
    ) -> None:
        """Train.

        Where several processes are needed and nothing has started them, this command is started
        again once a rank, this process watches them, and ends with them.

        Args:
            module: what to train.
            data: a data module, or a loader of training batches; by default the module's loaders.
            val_dataloader: validation batches, where ``data`` is a loader.

        Raises:
            UserError: something the user can mend; one line each.
        """
        self.check_fit()
        self._launch(lambda recorder: self._fit(recorder, module, data, val_dataloader))

    def check_fit(self) -> None:
        """Check what only training needs.

        Raises:
            ConfigurationError: training would not end.
        """
        if self._given["max_epochs"] is None and self._given["max_steps"] is None:
            raise ConfigurationError(
                "neither max_epochs nor max_steps is given: no end to training"
            )

    def validate(
        self, module: TrainingModule, data: Data = None, checkpoint: str | None = None
    ) -> dict[str, float]:
        """Validate, with the weights of a checkpoint or run directory if one is given."""
        return self._launch(
            lambda recorder: self._evaluate(recorder, "validation", module, data, checkpoint)
        )

    def test(
        self, module: TrainingModule, data: Data = None, checkpoint: str | None = None
    ) -> dict[str, float]:
        """Test, with the weights of a checkpoint or run directory if one is given."""
        return self._launch(
            lambda recorder: self._evaluate(recorder, "test", module, data, checkpoint)
        )

    def predict(
        self, module: TrainingModule, data: Data = None, checkpoint: str | None = None
    ) -> list[Any]:
        """Predict; one entry a batch, tensors of all processes in the data set's order."""
        return self._launch(lambda recorder: self._predict(module, data, checkpoint))

    # --- what a module asks (module.Run) ---------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps made."""
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
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are stepped."""
        return self._optimizers

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self._checked.layout.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._checked.layout.world_size

    # --- how it is done --------------------------------------------------------------------------

    def _launch(self, run: Callable[[Recorder], Result]) -> Result:
        checked = self._checked
        processes = checked.strategy.local_processes(checked.device_count)
        if processes > 1 and not checked.layout.started_outside:
            launch.supervise_copies(processes)
        try:
            return launch.run_external(lambda: self._connected(run))
        finally:
            # After a failure was reported: the others notice when the group is gone.
            checked.strategy.teardown()

    def _connected(self, run: Callable[[Recorder], Result]) -> Result:
        checked = self._checked
        if checked.layout.started_outside:
            self._say(checked.layout.receipt())
        checked.strategy.connect(checked.layout, checked.device, checked.precision)
        # Each rank draws its own dropout masks.
        randomness.seed_everything(randomness.mix(self._given["seed"], checked.layout.rank))
        return run(Recorder(checked.strategy.reduce, checked.device))

    def _fit(
        self,
        recorder: Recorder,
        module: TrainingModule,
        data: Data,
        val_dataloader: Loader | None,
    ) -> None:
        self._position = Position()
        chosen = run_directory.choose(
            self._checked.root, self._given["run_name"], self._given["resume"], self._checked.layout
        )
        self.run_directory = chosen.directory
        with self._output_of(chosen.directory), self._attached(module, recorder):
            loop = self._make_loop(recorder, module, data, val_dataloader, chosen.directory)
            module.on_fit_start()
            if chosen.checkpoint is not None:
                checkpoint = Checkpoint(chosen.checkpoint)
                self._say(f"resumed from {chosen.checkpoint}")
                for remark in loop.resume(checkpoint, self._checked.layout, chosen.is_same_run):
                    self._say(f"note: {remark}")
            self._say(*announcements.opening(self._checked, loop.feed, chosen.directory))
            try:
                loop.run()
            finally:
                loop.close()
        self.metrics = dict(loop.outputs.latest)
        self._say(*announcements.closing(loop, chosen.directory))

    def _make_loop(
        self,
        recorder: Recorder,
        module: TrainingModule,
        data: Data,
        val_dataloader: Loader | None,
        directory: Path,
    ) -> FitLoop:
        strategy, given = self._checked.strategy, self._given
        feed = feed_training(
            _loader(data, module, "train"),
            self._share(),
            accumulate=given["accumulate_grad_batches"],
            global_batch_size=given["global_batch_size"],
            in_global_order=given["use_distributed_sampler"],
        )
        if val_dataloader is None and _has_loader(data, module, "val"):
            val_dataloader = _loader(data, module, "val")
        optimization = strategy.setup(
            module, lambda: read_optimization(module.configure_optimizers())
        )
        self._optimizers = optimization.optimizers
        return FitLoop(
            module,
            strategy,
            optimization,
            feed,
            self._validation(recorder, module, val_dataloader),
            self._outputs(recorder, feed, directory),
            Checkpoints(
                directory / "checkpoints", given["keep_checkpoints"], given["async_checkpoints"]
            ),
            self._checked.schedule,
            self._checked.clip,
            self._position,
        )

    def _validation(
        self, recorder: Recorder, module: TrainingModule, loader: Loader | None
    ) -> Callable[[], dict[str, float]] | None:
        if loader is None:
            return None
        feed = self._feed_evaluation(loader)
        return lambda: evaluate(module, self._checked.strategy, recorder, feed, "validation")

    def _evaluate(
        self,
        recorder: Recorder,
        stage: Literal["validation", "test"],
        module: TrainingModule,
        data: Data,
        checkpoint: str | None,
    ) -> dict[str, float]:
        feed = self._feed_evaluation(
            _loader(data, module, "val" if stage == "validation" else stage)
        )
        with self._attached(module, recorder):
            self._set_up_for_evaluation(module, checkpoint)
            self.metrics = evaluate(module, self._checked.strategy, recorder, feed, stage)
        self._say(*(f"{name}: {value:.6g}" for name, value in self.metrics.items()))
        return self.metrics

    def _predict(self, module: TrainingModule, data: Data, checkpoint: str | None) -> list[Any]:
        feed = self._feed_evaluation(_loader(data, module, "predict"))
        self._set_up_for_evaluation(module, checkpoint)
        return predict(module, self._checked.strategy, feed)

    def _set_up_for_evaluation(self, module: TrainingModule, checkpoint: str | None) -> None:
        strategy = self._checked.strategy
        strategy.place(module)
        if checkpoint is not None:
            found = Checkpoint(resolve(checkpoint))
            try:
                strategy.load_state(found.state(), None)
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:300]
                raise CheckpointError(f"{found.path}: not of this model ({reason})") from None

    @contextlib.contextmanager
    def _attached(self, module: TrainingModule, recorder: Recorder) -> Iterator[None]:
        """The module knows its run for a while."""
        self.log = recorder.log
        module._run = self
        try:
            yield
        finally:
            module._run = None

    @contextlib.contextmanager
    def _output_of(self, directory: Path) -> Iterator[None]:
        """The main process prints where the user sees it, the others into the run's directory."""
        if self._checked.layout.is_main:
            yield
        else:
            log = directory / "logs" / f"rank-{self._checked.layout.rank}.log"
            with run_directory.output_to(log):
                yield

    def _share(self) -> Share:
        strategy = self._checked.strategy
        return Share(strategy.data_index, strategy.data_replicas, self._given["seed"])

    def _feed_evaluation(self, loader: Loader) -> Feed:
        in_order = self._given["use_distributed_sampler"]
        return feed_evaluation(loader, self._share(), in_global_order=in_order)

    def _outputs(self, recorder: Recorder, feed: Feed, directory: Path) -> Outputs:
        is_main = self._checked.layout.is_main
        shown = self._given["enable_progress_bar"] and is_main
        progress = Progress(
            shown,
            scaling.total_steps(feed.steps, *self._checked.schedule.ends),
            feed.samples_per_step,
        )
        if not is_main:
            return Outputs(recorder, progress)
        if self.configuration is not None:
            run_directory.write_atomically(directory / "config.yaml", self.configuration)
        facts = {
            "strategy": self._checked.strategy_name,
            "precision": self._checked.precision.name,
            "device": str(self._checked.device),
            "seed": self._given["seed"],
            "samples_per_step": feed.samples_per_step,
            "steps_per_epoch": feed.steps,
        }
        run_directory.write_record(directory, self._checked.layout, facts)
        return Outputs(recorder, progress, make_loggers(self._given["loggers"], directory))

    def _say(self, *lines: str) -> None:
        if self._checked.layout.is_main and self._given["enable_progress_bar"]:
            print(*lines, sep="\n", flush=True)


def _has_loader(data: Data, module: TrainingModule, stage: _Stage) -> bool:
    return (data is None or isinstance(data, DataModule)) and (
        getattr(data or module, f"{stage}_dataloader")() is not None
    )


def _loader(data: Data, module: TrainingModule, stage: _Stage) -> Loader:
    if data is not None and not isinstance(data, DataModule):
        return data
    loader: Loader | None = getattr(data or module, f"{stage}_dataloader")()
    if loader is None:
        owner = type(data or module).__name__
        raise UserError(f"no batches: {owner} has no {stage}_dataloader, and none was given")
    return loader


def _ignore(*arguments: Any, **options: Any) -> None:
    """Outside a run, what is logged goes nowhere."""
