"""What one strategy saves, each other one goes on from, on another number of processes."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ..project import missing, require, run
from .matrix import PORTABLE
from .rows import Launch
from .worker import STOP

WORKER = ("-m", "tests.conformance.portability_worker")
SECONDS = 600.0
# Of a weight, or a logged loss: as exact as ten steps of Adam that were not interrupted.
TOLERANCE = 1e-5
pytestmark = [pytest.mark.slow, pytest.mark.timeout(len(PORTABLE) * SECONDS)]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every strategy's run, stopped after a few steps."""
    folder = tmp_path_factory.mktemp("portability-")
    for name, ways in PORTABLE.items():
        if not any(map(missing, ways.saves.needs)):
            work("save", folder, name, ways.saves)
    return folder


@pytest.fixture(scope="session")
def loaded(request: pytest.FixtureRequest, saved: Path):
    """Has a strategy go on from those of them that are asked for, once."""

    @cache
    def load(name: str) -> Path:
        here = [item for item in request.session.items if item.path == Path(__file__)]
        asked = [item.callspec.params for item in here if hasattr(item, "callspec")]
        sources = {each["source"] for each in asked if each["target"] == name}
        there = (each for each in sources if not any(map(missing, PORTABLE[each].saves.needs)))
        work("load", saved, name, PORTABLE[name].loads, *sorted(there))
        return saved

    return load


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process computes that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole-")
    worker = ("-m", "tests.conformance.worker")
    done = run([*worker, folder, "reference", "1", "1", "adam"], timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return folder / "adam.safetensors"


def work(command: str, folder: Path, name: str, launch: Launch, *sources: str) -> None:
    """Run a worker to its end."""
    arguments = [*WORKER, command, folder, name, *sources]
    done = run(arguments, timeout=SECONDS, by=launch.command, engine=launch.engine)
    assert done.returncode == 0, f"{command} {name}: {done.stderr}"


def pairs() -> Iterator[Any]:
    """Each target with each source; a quarter of them, in which each is both, covers the others."""
    for row, target in enumerate(PORTABLE):
        for column, source in enumerate(PORTABLE):
            is_covering = (row + column) % 4 == 0
            yield pytest.param(target, source, marks=[] if is_covering else pytest.mark.exhaustive)


@pytest.mark.parametrize(("target", "source"), pairs())
def test_goes_on_from_what_another_saved(saved, loaded, whole, record_property, source, target):
    for name in (*PORTABLE[source].saves.needs, *PORTABLE[target].loads.needs):
        require(missing(name))
    first = load_file(saved / f"{source}-stopped.safetensors")
    assert len(first["losses"]) == STOP
    result = load_file(loaded(target) / f"{source} to {target}.safetensors")
    expected = load_file(whole)
    # The resumed run logs what is left of the losses.
    expected["losses"] = expected["losses"][STOP:]
    found = max(float((result[key] - expected[key]).abs().max()) for key in expected)
    on = f"{source}, {PORTABLE[source].saves}"
    record_property("portability", [on, f"{target}, {PORTABLE[target].loads}", f"{found:.1e}"])
    assert found <= TOLERANCE
