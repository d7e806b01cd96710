"""What a trainer is asked for, checked as a whole: every mistake is reported, all at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import launch, strategies
from ..arguments import legacy, other_trainers, paths, ranges, values
from ..checkpoint import run_choice, run_directory
from ..checkpoint.run_choice import Request
from ..data import scaling, sources
from ..data.feed import UNEVEN
from ..data.scaling import LearningRate
from ..errors import ConfigurationError, Problems, nearest, shown
from ..launch import cluster, files, restarts
from ..launch.cluster import Layout
from ..launch.devices import gpu_backends, hidden_gpus
from ..launch.devices.devices import Accelerator, choose_accelerator
from ..logging import loggers
from ..loop import compilation
from ..loop.schedule import Clip, Schedule
from ..memory import activation_checkpointing
from ..module import TrainingModule
from ..strategies import Asked, Strategy
from ..strategies.precision import Precision
from . import device_choice, environment, placement

_CLIP_ALGORITHMS = ("norm", "value")
# Paths, and what is checked in their place where they cannot be.
_PATHS = {"default_root_dir": ".", "resume": None}
# Checked in the place of what could not be translated, which has its own line already.
_PLAIN = {"accelerator": "auto", "devices": "auto", "strategy": "auto", "precision": "32-true"}


@dataclass(frozen=True)
class Arguments:
    """A trainer's arguments after all checks.

    ``given``: as the user gave them, in modern spelling; ``node_devices``: of all processes of a
    node; ``started_in``: the working directory when the trainer was made, to which relative paths
    refer, for user code may change it.
    """

    given: dict[str, Any]
    layout: Layout
    node_devices: tuple[torch.device, ...]
    strategy_name: str
    strategy: Strategy
    precision: Precision
    schedule: Schedule
    clip: Clip | None
    learning_rate: LearningRate
    request: Request
    started_in: Path

    @property
    def local_processes(self) -> int:
        """How many processes a node runs."""
        return self.strategy.local_processes(len(self.node_devices))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of this process: all of its node's where it is the only one there, or else its own."""
        if self.local_processes == 1:
            return self.node_devices
        return (self.node_devices[self.layout.local_rank],)

    @property
    def device(self) -> torch.device:
        """This process' only device, or the first."""
        return self.devices[0]

    def placed(self) -> "Arguments":
        """The same in a process that a launcher has started since."""
        return replace(self, layout=cluster.detect())

    def shown(self, path: Path) -> Path:
        """A path as the user would write it where the program was started."""
        return files.shown(path, self.started_in)

    def check_module(self, module: TrainingModule) -> None:
        """Check what a module asks of the strategy and of the arguments.

        Raises:
            ConfigurationError: one line for every mistake.
        """
        problems = Problems()
        if self.given["max_epochs"] is None and self.given["max_steps"] is None:
            problems.add("neither max_epochs nor max_steps is given: no end to training")
        needed = ["training_step", "configure_optimizers"][: 1 + self.strategy.needs_optimizers]
        problems.lines.extend(sources.missing(module, needed))
        if not module.automatic_optimization:
            _check_manual(self, type(module).__name__, problems)
        with problems:
            checkpointed = self.given["activation_checkpointing"]
            activation_checkpointing.select(module, checkpointed)
            compilation.select(module, self.given["compile"], checkpointed)
        problems.lines.extend(self.strategy.problems_of(module))
        if not self.layout.started_outside:  # rank 0 asks where it is, before it writes
            with problems:
                run_choice.refuse_existing(self.request)
        problems.raise_any()


def _check_manual(checked: Arguments, module: str, problems: Problems) -> None:
    reason = checked.strategy.limits.refused.get("manual_optimization")
    if reason is not None:
        problems.add(
            f"strategy={checked.strategy_name!r} takes no manual optimization, and {module} "
            f"optimizes by hand: {reason}"
        )
    if checked.clip is not None:
        problems.add(
            f"gradient_clip_val: {module} optimizes by hand; call clip_gradients of its optimizers "
            "instead"
        )
    if checked.given["accumulate_grad_batches"] != 1:
        problems.add(
            f"accumulate_grad_batches: {module} optimizes by hand; let it step in every n-th batch "
            "instead"
        )


