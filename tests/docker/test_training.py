"""Two ranks train in a container that may do nothing else, are stopped, and go on."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rendering import git
from slurm.jobs import until

from .conftest import CANARY, Built
from .engine import HARDENED, Engine

FIT = (
    *("fit", "--config", "configs/digits.yaml", "--trainer.devices", "2"),
    *("--trainer.log_every_n_steps", "1", "--trainer.resume", "auto"),
)
STEPS = 550  # 25 epochs of 22 batches
SIGTERM = 128 + 15


@pytest.fixture(scope="module")
def volume(engine: Engine) -> Iterator[str]:
    with engine.volume() as name:
        yield name


@pytest.fixture(scope="module")
def reference(
    engine: Engine, built: Built, volume: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a run to the end, copied out of its volume, and beside it what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    mounted = ("--volume", f"{volume}:/app/runs", "--env", f"SECRET_TOKEN={CANARY}-run")
    with engine.container(*mounted, built.image, *FIT, "--trainer.run_name", "whole") as container:
        code = engine.wait(container)
        (folder / "printed").write_text(engine.logs(container), encoding="utf-8")
        assert code == 0, engine.logs(container)
        engine("cp", f"{container}:/app/runs/whole", folder)
    return folder / "whole"


def metrics(run: Path, name: str) -> list[tuple[int, float]]:
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [(int(row["step"]), float(row["value"])) for row in rows if row["name"] == name]


def record(run: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))["attempts"][
        -1
    ]
    return read


def test_two_ranks_learn(reference: Path) -> None:
    step, accuracy = metrics(reference, "val_accuracy")[-1]
    assert step == STEPS
    assert accuracy > 0.95
    assert record(reference)["layout"]["world_size"] == 2


def test_the_run_knows_its_commit(built: Built, reference: Path) -> None:
    commit = git(built.project, "rev-parse", "HEAD").strip()
    assert record(reference)["git"] == {"commit": commit, "dirty": False}


def test_the_run_knows_its_template_and_locks_and_is_reproduced(
    engine: Engine, built: Built, volume: str, reference: Path
) -> None:
    attempt = record(reference)
    assert attempt["template"]["version"] == "0.1.0"
    assert {"cpu.txt", "torch.txt"} <= attempt["locks"].keys()
    mounted = ("--rm", *HARDENED, "--volume", f"{volume}:/app/runs")
    printed = engine("run", *mounted, built.image, "reproduce", "runs/whole", "--at", "22").stdout
    assert "reproduce: nothing differs from the record" in printed
    assert "reproduce: bit-equal: 5 steps, 2 ranks, up to step 16" in printed


def test_no_secret_of_its_environment_is_written(reference: Path) -> None:
    files = [path for path in reference.parent.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"run.json", "config.yaml", "metrics.csv", "printed", "rank-1.log"} <= names
    assert [path for path in files if path.suffix == ".safetensors"]
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


def test_stopped_by_docker_it_saves_and_goes_on_to_the_same_end(
    engine: Engine, built: Built, volume: str, reference: Path, tmp_path: Path
) -> None:
    mounted = ("--volume", f"{volume}:/app/runs", "--env", "TRAINER_OUTCOME=/app/runs/outcome")
    command = (*mounted, built.image, *FIT, "--trainer.run_name", "cut")
    began = time.monotonic()
    with engine.container(*command) as container:
        until(lambda: "epoch 3/25" in engine.logs(container), lambda: engine.logs(container))
        started = time.monotonic()
        engine("stop", "--time", "60", container)
        stopped = time.monotonic()
        assert engine.wait(container) == SIGTERM, engine.logs(container)
        engine("cp", f"{container}:/app/runs/cut", tmp_path / "before")
        engine("cp", f"{container}:/app/runs/outcome", tmp_path / "outcome")
    outcome = (tmp_path / "outcome").read_text(encoding="utf-8").split()
    assert outcome[:3] == ["preempted", "SIGTERM", "step"]
    assert 0 < int(outcome[3]) < STEPS
    # Docker kills after ten seconds by itself; where a start takes longer, the machine is busy.
    assert stopped - started < max(10, started - began)
    assert metrics(tmp_path / "before", "loss")[-1][0] == int(outcome[3])

    with engine.container(*command) as container:
        assert engine.wait(container) == 0, engine.logs(container)
        engine("cp", f"{container}:/app/runs/cut", tmp_path / "after")
    assert (tmp_path / "after/metrics.csv").read_bytes() == (reference / "metrics.csv").read_bytes()


def test_any_user_may_train(engine: Engine, built: Built) -> None:
    fit = ("fit", "--config", "configs/digits.yaml", "--trainer.max_epochs", "1")
    user = ("--rm", *HARDENED, "--tmpfs", "/app/runs", "--user", "12345:12345")
    assert "done after 22 steps" in engine("run", *user, built.image, *fit).stdout


def test_make_docker_test_trains(engine: Engine, built: Built, build_secrets: list[str]) -> None:
    said = engine.make(built.project, "docker-test", f"IMAGE={built.image}", *build_secrets)
    assert "done after 110 steps" in said
