"""How runs are started: strategies and launchers, and the attempts that they start."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.launch import reports
from tests.conformance.horovod_rows import horovodrun
from tests.project import PACKAGE, environment, free_port, missing, mpirun

from processes import at_root
from tests import fork_server

EVERY = 5  # steps between two checkpoints
EPOCHS = 8
LAST = 64  # steps: 96 samples an epoch, 12 a step
# Longer than anything takes here on a busy machine; a fault that hangs a rank shortens it.
TIMEOUT = 90.0


class Launcher(Protocol):
    """What starts ranks, as a ``subprocess.Popen`` is."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


@dataclass
class Attempt:
    """One start of a run: what a fault may change before it, and what it finds once it runs.

    Args:
        way: how it is started.
        folder: its working directory, which has the run directory ``run``.
        log: file that gets its output.
        dice: random numbers of the journey.
        resume: ``--trainer.resume``.
        timeout: ``timeout_seconds`` of the strategy, where it has several processes.
        options: more arguments of ``fit``.
        variables: more environment variables.
        fresh: start new interpreters: a fork server ends a process whose parent was killed.
        may_lose: steps that any fault may lose.
    """

    way: "Way"
    folder: Path
    log: Path
    dice: random.Random
    resume: str = "auto"
    timeout: float = TIMEOUT
    options: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    may_lose: float = 0.0
    launchers: list[Launcher] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def ranks(self) -> list[int]:
        return self.way.ranks(self)

    def a_rank(self) -> int:
        """Process of any rank; IndexError: none runs."""
        return self.dice.choice(self.ranks())

    def a_launcher(self) -> int:
        """Process of any launcher that runs; IndexError: none does."""
        return self.dice.choice([popen.pid for popen in self.launchers if popen.poll() is None])

    def order(self, what: str) -> None:
        """Have a rank do something in its next step: a name of ``subject.ORDERS``."""
        number = self.dice.choice(range(len(self.ranks())))
        new = self.folder / "order"
        new.write_text(what)
        new.rename(self.folder / f"order-to-rank-{number}")

    def checkpoints(self) -> list[Path]:
        checkpoints: list[Path] = run_directory.complete(self.run / "checkpoints")
        return checkpoints

    def steps(self) -> int:
        """The newest step in the log of metrics."""
        with suppress(OSError, ValueError, IndexError):
            text = (self.run / "metrics.csv").read_text()
            return int(text[: text.rindex("\n")].rpartition("\n")[2].split(",")[0])
        return 0

    def ended(self) -> str:
        """The run's own line of how it ended, or an empty text."""
        with suppress(OSError):
            return (self.folder / "outcome").read_text().strip()
        return ""

    def code(self) -> int | None:
        """Exit code of the launchers; ``None`` while one runs."""
        codes = [launcher.poll() for launcher in self.launchers]
        return None if None in codes else min(codes, key=lambda code: abs(code or 0))

    def printed(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass(frozen=True)
class Way:
    """A strategy on two devices, started by the trainer's own launcher.

    Args:
        strategy: its name.
        options: of the strategy.
        engine: package that must be installed.
        processes: ranks.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "torch"
    processes: int = 2

    # What the thing that starts the ranks is called, whether its ranks can save after a signal to
    # it, and whether it restarts them itself.
    launcher = "launcher"
    saves = True
    restarts = False
    # Whether its runs may be on a file system that only this process, and those below it, see.
    has_own_disk = True

    def missing(self) -> str | None:
        """Why it cannot be taken here, or ``None``."""
        return None if self.engine == "torch" else missing(self.engine)

    def fit(self, attempt: Attempt, devices: int | None = None) -> list[str]:
        """The package's command, without Python."""
        options = dict(self.options)
        if self.processes > 1:
            options["timeout_seconds"] = attempt.timeout
        return [
            *("-m", PACKAGE, "fit", "--model", "soak.subject.Model"),
            *("--trainer.strategy", self.strategy),
            *("--trainer.strategy_options", json.dumps(options)),
            *("--trainer.devices", str(devices or (1 if self.strategy in ALONE else 2))),
            *("--trainer.accelerator", "cpu", "--trainer.max_epochs", str(EPOCHS)),
            *("--trainer.global_batch_size", "12", "--trainer.log_every_n_steps", "1"),
            *("--trainer.checkpoint_every_n_steps", str(EVERY), "--trainer.loggers", "[csv]"),
            *("--trainer.default_root_dir", str(attempt.folder), "--trainer.run_name", "run"),
            *("--trainer.resume", attempt.resume, "--trainer.enable_progress_bar", "false"),
            *attempt.options,
        ]

    def begin(self, attempt: Attempt) -> None:
        """Start an attempt, and set its launchers."""
        attempt.launchers = [self.start(attempt, self.fit(attempt))]

    def start(
        self, attempt: Attempt, arguments: list[str], by: Callable[[], list[str]] = list
    ) -> "subprocess.Popen[Any]":
        """Start Python with arguments as the leader of a process group, with output to the log."""
        extra = {**at_root(), reports.OUTCOME: str(attempt.folder / "outcome")}
        extra |= {"TRAINER_SAVE_SECONDS": "30", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [*by(), sys.executable, *arguments]
        with attempt.log.open("a") as log:
            options: Any = {
                "cwd": attempt.folder,
                "env": environment(extra | attempt.variables),
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": log,
                "process_group": 0,
            }
            if attempt.fresh or len(command) > 1 + len(arguments):
                return subprocess.Popen(command, **options)
            engine = self.engine if self.engine in ("deepspeed", "fairscale") else "torch"
            return fork_server.ForkedProcess(command, engine=engine, **options)

    def ranks(self, attempt: Attempt) -> list[int]:
        """Processes of the ranks that have begun to train."""
        files = sorted(attempt.folder.glob("process-of-rank-*"))
        processes = [int(path.read_text()) for path in files]
        return [process for process in processes if psutil.pid_exists(process)]

    def left(self, attempt: Attempt) -> list[str]:
        """Processes that still work in the folder of an attempt."""
        return [f"{process.pid} {process.name()}" for process in processes_in(attempt.folder)]

    def stop(self, attempt: Attempt) -> None:
        """End all processes of an attempt at once."""
        for launcher in attempt.launchers:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
        for process in processes_in(attempt.folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for launcher in attempt.launchers:
            launcher.wait()


ALONE = ("single_device",)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes that work in a folder."""
    processes = psutil.process_iter(["cwd"])
    return [process for process in processes if (process.info["cwd"] or "").startswith(str(folder))]


class Torchrun(Way):
    """One agent of torchrun with two ranks."""

    launcher = "agent"

    def begin(self, attempt: Attempt) -> None:
        attempt.launchers = [self.agent(attempt, "--standalone", "--nproc-per-node=2")]

    def agent(
        self, attempt: Attempt, *options: str, by: Callable[[], list[str]] = list
    ) -> "subprocess.Popen[Any]":
        signals = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        arguments = ["-m", "torch.distributed.run", signals, "--shutdown-timeout=30", *options]
        return self.start(attempt, [*arguments, *self.fit(attempt, int(options[-1][-1]))], by)


class Elastic(Torchrun):
    """As slurm/elastic.sh: 1 to 4 nodes, here agents on one machine, which restart their ranks."""

    restarts = True
    saves = False  # an agent restarts ranks that have saved

    def begin(self, attempt: Attempt) -> None:
        port = free_port()
        attempt.launchers = []
        for number in range(self.processes):
            # On a busy machine agents are late, and would be taken for lost as soon as there.
            conf = f"--rdzv-conf=last_call_timeout=10,is_host={'false' if number else 'true'}"
            options = ("--nnodes=1:4", "--max-restarts=100", "--rdzv-backend=c10d")
            where = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=soak")
            agent = self.agent(attempt, *options, *where, conf, "--nproc-per-node=1")
            attempt.launchers.append(agent)
            time.sleep(0.2)


class Mpirun(Way):
    """Two ranks by Open MPI."""

    saves = False  # it kills ranks a second after it has told them to end, or another has ended

    def begin(self, attempt: Attempt) -> None:
        fit = self.fit(attempt, 2)
        attempt.launchers = [self.start(attempt, fit, lambda: mpirun(2))]


class Horovodrun(Way):
    """Two ranks by Horovod's own launcher."""

    saves = False  # as mpirun

    def begin(self, attempt: Attempt) -> None:
        fit = self.fit(attempt, 1)
        attempt.launchers = [self.start(attempt, fit, lambda: horovodrun(2))]


WAYS: dict[str, Way] = {
    "single_device": Way("single_device", processes=1),
    "dp": Way("dp", processes=1),
    **{name: Way(name) for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_zero1", "fsdp", "hsdp")},
    "ddp_sharded": Way("ddp_sharded", engine="fairscale"),
    **{
        f"deepspeed_stage_{stage}": Way(f"deepspeed_stage_{stage}", engine="deepspeed")
        for stage in (1, 2, 3)
    },
    "sequential": Way("sequential"),
    "tensor_parallel": Way("tensor_parallel"),
    "mesh": Way("mesh", {"data": 1, "shard": -1, "tensor": 2}),
    "parameter_server": Way("parameter_server", {"max_staleness": 0}),
    "horovod by horovodrun": Horovodrun("horovod", {"scale_learning_rate": False}, "horovod"),
    "ddp by mpirun": Mpirun("ddp", engine="mpirun"),
    "fsdp by mpirun": Mpirun("fsdp", engine="mpirun"),
    "ddp by torchrun": Torchrun("ddp"),
    "fsdp by torchrun": Torchrun("fsdp"),
    "deepspeed_stage_2 by torchrun": Torchrun("deepspeed_stage_2", engine="deepspeed"),
    "ddp by elastic torchrun": Elastic("ddp"),
    "fsdp by elastic torchrun": Elastic("fsdp", processes=3),
}
