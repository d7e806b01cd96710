"""What a trainer is asked for, checked as a whole: every mistake is reported, all at once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import cluster, loggers, run_directory, scaling, strategies
from .cluster import Layout
from .devices import choose_accelerator, parse_devices
from .errors import Problems, nearest
from .loop import Clip, Schedule
from .precision import Precision
from .strategies import SingleDevice

_CLIP_ALGORITHMS = ("norm", "value")


@dataclass(frozen=True)
class Arguments:
    """A trainer's arguments after all checks."""

    layout: Layout
    device: torch.device
    device_count: int
    strategy_name: str
    strategy: SingleDevice
    precision: Precision
    schedule: Schedule
    clip: Clip | None
    replicas: int
    root: Path


def check(given: dict[str, Any]) -> Arguments:
    """Check a trainer's arguments together.

    Args:
        given: by name, as :class:`~.trainer.Trainer` takes them.

    Raises:
        ConfigurationError: one line for every mistake.
    """
    problems = Problems()
    accelerator, devices = "cpu", [0]
    with problems:
        accelerator = choose_accelerator(given["accelerator"])
    layout = Layout()
    with problems:
        layout = cluster.detect()
    with problems:
        devices = _devices(given["devices"], accelerator, layout)
    name, strategy = _strategy(given, len(devices), layout, problems)
    is_layout_known = not problems.lines
    _check_numbers(given, problems)
    _check_choices(given, problems)
    _check_layout(given, name, strategy, len(devices), layout, problems)
    lines = strategy.limits.problems(name, accelerator, given["precision"], len(devices))
    problems.lines.extend(lines)
    precision = Precision("32-true", accelerator)
    with problems:
        precision = Precision(given["precision"], accelerator)
    num_nodes = layout.num_nodes if layout.started_outside else 1
    replicas = strategy.replicas(len(devices), num_nodes)
    global_batch, accumulate = given["global_batch_size"], given["accumulate_grad_batches"]
    if global_batch is not None and accumulate > 0 and is_layout_known:
        with problems:
            scaling.device_batch_size(global_batch, replicas, accumulate)
    problems.raise_any()
    return Arguments(
        layout=layout,
        device=_own_device(accelerator, devices, layout),
        device_count=len(devices),
        strategy_name=name,
        strategy=strategy,
        precision=precision,
        schedule=_schedule(given),
        clip=_clip(given),
        replicas=replicas,
        root=Path(given["default_root_dir"]),
    )


def _check_numbers(given: dict[str, Any], problems: Problems) -> None:
    at_least_one = ("accumulate_grad_batches", "log_every_n_steps", "check_val_every_n_epoch")
    optional = (
        "max_epochs",
        "max_steps",
        "val_every_n_steps",
        "checkpoint_every_n_steps",
        "num_nodes",
    )
    for name in (*at_least_one, *optional):
        value = given[name]
        if (value is not None or name in at_least_one) and (type(value) is not int or value < 1):
            problems.add(f"{name}={value!r}: give a whole number of at least 1")
    if given["gradient_clip_val"] is not None and not given["gradient_clip_val"] > 0:
        problems.add(
            f"gradient_clip_val={given['gradient_clip_val']!r}: give a number above 0, or none"
        )
    if given["keep_checkpoints"] < 2:
        problems.add(
            f"keep_checkpoints={given['keep_checkpoints']}: keep at least 2; one is always whole"
        )
    if not 0 <= given["seed"] < 2**63:
        problems.add(f"seed={given['seed']}: give a number from 0 to 2**63 - 1")


def _check_choices(given: dict[str, Any], problems: Problems) -> None:
    algorithm = given["gradient_clip_algorithm"]
    if algorithm not in _CLIP_ALGORITHMS:
        known = nearest(algorithm, _CLIP_ALGORITHMS)
        problems.add(f"gradient_clip_algorithm={algorithm!r} is unknown{known}")
    with problems:
        loggers.check_names(given["loggers"])
    with problems:
        run_directory.check_name(given["run_name"])
    root = Path(given["default_root_dir"])
    if root.exists() and not root.is_dir():
        problems.add(f"default_root_dir={str(root)!r} is a file")
    elif not os.access(
        next(parent for parent in (root, *root.absolute().parents) if parent.exists()), os.W_OK
    ):
        problems.add(f"default_root_dir={str(root)!r} cannot be written")
    resume = given["resume"]
    if resume not in (None, "auto") and not Path(resume).is_dir():
        problems.add(
            f"resume={str(resume)!r}: no such directory; give a run's directory or a checkpoint"
        )


def _devices(value: int | str | list[int], accelerator: str, layout: Layout) -> list[int]:
    available = torch.cuda.device_count() if accelerator == "cuda" else None
    if value == "auto" and layout.started_outside:
        return list(range(layout.local_world_size))
    return parse_devices(value, available)


def _strategy(
    given: dict[str, Any], device_count: int, layout: Layout, problems: Problems
) -> tuple[str, SingleDevice]:
    wanted, options = given["strategy"], given["strategy_options"] or {}
    if isinstance(wanted, SingleDevice):
        if options:
            problems.add("strategy_options belong to a strategy's name; this one is already made")
        return type(wanted).__name__, wanted
    if wanted == "auto":
        wanted = "ddp" if max(device_count, layout.world_size) > 1 else "single_device"
    with problems:
        return wanted, strategies.create(wanted, options)
    # One that fits whatever else is asked, so that only its name is reported.
    fallback = "ddp" if max(device_count, layout.world_size) > 1 else "single_device"
    return fallback, strategies.create(fallback, {})


def _check_layout(
    given: dict[str, Any],
    name: str,
    strategy: SingleDevice,
    device_count: int,
    layout: Layout,
    problems: Problems,
) -> None:
    nodes = given["num_nodes"]
    expected = strategy.local_processes(device_count)
    if not layout.started_outside:
        if nodes is not None and nodes > 1:
            problems.add(
                f"num_nodes={nodes}: nothing has started this process on several nodes; "
                "start it with srun or torchrun"
            )
        return
    if nodes is not None and nodes != layout.num_nodes:
        problems.add(f"num_nodes={nodes}, but {layout.source} started {layout.num_nodes}")
    if expected != layout.local_world_size:
        problems.add(
            f"strategy={name!r} on devices={given['devices']!r} wants {expected} processes a node, "
            f"but {layout.source} started {layout.local_world_size}; set {cluster.OVERRIDE}=none "
            "to ignore it"
        )


def _own_device(accelerator: str, devices: list[int], layout: Layout) -> torch.device:
    if accelerator == "cpu":
        return torch.device("cpu")
    # A cluster may show each task only its own GPU: then that is device 0.
    visible = torch.cuda.device_count()
    index = devices[layout.local_rank] if layout.local_rank < len(devices) else devices[0]
    return torch.device("cuda", index if index < visible else 0)


def _schedule(given: dict[str, Any]) -> Schedule:
    return Schedule(**{name: given[name] for name in Schedule.__dataclass_fields__})


def _clip(given: dict[str, Any]) -> Clip | None:
    if given["gradient_clip_val"] is None:
        return None
    return Clip(given["gradient_clip_val"], given["gradient_clip_algorithm"])
