"""Checks of a configuration: its step, the parts that are pickled, and what strategies refuse."""

import contextlib
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ... import strategies
from ...cli import configuration
from ...cli.configuration import Work
from ...data.samples import Splitter, batch_length
from ...errors import ConfigurationError, UserError
from ...launch.pickling import find_unpicklable
from ...loop.problems import problems_of
from ...module import TrainingModule
from ...strategies import Requested, SingleDevice
from ...strategies.base import Stage
from ...strategies.gradients.same_use import OPTION, trained
from ...strategies.optimizers import Optimization
from ...trainer import Trainer
from . import loading
from .checks import Check, run
from .waits import Waits

_SECONDS = 120.0
_BATCHES = 3
_SAMPLES = 4  # of a batch; BatchNorm needs more than one
_SHOWN = 5
_BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def read(program: str, given: Sequence[str]) -> Work:
    """Parse options as ``fit`` does, and create the objects that they name.

    Raises:
        ConfigurationError: One line per error.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no result
        return configuration.read_work(program, "fit", given)


def check(work: Work, program: str, given: Sequence[str]) -> list[Check]:
    """Run all checks of a configuration; ``given``: its options."""
    step = run("step", partial(_step, work), _SECONDS, "fails")
    checks: dict[str, Callable[[Work], Iterator[Check]]] = {
        "pickling": _pickling,
        "layers": _layers,
        "strategies": _strategies,
    }
    found = [line for name, each in checks.items() for line in run(name, partial(each, work), 60)]
    return step + found + loading.check(work, partial(read, program, list(given)))


# --- the step ------------------------------------------------------------------------------------


class _Watched(SingleDevice):
    """Runs steps on a few samples of each batch, and notes what they wait for and use."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.batches = waits, 0
        self.uses: Counter[str] = Counter()
        self._used: set[str] = set()
        self._splitter = Splitter()

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        made = super().setup(module, configure)
        for name, each in trained(module):
            each.register_post_accumulate_grad_hook(partial(self._use, name))
        return made

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        if stage != "training":
            return super().forward(stage, batch, batch_idx)
        self._end_batch()
        self.batches += 1
        self.waits.batch = batch_idx
        batch = self._some(batch)
        own = [*self.module.parameters(), *self.module.buffers()]
        self.waits.mark([batch, *own, *(each.grad for each in own)])
        with self.waits.watching():
            return super().forward(stage, batch, batch_idx)

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        with self.waits.watching():
            super().backward(loss, synchronize=synchronize)

    def finish(self) -> None:
        self._end_batch()

    def _use(self, name: str, _: Tensor) -> None:
        self._used.add(name)

    def _end_batch(self) -> None:
        self.uses.update(self._used)
        self._used = set()

    def _some(self, batch: Any) -> Any:
        count = batch_length(batch)
        if count <= _SAMPLES:
            return batch
        with contextlib.suppress(UserError):  # it cannot be split by samples
            return self._splitter.split(batch, [_SAMPLES, count - _SAMPLES])[0]
        return batch


def _step(work: Work) -> Iterator[Check]:
    """Run some steps on the CPU; find what waits, and parameters that are not used."""
    file = getattr(sys.modules[type(work.model).__module__], "__file__", None) or __file__
    watched = _Watched(Waits(file))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **loading.options(work, accelerator="cpu", precision="32-true"),
            strategy=watched,
            fast_dev_run=_BATCHES,
            default_root_dir=folder,
            enable_progress_bar=False,
        )
        trainer.fit(work.model, work.data)
    count = watched.batches
    yield Check("step", "ok", f"{count} steps of at most {_SAMPLES} samples were trained on the CPU")
    advice = "keep values on the device; log tensors with self.log"
    # In some batches only, such as every 50th, a wait costs little.
    waits = [item for item in watched.waits.found.items() if len(item[1][1]) >= min(2, count)]
    for place, (what, _) in waits:
        yield Check("waits", "warning", f"{place}: {what}", advice)
    if not waits:
        yield Check("waits", "ok", "no line of the training step waits for the device")
    rare = [name for name, _ in trained(work.model) if watched.uses[name] < count]
    if not rare:
        yield Check("unused parameters", "ok", "each step uses all parameters")
        return
    never = sum(watched.uses[name] == 0 for name in rare)
    found = f"{_some_of(rare)}: not used in each step, {never} of {len(rare)} in none"
    yield Check("unused parameters", "warning", found, f"freeze or remove them, or {OPTION}")


def _some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# --- without a step ------------------------------------------------------------------------------


def _pickling(work: Work) -> Iterator[Check]:
    """Parts that cannot be pickled for processes that are spawned, and for loader workers."""
    named = {"model": work.model, "data": work.data}
    lines = [line for name, each in named.items() if (line := find_unpicklable(each, name))]
    for line in lines:
        yield Check("pickling", "warning", line)
    if not lines:
        yield Check("pickling", "ok", "all parts of model and data can be pickled")


def _layers(work: Work) -> Iterator[Check]:
    """BatchNorm and parameters with several names."""
    norms = [name for name, each in work.model.named_modules() if isinstance(each, _BATCHNORM)]
    options, plan = work.trainer._plan.options, work.trainer._plan
    if norms and not options.sync_batchnorm:
        refusing = [
            name
            for name in strategies.names()
            if "sync_batchnorm" in strategies.find(name).limits.refused
        ]
        nodes = plan.layout.num_nodes
        has_several = plan.strategy.replicas(len(plan.node_devices), nodes) > 1
        found = f"{_some_of(norms)}: each replica normalizes with its own part of a batch"
        advice = f"--trainer.sync_batchnorm true, which {', '.join(refusing)} refuse"
        yield Check("BatchNorm", "warning" if has_several else "ok", found, advice)
    names = defaultdict(list)
    for name, each in work.model.named_parameters(remove_duplicate=False):
        names[id(each)].append(name)
    for tied in (each for each in names.values() if len(each) > 1):
        yield Check("tied parameters", "ok", f"{' = '.join(tied)}: see what strategies refuse")


def _strategies(work: Work) -> Iterator[Check]:
    """What each strategy would refuse of this module and these options."""
    lines: dict[str, list[str]] = defaultdict(list)
    fits = []
    for name in strategies.names():
        problems = _problems(name, work)
        for line in problems:
            lines[line.replace(repr(name), "…")].append(name)
        fits += [] if problems else [name]
    yield Check("strategies", "ok", f"can train the model: {', '.join(fits)}")
    for line, names in lines.items():
        yield Check("strategies", "ok", f"{', '.join(names)}: {line}")


def _problems(name: str, work: Work) -> list[str]:
    plan = work.trainer._plan
    options, module = plan.options, work.model
    features = ["sync_batchnorm"] * options.sync_batchnorm + ["compile"] * bool(options.compile)
    asked = Requested(plan.device.type, str(options.precision), 1, 1, frozenset(features))
    try:
        strategy = strategies.create(name, {})
        lines = strategy.limits.problems(name, asked) + strategy.problems(options, None)
        lines += problems_of(module, name, strategy, options)
        return lines + strategy.problems(options, module)
    except ConfigurationError as error:
        return error.problems
