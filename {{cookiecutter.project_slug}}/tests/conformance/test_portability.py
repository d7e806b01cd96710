"""What one strategy saves, each other one goes on from, on another number of processes."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ..project import missing, require, succeed
from .matrix import PORTABLE
from .rows import ROUNDING, Launch
from .worker import STOP

WORKER = ("-m", "tests.conformance.portability_worker")
SECONDS = 600.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(len(PORTABLE) * SECONDS)]


def marks(target: str, source: str) -> list[pytest.MarkDecorator]:
    """Some pairs, in which half of the strategies save and the others load, cover the rest."""
    names = list(PORTABLE)
    to, by = names.index(target), names.index(source)
    is_covering = to % 2 == 1 and by % 2 == 0 and (to + by) % 4 == 1
    return [] if is_covering else [pytest.mark.exhaustive]


PAIRS = [
    pytest.param(target, source, marks=marks(target, source))
    for target, source in itertools.product(PORTABLE, PORTABLE)
    if all(
        {target, source} <= {row, *(PORTABLE[row].partners or PORTABLE)} for row in (target, source)
    )
]


def selected(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Parameters of the tests that were selected: nothing else is trained."""
    here = [item for item in request.session.items if item.path == Path(__file__)]
    return [item.callspec.params for item in here if hasattr(item, "callspec")]


@pytest.fixture(scope="session")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of each strategy of the selected tests, stopped after a few steps."""
    folder = tmp_path_factory.mktemp("portability-")
    sources = {parameters["source"] for parameters in selected(request)}
    for name, ways in PORTABLE.items():
        if name in sources and not any(map(missing, ways.saves.needs)):
            work("save", folder, name, ways.saves)
    return folder


@pytest.fixture(scope="session")
def loaded(request: pytest.FixtureRequest, saved: Path):
    """Has a strategy go on from those of them that are asked for, once."""

    @cache
    def load(name: str) -> Path:
        sources = {values["source"] for values in selected(request) if values["target"] == name}
        there = (row for row in sources if not any(map(missing, PORTABLE[row].saves.needs)))
        work("load", saved, name, PORTABLE[name].loads, *sorted(there))
        return saved

    return load


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process computes that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole-")
    worker = ("-m", "tests.conformance.worker")
    succeed([*worker, folder, "reference", "1", "1", "adam"], timeout=SECONDS)
    return folder / "adam.safetensors"


def work(command: str, folder: Path, name: str, launch: Launch, *sources: str) -> None:
    arguments = [*WORKER, command, folder, name, *sources]
    succeed(arguments, timeout=SECONDS, by=launch.command, engine=launch.engine)


@pytest.mark.parametrize(("target", "source"), PAIRS)
def test_goes_on_from_what_another_saved(saved, loaded, reference, record_property, source, target):
    for name in (*PORTABLE[source].saves.needs, *PORTABLE[target].loads.needs):
        require(missing(name))
    first = load_file(saved / f"{source}-stopped.safetensors")
    assert len(first["losses"]) == STOP
    result = load_file(loaded(target) / f"{source} to {target}.safetensors")
    expected = load_file(reference)
    # The resumed run logs what is left of the losses.
    expected["losses"] = expected["losses"][STOP:]
    distance = max(float((result[key] - expected[key]).abs().max()) for key in expected)
    on = f"{source}, {PORTABLE[source].saves}"
    record_property("portability", [on, f"{target}, {PORTABLE[target].loads}", f"{distance:.1e}"])
    assert distance <= ROUNDING  # as exact as if it was not interrupted
