"""Jobs of the rendered project on a SLURM cluster on this machine, and what strikes them there."""

import atexit
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import psutil
from tests.project import ROOT, environment

from processes import at_root

from .faults import Strike, fault
from .journal import Failed
from .ways import Attempt, Way, processes_in

_CLUSTER = Path(__file__).parents[2] / "slurm" / "cluster.sh"
# Three nodes of a job, of which it takes two: a fault of a node concerns no other journey.
_NODES = ("node1,node2,node3", "node4,node5,node6")
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL"}
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# In which the controller answers again.
_SECONDS_AWAY = 40.0
# In which ranks save and a lost node is noticed.
_SECONDS_TO_REQUEUE = 120.0
_free: "queue.Queue[str]" = queue.Queue()
_lock = threading.Lock()
# Of before the soak has mounts of its own: namespaces that are made there have files in /run.
_MOUNTS = Path("/proc/self/ns/mnt")
_mounts = os.open(_MOUNTS, os.O_RDONLY) if _MOUNTS.exists() else -1


def missing() -> str | None:
    commands = ("slurmctld", "slurmd", "munged", "ip", "nsenter")
    if absent := [name for name in commands if not shutil.which(name, path=_PATH)]:
        return f"{absent[0]} is not installed: apt install slurm-wlm munge iproute2 util-linux"
    return "network namespaces need root" if os.getuid() else None


