"""``Trainer``: checks every argument together, picks the strategy, launches, runs the loop.

The only place that knows everybody.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from . import arguments, distributed, launch, randomness, run_directory, scaling
from .checkpoint import Checkpoint, Checkpoints, resolve
from .errors import CheckpointError, UserError
from .evaluation import evaluate, predict
from .feed import Feed, OrderedFeed, ReplayFeed
from .loggers import make_loggers
from .loop import FitLoop, Outputs, Position
from .metrics import Recorder
from .module import DataModule, Loader, TrainingModule
from .optimization import read_optimization
from .progress import Progress
from .sampling import BatchPlan, GlobalOrder, can_be_ordered, order_globally
from .strategies import SingleDevice

Result = TypeVar("Result")


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
        self._recorder: Recorder | None = None
        self._optimizers: list[Optimizer] = []
        self.run_directory: Path | None = None
        self.metrics: dict[str, float] = {}
        self.configuration: str | None = None
        randomness.use_deterministic_algorithms(deterministic)
        randomness.seed_everything(seed)

    # --- what a user calls -----------------------------------------------------------------------

    def fit(
        self,
        module: TrainingModule,
        data: DataModule | Loader | None = None,
        val_dataloader: Loader | None = None,
    ) -> None:
        """Train.

        Where several processes are needed and nothing has started them, this command is started
        again once a rank, this process watches them, and ends with them.

        Args:
            module: what to train.
            data: a data module, or a loader of training batches; by default the module's own loaders.
            val_dataloader: validation batches, where ``data`` is a loader.

        Raises:
            UserError: something the user can mend; one line each.
        """
        self._launch(lambda: self._fit(module, data, val_dataloader))

    def validate(
        self,
        module: TrainingModule,
        data: DataModule | Loader | None = None,
        checkpoint: str | None = None,
    ) -> dict[str, float]:
        """Validate, with the weights of a checkpoint or run directory if one is given."""
        return self._launch(lambda: self._evaluate("validation", module, data, checkpoint))

    def test(
        self,
        module: TrainingModule,
        data: DataModule | Loader | None = None,
        checkpoint: str | None = None,
    ) -> dict[str, float]:
        """Test, with the weights of a checkpoint or run directory if one is given."""
        return self._launch(lambda: self._evaluate("test", module, data, checkpoint))

    def predict(
        self,
        module: TrainingModule,
        data: DataModule | Loader | None = None,
        checkpoint: str | None = None,
    ) -> list[Any]:
        """Predict; one entry a batch, tensors of all processes in the data set's order."""
        return self._launch(lambda: self._predict(module, data, checkpoint))

    # --- what a module asks (module.Run) -----------------------------------------------------------

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

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Take a value that the module logs."""
        if self._recorder is not None:
            self._recorder.log(name, value, **options)

    # --- how it is done --------------------------------------------------------------------------

    def _launch(self, run: Callable[[], Result]) -> Result:
        checked = self._checked
        processes = checked.strategy.local_processes(checked.device_count)
        if processes > 1 and not checked.layout.started_outside:
            launch.supervise_copies(processes)
        return launch.run_external(lambda: self._connected(run))

    def _connected(self, run: Callable[[], Result]) -> Result:
        checked = self._checked
        if checked.layout.started_outside:
            self._say(checked.layout.receipt())
        checked.strategy.connect(checked.layout, checked.device, checked.precision)
        self._recorder = Recorder(checked.strategy.reduce, checked.device)
        # Each rank draws its own dropout masks.
        randomness.seed_everything(randomness.mix(self._given["seed"], checked.layout.rank))
        try:
            return run()
        finally:
            checked.strategy.teardown()

    def _fit(
        self, module: TrainingModule, data: DataModule | Loader | None, val_dataloader: Loader | None
    ) -> None:
        strategy, recorder = self._checked.strategy, self._recorder
        assert recorder is not None
        self._position = Position()
        source, checkpoint = self._choose_run()
        assert self.run_directory is not None
        with self._output(self.run_directory):
            feed = self._feed(_loader(data, module, "train"), training=True)
            val_loader = val_dataloader if val_dataloader is not None else _loader(data, module, "val")
            with self._attached(module):
                optimization = strategy.setup(
                    module, lambda: read_optimization(module.configure_optimizers())
                )
                assert optimization is not None
                self._optimizers = optimization.optimizers
                outputs = self._outputs(recorder, feed, self.run_directory)
                checkpoints = Checkpoints(
                    self.run_directory / "checkpoints",
                    self._given["keep_checkpoints"],
                    self._given["async_checkpoints"],
                )
                validate = None
                if val_loader is not None:
                    val_feed = self._feed(val_loader, training=False)
                    validate = lambda: evaluate(module, strategy, recorder, val_feed, "validation")  # noqa: E731
                loop = FitLoop(
                    module,
                    strategy,
                    optimization,
                    feed,
                    validate,
                    outputs,
                    checkpoints,
                    self._checked.schedule,
                    self._checked.clip,
                    self._position,
                )
                module.on_fit_start()
                if checkpoint is not None:
                    self._resume(loop, checkpoint, same_run=source == self.run_directory)
                self._announce(feed)
                try:
                    loop.run()
                finally:
                    checkpoints.close()
                    for logger in outputs.loggers:
                        logger.close()
        self.metrics = dict(outputs.latest)
        self._say_result(loop)

    def _evaluate(
        self,
        stage: Literal["validation", "test"],
        module: TrainingModule,
        data: DataModule | Loader | None,
        checkpoint: str | None,
    ) -> dict[str, float]:
        recorder = self._recorder
        assert recorder is not None
        feed = self._feed(_loader(data, module, "val" if stage == "validation" else "test"), training=False)
        with self._ready(module, checkpoint):
            self.metrics = evaluate(module, self._checked.strategy, recorder, feed, stage)
        self._say("\n".join(f"{name}: {value:.6g}" for name, value in self.metrics.items()))
        return self.metrics

    def _predict(
        self, module: TrainingModule, data: DataModule | Loader | None, checkpoint: str | None
    ) -> list[Any]:
        feed = self._feed(_loader(data, module, "predict"), training=False)
        with self._ready(module, checkpoint):
            return predict(module, self._checked.strategy, feed)

    @contextlib.contextmanager
    def _ready(self, module: TrainingModule, checkpoint: str | None) -> Iterator[None]:
        """The module set up for evaluation, with a checkpoint's weights."""
        strategy = self._checked.strategy
        with self._attached(module):
            strategy.setup(module, None)
            if checkpoint is not None:
                found = Checkpoint(resolve(checkpoint))
                try:
                    strategy.load_state(found.state(), None)
                except RuntimeError as error:
                    reason = " ".join(str(error).split())[:300]
                    raise CheckpointError(f"{found.path}: not of this model ({reason})") from None
            yield

    @contextlib.contextmanager
    def _attached(self, module: TrainingModule) -> Iterator[None]:
        module._run = self
        try:
            yield
        finally:
            module._run = None

    @contextlib.contextmanager
    def _output(self, directory: Path) -> Iterator[None]:
        """The main process prints where the user sees it, the others into the run's directory."""
        if self._checked.layout.is_main:
            yield
        else:
            rank = self._checked.layout.rank
            with run_directory.output_to(directory / "logs" / f"rank-{rank}.log"):
                yield

    def _choose_run(self) -> tuple[Path | None, Path | None]:
        """Pick this run's directory, the same on every process.

        Returns:
            the run that is gone on with, and its checkpoint; ``None`` for a fresh start.
        """
        root, name, resume = self._checked.root, self._given["run_name"], self._given["resume"]
        checkpoint = None
        if resume == "auto":
            with contextlib.suppress(CheckpointError):
                checkpoint = resolve(root / name) if name else None
        elif resume is not None:
            checkpoint = resolve(resume)
        source = checkpoint.parent.parent if checkpoint is not None else None
        if self._checked.layout.is_main:
            directory = source if source and not name else run_directory.create(root, name)
            chosen = [str(directory), str(checkpoint) if checkpoint else None]
        else:
            chosen = [None, None]
        # Rank 0's choice counts: another may look a moment later, and see another newest one.
        directory_text, checkpoint_text = distributed.broadcast(chosen)
        self.run_directory = Path(directory_text)
        return source, Path(checkpoint_text) if checkpoint_text else None

    def _feed(self, loader: Loader | None, training: bool) -> Feed:
        if loader is None:
            raise UserError(
                "no batches: give a data module, or define the loader "
                f"({'train' if training else 'val, test or predict'}_dataloader) in it or in the module"
            )
        strategy, seed = self._checked.strategy, self._given["seed"]
        accumulate = self._given["accumulate_grad_batches"] if training else 1
        if not (self._given["use_distributed_sampler"] and can_be_ordered(loader)):
            return ReplayFeed(
                loader,
                accumulate=accumulate,
                replica=strategy.data_index,
                replicas=strategy.data_replicas,
                seed=seed,
            )
        assert isinstance(loader, DataLoader)
        plan = self._plan(loader, accumulate, training)

        def make_order(keyed: bool) -> GlobalOrder:
            return GlobalOrder(
                plan, strategy.data_index, seed=seed, shuffle=training, keyed=keyed, fill=training
            )

        ordered = order_globally(loader, make_order, seed)
        assert isinstance(ordered.batch_sampler, GlobalOrder)
        return OrderedFeed(ordered, ordered.batch_sampler, seed)

    def _plan(self, loader: DataLoader[Any], accumulate: int, training: bool) -> BatchPlan:
        replicas, global_batch = self._checked.strategy.data_replicas, self._given["global_batch_size"]
        assert loader.batch_size is not None
        batch_size = loader.batch_size
        if training and global_batch is not None:
            batch_size = scaling.device_batch_size(global_batch, replicas, accumulate)
        samples = len(loader.dataset)  # type: ignore[arg-type]
        plan = BatchPlan(samples, batch_size, replicas, accumulate, training and loader.drop_last)
        if plan.batches == 0:
            raise UserError(
                f"the data set has {samples} samples and a batch takes {plan.global_batch}: "
                "there is nothing to read with drop_last"
            )
        return plan

    def _outputs(self, recorder: Recorder, feed: Feed, directory: Path) -> Outputs:
        is_main, schedule = self._checked.layout.is_main, self._checked.schedule
        steps = scaling.total_steps(_steps(feed), schedule.max_epochs, schedule.max_steps)
        progress = Progress(
            self._given["enable_progress_bar"] and is_main, steps, feed.samples_per_step
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
            "steps_per_epoch": _steps(feed),
        }
        run_directory.write_record(directory, self._checked.layout, facts)
        return Outputs(recorder, progress, make_loggers(self._given["loggers"], directory))

    def _resume(self, loop: FitLoop, path: Path, same_run: bool) -> None:
        checkpoint, layout = Checkpoint(path), self._checked.layout
        remarks = loop.resume(checkpoint, layout.rank, layout.world_size, same_run)
        self._say(f"resumed from {path} at step {self.global_step}")
        for remark in remarks:
            self._say(f"note: {remark}")

    def _announce(self, feed: Feed) -> None:
        checked, steps = self._checked, _steps(feed)
        self._say(
            f"strategy {checked.strategy_name} on {checked.device.type}, precision "
            f"{checked.precision.name}, {checked.layout.world_size} process"
            f"{'es' * (checked.layout.world_size > 1)}"
        )
        if feed.samples_per_step:
            self._say(
                f"effective batch size {feed.samples_per_step} "
                f"({checked.strategy.data_replicas} replicas × {feed.accumulate} accumulated)"
            )
        total = scaling.total_steps(steps, checked.schedule.max_epochs, checked.schedule.max_steps)
        self._say(
            f"steps per epoch {steps or 'unknown'}, epochs {checked.schedule.max_epochs or 'as many as it takes'}, "
            f"steps in all {total or 'unknown'}"
        )
        self._say(f"run directory {self.run_directory}")

    def _say_result(self, loop: FitLoop) -> None:
        values = "  ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        rate = f", {loop.samples_per_second:.0f} samples/s" if loop.samples_per_second else ""
        self._say(f"done after {self.global_step} steps{rate}: {values}")
        self._say(f"the run lies in {self.run_directory}")

    def _say(self, text: str) -> None:
        if self._checked.layout.is_main and self._given["enable_progress_bar"]:
            print(text, flush=True)


def _loader(data: DataModule | Loader | None, module: TrainingModule, stage: str) -> Loader | None:
    if isinstance(data, DataModule) or data is None:
        loader: Loader | None = getattr(data or module, f"{stage}_dataloader")()
        return loader
    # A bare loader is of the stage that was called; its validation loader comes beside it.
    return None if stage == "val" else data


def _steps(feed: Feed) -> int | None:
    return None if feed.batches is None else -(-feed.batches // feed.accumulate)
