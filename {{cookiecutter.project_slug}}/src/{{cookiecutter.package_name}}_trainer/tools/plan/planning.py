"""Makes a plan: the run that ``fit`` would start, and the memory of each strategy."""

import bisect
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ...cli import arguments, config_files, configuration
from ...data import Feed, moving, sources
from ...data.feed_creation import device_batch_size
from ...data.randomness import seed_generators
from ...errors import Problems, UserError, shown
from ...loop.position import scaled_rate
from ...module import DataModule, TrainingModule
from ...options import Options, reading, values
from ...run import placement
from ...run import plan as plans
from ...run.plan import Find, Plan
from ...strategies import SingleDevice, Strategy, registry
from ...strategies.fsdp.fsdp import FSDP
from ...strategies.memory import Memory
from ..isolated import Child, Failure
from .trace import PlannedRun, Trace, extrapolated, fake_tensors, trace

# In this order the simplest of those that fit is named; others follow as they are registered.
_SIMPLE = ("single_device", "ddp", "ddp_zero1", "fsdp", "hsdp")
_MARGIN = 0.1
_RESERVED = {"cuda": 3 * 2**29, "cpu": 2**29}
_BATCHES = range(1, 2**30)
_ALONE = ""
_WHOLE_MODEL = ("parameters", "gradients", "optimizer", "activations", "step")
_OWN = {
    "devices": "devices per node; default: trainer.devices",
    "num_nodes": "number of nodes; default: trainer.num_nodes, or 1",
    "memory": "memory of a device, such as 80G (of 2^30 bytes); on CPUs, that of a process",
    "accelerator": "gpu (default) or cpu",
    "seconds": "time limit of each traced step; default: 120",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SCRIPTS = ("slurm/train.sh", "slurm/settings.sh")
_OPTION = r"(?m)^(?:#SBATCH\s+--|\s*export\s+SBATCH_)([a-zA-Z_-]+)[= ]\s*[\"']?([^\"'\s#]+)"


class Request(NamedTuple):
    """The plan's own options; ``words`` are those of ``fit``."""

    words: Sequence[str]
    as_json: bool
    memory: int
    accelerator: str
    seconds: int


def read_request(program: str, words: Sequence[str], problems: Problems) -> Request:
    """Take the plan's own options from a command line; ``problems`` has a line per error."""
    rest = f"and all options of '{program} fit --help'"
    parser = arguments.Parser(f"{program} plan", allow_abbrev=False, epilog=rest)
    for name, text in _OWN.items():
        parser.add_argument(f"--{name}", nargs="?", metavar="VALUE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, others = parser.parse_known_args(words)
    for name in ("devices", "num_nodes"):
        if (value := getattr(args, name)) is not None:
            others.append(f"--trainer.{name}={value}")
    seconds = config_files.word("--seconds", args.seconds or "120")
    texts = {"accelerator": args.accelerator or "gpu", "seconds": seconds}
    types = {"accelerator": Literal["gpu", "cpu"], "seconds": values.PositiveInt}
    good = values.convert("--", types, texts, problems, values.fitting)
    device = "cuda" if good.get("accelerator") == "gpu" else "cpu"
    return Request(others, args.json, _bytes(args.memory, problems), device, good.get("seconds", 1))


def _bytes(text: str | None, problems: Problems) -> int:
    if (match := _SIZE.fullmatch(text or "")) is None or not float(match[1]):
        reason = "not given" if text is None else f"{shown(text)} is no size"
        problems.add(f"--memory: {reason}; give the memory of a device, such as --memory 80G")
        return 0
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _placed(accelerator: str, options: Options, problems: Problems) -> placement.Placement:
    """Find where a run will be: not on this machine, and on a number of devices that is given."""
    if str(options.devices) in ("auto", "-1"):
        problems.add("devices: a plan needs their number on a node; give --devices N")
    return placement.find_elsewhere(accelerator, options, problems)


def disagreements(root: Path, devices: int, nodes: int, accelerator: str) -> list[str]:
    """One line for each option of sbatch that is not the plan's, with what overrides it."""
    on_gpus = accelerator != "cpu"
    scripts = [name for name in _SCRIPTS if (root / name).is_file()]
    options: dict[str, tuple[str, str]] = {}  # later ones win
    for name in scripts:
        for line in re.finditer(_OPTION, (root / name).read_text("utf-8", errors="replace")):
            options[line[1].lower().replace("_", "-")] = line[2], f"{name}: {line[0].strip()}"
    expected = {"nodes": nodes, "ntasks": nodes * devices, "ntasks-per-node": devices}
    if on_gpus:
        expected |= {"gpus": nodes * devices, "gpus-per-node": devices}
        expected |= {"gpus-per-task": 1, "gres": devices}
    ways = ("gpus-per-node", "gpus-per-task", "gpus", "gres", "ntasks")
    key, *others = ways if on_gpus else ("ntasks-per-node", "ntasks")
    defaults = {"nodes": "1", key: "0" if on_gpus else "1"}
    if options.keys() & {key, *others}:
        del defaults[key]
    for name, default in defaults.items() if scripts else ():
        options.setdefault(name, (default, f"no #SBATCH line says {name}"))
    lines = []
    for name, number in expected.items():
        value, place = options.get(name, ("", ""))
        if (asked := value.rpartition(":")[2]).isdigit() and int(asked) != number:
            lines.append(f"{place}, and the plan has {number}: give sbatch --{name}={number}")
    return lines


def make(asked: Request, problems: Problems, program: str) -> dict[str, Any]:
    """Read the options as ``fit`` does, and plan: plain values, for JSON."""
    with configuration.read_sections(program, "fit", asked.words, problems) as checked:
        parsed = reading.read(checked.trainer, problems)
        options = replace(parsed, accelerator="cpu", auto_select_gpus=False)
        place = partial(_placed, asked.accelerator)
        data: DataModule | None = None
        if "data" in checked.classes:
            with problems:
                data = checked.classes["data"].create()
        plan = plans.make(options, problems, place)  # raises all problems
        seed_generators(options.seed)
        build = checked.classes["model"].create
        try:
            with contextlib.redirect_stdout(None):  # user code would print in each trace
                return _Planning(asked, plan, place, build, data).planned()
        except SystemExit as error:
            line = f"user code called sys.exit({error.code}): return instead, or raise an error"
            raise UserError(line) from None


@dataclass
class _Planning:
    asked: Request
    plan: Plan
    find: Find
    build: Callable[[], TrainingModule]
    data: DataModule | None
    left_out: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def planned(self) -> dict[str, Any]:
        devices, nodes = len(self.plan.node_devices), self.plan.layout.num_nodes
        kind = self.asked.accelerator
        self.place = dict[str, Any](devices=devices, nodes=nodes, accelerator=kind)
        self.replicas = self.plan.strategy.replicas(devices, nodes)
        self.margin = math.ceil(self.asked.memory * _MARGIN) + _RESERVED[kind]
        self.available = self.asked.memory - self.margin
        with fake_tensors():
            bare = self.build()
        plans.check_module(self.plan, bare)
        sources.check_given(self.data, is_training=True)
        run = PlannedRun(self.plan, self.replicas, 1)
        with run.running(bare, "fit", self.data):  # a micro-batch of rank 0, as in a fit
            feed = run.training_feed(sources.training_loader(self.data, bare))
            sample, _, samples, *_ = next(iter(feed.epoch(0, 0)))
        self.plan = replace(self.plan, total_steps=run.total_steps)
        able = self._strategies(bare)
        traces = self._traces(able, sample, samples)
        rows = []
        for name, plan in able.items():
            with self._left_out(name):
                rows.append(self._row(name, plan.strategy, traces, samples))
        rows.sort(key=lambda row: [*_SIMPLE, row["name"]].index(row["name"]))
        return {
            "facts": self._facts(traces[_ALONE], feed, samples, bare.flops_per_sample or 0),
            "rows": rows,
            "simplest": next((row["name"] for row in rows if row["fits"]), None),
            "left_out": self.left_out,
            "notes": self.notes,
            "disagreements": disagreements(Path.cwd(), **self.place),
        }

    @contextlib.contextmanager
    def _left_out(self, name: str) -> Iterator[None]:
        """Leave out a strategy that ``fit`` would refuse, with its reason."""
        try:
            yield
        except UserError as error:
            reason = "; ".join(error.problems).replace(f"strategy={name!r} ", "")
            self.left_out.setdefault(reason, []).append(name)

    def _strategies(self, bare: TrainingModule) -> dict[str, Plan]:
        able = {self.plan.strategy_name: self.plan}
        for name in registry.names():
            with self._left_out(name):
                if name not in able:
                    options = replace(self.plan.options, strategy=name, strategy_options=None)
                    plan = plans.make(options, Problems(), self.find)
                    plans.check_module(plan, bare)
                    able[name] = replace(plan, total_steps=self.plan.total_steps)
        return able

    def _traces(self, able: dict[str, Plan], sample: Any, samples: int) -> dict[str, Trace]:
        """Traces by strategy, and of a process alone; in child processes."""
        alone = replace(self.plan, strategy=SingleDevice())
        chosen = {_ALONE: alone, **{name: plan for name, plan in able.items() if _shards(plan)}}
        batches = [_resized(sample, samples, size) for size in (samples, 2 * samples)]
        works = {name: partial(trace, plan, self.build, batches) for name, plan in chosen.items()}
        children = {name: Child(work, self.asked.seconds) for name, work in works.items()}
        traces: dict[str, Trace] = {}
        for name, child in children.items():
            try:
                traces[name] = child.result()
            except Failure as failure:
                if name == _ALONE:
                    small = [_resized(sample, samples, size) for size in (1, 2)]
                    traces[name] = self._real(alone, small, samples, failure)
                else:
                    self.notes.append(f"{name} was not traced ({failure}): a formula instead")
        if asked := ", ".join(traces[_ALONE].asked).replace("local_scalar_dense", "item"):
            self.notes.append(f"the step reads tensor values ({asked}): traced with bounds of them")
        if self.plan.options.compile:
            self.notes.append("compile: traced without; compiled steps need less for activations")
        return traces

    def _real(self, plan: Plan, batches: list[Any], samples: int, failure: Failure) -> Trace:
        """Real steps of 1 and 2 samples, where fake tensors do not work."""
        instead = "two real steps of 1 and 2 samples on this CPU instead"
        self.notes.append(f"fake tensors do not work here ({failure}): {instead}")
        work = partial(trace, plan, self.build, batches, is_fake=False)
        try:
            traced = Child(work, self.asked.seconds).result()
        except Failure as second:
            how = f"neither with fake tensors ({failure}) nor with real ones ({second})"
            advice = "correct it, or give a longer --seconds"
            raise UserError(f"the training step can be traced {how}; {advice}") from None
        base, doubled = (extrapolated(traced.base, traced.doubled, n * samples) for n in (1, 2))
        return traced._replace(base=base, doubled=doubled)

    def _row(self, name: str, strategy: Strategy, traces: dict[str, Trace], size: int) -> Any:
        """A strategy's row; ``size``: samples of the traced micro-batch."""
        options, batch_size = self.plan.options, size
        if total := options.global_batch_size:
            replicas = strategy.replicas(self.place["devices"], self.place["nodes"])
            batch_size = device_batch_size(total, replicas, options.accumulate_grad_batches)

        def memory(batch: int) -> Memory:
            source = traces.get(name, traces[_ALONE])
            sizes = replace(extrapolated(source.base, source.doubled, batch / size), **self.place)
            if name not in traces:
                return strategy.memory(sizes)
            if sizes.is_on_host:  # gloo gathers a unit in a copy, which no trace sees
                copied = [(grads, other + sizes.unit) for grads, other in sizes.moments]
                sizes = replace(sizes, moments=copied)
            measured = Strategy.memory(strategy, sizes)
            gathered = max(0, measured.activations - traces[_ALONE].base.activations)
            return replace(measured, mark="measured", gathered=gathered)

        largest = bisect.bisect(_BATCHES, self.available, key=lambda batch: memory(batch).peak)
        return {
            "name": name,
            "memory": asdict(memory(batch_size)),
            "batch_size": batch_size,
            "fits": batch_size <= largest,
            "largest_batch_size": largest,
        }

    def _facts(self, alone: Trace, feed: Feed, samples: int, flops: float) -> dict[str, Any]:
        """Names and values of the run; ``flops``: of a sample, 0 if unknown."""
        options, plan, effective = self.plan.options, self.plan, feed.samples_per_step
        per_device = effective and effective // (self.replicas * feed.accumulate)
        target = scaled_rate(options, effective, per_device)
        target *= self.replicas if "learning_rate_scaling" in plan.strategy.limits.always else 1
        rates, peak = sorted(set(alone.rates)), options.peak_flops
        flops *= samples * options.accumulate_grad_batches
        return {
            "strategy": plan.strategy_name,
            **self.place,
            "precision": str(options.precision),
            "parameters": alone.elements,
            "trained": alone.base.elements,
            "replicas": self.replicas,
            "micro_batch": samples,
            "accumulate": feed.accumulate,
            "effective_batch": effective,
            "steps_per_epoch": feed.steps,
            "total_steps": plan.total_steps,
            "learning_rates": rates,
            "learning_rate_factor": target,
            "scaled_learning_rates": [rate * target for rate in rates],
            "warmup_steps": options.learning_rate_warmup_steps if target != 1 else 0,
            "memory": self.asked.memory,
            "margin": self.margin,
            "available": self.available,
            "whole_model": {name: getattr(alone.base, name) for name in _WHOLE_MODEL},
            "step_seconds_at_least": flops / peak if flops and peak else None,
        }


def _shards(plan: Plan) -> bool:
    """Whether a strategy has shards, and can run under a fake process group."""
    strategy: Any = plan.strategy
    if not isinstance(plan.strategy, FSDP) or plan.layout.world_size == 1:
        return False
    shards = getattr(strategy, "has_units", True) or strategy.sizes.tensor != 1
    return bool(shards) and not (strategy.offload and plan.device.type != "cpu")


def _resized(batch: Any, samples: int, size: int) -> Any:
    """A batch of another number of samples, each like its first one."""

    def first(value: Any) -> Any:
        has_samples = isinstance(value, Tensor) and value.shape[:1] == (samples,)
        return value[:1].expand(size, *value.shape[1:]) if has_samples else value

    return moving.mapped(batch, first)
