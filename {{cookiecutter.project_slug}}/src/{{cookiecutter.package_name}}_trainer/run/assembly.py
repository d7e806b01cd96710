"""Create the parts of a rank's run from its plan."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from ..callbacks import HookCalls
from ..checkpoint import DIRECTORY, Checkpoints
from ..data import (
    BatchLimit,
    Feed,
    LoadersByName,
    Share,
    feed_evaluation,
    feed_first,
    feed_trained,
    feed_training,
    scaling,
)
from ..errors import UserError
from ..logging import Outputs, Progress, Recorder
from ..loop import (
    FitLoop,
    FitParts,
    ManualOptimization,
    Position,
    check_validation,
    evaluate,
)
from ..module import Loader, TrainingModule
from ..strategies import sync_batchnorm
from ..strategies.optimizers import configured
from .plan import Plan


class Assembly:
    """Creates the parts of a run whose strategy is connected.

    Args:
        plan: The run's.
        recorder: Records what the module logs.
    """

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        self._plan = plan
        self._recorder = recorder

    def training_feed(self, loader: Loader) -> Feed:
        """This replica's training batches."""
        options = self._plan.options
        limit = BatchLimit("limit_train_batches", options.limit_train_batches)
        if options.overfit_batches:
            limit = BatchLimit("overfit_batches", options.overfit_batches)
        feed = feed_training(
            loader,
            self._share(),
            accumulate=options.accumulate_grad_batches,
            global_batch_size=options.global_batch_size,
            in_global_order=options.use_distributed_sampler,
            uneven=options.uneven_inputs,
            limit=limit,
            repeats=bool(options.overfit_batches),
        )
        if not (feed.has_plan or self._plan.strategy.steps_together):
            raise UserError(
                f"strategy={self._plan.strategy_name!r} does not compare the batches of ranks, and "
                "the training loader is read as it is; use a map-style dataset, torch's own "
                "samplers and use_distributed_sampler=True"
            )
        return feed

    def evaluation_feeds(
        self, loaders: LoadersByName, stage: Literal["validation", "test", "predict"]
    ) -> dict[str, Feed]:
        """This replica's batches of an evaluation, by name of their loader."""
        options = self._plan.options
        limits = {
            "validation": BatchLimit("limit_val_batches", options.limit_val_batches),
            "test": BatchLimit("limit_test_batches", options.limit_test_batches),
            "predict": BatchLimit("limit_predict_batches", options.limit_predict_batches),
        }
        return {
            name: feed_evaluation(
                loader,
                self._share(),
                in_global_order=options.use_distributed_sampler,
                together=self._plan.strategy.shards_parameters,
                limit=limits[stage],
            )
            for name, loader in loaders.items()
        }

    def fit_loop(self, fit: FitParts, loaders: LoadersByName, directory: Path) -> FitLoop:
        """The training loop, which writes checkpoints into a run directory.

        Args:
            fit: The parts of the fit.
            loaders: The validation loaders, if any; with ``overfit_batches``, that of training.
            directory: The run directory.
        """
        options = self._plan.options
        validate, check = None, None
        if loaders:
            validate = self._validation(fit, loaders)
            check = self._validation_check(fit.module, loaders)
        checkpoints = Checkpoints(
            directory / DIRECTORY,
            options.keep_checkpoints,
            options.async_checkpoints,
            self._plan.strategy.timeout_seconds,
        )
        return FitLoop(fit, checkpoints, validate, check, self._rate_factor(fit.feed))

    def fit_parts(
        self, module: TrainingModule, feed: Feed, position: Position, calls: HookCalls
    ) -> FitParts:
        """Set a module up under the strategy, to train from a position."""
        strategy, recorder, options = self._plan.strategy, self._recorder, self._plan.options
        if options.sync_batchnorm:
            sync_batchnorm.convert(module, self._plan.device.type)
        strategy.read_sample = lambda: next(iter(feed.epoch(0, 0))).data
        optimization = strategy.setup(module, lambda: configured(module))
        strategy.read_sample = None
        manual: ManualOptimization | None = None
        if not module.automatic_optimization:
            manual = ManualOptimization(strategy, optimization, lambda: recorder.context)
        outputs = Outputs(recorder, self._progress(feed, position.extra_steps))
        return FitParts(
            options,
            module,
            strategy,
            optimization,
            manual,
            feed,
            outputs,
            position,
            calls,
            module.flops_per_sample,
        )

    def _validation(self, fit: FitParts, loaders: LoadersByName) -> Callable[[], dict[str, float]]:
        strategy, recorder = self._plan.strategy, self._recorder
        feeds = {self._share(): self._validation_feeds(fit, loaders)}

        def validate() -> dict[str, float]:
            share = self._share()
            if share not in feeds:  # after a loss, the other ranks read the lost rank's samples
                feeds.clear()
                feeds[share] = self._validation_feeds(fit, loaders)
            return evaluate(fit.module, strategy, recorder, feeds[share], "validation")

        return validate

    def _validation_feeds(self, fit: FitParts, loaders: LoadersByName) -> dict[str, Feed]:
        if not self._plan.options.overfit_batches:
            return self.evaluation_feeds(loaders, "validation")
        together, share = self._plan.strategy.shards_parameters, self._share()
        return {
            name: feed_trained(loader, share, training=fit.feed, together=together)
            for name, loader in loaders.items()
        }

    def _validation_check(
        self, module: TrainingModule, loaders: LoadersByName
    ) -> Callable[[], dict[str, float]] | None:
        options, strategy, recorder = self._plan.options, self._plan.strategy, self._recorder
        if not options.sanity_check:
            return None
        feeds = {
            name: feed_first(
                loader,
                self._share(),
                in_global_order=options.use_distributed_sampler,
                batches=options.sanity_check,
            )
            for name, loader in loaders.items()
        }
        read = {name: feed for name, feed in feeds.items() if feed is not None}
        return partial(check_validation, module, strategy, recorder, read) if read else None

    def _share(self) -> Share:
        strategy = self._plan.strategy
        return Share(strategy.data_index, strategy.data_replicas, self._plan.options.seed)

    def _progress(self, feed: Feed, extra: int) -> Progress:
        options = self._plan.options
        return Progress(
            options.enable_progress_bar and self._plan.layout.is_main,
            scaling.total_steps(feed.steps, options.max_epochs, options.max_steps, extra),
            feed.samples_per_step,
        )

    def _rate_factor(self, feed: Feed) -> Callable[[int], float]:
        """The factor of learning rates at a step, counted from 0."""
        rate, strategy = self._plan.learning_rate, self._plan.strategy
        batch_size = feed.samples_per_step
        shares = strategy.data_replicas * feed.accumulate
        scaled = rate.target(batch_size, batch_size // shares if batch_size else None)
        target = strategy.learning_rate_factor * scaled
        return lambda step: rate.factor(target, step)
