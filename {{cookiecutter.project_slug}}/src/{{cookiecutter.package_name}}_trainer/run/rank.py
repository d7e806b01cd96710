"""One rank's run: it joins the process group and runs a command, whose loaders it reads."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..checkpoint import Checkpoint, resolve, run_choice, run_directory
from ..data import (
    BatchLimit,
    Data,
    Feed,
    LoadersByName,
    Share,
    feed_evaluation,
    feed_training,
    randomness,
    sources,
)
from ..errors import CheckpointError, UserError
from ..launch import collectives, files
from ..logging import Recorder
from ..loop import FitLoop, Position, evaluate, float8, predict, trials
from ..memory import activation_checkpointing
from ..module import (
    DataHooks,
    DataModule,
    Loader,
    Run,
    RunFacts,
    TrainingModule,
    is_overridden,
)
from . import initial_weights
from .console import Console
from .plan import Plan

Evaluation = Literal["validation", "test", "predict"]


class RankRun(Run):
    """One rank's run, from the creation of its process group to the end.

    Args:
        plan: The run's.
        configuration: The configuration of the command line, as YAML; ``None`` in a script.
        is_started: Whether this process was started for one command, and returns the weights.
    """

    def __init__(self, plan: Plan, configuration: str | None, is_started: bool) -> None:
        options, self.plan, self.strategy = plan.options, plan, plan.strategy
        self.seed, mode = options.seed, options.activation_checkpointing_mode
        self.checkpointing = options.activation_checkpointing, mode
        self.configuration = configuration
        self.console = Console(plan, is_command=configuration is not None)
        self.position = Position()
        self.weights = plan.strategy.weights
        self.metrics: Mapping[str, float] = {}
        self.total_steps = plan.options.max_steps
        self.loop: FitLoop | None = None
        """During a fit."""
        self._is_started = is_started

    def connect(self) -> None:
        """Join the process group, and seed this rank."""
        plan, strategy = self.plan, self.strategy
        if plan.layout.source != "none":
            self.console.say(plan.layout.receipt())
        self.console.note(*plan.notes)
        strategy.connect(plan.layout, plan.devices, plan.precision)
        # Each rank draws its own dropout masks, unless it computes the same as another one.
        data = strategy.data
        randomness.seed_everything(randomness.mix(self.seed, data.random_rank))
        self.recorder = Recorder(
            strategy.reduce,
            strategy.device,
            steps_together=strategy.limits.steps_together,
            counts=data.counts,
        )
        self.log, self.has_skipped_step = self.recorder.log, strategy.precision.has_skipped_step

    # --- what a module and callbacks see -------------------------------------------------------

    def _run_facts(self) -> RunFacts:
        position = self.position
        return RunFacts(self.plan.layout, position.global_step, position.epoch, self._data_replica)

    def _data_replica(self) -> tuple[int, int]:
        data = self.strategy.data
        return data.replicas, data.index

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested on this rank; setting it to True is :meth:`stop`."""
        return self._fit_loop("should_stop").preemption.has_requested_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop("should_stop was set")

    def stop(self, reason: str = "") -> None:
        self._fit_loop("stop").preemption.request_stop()
        line = f"stop requested in step {self.global_step}{reason and f': {reason}'}"
        if self.is_global_zero:
            self.console.note(line)
        else:  # into the log of this rank
            print(line, flush=True)

    def save_checkpoint(self, then: Callable[[Path], None]) -> None:
        self._fit_loop("save_checkpoint").after_save.append(then)

    def measure(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._fit_loop("measure").fit.outputs.measurements.append(read)

    def end_waits(self) -> bool:
        """Whether a pending save, or a server of this rank, waits for its peers."""
        alone = not self.strategy.limits.steps_together
        return self.loop is not None and (alone or self.loop.checkpoints.waits_for_peers)

    def _fit_loop(self, name: str) -> FitLoop:
        if self.loop is None:
            raise RuntimeError(f"trainer.{name}() is available during a fit only")
        return self.loop

    # --- the module and its data ---------------------------------------------------------------

    @contextlib.contextmanager
    def attached(self, module: TrainingModule, command: str, data: Data) -> Iterator[None]:
        """Set this run as the module's ``trainer``, and call the hooks around a command."""
        module.trainer_state = replace(module.trainer_state, run=self)
        owners: list[DataHooks] = [module]
        if isinstance(data, DataModule):  # not the run: a loader with workers may pickle it
            data.data_replicas, data.data_index = self.data_replicas, self.data_index
            owners = [data, module]
        try:
            preparing = [each for each in owners if is_overridden(each, DataHooks, "prepare_data")]
            for each in preparing if self.local_rank == 0 else []:
                each.prepare_data()
            if preparing:
                collectives.barrier()
            before = _shapes(module)
            for each in owners:
                with self.plan.building() if each is module else contextlib.nullcontext():
                    each.setup(command)
            if self._is_started and (changed := before.items() ^ _shapes(module).items()):
                raise UserError(
                    f"{type(module).__name__}.setup changes {min(changed)[0]}: with strategy="
                    f"{self.plan.strategy_name!r}, weights are returned into the module of the "
                    "script; create it in __init__, or use 'ddp'"
                )
            with float8.applied(module, self.plan.options.float8, self.strategy.device) as notes:
                self.console.note(*notes)
                yield
            for each in owners:
                each.teardown(command)
        finally:
            module.trainer_state = replace(module.trainer_state, run=None, weights={})

    def start_from_weights(self, module: TrainingModule, resumed: Checkpoint | None = None) -> None:
        """Load the weights that a new run starts from, if there are any."""
        options = self.plan.options
        if resumed is None:
            self.console.note(*initial_weights.load(options, self.plan.started_in, module))
            return
        initial_weights.leave_to(resumed, module)
        if options.weights is not None:
            self.console.note(f"weights={options.weights} is not used: the run is resumed")

    def share(self) -> Share:
        """The part of the samples that this rank reads."""
        return Share(self.data_index, self.data_replicas, self.seed)

    def training_feed(self, loader: Loader) -> Feed:
        """This replica's training batches."""
        options = self.plan.options
        limit = "overfit_batches" if options.overfit_batches else "limit_train_batches"
        feed = feed_training(
            loader,
            self.share(),
            accumulate=options.accumulate_grad_batches,
            global_batch_size=options.global_batch_size,
            in_global_order=options.use_distributed_sampler,
            uneven=options.uneven_inputs,
            limit=BatchLimit(limit, getattr(options, limit)),
            repeats=bool(options.overfit_batches),
        )
        if not (feed.has_plan or self.strategy.limits.steps_together):
            raise UserError(
                f"strategy={self.plan.strategy_name!r} does not compare the batches of ranks, and "
                "the training loader is read as it is; use a map-style dataset, torch's own "
                "samplers and use_distributed_sampler=True"
            )
        return feed

    def evaluation_feeds(
        self, loaders: LoadersByName, kind: Literal["val", "test", "predict"]
    ) -> dict[str, Feed]:
        """This replica's batches of an evaluation, by name of their loader."""
        options, limit = self.plan.options, f"limit_{kind}_batches"
        return {
            name: feed_evaluation(
                loader,
                self.share(),
                in_global_order=options.use_distributed_sampler,
                together=self.strategy.limits.shards_parameters,
                limit=BatchLimit(limit, getattr(options, limit)),
            )
            for name, loader in loaders.items()
        }

    # --- commands other than fit ---------------------------------------------------------------

    def evaluate(
        self,
        kind: Evaluation,
        module: TrainingModule,
        data: Data,
        checkpoint: str | None,
        averaged: bool,
    ) -> Any:
        """Validate, test or predict, with the weights of a checkpoint if one is given."""
        name: Literal["val", "test", "predict"] = "val" if kind == "validation" else kind
        with self.attached(module, "validate" if kind == "validation" else kind, data):
            loaders = sources.evaluation_loaders(data, module, name)
            feeds = self.evaluation_feeds(loaders, name)
            self._place(module, checkpoint, averaged)
            if kind == "predict":
                outputs = predict(module, self.strategy, self.recorder, feeds)
                return outputs.get("", outputs)
            self.metrics = evaluate(module, self.strategy, self.recorder, feeds, kind)
        self.console.say(*(f"{name}: {value:.6g}" for name, value in self.metrics.items()))
        return self.metrics

    def _place(self, module: TrainingModule, checkpoint: str | None, averaged: bool) -> None:
        if checkpoint is None:
            self.strategy.place(module)
            return
        found = run_choice.whole(resolve(checkpoint))
        initial_weights.leave_to(found, module)
        self.strategy.place(module)
        weights, remarks = found.weights(averaged)
        self.console.note(*remarks)
        try:
            self.strategy.load_state({**found.stored_state(), "model": weights}, None)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"{found.path}: does not match this model ({reason}); see "
                "docs/trouble.md#a-checkpoint-of-another-model"
            ) from None

    def find_batch_size(self, module: TrainingModule, data: Data) -> int:
        """The largest batch that a device can train on, the same on all ranks."""
        with self.attached(module, "fit", data):
            loader = sources.training_loader(data, module)
            device, precision = self.plan.device, self.plan.precision.name
            with activation_checkpointing.applied(module, *self.checkpointing):
                found, why = trials.find_batch_size(
                    module, loader, device, precision, self.data_replicas
                )
        self.console.say(f"the largest batch that fits on every device: {found}{why}")
        return found

    def find_learning_rate(self, module: TrainingModule, data: Data, sweep: trials.Sweep) -> float:
        """The rate at which the loss falls most steeply, the same on all ranks."""
        options, request = self.plan.options, self.plan.request
        with self.attached(module, "fit", data):
            self.start_from_weights(module)
            feed = self.training_feed(sources.training_loader(data, module))
            with activation_checkpointing.applied(module, *self.checkpointing):
                tried = trials.try_rates(module, feed, self.plan.device, options, sweep)
        if self.is_global_zero:
            path = run_directory.create(request.root, request.name) / "learning_rates.csv"
            lines = [",".join(map(repr, each)) + "\n" for each in tried]
            files.write_atomically(path, "".join(["lr,loss,initial_loss\n", *lines]))
            self.console.say(f"learning rates and losses: {self.plan.shown(path)}")
        found = trials.suggest(tried)
        self.console.say(f"the loss falls most steeply at the learning rate {found:.3g}")
        return found


def _shapes(module: TrainingModule) -> dict[str, torch.Size]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: each.shape for name, each in named}