def check(
    given: dict[str, Any], defaults: Mapping[str, Any], types: Mapping[str, Any]
) -> Arguments:
    """Check a trainer's arguments together.

    Args:
        given: by name, as :class:`~.trainer.Trainer` takes them.
        defaults: by name, of all arguments.
        types: by name, of all arguments.

    Raises:
        ConfigurationError: one line for every mistake.
    """
    launch.drop_inherited_variables()
    environment.warn()
    problems = Problems()
    # These have checks of their own: the older ones where they are translated.
    skip = [
        *legacy.ARGUMENTS,
        "activation_checkpointing",
        *(["strategy"] if isinstance(given["strategy"], type) else []),
    ]
    given = values.typed(given, defaults, types, problems, skip)
    mistyped = len(problems.lines)
    if given["tpu_cores"] is not None and "xla" not in strategies.names():
        problems.add(f"tpu_cores={shown(given['tpu_cores'])}: TPUs are not supported; use devices")
        given["tpu_cores"] = None
    with problems:
        given = legacy.translate(given)
    if len(problems.lines) > mistyped:
        is_elsewhere = other_trainers.about("accelerator", given["accelerator"]) is not None
        kept = {"accelerator": given["accelerator"]} if is_elsewhere else {}
        given = {**given, **_PLAIN, **kept}
    given = paths.expanded(given, _PATHS, problems)
    accelerator: Accelerator = "cpu"
    with problems:
        accelerator = choose_accelerator(given["accelerator"])
    layout = Layout()
    with problems:
        layout = cluster.detect(num_nodes=given["num_nodes"])
        _check_port(layout)
    # Where they cannot be told, as many as nothing else is said about.
    devices = list(range(layout.local_world_size if layout.started_outside else 1))
    with problems:
        devices = device_choice.choose(given, accelerator, layout)
    name, strategy = _strategy(given, len(devices), layout, problems)
    is_layout_known = not problems.lines
    with problems:
        environment.check(several=max(len(devices), layout.world_size) > 1)
    ranges.check(given, problems)
    gpu_backends.check(given, problems)
    _check_choices(given, problems)
    _check_run(given, layout, problems)
    placement.check(given, name, strategy, len(devices), layout, problems)
    nodes = layout.num_nodes if layout.source != "none" else given["num_nodes"] or 1
    asked = Asked(accelerator, given["precision"], len(devices), nodes, _features(given))
    problems.lines.extend(strategy.limits.problems(name, asked))
    with problems:
        problems.lines.extend(strategy.problems(given))
    precision = Precision("32-true", accelerator)
    with problems:
        precision = Precision(given["precision"], accelerator)
    learning_rate = LearningRate()
    with problems:
        learning_rate = _learning_rate(given)
    global_batch, accumulate = given["global_batch_size"], given["accumulate_grad_batches"]
    if global_batch is not None and accumulate > 0 and is_layout_known:
        with problems:
            replicas = strategy.replicas(len(devices), nodes)
            scaling.device_batch_size(global_batch, replicas, accumulate)
    problems.raise_any()
    # Once for all: a launcher of ours has said it for its ranks.
    speaks = layout.is_main and not launch.is_reported()
    if speaks and given["accelerator"] == "auto" and accelerator == "cpu":
        hidden_gpus.warn()
    return Arguments(
        given=given,
        layout=layout,
        node_devices=tuple(device_choice.torch_device(accelerator, each) for each in devices),
        strategy_name=name,
        strategy=strategy,
        precision=precision,
        schedule=_schedule(given),
        clip=_clip(given),
        learning_rate=learning_rate,
        request=_request(given),
        started_in=Path.cwd(),
    )


def _check_port(layout: Layout) -> None:
    if not 0 <= layout.main_port < 2**16:
        raise ConfigurationError(
            f"{layout.source}: MASTER_PORT={layout.main_port}: give a port from 1 to 65535"
        )


