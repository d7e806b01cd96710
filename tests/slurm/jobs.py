"""A SLURM cluster on this machine, and the jobs of a rendered project on it."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rendering import ROOT, ran

SCRIPT = ROOT / "slurm" / "cluster.sh"
# Of a project with Horovod and python-etcd, as `make slurm` sets it up.
PYTHON = Path(os.environ.get("PROJECT_PYTHON", ROOT / "build" / "venv" / "bin" / "python"))
Rows = list[tuple[str, ...]]
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

# What is trained: as slow as a test needs at each start of a job, or at the pace that a file says,
# and failing on demand.
SUBJECT = """
import os
import time
from pathlib import Path

from my_project.tasks.image_classifier import ImageClassifier


class Slow(ImageClassifier):
    def __init__(
        self,
        seconds: list[float] = [0.0],
        pace: str = "",
        width: int = 8,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        note: str = "",
    ) -> None:
        super().__init__(width=width, dropout=dropout, learning_rate=learning_rate)
        start = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self.seconds = seconds[min(start, len(seconds) - 1)]
        self.pace = Path(pace) if pace else None

    def training_step(self, batch, batch_idx):
        time.sleep(float(self.pace.read_text()) if self.pace else self.seconds)
        return super().training_step(batch, batch_idx)


class Failing(ImageClassifier):
    def training_step(self, batch, batch_idx):
        rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
        if rank == "1" and batch_idx == 3:
            raise ValueError("planted on purpose")
        return super().training_step(batch, batch_idx)
"""
# Of all runs: every step in the log, and nothing that depends on the number of processes.
PLAIN = (
    "--trainer.accelerator=cpu",
    "--trainer.log_every_n_steps=1",
    "--trainer.max_epochs=3",
    "--data.shift=0",
)


def missing() -> str | None:
    """Why no cluster can be started here; None if one can."""
    commands = ("slurmctld", "slurmd", "munged", "ip", "nsenter")
    absent = [name for name in commands if not shutil.which(name, path=search_path())]
    if absent:
        return f"{', '.join(absent)} missing: apt-get install slurm-wlm munge iproute2 util-linux"
    if os.getuid() != 0:
        return "network namespaces need root"
    return None if PYTHON.exists() else f"there is no {PYTHON} (PROJECT_PYTHON): make demo"


def search_path() -> str:
    """Return PATH with the folders of daemons, which a user's may lack."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def until(
    condition: Callable[[], object], what: str | Callable[[], str], timeout: float = 600
) -> None:
    """Wait for a condition, asked ten times a second; `what` is asked when it does not come."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, (
            f"not within {timeout:g} s: {what if isinstance(what, str) else what()}"
        )
        time.sleep(0.1)


@dataclass(frozen=True)
class Cluster:
    folder: Path

    def control(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"SLURM_CLUSTER_DIR": str(self.folder)}
        return ran([str(SCRIPT), *arguments], env=variables, stdin=subprocess.DEVNULL)

    def slurm(self, *command: str, cwd: Path | None = None, **extra: str) -> str:
        """Return what a command of SLURM prints; it must succeed."""
        lines = self.control("env").stdout.splitlines()
        (link,) = (line.removeprefix("export SLURM_CONF=").strip() for line in lines)
        variables = _environment() | {"SLURM_CONF": link} | extra
        done = ran(command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()


def _environment() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "PYTEST_"))
    }
    return inherited | {"VENV": str(PYTHON.parent.parent), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Project:
    cluster: Cluster
    folder: Path

    def submit(self, script: str, *fit: str, sbatch: tuple[str, ...] = (), **extra: str) -> Job:
        """Submit one of its scripts with options of `fit`, and variables for the job."""
        command = ("sbatch", "--parsable", *sbatch, f"slurm/{script}", *fit)
        return Job(self, self.cluster.slurm(*command, cwd=self.folder, **extra))

    def fit_alone(self, name: str, *fit: str) -> Rows:
        """Train in one process, without SLURM, and return its metrics."""
        return fit_alone(self.folder, _environment(), name, *fit)


@dataclass(frozen=True)
class Job:
    """A job, or a task of an array, and its run."""

    project: Project
    id: str

    @property
    def run(self) -> Path:
        return self.project.folder / "runs" / f"job-{self.id.replace('_', '-')}"

    @property
    def log(self) -> str:
        path = self.project.folder / f"slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""

    def ask(self, name: str) -> str:
        """Return a fact that scontrol knows of it, such as JobState."""
        facts = self.project.cluster.slurm("scontrol", "--oneliner", "show", "job", self.id)
        match = re.search(rf"(?:^| ){name}=(\S*)", facts)
        assert match, (name, facts)
        return match.group(1)

    def finish(self, timeout: float = 600) -> str:
        """Wait for its end, and return in which state it is and how often it was requeued."""
        until(
            lambda: self.ask("JobState") in OVER,
            lambda: f"end of job {self.id}:\n{self.log}",
            timeout,
        )
        return f"{self.ask('JobState')} after {self.ask('Restarts')} restarts"

    def step(self) -> int:
        rows = read_metrics(self.run)
        return int(rows[-1][0]) if rows else 0

    def has_requeued(self, times: int) -> bool:
        return self.ask("Restarts") == str(times)

    def reach(self, step: int, timeout: float = 600) -> None:
        until(
            lambda: self.step() >= step,
            lambda: f"step {step} of job {self.id}:\n{self.log}",
            timeout,
        )

    def signal(self, name: str = "USR1") -> None:
        """Send what SLURM sends ahead of a time limit, or another signal, to the script only."""
        self.project.cluster.slurm("scancel", f"--signal={name}", "--batch", self.id)


def read_metrics(run: Path) -> Rows:
    """Return the rows of a run's metrics.csv, without its header; none where there is no file."""
    path = run / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


def fit_alone(folder: Path, environment: dict[str, str], name: str, *fit: str) -> Rows:
    """Train in one process of a project, and return its metrics."""
    options = ["--config=configs/digits.yaml", *fit, f"--trainer.run_name={name}"]
    command = [str(PYTHON), "-m", "my_project", "fit", *options]
    done = ran(command, cwd=folder, env=environment | {"PYTHONPATH": "src"})
    assert done.returncode == 0, done.stderr
    return read_metrics(folder / "runs" / name)


def difference(ours: Rows, theirs: Rows, steps: int) -> float:
    """Return by how much the losses of two runs differ at most within so many steps."""
    a, b = ([row for row in rows if row[2] == "loss"] for rows in (ours, theirs))
    same = [row[:2] for row in a] == [row[:2] for row in b]
    assert same, "the runs have not logged the same steps"
    pairs = zip(a[:steps], b[:steps], strict=True)
    return max(abs(float(x[3]) - float(y[3])) for x, y in pairs)


def value(rows: Rows, name: str) -> float:
    return float([row for row in rows if row[2] == name][-1][3])
