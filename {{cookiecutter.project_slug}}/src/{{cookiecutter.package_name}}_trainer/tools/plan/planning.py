"""Makes a plan: the run that ``fit`` would start, and the memory of each strategy."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...cli import classes, configuration
from ...data import Feed, batch_length, scaling, seed_everything, sources
from ...errors import ConfigurationError, Problems, UserError
from ...module import DataHooks, DataModule, TrainingModule, is_overridden
from ...options import reading
from ...run import plan as plans
from ...run.plan import Plan
from ...strategies import SingleDevice, Strategy, registry
from ...strategies.fsdp.fsdp import FSDP
from ...strategies.memory import Memory, Sizes, extrapolated
from . import fake, request, sbatch
from .isolated import Child, Failure
from .request import Request
from .trace import Job, PlannedRun, Trace, quiet, trace

# In this order the simplest of those that fit is named; others follow as they are registered.
_SIMPLE = ("single_device", "ddp", "ddp_zero1", "fsdp", "hsdp")
MARGIN = 0.1
GPU_RESERVED, CPU_RESERVED = 3 * 2**29, 2**29
_MOST_BATCHES, _MOST_CHILDREN = 2**20, 8


@dataclass(frozen=True)
class Row:
    """A strategy of the plan: its memory, whether that fits, and the largest batch of a rank."""

    name: str
    also: Sequence[str]
    memory: Memory
    batch_size: int
    fits: bool
    largest_batch_size: int


@dataclass(frozen=True)
class Planned:
    """A plan, to be printed.

    ``facts``: names and values of the run; ``left_out``: a reason, and the strategies it is for.
    """

    facts: dict[str, Any]
    rows: Sequence[Row]
    simplest: str | None
    left_out: dict[str, list[str]]
    notes: Sequence[str] = field(default_factory=list)
    disagreements: Sequence[str] = field(default_factory=list)


def make(asked: Request, problems: Problems, program: str) -> Planned:
    """Read the options as ``fit`` does, and plan.

    Raises:
        UserError: One line for each error.
    """
    parser = configuration.make_parser(program, "fit")
    with configuration.read_sections(parser, "fit", asked.words, problems) as checked:
        given = reading.read(checked.trainer, problems)
        options, devices, nodes = request.planned(asked, given, problems)
        find = request.finder(asked, devices, nodes)
        data: DataModule | None = None
        if "data" in checked.classes:
            with problems:
                data = classes.create("data", *checked.classes["data"])
        plan = plans.make(options, problems, find)  # raises all problems
        seed_everything(options.seed)
        build = partial(classes.create, "model", *checked.classes["model"])
        return _Planning(asked, plan, find, build, data, devices, nodes).planned()


class _Planning:
    """A plan in the making."""

    def __init__(
        self,
        asked: Request,
        plan: Plan,
        find: Any,
        build: Callable[[], TrainingModule],
        data: DataModule | None,
        devices: int,
        nodes: int,
    ) -> None:
        self.asked, self.plan, self.find, self.build, self.data = asked, plan, find, build, data
        self.devices, self.nodes = devices, nodes
        self.options = plan.options
        self.replicas = plan.strategy.replicas(devices, nodes)
        self.flops_per_sample: float | None = None
        self.notes: list[str] = []

    def planned(self) -> Planned:
        """Read the data, trace, and compute."""
        with quiet():
            with fake.tensors():
                bare = self.build()
            plans.check_module(self.plan, bare)
            sample, feed = self._data(bare)
        samples, self.flops_per_sample = batch_length(sample), bare.flops_per_sample
        able, left_out = self._strategies(bare)
        traces = self._traces(able, sample, samples)
        rows = []
        for name, (plan, also) in able.items():
            row = self._row(name, also, plan, traces, samples)
            if isinstance(row, str):
                left_out.setdefault(row, []).extend([name, *also])
            else:
                rows.append(row)
        order = {name: place for place, name in enumerate(_SIMPLE)}
        rows.sort(key=lambda row: order.get(row.name, len(order)))
        fitting = [row.name for row in rows if row.fits]
        single = traces[""]
        self._note(single, feed)
        on_gpus = self.asked.accelerator != "cpu"
        return Planned(
            facts=self._facts(single, feed, samples),
            rows=rows,
            simplest=next(iter(fitting), None),
            left_out=left_out,
            notes=self.notes,
            disagreements=sbatch.disagreements(Path.cwd(), self.devices, self.nodes, on_gpus),
        )

    # --- the module and its data -----------------------------------------------------------------

    def _data(self, bare: TrainingModule) -> tuple[Any, Feed]:
        """A micro-batch of rank 0, and the feed that gives it, as in a fit."""
        run = PlannedRun(self.plan, self.replicas, 1)
        bare.trainer_state = replace(bare.trainer_state, run=run)
        owner: DataHooks = bare
        if self.data is not None:
            sources.check_given(self.data, is_training=True)
            self.data.data_replicas, self.data.data_index = self.replicas, 0
            owner = self.data
        if is_overridden(owner, DataHooks, "prepare_data"):
            owner.prepare_data()
        owner.setup("fit")
        feed = run.training_feed(sources.training_loader(self.data, bare))
        sample = next(iter(feed.epoch(0, 0))).data
        bare.trainer_state = replace(bare.trainer_state, run=None)
        return sample, feed

    # --- strategies ------------------------------------------------------------------------------

    def _strategies(
        self, bare: TrainingModule
    ) -> tuple[dict[str, tuple[Plan, list[str]]], dict[str, list[str]]]:
        """The strategies that this run allows, with their other names; and why others are not."""
        able: dict[str, tuple[Plan, list[str]]] = {}
        left_out: dict[str, list[str]] = {}
        kinds: dict[Any, str] = {}
        chosen, given = self.plan.strategy_name, self.options.strategy
        for name in dict.fromkeys([chosen, *registry.names()]):
            plan = self.plan
            if name != chosen:
                options = replace(self.options, strategy=name, strategy_options=None)
                problems = Problems()
                try:
                    plan = plans.make(options, problems, self.find)
                    plans.check_module(plan, bare)
                except UserError as error:
                    reason = "; ".join(error.problems).replace(f"strategy={name!r} ", "")
                    left_out.setdefault(reason, []).append(name)
                    continue
            kind: Any = name
            if name != chosen or (isinstance(given, str) and not self.options.strategy_options):
                entry = registry.find(name)
                kind = (entry.cls, str(entry.preset))
            if kind in kinds:
                able[kinds[kind]][1].append(name)
            else:
                kinds[kind] = name
                able[name] = plan, []
        return able, left_out

    def _traces(
        self, able: dict[str, tuple[Plan, list[str]]], sample: Any, samples: int
    ) -> dict[str, Trace]:
        """Traces by strategy, ``""`` of a process alone; in child processes, some at a time."""
        waiting: dict[str, Job] = {"": self._job(self.plan, sample, samples, is_alone=True)}
        for name, (plan, _) in able.items():
            if isinstance(plan.strategy, FSDP) and self._is_traced(plan):
                waiting[name] = self._job(plan, sample, samples)
        found: dict[str, Trace] = {}
        running: dict[str, Child] = {}
        most = max(1, min(os.cpu_count() or 1, _MOST_CHILDREN))
        names = list(waiting)
        for place, name in enumerate(names):
            for later in names[place : place + most]:
                if later not in running:
                    running[later] = Child(partial(trace, waiting[later]), self.asked.seconds)
            try:
                found[name] = running[name].result()
            except Failure as failure:
                if name == "":
                    for child in running.values():
                        child.kill()
                    found[""] = self._real(waiting[""], failure)
                    return found
                self.notes.append(f"{name} was not traced ({failure}): a formula instead")
        return found

    def _is_traced(self, plan: Plan) -> bool:
        """Whether a strategy with shards runs under a fake process group."""
        strategy: Any = plan.strategy
        offloads = strategy.offload and self.asked.accelerator != "cpu"
        shards = getattr(strategy, "has_units", True) or strategy.sizes.tensor != 1
        return plan.layout.world_size > 1 and shards and not offloads

    def _job(self, plan: Plan, sample: Any, samples: int, *, is_alone: bool = False) -> Job:
        if is_alone:
            layout = replace(plan.layout, source="plan")
            plan = replace(plan, strategy=SingleDevice(), layout=layout)
        sizes = samples, 2 * samples
        return Job(plan, self.build, sample, samples, sizes, has_peers=not is_alone)

    def _real(self, job: Job, failure: Failure) -> Trace:
        """Real steps of small batches, where fake tensors do not work."""
        self.notes.append(
            f"fake tensors do not work here ({failure}): two real steps of 1 and 2 samples on this "
            "CPU instead"
        )
        real = replace(job, is_fake=False, batches=(1, 2))
        try:
            found: Trace = Child(partial(trace, real), self.asked.seconds).result()
        except Failure as second:
            raise UserError(
                f"the training step can be traced neither with fake tensors ({failure}) nor with "
                f"real ones ({second}); correct it, or give a longer --seconds"
            ) from None
        one, two = (extrapolated(found.one, found.two, each * job.samples) for each in (1, 2))
        return replace(found, one=one, two=two)

    # --- rows ------------------------------------------------------------------------------------

    def _row(
        self, name: str, also: Sequence[str], plan: Plan, traces: dict[str, Trace], size: int
    ) -> Row | str:
        """A strategy's row, or why it has none; ``size``: samples of the traced micro-batch."""
        strategy = plan.strategy
        try:
            replicas = strategy.replicas(self.devices, self.nodes)
        except ConfigurationError as error:
            return "; ".join(error.problems)
        whole = self.options.global_batch_size
        own = size
        if whole is not None:
            shares = replicas * self.options.accumulate_grad_batches
            if whole % shares:
                return f"global_batch_size={whole} is not divisible by {shares} micro-batches"
            own = whole // shares
        source = traces.get(name, traces[""])

        def memory(batch: int) -> Memory:
            sizes = extrapolated(source.one, source.two, batch / size)
            sizes = replace(
                sizes, devices=self.devices, nodes=self.nodes, accelerator=self.asked.accelerator
            )
            if name in traces:
                sizes = _with_copies(sizes)
                found = Strategy.memory(strategy, sizes)
                return replace(found, mark="measured", gathered=_gathered(sizes, traces[""].one))
            return strategy.memory(sizes)

        found = memory(own)
        return Row(name, also, found, own, self._fits(found), self._largest(memory))

    def _fits(self, memory: Memory) -> bool:
        return memory.peak <= self.available

    @property
    def available(self) -> int:
        """The bytes of a device without the margin."""
        reserved = CPU_RESERVED if self.asked.accelerator == "cpu" else GPU_RESERVED
        return int(self.asked.memory * (1 - MARGIN)) - reserved

    def _largest(self, memory: Callable[[int], Memory]) -> int:
        """The largest batch that fits; 0 if none does."""
        low, high = 0, 1
        while high < _MOST_BATCHES and self._fits(memory(high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(memory(middle)) else (low, middle)
        return low

    # --- facts -----------------------------------------------------------------------------------

    def _facts(self, single: Trace, feed: Feed, samples: int) -> dict[str, Any]:
        options, plan = self.options, self.plan
        effective = feed.samples_per_step
        per_device = effective and effective // (self.replicas * feed.accumulate)
        target = plan.learning_rate.target(effective, per_device)
        target *= self.replicas if plan.strategy.limits.scales_learning_rate else 1
        rates = sorted(set(single.rates))
        sizes = single.one
        return {
            "strategy": plan.strategy_name,
            "devices": self.devices,
            "nodes": self.nodes,
            "accelerator": self.asked.accelerator,
            "precision": str(options.precision),
            "parameters": single.parameters,
            "trained": sizes.elements,
            "replicas": self.replicas,
            "micro_batch": samples,
            "accumulate": feed.accumulate,
            "effective_batch": effective,
            "steps_per_epoch": feed.steps,
            "total_steps": scaling.total_steps(feed.steps, options.max_epochs, options.max_steps),
            "learning_rates": rates,
            "learning_rate_factor": target,
            "scaled_learning_rates": [rate * target for rate in rates],
            "warmup_steps": plan.learning_rate.warmup_steps if target != 1 else 0,
            "memory": self.asked.memory,
            "available": self.available,
            "whole_model": {
                "parameters": sizes.parameters,
                "gradients": sizes.gradients,
                "optimizer": sizes.optimizer,
                "activations": sizes.activations,
                "optimizer_step": sizes.step,
            },
            "step_seconds_at_least": self._seconds(samples),
        }

    def _seconds(self, samples: int) -> float | None:
        """The time that the operations of a step need at the peak of the device."""
        peak, flops = self.options.peak_flops, self.flops_per_sample
        if not peak or not flops:
            return None
        return float(flops * samples * self.options.accumulate_grad_batches / peak)

    def _note(self, single: Trace, feed: Feed) -> None:
        if single.asked:
            self.notes.append(
                f"the step reads values from the device ({', '.join(single.asked)}): traced with "
                "bounds of them"
            )
        if self.options.compile:
            self.notes.append("compile: traced without; compiled steps need less for activations")
        whole = single.one.parameters
        if not self.options.meta_device:
            self.notes.append(
                f"each process creates the whole model on its host: {whole / 2**30:.1f} GiB, "
                f"{whole * self.devices / 2**30:.1f} GiB a node; meta_device=True creates shards"
            )


def _with_copies(sizes: Sizes) -> Sizes:
    """On CPUs, gloo gathers a unit in a copy, which no trace sees."""
    if not sizes.is_on_host:
        return sizes
    return replace(sizes, moments=[(own, other + sizes.unit) for own, other in sizes.moments])


def _gathered(own: Sizes, whole: Sizes) -> int:
    """What a rank with shards needs in forward and backward beyond a process alone."""
    return max(0, own.activations - whole.activations)


def as_dict(planned: Planned) -> dict[str, Any]:
    """The plan as plain values, for JSON."""
    return dataclasses.asdict(planned)