@cache
def _folder() -> Path:
    """Start the cluster of this process, which ends with it: its folder."""
    folder = Path(tempfile.mkdtemp(prefix="soak-slurm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(_control, "down", folder=folder / "slurm")
    _control("up", str(3 * len(_NODES)), "2", folder=folder / "slurm")
    for nodes in _NODES:
        _free.put(nodes)
    return folder / "slurm"


def _control(*arguments: str, folder: Path | None = None) -> None:
    """Call cluster.sh."""
    env = {**os.environ, "SLURM_CLUSTER_DIR": str(folder or _folder())}
    command = ["nsenter", f"--mount=/proc/{os.getpid()}/fd/{_mounts}", str(_CLUSTER), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"cluster.sh {' '.join(arguments)}: {done.stderr}")


def _slurm(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    """What a command of SLURM prints; IndexError: it fails, as the job has ended."""
    conf = {"SLURM_CONF": str(_folder() / "slurm.conf")}
    deadline = time.monotonic() + _SECONDS_AWAY
    while True:
        env = environment(conf | variables)
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300
        )
        if done.returncode == 0:
            return done.stdout.strip()
        if "ontact slurm controller" not in done.stderr or time.monotonic() > deadline:
            raise IndexError(f"{command}: {done.stderr}")
        time.sleep(1)


class Job:
    """A job as a launcher of an attempt: its process is that of the batch script."""

    def __init__(self, number: str, nodes: str, attempt: Attempt) -> None:
        self.number, self.nodes, self._attempt = number, nodes, attempt
        self._asked, self._code = 0.0, -1

    def ask(self, name: str) -> str:
        """A fact that scontrol knows."""
        facts = _slurm("scontrol", "--oneliner", "show", "job", self.number)
        match = re.search(rf"(?:^| ){name}=(\S*)", facts)
        return match[1] if match else ""

    def hosts(self) -> list[str]:
        return _slurm("scontrol", "show", "hostnames", self.ask("NodeList")).split()

    @property
    def pid(self) -> int:
        return _named(self._attempt, "slurm_script")[0]

    def poll(self) -> int | None:
        """Its exit code; asked for once a second."""
        if self._code < 0 and time.monotonic() > self._asked + 1:
            if self.ask("JobState") in _OVER:
                self._code = int(self.ask("ExitCode").split(":")[0]) or int(
                    self.ask("JobState") != "COMPLETED"
                )
                pattern = rf"^job-{self.number}: ((?:finished|preempted|failed) .*)$"
                if outcomes := re.findall(pattern, self._attempt.printed(), re.MULTILINE):
                    (self._attempt.folder / "outcome").write_text(outcomes[-1])
            self._asked = time.monotonic()
        return None if self._code < 0 else self._code

    def wait(self) -> int:
        return self._code


class OnCluster(Way):
    """slurm/train.sh on two nodes: one step of srun."""

    script = "train.sh"
    launcher = "script"
    saves = False  # as SLURM requeues
    has_own_disk = False  # which the nodes, where it is not mounted, would not see

    def missing(self) -> str | None:
        return missing() or super().missing()

    def begin(self, attempt: Attempt) -> None:
        with _lock:
            _folder()
        if not (attempt.folder / "slurm").exists():
            (attempt.folder / "slurm").symlink_to(ROOT / "slurm")
            (attempt.folder / "cpu.yaml").write_text("trainer: {accelerator: cpu}\n")
        nodes = _free.get()
        others = ",".join(node for node in _NODES if node != nodes)
        where = [f"--exclude={others}", "--nodes=2", "--gpus-per-node=1", f"--output={attempt.log}"]
        # Steps take long enough for commands of SLURM to strike between two of them.
        fit = [*self.fit(attempt, 1)[3:], "--model.seconds", "0.15"]
        variables = {
            **(at_root() | attempt.variables),
            **{"VENV": sys.prefix, "CONFIG": "cpu.yaml", "SAVE_SECONDS": "30"},
            "REPLACEMENT_OPTIONS": f"--exclude={others}",
        }
        command = ("sbatch", "--parsable", *where, f"slurm/{self.script}", *fit)
        number = _slurm(*command, cwd=attempt.folder, **variables)
        attempt.launchers = [Job(number, nodes, attempt)]

    def left(self, attempt: Attempt) -> list[str]:
        return [*super().left(attempt), *_jobs(attempt)]

    def stop(self, attempt: Attempt) -> None:
        """End its jobs, and whatever they have left."""
        if numbers := [line.split()[0] for line in _jobs(attempt)]:
            _slurm("scancel", "--signal=KILL", "--full", *numbers)
            _slurm("scancel", *numbers)
        for process in processes_in(attempt.folder):
            process.kill()
        for job in attempt.launchers:
            if isinstance(job, Job) and job.nodes:
                _free.put(job.nodes)
                job.nodes = ""


class ElasticOnCluster(OnCluster):
    """slurm/elastic.sh on two nodes: an agent of torchrun on each."""

    script = "elastic.sh"


def _jobs(attempt: Attempt) -> list[str]:
    """Jobs of its folder that have not ended: number, name and state."""
    lines = _slurm("squeue", "--noheader", "--format=%i %j %T %Z").splitlines()
    return [line for line in lines if line.endswith(f" {attempt.folder}")]


def _job(attempt: Attempt) -> Job:
    (job,) = attempt.launchers
    assert isinstance(job, Job)
    return job


def _named(attempt: Attempt, name: str) -> list[int]:
    """Processes whose command has a name."""
    pairs = [(process, process.cmdline()) for process in processes_in(attempt.folder)]
    return [pid.pid for pid, words in pairs if any(name in Path(word).name for word in words[:2])]


# --- faults --------------------------------------------------------------------------------------


def _is_here(way: Way) -> bool:
    return isinstance(way, OnCluster)


def _is_elastic(way: Way) -> bool:
    return isinstance(way, ElasticOnCluster)


on_cluster = partial(fault, ends="any", fits=_is_here)


def _requeued(name: str, strikes: Callable[[Attempt], Callable[[], object] | None]) -> None:
    """A fault after which the job is requeued; it may return what undoes it, once the job ended."""

    @on_cluster(name)
    def strike(attempt: Attempt) -> Strike:
        yield
        job = _job(attempt)
        host, restarts = job.ask("BatchHost"), job.ask("Restarts")
        undo = strikes(attempt)
        try:
            deadline = time.monotonic() + _SECONDS_TO_REQUEUE
            # An elastic job goes on without a node, unless that runs its script.
            is_lost = undo is None or not _is_elastic(attempt.way) or host not in job.hosts()
            while is_lost and job.ask("Restarts") == restarts:
                if attempt.ended().startswith("finished"):
                    break
                if attempt.code() is not None or time.monotonic() > deadline:
                    raise Failed("lost", f"it was not requeued: {attempt.printed()[-3000:]}")
                time.sleep(0.2)
            yield
        finally:
            if undo is not None:
                undo()


def _tell(*command: str) -> None:
    _slurm(*command)


def _by_scancel(*options: str) -> None:
    _requeued(
        f"scancel {' '.join(options)}",
        lambda attempt: _tell("scancel", *options, _job(attempt).number),
    )


def _node_down(attempt: Attempt) -> Callable[[], object]:
    update = ("scontrol", "update", f"nodename={attempt.dice.choice(_job(attempt).hosts())}")
    _slurm(*update, "state=down", "reason=soak")

    def resume() -> None:
        with suppress(IndexError):  # it has come back by itself
            _slurm(*update, "state=resume")

    return resume


def _node_killed(attempt: Attempt) -> Callable[[], object]:
    node = attempt.dice.choice(_job(attempt).hosts())
    _control("kill", node)
    return partial(_control, "start", node)


def _daemon_killed(attempt: Attempt) -> Callable[[], object]:
    """Its tasks go on, and SLURM takes the node for lost."""
    node = attempt.dice.choice(_job(attempt).hosts())
    os.kill(int((_folder() / "pid" / node).read_text().split()[0]), signal.SIGKILL)
    return partial(_control, "start", node)


_by_scancel("--signal=USR1")
_by_scancel("--signal=USR1", "--batch")
_requeued("scontrol requeue", lambda attempt: _tell("scontrol", "requeue", _job(attempt).number))
_requeued("a node down", _node_down)
_requeued("a node killed", _node_killed)
_requeued("slurmd killed", _daemon_killed)


@on_cluster("scancel --signal=TERM")
def terminate(attempt: Attempt) -> Strike:
    yield
    _slurm("scancel", "--signal=TERM", _job(attempt).number)


@on_cluster("the controller away")
def stop_controller(attempt: Attempt) -> Strike:
    yield
    with _lock:
        _control("stop")
        time.sleep(attempt.dice.uniform(1, 10))
        _control("start", "controller")


def _kill(name: str, fits: Callable[[Way], bool], find: Callable[[Attempt], list[int]]) -> None:
    @on_cluster(f"SIGKILL to {name}", fits=fits)
    def strike(attempt: Attempt) -> Strike:
        yield
        os.kill(attempt.dice.choice(find(attempt)), signal.SIGKILL)


def _parents(name: str, attempt: Attempt) -> list[int]:
    """Processes above a rank that have a name."""
    parents = psutil.Process(attempt.a_rank()).parents()
    return [parent.pid for parent in parents if parent.name().startswith(name)]


_kill("srun", _is_here, lambda attempt: _named(attempt, "srun"))
_kill("the batch script", _is_here, lambda attempt: _named(attempt, "slurm_script"))
_kill("slurmstepd", _is_here, partial(_parents, "slurmstepd"))
_kill("a node's agent", _is_elastic, partial(_parents, "python"))

WAYS: dict[str, Way] = {
    "ddp by srun": OnCluster("ddp"),
    "fsdp by srun": OnCluster("fsdp"),
    "ddp by elastic srun": ElasticOnCluster("ddp"),
}