def _features(given: dict[str, Any]) -> frozenset[str]:
    named = ("sync_batchnorm", "compile", "activation_checkpointing")
    features = {name for name in named if given[name]}
    if given["learning_rate_scaling"] != "none":
        features.add("learning_rate_scaling")
    return frozenset(features)


def _learning_rate(given: dict[str, Any]) -> LearningRate:
    rule, reference = given["learning_rate_scaling"], given["reference_batch_size"]
    found = LearningRate(rule, reference, given["learning_rate_warmup_steps"])
    if rule != "none" and given["global_batch_size"] is not None and reference is None:
        raise ConfigurationError(
            f"learning_rate_scaling={rule!r} with global_batch_size: give reference_batch_size, "
            "the batch that the rate was chosen for"
        )
    return found


def _check_choices(given: dict[str, Any], problems: Problems) -> None:
    algorithm = given["gradient_clip_algorithm"]
    if algorithm not in _CLIP_ALGORITHMS:
        known = nearest(algorithm, _CLIP_ALGORITHMS)
        problems.add(f"gradient_clip_algorithm={algorithm!r} is unknown{known}")
    compilation.check(given["compile"], problems)
    with problems:
        activation_checkpointing.check_names(given["activation_checkpointing"])
    uneven = given["uneven_inputs"]
    if uneven not in UNEVEN:
        problems.add(f"uneven_inputs={uneven!r} is unknown{nearest(uneven, UNEVEN)}")
    with problems:
        loggers.check_names(given["loggers"])


def _check_run(given: dict[str, Any], layout: Layout, problems: Problems) -> None:
    """Check where the run writes, and what it resumes from."""
    with problems:
        run_directory.check_name(given["run_name"])
    root = Path(given["default_root_dir"])
    if root.exists() and not root.is_dir():
        problems.add(f"default_root_dir={shown(str(root))} is a file")
    elif not os.access(
        next(parent for parent in (root, *root.absolute().parents) if parent.exists()), os.W_OK
    ):
        problems.add(f"default_root_dir={shown(str(root))} cannot be written")
    resume = given["resume"]
    if resume == "auto":
        # torchrun's restarts name the run by its --rdzv-id.
        name = restarts.run_name() if restarts.expected(layout) else None
        if (given["run_name"] or name) is None:
            problems.add(
                "resume='auto' needs run_name, the run to look for: add --trainer.run_name NAME, "
                "or give resume a run's directory"
            )
        if given["overwrite"]:
            problems.add(
                "overwrite=True with resume='auto': the one replaces the run that the other "
                "continues; leave out one of them"
            )
    elif resume is not None and not Path(resume).is_dir():
        problems.add(
            f"resume={shown(str(resume))}: no such directory; give a run's directory or a "
            "checkpoint"
        )


def _strategy(
    given: dict[str, Any], device_count: int, layout: Layout, problems: Problems
) -> tuple[str, Strategy]:
    wanted, options = given["strategy"], given["strategy_options"] or {}
    if isinstance(wanted, Strategy):
        if options:
            problems.add("strategy_options belong to a strategy's name; this one is already made")
        return type(wanted).__name__, wanted
    chosen = "ddp" if max(device_count, layout.world_size) > 1 else "single_device"
    if wanted == "auto":
        in_notebook = launch.is_interactive() and not layout.started_outside
        wanted = "ddp_notebook" if chosen == "ddp" and in_notebook else chosen
    with problems:
        return wanted, strategies.create(wanted, options)
    # One that fits whatever else is asked, so that only its name is reported.
    return chosen, strategies.create(chosen, {})


def _request(given: dict[str, Any]) -> Request:
    root, resume = Path(given["default_root_dir"]).absolute(), given["resume"]
    if resume not in (None, "auto"):
        resume = str(Path(resume).absolute())
    return Request(root, given["run_name"], resume, given["overwrite"])


def _schedule(given: dict[str, Any]) -> Schedule:
    return Schedule(**{name: given[name] for name in Schedule.__dataclass_fields__})


def _clip(given: dict[str, Any]) -> Clip | None:
    if given["gradient_clip_val"] is None:
        return None
    return Clip(given["gradient_clip_val"], given["gradient_clip_algorithm"])
