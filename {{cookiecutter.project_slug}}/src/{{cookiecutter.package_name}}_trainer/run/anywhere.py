"""Plan a run on a machine that is not its own, such as a login node: its devices are not asked."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from ..errors import Problems
from ..launch import cluster
from ..launch.devices import ADDED, Accelerator
from ..options import Options, reading
from . import placement, plan
from .placement import Placement


def make(given: Mapping[str, Any]) -> plan.Plan:
    """Make the plan of a trainer with these keywords, or raise a ConfigurationError as it does."""
    problems = Problems()
    options = reading.read(given, problems)
    return plan.make(options, problems, partial(find, str(options.accelerator)))


def find(accelerator: Accelerator, options: Options, problems: Problems) -> Placement:
    """Find where a run will be: this machine's CPUs stand for the devices of a node.

    If the accelerator is ``auto``, it is one that the strategy runs on.
    """
    is_other = accelerator in ("auto", "cpu", "cuda", "gpu")
    on_cpus = replace(options, accelerator="cpu", auto_select_gpus=False) if is_other else options
    with mock.patch.dict(os.environ, {cluster.OVERRIDE: "none"}):
        where = placement.find(on_cpus, problems)
    if not is_other or accelerator in ADDED:
        return where
    limits, nodes = where.strategy.limits, where.nodes
    if accelerator != "cpu":
        able = "cuda" in limits.accelerators or accelerator != "auto"
        accelerator = "cuda" if able else limits.accelerators[0]
    local, source = limits.local_processes(len(where.devices)), next(iter(limits.sources), "plan")
    layout = cluster.Layout(
        world_size=local * nodes, local_world_size=local, num_nodes=nodes, source=source
    )
    counted = str(options.devices) not in ("auto", "-1")
    where = replace(where, accelerator=accelerator, layout=layout)
    return replace(where, is_here=False, is_counted=counted)
