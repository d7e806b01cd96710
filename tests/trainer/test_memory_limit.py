"""A model that does not fit a rank is trained where its parameters are sharded."""

from pathlib import Path

import pytest
from tests.project import PACKAGE, missing, require, run

import memory_limit_subject as subject
from processes import at_root

pytestmark = pytest.mark.slow

RANKS = 4
# Parameters, gradients and Adam's two numbers take four times the parameters' 192 MiB.
LIMIT_MIB = 680
# By default glibc keeps what is freed for later, and the kernel counts it.
GIVEN_BACK = {
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
    "MALLOC_ARENA_MAX": "1",
}


def train(folder: Path, strategy: str, limit: int | None):
    """Two steps on ranks that may each take so many MiB beyond their imports."""
    arguments = [
        *("-m", PACKAGE, "fit", "--model", "memory_limit_subject.Wide"),
        *("--trainer.meta_device", "true", "--trainer.strategy", strategy),
        *("--trainer.accelerator", "cpu", "--trainer.devices", str(RANKS)),
        *("--trainer.max_steps", "2", "--trainer.log_every_n_steps", "1"),
        *("--trainer.loggers", "[csv]", "--trainer.default_root_dir", folder),
        *("--trainer.run_name", "run"),
    ]
    # What a rank may take counts from its imports on: they are to be its own.
    limited = {} if limit is None else GIVEN_BACK | {subject.LIMIT: str(limit)}
    return run(arguments, extra=at_root() | limited, fresh=limit is not None)


def losses(folder: Path) -> list[float]:
    """Of each step."""
    rows = (folder / "run" / "metrics.csv").read_text().splitlines()
    return [float(row.split(",")[3]) for row in rows if row.split(",")[2] == "loss"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What ddp comes to without a limit."""
    folder = tmp_path_factory.mktemp("enough")
    done = train(folder, "ddp", None)
    assert done.returncode == 0, done.stderr
    return losses(folder)


def test_it_does_not_fit_under_ddp(tmp_path):
    done = train(tmp_path, "ddp", LIMIT_MIB)
    assert done.returncode != 0
    assert "can't allocate memory" in done.stderr or "MemoryError" in done.stderr


@pytest.mark.parametrize(
    "strategy", ["fsdp", pytest.param("deepspeed_stage_3", marks=pytest.mark.exhaustive)]
)
def test_it_fits_where_parameters_are_sharded(tmp_path, expected, strategy):
    if strategy.startswith("deepspeed"):
        require(missing("deepspeed"))
    done = train(tmp_path, strategy, LIMIT_MIB)
    assert done.returncode == 0, done.stderr
    assert len(expected) == 2
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
