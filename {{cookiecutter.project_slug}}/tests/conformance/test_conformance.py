"""Each strategy computes what one process computes at the same global batch."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import my_project_trainer as trainer
from my_project_trainer import strategies

from ..project import run_nodes, succeed
from .matrix import MATRIX
from .rows import CONTAINED, COVERING, PROPERTIES, QUICKLY, Launch, Row
from .subject import make
from .worker import STOP

WORKER = ("-m", "tests.conformance.worker")
# A worker trains in every way of the matrix: more than a single test may take.
SECONDS = 1800.0
pytestmark = pytest.mark.timeout(SECONDS + 60)


def marks(name: str, number: int, way: str) -> list[pytest.MarkDecorator]:
    """A slow launch or way is tried only on request; an engine is needed, too, to be refused."""
    row = MATRIX[name]
    launch = row.launches[number]
    is_quick = (way in QUICKLY or way in row.refused) and not launch.slow
    needs = [pytest.mark.needs(*launch.needs)] if launch.needs else []
    if is_quick:
        return needs
    left_out = [] if in_ci(row, launch, way) else [pytest.mark.exhaustive]
    return [*needs, *left_out, pytest.mark.slow]


def in_ci(row: Row, launch: Launch, way: str) -> bool:
    """Whether CI tries it on each push: most strategies train on two processes only then."""
    if row.weekly or (launch.devices > 2 and len(row.launches) > 1):
        return False
    return way in COVERING if launch.slow else way not in CONTAINED


LAUNCHES = [
    (name, number, row.ways(launch))
    for name, row in MATRIX.items()
    for number, launch in enumerate(row.launches)
]
EACH = "name", "number", "way"
# Those that are refused, each with its launch, are in the table too.
TRIED = [
    pytest.param(name, number, way, marks=marks(name, number, way))
    for name, number, ways in LAUNCHES
    for way in ways
]
TRAINED = [case for case in TRIED if case.values[2] not in MATRIX[case.values[0]].refused]


@pytest.fixture(scope="session")
def asked(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Parameters of the tests that were selected: nothing else is trained."""
    here = [item for item in request.session.items if item.path == Path(__file__)]
    return [item.callspec.params for item in here if hasattr(item, "callspec")]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, asked: list[dict[str, Any]]):
    """Runs a row's worker once, and gives the folder that it wrote."""

    def ways(name: str, number: int) -> list[str]:
        row = MATRIX[name]
        wanted = {
            parameters["way"]
            for parameters in asked
            if parameters.keys() >= {"name", "number", "way"}
            and (parameters["name"], parameters["number"]) == (name, number)
        }
        return [way for way in row.only if way in {row.only[0], *wanted} - row.refused.keys()]

    @cache
    def folder(name: str, number: int) -> Path:
        path = tmp_path_factory.mktemp("row-")
        launch = MATRIX[name].launches[number]
        arguments = [*WORKER, path, name, str(number), *ways(name, number)]
        how = {"timeout": SECONDS, "by": launch.command, "engine": launch.engine}
        for done in run_nodes(arguments, launch.nodes, **how):
            assert done.returncode == 0, done.stderr
        return path

    return folder


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory, asked: list[dict[str, Any]]):
    """Runs one process in the stead of pieces and readers once."""
    ways = sorted({parameters["way"] for parameters in asked if "way" in parameters})

    @cache
    def folder(pieces: int, readers: int) -> Path:
        path = tmp_path_factory.mktemp("reference-")
        arguments = [*WORKER, path, "reference", str(pieces), str(readers), *ways]
        succeed(arguments, timeout=SECONDS)
        return path

    return folder


def difference(one: Path, other: Path) -> float:
    """Largest difference of any weight, logged loss or state of a callback in two results."""
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    assert len(ours["losses"]) >= 8
    return max(_distance(ours[key], theirs[key]) for key in ours)


def _distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())


def proven() -> set[str]:
    """Names of the strategies that have a row."""
    return {row.strategy or name for name, row in MATRIX.items()}


def test_every_registered_strategy_has_a_row():
    assert set(strategies.names()) == proven()


@pytest.mark.parametrize(EACH, TRIED)
def test_equals_one_process(results, references, record_property, tmp_path, name, number, way):
    row = MATRIX[name]
    launch = row.launches[number]
    if way in row.refused:
        record_property("conformance", [name, str(launch), way, "not supported"])
        check_refused(name, launch, way, tmp_path)
        return
    distance = difference(
        results(name, number) / f"{way}.safetensors",
        references(*row.cut(launch)) / f"{way}.safetensors",
    )
    record_property("conformance", [name, str(launch), way, f"{distance:.1e}"])
    assert distance <= row.tolerances.get(way, PROPERTIES[way].tolerance)


def check_refused(name: str, launch: Launch, way: str, folder: Path) -> None:
    """It says why: before processes are started, or in setup if it depends on the optimizers."""
    row, one = MATRIX[name], PROPERTIES[way]
    options = {"strategy": row.strategy or name, "accelerator": "cpu", "max_steps": 1}
    options |= {"default_root_dir": folder, **one.trainer}
    options["strategy_options"] = {**row.options, **one.options}
    # Of a launcher's own processes, one alone is asked.
    devices = 1 if launch.by is not None else launch.devices

    def fit() -> None:
        trainer.Trainer(**options, devices=devices).check_fit(make(**one.subject))
        trainer.Trainer(**options, devices=1).fit(make(**one.subject))

    with pytest.raises(trainer.ConfigurationError, match=row.refused[way]):
        fit()


@pytest.mark.parametrize(EACH, TRAINED)
def test_resumes_to_the_last_bit(results, name, number, way):
    folder = results(name, number)
    uninterrupted = load_file(folder / f"{way}.safetensors")
    resumed = load_file(folder / f"{way}-resumed.safetensors")
    stopped = load_file(folder / f"{way}-stopped.safetensors")
    assert len(stopped["losses"]) == STOP
    assert all(torch.equal(uninterrupted[key], resumed[key]) for key in uninterrupted)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=marks(name, number, ways[0]))
        for name, number, ways in LAUNCHES
    ],
)
def test_as_many_processes_took_part(results, name, number):
    row = MATRIX[name]
    launch = row.launches[number]
    path = results(name, number) / "runs" / row.only[0] / "run.json"
    (record,) = json.loads(path.read_text())["attempts"]
    cls = strategies.find(row.strategy or name).cls
    assert (
        record["layout"]["world_size"] == cls.limits.local_processes(launch.devices) * launch.nodes
    )
    assert record["layout"]["num_nodes"] == launch.nodes
