"""Options in pairs: each row trains, resumes to the last bit, and equals one process."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import strategies
from my_project_trainer.checkpoint.reading import Checkpoint, resolve
from my_project_trainer.options import Options
from tests.conformance.rows import PROPERTIES
from tests.project import run, succeed
from torch import Tensor

import fitting
from pairs import Array, Atom, Row, all_pairs, pairs
from pairs_factors import (
    BUILT_IN,
    CALLBACKS,
    EXEMPT,
    FACTORS,
    OPTIONS,
    REGISTERED,
    SAME,
    SIZES,
    STRATEGIES,
    keywords,
)

# Of all rows of a strategy in one way.
SECONDS = 600.0
IN_CI = {"ddp", "fsdp"}
Request = dict[str, Any]
WAYS = {"bf16-mixed": "bf16", "16-mixed": "fp16", "bf16-true": "bf16 true", "16-true": "fp16 true"}


def test_each_option_is_a_factor_or_has_a_reason_not_to_be() -> None:
    assert OPTIONS.keys() | EXEMPT.keys() == {field.name for field in fields(Options)}
    assert not OPTIONS.keys() & EXEMPT.keys()
    assert set(CALLBACKS) == BUILT_IN
    assert {*STRATEGIES} | SAME == REGISTERED


def refused_together(*together: dict[str, int]) -> Callable[[Row], tuple[int, list[str]]]:
    """Refuses a row that has all of some values, in a line that names them."""

    def ask(row: Row) -> tuple[int, list[str]]:
        return 0, [str(pair) for pair in together if pair.items() <= row.items()]

    return ask


def test_all_pairs_are_covered_but_those_that_are_refused() -> None:
    sizes = {"a": 3, "b": 2, "c": 2, "d": 4}
    # The last two leave no value of c for a: 1 with d: 2, although no line says so.
    ask = refused_together({"a": 0, "b": 1}, {"a": 1, "c": 0}, {"d": 2, "c": 1})
    array = Array(sizes, ask)
    left = array.complete(all_pairs(sizes))
    expected = [{("a", 0), ("b", 1)}, {("a", 1), ("c", 0)}, {("d", 2), ("c", 1)}]
    assert left == {*map(frozenset, expected), frozenset([("a", 1), ("d", 2)])}
    assert set().union(*map(pairs, array.rows)) == all_pairs(sizes) - left
    assert not any(ask(row)[1] for row in array.rows)
    assert len(array.rows) <= 16


@dataclass(frozen=True)
class Found:
    """The rows, and values that the trainer refuses together, with its line."""

    rows: list[Row]
    refused: dict[frozenset[Atom], str]

    def of(self, strategy: str) -> dict[str, Row]:
        """The rows of a strategy, by number."""
        index = FACTORS["strategy"].index(strategy)
        named = {str(number): row for number, row in enumerate(self.rows)}
        return {number: row for number, row in named.items() if row["strategy"] == index}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs-")


@pytest.fixture(scope="module")
def array(folder: Path) -> Found:
    # In a fixed order of sets, on which it depends how many rows are needed.
    command = ["-m", "pairs_subject", "array", folder]
    succeed(command, extra={"PYTHONHASHSEED": "0"}, fresh=True, timeout=SECONDS)
    content = json.loads((folder / "array.json").read_text())
    refused = {frozenset(map(tuple, atoms)): line for atoms, line in content["refused"]}
    return Found(content["rows"], refused)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_pairs_that_are_refused_say_why_in_one_line(array, record_property) -> None:
    for atoms, line in array.refused.items():
        assert line.isprintable(), line
        assert 20 < len(line) < 400, line
        if len(atoms) <= 2:
            names = [f"{name}={FACTORS[name][value]!r}" for name, value in sorted(atoms)]
            record_property("refused pairs", [", ".join(names), "line", line.replace("|", "\\|")])
    covered = set().union(*map(pairs, array.rows))
    assert not any(atoms <= set(row.items()) for atoms in array.refused for row in array.rows)
    for name in FACTORS:  # each value is in some row
        assert {row[name] for row in array.rows} == set(range(SIZES[name])), name
    total = len(all_pairs(SIZES))
    counts = {"rows": len(array.rows), "pairs": len(covered), "refused": total - len(covered)}
    for name, number in counts.items():
        record_property("pairs", ["all", name, str(number)])


def train(folder: Path, strategy: str, requests: list[Request]) -> dict[str, str]:
    """Train one after another in the processes of a strategy; give what failed, and how.

    What comes after a failure is trained in new processes.
    """
    launch = STRATEGIES[strategy].launches[0]
    how = {"by": launch.command, "engine": launch.engine, "extra": {"DS_ACCELERATOR": "cpu"}}
    failures: dict[str, str] = {}
    while requests:
        (folder / "requests.json").write_text(json.dumps(requests))
        arguments = ["-m", "pairs_subject", "train", folder, "requests"]
        try:
            output = run(arguments, cwd=folder, timeout=SECONDS, **how).stderr
        except subprocess.TimeoutExpired as error:
            output = f"did not end within {SECONDS:.0f} s\n{error.__notes__[0]}"
        files = {request["name"]: folder / f"{request['name']}.json" for request in requests}
        results = {
            name: json.loads(file.read_text()) for name, file in files.items() if file.exists()
        }
        failures |= {
            name: str(result["refused"]) for name, result in results.items() if "refused" in result
        }
        left = [request for request in requests if request["name"] not in results]
        if left:
            failures[left[0]["name"]] = output[-3000:]
        requests = [request for request in left[1:] if request.get("half_of") not in failures]
    return failures


def train_rows(folder: Path, rows: dict[str, Row], strategy: str) -> dict[str, str]:
    """Train rows uninterrupted, stopped, resumed by other processes, and in one process."""
    options = {number: keywords(row, folder) for number, row in rows.items()}
    first: list[Request] = []
    for number, arguments in options.items():
        first.append({"name": f"{number}-whole", "options": arguments})
        first.append({"name": f"{number}-cut", "options": arguments, "half_of": f"{number}-whole"})
    failures = train(folder, strategy, first)
    trained = [
        number for number in rows if not {f"{number}-whole", f"{number}-cut"} & failures.keys()
    ]
    again: list[Request] = []
    for number in trained:
        (folder / f"{number}-cut.json").unlink()
        arguments = {**options[number], "resume": "auto"}
        again.append({"name": f"{number}-cut", "options": arguments})
    failures |= train(folder, strategy, again)
    alone = [in_one_process(folder, number, options[number]) for number in trained]
    return failures | train(folder, "single_device", alone)


def in_one_process(folder: Path, number: str, options: Mapping[str, Any]) -> Request:
    """What one process trains in the stead of several."""
    strategy = strategies.create(options["strategy"], options["strategy_options"])
    replicas = strategy.replicas(options["devices"], 1)
    record = json.loads((folder / number / f"{number}-whole" / "run.json").read_text())
    samples = record["attempts"][-1]["samples_per_step"]
    alone = {**options, "strategy": "single_device", "strategy_options": {}, "devices": 1}
    alone["sync_batchnorm"] = False
    if samples is not None:
        alone["global_batch_size"] = samples
        if options["learning_rate_scaling"] != "none" and options["reference_batch_size"] is None:
            shares = replicas * options["accumulate_grad_batches"]
            alone["reference_batch_size"] = samples // shares
    subject = {"pieces": replicas, "norm": options["sync_batchnorm"]}
    return {"name": f"{number}-alone", "options": alone, **subject}


def values(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, child in items:
            yield from values(child, f"{path}/{key}")
    else:
        yield path, tree


def saved(run_directory: Path) -> dict[str, Any]:
    """All of the last checkpoint but the time that the run took."""
    checkpoint = Checkpoint(resolve(run_directory))
    state = dict(values(checkpoint.state()))
    for rank in range(checkpoint.world_size):
        state |= values(checkpoint.rank_local_state(rank), f"/ranks/{rank}")
    return {path: value for path, value in state.items() if "seconds" not in path}


def metrics(run_directory: Path) -> dict[str, float]:
    """What was logged, by step and name, but what says something of the machine."""
    if not (run_directory / "metrics.csv").exists():
        return {}
    rows = [row for row in fitting.rows(run_directory) if not row[2].startswith("system/")]
    return {f"step {step}: {name}": value for step, _, name, value in rows}


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, str]:
    """The largest of any value that both have, and of which; of values above 1 the relative one."""
    gaps = [(0.0, "")]
    for key in sorted(one.keys() & other.keys()):
        if isinstance(one[key], Tensor | float):
            ours, theirs = (torch.as_tensor(value).double() for value in (one[key], other[key]))
            assert ours.shape == theirs.shape, key
            gap = (ours - theirs).abs() / theirs.abs().clamp(min=1)
            gap[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0.0
            gaps.append((float(gap.nan_to_num(torch.inf).max()) if gap.numel() else 0.0, key))
        elif one[key] != other[key]:
            gaps.append((torch.inf, key))
    return max(gaps)


def inexact(options: Mapping[str, Any]) -> str:
    """Why a row does not equal one process; empty: it has to."""
    if options["uneven_inputs"] == "join" and options["limit_train_batches"] == 0.7:
        return "a part of the batches of each rank, which has its own number, is no part of all"
    return ""


def tolerance(options: Mapping[str, Any]) -> float:
    """That of the conformance matrix in this precision."""
    way = WAYS.get(options["precision"], "sgd")
    return STRATEGIES[options["strategy"]].tolerances.get(way, PROPERTIES[way].tolerance)


def marked() -> list[Any]:
    """All strategies, each with what it needs; CI tries those of an engine that differ most."""
    rest = [pytest.mark.exhaustive]
    return [
        pytest.param(
            name,
            marks=[pytest.mark.needs(*row.launches[0].needs), *(rest if name not in IN_CI else [])],
        )
        for name, row in STRATEGIES.items()
    ]


@pytest.mark.slow
@pytest.mark.timeout(10 * SECONDS)
@pytest.mark.parametrize("strategy", marked())
def test_rows_train_resume_and_equal_one_process(folder, array, record_property, strategy) -> None:
    rows = array.of(strategy)
    failures = train_rows(folder, rows, strategy)
    largest = 0.0
    for number, row in rows.items():
        names = [f"{number}-{way}" for way in ("whole", "cut", "alone")]
        if {*names} & failures.keys():
            continue
        options = keywords(row, folder)
        uninterrupted, cut, alone = (folder / number / name for name in names)
        ours, logged = saved(uninterrupted), metrics(uninterrupted)
        resumed = saved(cut)
        assert ours.keys() == resumed.keys(), number
        # A run that is stopped has also logged its last step.
        gap, where = max(difference(ours, resumed), difference(logged, metrics(cut)))
        if gap > 0:
            failures[names[1]] = f"resumed, {where} differs by {gap:.1e}"
        model = {name: value for name, value in ours.items() if name.startswith("/model")}
        gap, where = max(difference(model, saved(alone)), difference(logged, metrics(alone)))
        bound = torch.inf if inexact(options) else tolerance(options)
        if gap > bound:
            failures[names[2]] = f"{where} differs by {gap:.1e} from one process: above {bound:.1e}"
        elif options["precision"] == "32-true" and not inexact(options):
            largest = max(largest, gap)
    record_property("pairs", [strategy, "rows", str(len(rows))])
    record_property("pairs", [strategy, "in float32", f"{largest:.1e}"])
    assert not failures, "\n\n".join(
        f"{name}: {text}\n{used(rows[name.partition('-')[0]])}" for name, text in failures.items()
    )


def used(row: Row) -> dict[str, Any]:
    """The values of a row that are not the first of their factor."""
    return {name: FACTORS[name][value] for name, value in sorted(row.items()) if value}
