"""Detect the layout of this process by trying all sources in order."""

import os
import re
from collections.abc import Sequence

from ...errors import ConfigurationError, nearest, one_line, shown
from .layout import OVERRIDE, Environment, Layout, Source
from .sources import SOURCES

# Of a larger number, ranks would wait in vain.
_MOST_PROCESSES = 2**20
_NUMBERS = re.compile("RANK|SIZE|PORT|NODE|TASKS|ID$")
_DIGITS = 640


def register(source: Source) -> None:
    """Register a source for :func:`detect`, in the order of precedence."""
    SOURCES.append(source)
    SOURCES.sort(key=lambda each: each.precedence)


def without_appended(words: Sequence[str]) -> list[str]:
    """A command line without the words that launchers append to it."""
    appended = {word for source in SOURCES for word in source.appended(os.environ)}
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
    known = {source.name: source for source in SOURCES}
    if chosen is not None and chosen not in known:
        raise ConfigurationError(f"{OVERRIDE}={chosen}: no such source{nearest(chosen, known)}")
    for source in SOURCES if chosen is None else [known[chosen]]:
        layout = _read(source, environment)
        if layout is not None:
            return layout
    raise ConfigurationError(f"{OVERRIDE}={chosen}: its variables are not set here")


def _read(source: Source, environment: Environment) -> Layout | None:
    try:
        layout = source.read(environment)
    except KeyError as error:
        raise ConfigurationError(
            f"{source.name}: {error.args[0]} is not set; the launch is broken"
        ) from error
    except ValueError as error:
        wrong = [
            f"{name}={shown(value)}"
            for name, value in sorted(environment.items())
            if _NUMBERS.search(name)
            # Python converts a limited number of digits, and does not show them.
            if str(error).endswith(f": {value!r}") or (value.isdecimal() and len(value) > _DIGITS)
        ]
        raise ConfigurationError(
            f"{source.name}: {' and '.join(wrong) or one_line(error)} is not a number; the launch "
            "is broken"
        ) from error
    if layout is not None:
        _check_ranks(layout)
    return layout


def _check_ranks(layout: Layout) -> None:
    places = (
        (layout.rank, layout.world_size),
        (layout.local_rank, layout.local_world_size),
        (layout.node_rank, layout.num_nodes),
    )
    parts = max(layout.local_world_size, layout.num_nodes)
    is_possible = all(0 <= place < count for place, count in places)
    if not is_possible or not parts <= layout.world_size <= _MOST_PROCESSES:
        rank, local, node = (f"{place} of {count}" for place, count in places)
        raise ConfigurationError(
            f"{layout.source}: rank {rank}, local rank {local}, node {node} (counted from 0) are "
            f"impossible (at most {_MOST_PROCESSES} processes); the launch is broken"
        )
