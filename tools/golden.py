"""Records what the rows of the conformance matrix compute, and compares it after a refactoring.

``python tools/golden.py record FILE [-k EXPRESSION …]`` trains the rows that pytest's
arguments select, and adds each tensor of their results and checkpoints (type, shape and hash) and
their metrics to FILE; ``… compare FILE …`` trains them again: all must be equal, to the last bit.
It runs on a rendered project, in its environment: RENDERED_PROJECT, or that of `make project`.
Kernels of other CPUs and other versions of torch round otherwise, so FILE is not committed.
"""

import hashlib
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parent / "build" / "test" / "my-project"
# A worker of the matrix trains for this test; it needs no reference beside it.
TEST = "tests/conformance/test_conformance.py::test_resumes_to_the_last_bit"
# Rows whose sums depend on what arrives first, with the reason: of these only names, types and
# shapes are compared.
LOOSE: dict[str, str] = {}

Found = dict[str, str]


def tensors(path: Path, label: str) -> Found:
    """Type, shape and hash of each tensor of a file."""
    return {
        f"{label}: {key}": f"{value.dtype} {list(value.shape)} {_hash(_bytes(value))}"
        for key, value in load_file(path).items()
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def trained(folder: Path, way: str) -> Found:
    """What a row's worker has left of one way: results, metrics, and the newest checkpoint."""
    results: Found = {}
    for name in (way, f"{way}-stopped", f"{way}-resumed"):
        results |= tensors(folder / f"{name}.safetensors", name)
    run_name = way.replace(", ", "-").replace(" ", "-")
    for run in (folder / "runs" / run_name, folder / "runs" / f"{run_name}-interrupted"):
        # Times are in speed.csv.
        results[f"{run.name}/metrics.csv"] = f"metrics {_hash((run / 'metrics.csv').read_bytes())}"
        newest = max((run / "checkpoints").iterdir())
        for path in sorted(newest.rglob("*")):
            label = f"{run.name}/{newest.name}/{path.relative_to(newest)}"
            results[label] = "file"
            results |= tensors(path, label) if path.suffix == ".safetensors" else {}
    return results


def differences(row: str, old: Found, new: Found) -> list[str]:
    """A line for each thing that is not equal."""
    if row.split(" | ")[0] in LOOSE:
        old, new = ({key: value.rpartition(" ")[0] for key, value in d.items()} for d in (old, new))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    lines = [f"{row} | {key}: {old.get(key)} became {new.get(key)}" for key in keys]
    return lines if old else [f"{row}: not recorded"]


class Golden:
    """Receives the rows from all of pytest's workers, and records or compares each."""

    def __init__(self, file: Path, records: bool) -> None:
        self.file, self.records = file, records
        lines = file.read_text().splitlines() if file.exists() else []
        self.before: dict[str, Found] = dict(map(json.loads, lines))
        self.rows = 0
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: list[tuple[str, Any]] = report.user_properties if report.when == "call" else []
        for row, results in properties:
            self.rows += 1
            if self.records:
                with self.file.open("a") as file:
                    print(json.dumps([row, results]), file=file)
            else:
                self.lines += differences(row, self.before.get(row, {}), results)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.lines:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        verb = "recorded in" if self.records else f"compared with the {len(self.before)} of"
        for line in [*self.lines, f"{self.rows} rows {verb} {self.file}"]:
            terminalreporter.line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, Any, Any]:
    """After a test of a row, note what its worker has left."""
    outcome = yield
    name, number, way = (item.callspec.params[key] for key in ("name", "number", "way"))
    results = trained(item.funcargs["results"](name, number), way)
    item.user_properties.append((f"{name} | {number} | {way}", results))
    return outcome


def main(verb: str, file: str, *arguments: str) -> int:
    """Run the test of each row in the project."""
    golden = Golden(Path(file).resolve(), records={"record": True, "compare": False}[verb])
    project = Path(os.environ.get("RENDERED_PROJECT") or DEFAULT).resolve()
    sys.path[:0] = folders = [str(project / "src"), str(project), str(HERE)]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.chdir(project)
    how = ["-p", "golden", "-p", "no:cacheprovider", "-q"]
    return pytest.main([*how, TEST, *arguments], plugins=[golden])


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
