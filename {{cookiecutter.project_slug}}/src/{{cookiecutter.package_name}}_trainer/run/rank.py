"""One rank's run: it joins the process group and runs a command, whose loaders it reads."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from ..checkpoint import Checkpoint
from ..data import Feed, Share, randomness
from ..data.feed_creation import BatchLimit, feed_evaluation, feed_training
from ..data.sources import Data, LoadersByName
from ..errors import UserError, refuse, shown
from ..launch import collectives, output
from ..logging import Recorder
from ..logging.logger import NoLogger
from ..loop.fit import FitLoop
from ..loop.position import Position, total_steps
from ..module import DataHooks, DataModule, Loader, Run, TrainingModule
from ..module.current_run import RunFacts
from ..module.hooks import is_overridden, problems_of_lazy
from ..options import reading
from ..strategies.precision import Precision
from .console import Console
from .plan import Plan

RUNNING = threading.Lock()  # seeds, signals and process groups are the process's
OTHERS = threading.Event()  # another thread has called a trainer since RUNNING is held
_OF_THE_FIT = {"callbacks", "metrics", "num_training_batches", "optimizers", "schedulers"}
_OF_THE_FIT |= {"estimated_stepping_batches", "total_steps"}
SHARED = (
    "another thread of this process runs a trainer, or this is a hook of its run: they share "
    "random numbers and the process group; run one after the other, or in processes of their own"
)
current: "RankRun | None" = None  # the run of this process


class RankRun(Run):
    """One rank's run, from the creation of its process group to the end.

    ``configuration``: that of the command line, as YAML; ``None`` in a script. ``is_started``:
    whether this process was started for one command, and returns the weights.
    """

    def __init__(self, plan: Plan, configuration: str | None, is_started: bool) -> None:
        options, self.strategy, self.callbacks = plan.options, plan.strategy, plan.callbacks
        self.seed, self.checkpointing = options.seed, options.activation_checkpointing
        self.configuration = configuration
        self.console = Console(plan, is_command=configuration is not None)
        self.position = Position()
        self.weights = plan.strategy.weights
        self.metrics: dict[str, float] = {}
        self.total_steps = plan.total_steps or plan.options.max_steps
        self.loop: FitLoop | None = None  # during a fit
        self._is_started = is_started
        self.plan = plan  # no option can be set any more

    def connect(self, command: str) -> None:
        """Join the process group, and seed this rank."""
        plan, strategy = self.plan, self.strategy
        if plan.layout.source != "none":
            self.console.say(plan.layout.receipt())
        self.console.note(*plan.notes, *reading.notes(plan.options, command))
        precision = Precision(plan.precision.name, plan.precision.device_type)  # with a new scale
        # The first compile of a rank may take so much longer than that of its peers.
        collectives.compile_seconds = 3600.0 if plan.options.compile else 0.0
        strategy.connect(plan.layout, plan.devices, precision)
        data = strategy.data  # ranks that compute the same draw the same dropout masks
        randomness.seed_generators(randomness.mix(self.seed, data.random_rank))
        self.recorder = Recorder(
            strategy.reduce,
            strategy.device,
            steps_together="asynchronous" not in strategy.limits.always,
            counts=data.counts,
        )
        self.log, self.has_skipped_step = self.recorder.log, strategy.precision.has_skipped_step
        self.agree(lambda agreement: agreement.of_options(plan.options))

    def agree(self, facts: Callable[[Any], Mapping[str, str]]) -> None:
        """End the run if facts differ between ranks; ``facts`` gets the module ``agreement``."""
        if collectives.world_size() > 1:
            from . import agreement

            agreement.check(facts(agreement))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_THE_FIT and vars(self).get("loop"):
            raise AttributeError(f"trainer.{name} cannot be changed in a fit, which has its own")
        super().__setattr__(name, value)

    def _run_facts(self) -> RunFacts:
        position = self.position
        return RunFacts(self.plan.layout, position.global_step, position.epoch, self._data_replica)

    def _data_replica(self) -> tuple[int, int]:
        return self.strategy.data.replicas, self.strategy.data.index

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested on this rank; setting it to True is :meth:`stop`."""
        return self._fit_loop("should_stop").preemption.has_requested_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop("should_stop was set")

    @property
    def logger(self) -> Any:
        loggers = {} if self.loop is None else self.loop.fit.outputs.loggers
        able = next((log for log in loggers.values() if log.experiment is not None), None)
        if able is None and (loggers or self.loop is None or self.plan.loggers):
            only = "are open in a fit only, after on_fit_start"
            why = "write numbers only: add 'tensorboard'" if loggers else only
            if self.is_global_zero:
                output.print_once(f"note: trainer.logger does nothing here: loggers {why}")
        return able or NoLogger()

    def stop(self, reason: str = "") -> None:
        self._fit_loop("stop").preemption.request_stop()
        line = f"stop requested in step {self.global_step}{reason and f': {reason}'}"
        self.console.note(line, on_each_rank=True)

    def save_checkpoint(self, then: Callable[[Path], None]) -> None:
        given: Any = then  # by users, a path
        if not callable(given):
            advice = "it takes a function, which gets the path of the checkpoint when it is saved"
            raise UserError(f"trainer.save_checkpoint({shown(given)}): {advice}")
        self._fit_loop("save_checkpoint").after_save.append(then)

    def measure(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._fit_loop("measure").fit.outputs.measurements.append(read)

    def teardown_may_hang(self) -> bool:
        """Whether a pending save, or a server of this rank, waits for its peers."""
        alone = "asynchronous" in self.strategy.limits.always
        return self.loop is not None and (alone or self.loop.checkpoints.waits_for_peers)

    def _fit_loop(self, name: str) -> FitLoop:
        if self.loop is None:
            raise RuntimeError(f"trainer.{name}() is available during a fit only")
        return self.loop

    @contextlib.contextmanager
    def running(self, module: TrainingModule, command: str, data: Data) -> Iterator[None]:
        """Set this run as the module's ``trainer``, and call the hooks around a command."""
        module.trainer_state = replace(module.trainer_state, run=self)
        self._module = module
        owners: list[DataHooks] = [module]
        self.datamodule = data if isinstance(data, DataModule) else None
        if isinstance(data, DataModule):  # not the run: a loader with workers may pickle it
            data.data_replicas, data.data_index = self.data_replicas, self.data_index
            owners = [data, module]
        try:
            preparing = [obj for obj in owners if is_overridden(obj, DataHooks, "prepare_data")]
            for owner in preparing if self.local_rank == 0 else []:
                owner.prepare_data()
            if preparing:
                collectives.barrier()
            before = _shapes(module)
            for owner in owners:
                with self.plan.building() if owner is module else contextlib.nullcontext():
                    owner.setup(command)
            refuse(problems_of_lazy(module))
            if self._is_started and (changed := before.items() ^ _shapes(module).items()):
                raise UserError(
                    f"{type(module).__name__}.setup changes {min(changed)[0]}: with strategy="
                    f"{self.plan.strategy_name!r}, weights are returned into the module of the "
                    "script; create it in __init__, or use 'ddp'"
                )
            yield
            for owner in owners:
                owner.teardown(command)
        finally:
            module.trainer_state = replace(module.trainer_state, run=None, weights={})
            del self._module

    def start_from_weights(self, module: TrainingModule, resumed: Checkpoint | None = None) -> None:
        """Load the weights that a new run starts from, if there are any."""
        options = self.plan.options
        if resumed is None and options.weights is None:
            return
        from . import initial_weights

        if resumed is None:
            notes = initial_weights.load(options, self.plan.started_in, module)
            self.console.note(*notes, on_each_rank=True)
            return
        initial_weights.leave_to(resumed, module)
        if options.weights is not None:
            self.console.note(f"weights={options.weights} is not used: the run is resumed")

    def share(self) -> Share:
        """The part of the samples that this rank reads, and how the module counts them."""
        module = self._module
        names = ("count_samples", "count_weight")
        named = [name for name in names if is_overridden(module, TrainingModule, name)]
        hooks = {name: getattr(module, name) for name in named}
        together = "asynchronous" not in self.strategy.limits.always
        return Share(self.data_index, self.data_replicas, self.seed, together=together, **hooks)

    def training_feed(self, loader: Loader, resumed: Checkpoint | None = None) -> Feed:
        """This replica's training batches; sets the numbers of steps and batches of the run."""
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
        if "asynchronous" in self.strategy.limits.always and not feed.has_plan:
            raise UserError(
                f"strategy={self.plan.strategy_name!r} does not compare the batches of ranks, and "
                "the training loader is read as it is; use a map-style dataset, torch's own "
                "samplers and use_distributed_sampler=True"
            )
        extra = 0
        if resumed is not None:
            from ..loop import resuming

            extra = resuming.extra_steps(resumed, feed)
        steps = total_steps(feed.steps, options.max_epochs, options.max_steps, extra)
        self.total_steps = self.plan.total_steps or steps
        self.num_training_batches = math.inf if feed.batches is None else feed.batches
        return feed

    def evaluation_feeds(
        self, loaders: LoadersByName, kind: Literal["val", "test", "predict"]
    ) -> dict[str, Feed]:
        """This replica's batches of an evaluation, by name of their loader."""
        options, limit = self.plan.options, f"limit_{kind}_batches"
        joins = options.uneven_inputs == "join" or options.fast_dev_run > 0
        return {
            name: feed_evaluation(
                loader,
                self.share(),
                in_global_order=options.use_distributed_sampler,
                together=self.strategy.limits.shards_parameters or joins,
                limit=BatchLimit(limit, getattr(options, limit)),
            )
            for name, loader in loaders.items()
        }


def _shapes(module: TrainingModule) -> dict[str, torch.Size]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.shape for name, tensor in named if not is_lazy(tensor)}
