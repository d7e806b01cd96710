"""Compare what all ranks of a fit have alike, before their steps and collectives depend on it.

Each rank reads its own command line, environment, code and data. Where these differ, ranks would
read other samples, train other models, or wait for each other in different collectives.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..data.feed import Feed, OrderedFeed
from ..data.sampling import can_be_ordered
from ..data.sources import LoadersByName
from ..errors import UserError, shown
from ..launch import collectives, files
from ..module import TrainingModule
from ..options import Options

_MAY_DIFFER = {  # where a rank runs, finds files and prints; the main rank's name is the run's
    *("accelerator", "devices", "num_nodes", "auto_select_gpus", "default_root_dir", "run_name"),
    *("callbacks", "loggers", "enable_progress_bar", "resume", "weights"),
}


def check(facts: Mapping[str, str]) -> None:
    """Raise a UserError on all ranks that names what differs between them; all call it."""
    encoded = json.dumps(facts, sort_keys=True).encode()
    if len({*collectives.gather(hashlib.blake2b(encoded).hexdigest())}) == 1:
        return
    first, *others = collectives.gather(dict(facts))
    lines = [
        f"ranks differ: {name} is {first.get(name, 'not there')} on rank 0 and "
        f"{other.get(name, 'not there')} on rank {rank}: start all with the same options, code "
        "and data"
        for rank, other in enumerate(others, 1)
        for name in dict.fromkeys([*first, *other])
        if first.get(name) != other.get(name)
    ]
    raise UserError(lines[:3])


def of_options(options: Options) -> dict[str, str]:
    """The trainer's options that decide what is trained."""
    facts = {field.name: getattr(options, field.name) for field in fields(options)}
    engine = facts["strategy_options"] or {}  # of which a file may be each node's own copy
    facts["strategy_options"] = {name: _content(value) for name, value in engine.items()}
    return {name: shown(value) for name, value in facts.items() if name not in _MAY_DIFFER}


def _content(value: Any) -> Any:
    is_file = isinstance(value, str) and os.path.isfile(value)  # noqa: PTH113 (or any text)
    return f"file with {zlib.crc32(files.read(Path(value), 2**26)):08x}" if is_file else value


def of_module(module: TrainingModule) -> dict[str, str]:
    named: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    shapes = {name: f"{tuple(tensor.shape)} of {tensor.dtype}" for name, tensor in named}
    return {"module": type(module).__name__, **shapes}


def of_data(feed: Feed, loaders: LoadersByName) -> dict[str, str]:
    """Batches of loaders whose samples the ranks divide, and names of such validation loaders."""
    facts = {"names of validation loaders": str(sorted(loaders))}
    if isinstance(feed, OrderedFeed):
        facts |= {f"{name} of training": str(value) for name, value in vars(feed.plan).items()}
    for name, loader in loaders.items():
        if can_be_ordered(loader):
            facts[f"validation samples {name}".strip()] = str(len(loader.dataset))  # type: ignore[arg-type]
    return facts
