"""Detect the layout of this process by trying all sources in order."""

import os
import re
from collections.abc import Sequence

from ...errors import ConfigurationError, nearest, one_line, shown
from . import environment as plain
from . import mpi, nodes, srun, torchelastic
from .layout import OVERRIDE, Environment, Layout, Source

# Of a larger number, ranks would wait in vain.
_MOST_PROCESSES = 2**20
_ALONE = Source("none", 90, lambda environment: Layout())
_SOURCES = [
    *(torchelastic.SOURCE, mpi.OPEN_MPI, mpi.HYDRA, srun.SOURCE, plain.SOURCE, nodes.SOURCE),
    _ALONE,
]


def register(source: Source) -> None:
    """Register a source for :func:`detect`, in the order of precedence."""
    _SOURCES.append(source)
    _SOURCES.sort(key=lambda each: each.precedence)


def without_appended(words: Sequence[str]) -> list[str]:
    """A command line without the words that launchers append to it."""
    appended = {word for source in _SOURCES for word in source.appended(os.environ)}
    return [word for word in words if word not in appended]


def detect(environment: Environment | None = None, num_nodes: int | None = None) -> Layout:
    """Detect this process' layout.

    Args:
        environment: Environment variables; default: ``os.environ``.
        num_nodes: The user's number of nodes; used if no variable gives it.

    Raises:
        ConfigurationError: The override names an unknown source, or one without variables here.
    """
    environment = os.environ if environment is None else environment
    if isinstance(num_nodes, int):
        environment = {"NNODES": str(num_nodes), **environment}
    chosen = environment.get(OVERRIDE)
    if chosen is not None:
        known = {source.name: source for source in _SOURCES}
        if chosen not in known:
            raise ConfigurationError(f"{OVERRIDE}={chosen}: no such source{nearest(chosen, known)}")
        layout = _read(known[chosen], environment)
        if layout is None:
            raise ConfigurationError(f"{OVERRIDE}={chosen}: its variables are not set here")
        return layout
    for source in _SOURCES:
        layout = _read(source, environment)
        if layout is not None:
            return layout
    raise AssertionError("the last source always answers")


def _read(source: Source, environment: Environment) -> Layout | None:
    try:
        layout = source.read(environment)
    except KeyError as error:
        raise ConfigurationError(
            f"{source.name}: {error.args[0]} is not set; the launch is broken"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{source.name}: {_no_number(environment, error)}") from error
    if layout is not None:
        _check_ranks(layout)
    return layout


def _no_number(environment: Environment, error: ValueError) -> str:
    """Describe which variables of a launch are not numbers."""
    numbers = "|".join(source.numbers for source in _SOURCES if source.numbers)
    wrong = [
        f"{name}={shown(value)}"
        for name, value in sorted(environment.items())
        if re.fullmatch(numbers, name) and not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value)
    ]
    return f"{' and '.join(wrong) or one_line(error)} is not a number; the launch is broken"


def _check_ranks(layout: Layout) -> None:
    parts = max(layout.local_world_size, layout.num_nodes)
    if not parts <= layout.world_size <= _MOST_PROCESSES:
        raise ConfigurationError(
            f"{layout.source}: {layout.world_size} processes on {layout.num_nodes} nodes, "
            f"{layout.local_world_size} of them on this one, are impossible (at most "
            f"{_MOST_PROCESSES}); the launch is broken"
        )
    places = {
        "rank": (layout.rank, layout.world_size),
        "local rank": (layout.local_rank, layout.local_world_size),
        "node": (layout.node_rank, layout.num_nodes),
    }
    for name, (place, count) in places.items():
        if not 0 <= place < count:
            raise ConfigurationError(
                f"{layout.source}: {name} {place} of {count} (counted from 0) is invalid; "
                "the launch is broken"
            )
