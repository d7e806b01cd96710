"""`sbatch slurm/elastic.sh`: a node is lost, the run goes on, the node is used again."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .jobs import PLAIN, PYTHON, Job, Project, difference, read_metrics, until, value

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
STEPS = 5 * 23
FIT = (
    *PLAIN,
    "--trainer.max_epochs=5",
    "--trainer.global_batch_size=60",
    "--trainer.checkpoint_every_n_steps=5",
    "--model=subject.Slow",
    "--model.dropout=0",
)


@pytest.fixture
def etcd(on_cluster: Project, tmp_path: Path) -> Iterator[str]:
    """Return host and port of a server of etcd that the nodes can reach."""
    conf = on_cluster.cluster.slurm("scontrol", "show", "config")
    match = re.search(r"SlurmctldHost\[0\]\s*= controller\(([0-9.]+)\.253\)", conf)
    assert match, conf
    host = f"{match.group(1)}.254"
    with socket.socket() as one, socket.socket() as other:
        for listener in one, other:
            listener.bind((host, 0))
        port, peer = one.getsockname()[1], other.getsockname()[1]
    url = f"http://{host}:{port}"
    command = ["etcd", "--enable-v2", "--data-dir", str(tmp_path / "etcd"), "--log-level=error"]
    command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
    command += [f"--listen-peer-urls=http://{host}:{peer}"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_up() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, port)) == 0

    until(is_up, "etcd")
    yield f"{host}:{port}"
    server.terminate()
    server.wait()


def layouts(job: Job) -> list[str]:
    """Return how many processes each attempt had."""
    return re.findall(r"layout: (\d) processes on \1 nodes", job.log)


def has_processes(job: Job, count: str) -> None:
    """Wait until its newest attempt, of so many processes, has gone on from a checkpoint."""

    def has() -> bool:
        # An attempt may end before it resumes: where a process' start takes long, for example.
        newest = job.log.rpartition("layout: ")[2]
        return newest.startswith(f"{count} processes on {count} nodes") and "resumed" in newest

    until(has, lambda: f"{count} processes:\n{job.log}\n{queue(job)}")


def queue(job: Job) -> str:
    slurm = job.project.cluster.slurm
    return f"{slurm('squeue', '--states=all')}\n{slurm('sinfo', '--Node', '--long')}"


def resumed(job: Job) -> list[int]:
    return [int(step) for step in re.findall(r"resumed from runs/\S+/step-(\d+)", job.log)]


def replacements(job: Job) -> list[Job]:
    """Return the jobs that stand in for its lost nodes."""
    listed = job.project.cluster.slurm(
        *("squeue", "--noheader", "--states=all", "--format=%i"),
        f"--name={job.run.name}-replacement",
    )
    return [Job(job.project, name) for name in listed.split()]


def replacement(job: Job) -> Job:
    """Wait for the one job that stands in for a lost node."""
    until(lambda: replacements(job), lambda: f"replacement:\n{job.log}")
    (only,) = replacements(job)
    return only


def test_a_lost_node_shrinks_a_run_and_grows_it_again(on_cluster: Project, etcd: str) -> None:
    assert subprocess.run([str(PYTHON), "-c", "import etcd"], check=False).returncode == 0
    alone = on_cluster.fit_alone("alone-elastic", *FIT)
    # Both take a GPU of each node, so that only a node that is back has room for more.
    sbatch = ("--nodes=3", "--gpus-per-node=fake:1")
    pace = on_cluster.folder / "pace"

    def train_at(seconds: float) -> None:
        """Let each step of both take so long from now on."""
        pace.with_suffix(".new").write_text(f"{seconds}")
        pace.with_suffix(".new").rename(pace)

    train_at(0.5)
    fit = (*FIT, "--model.pace=pace")
    jobs = [
        on_cluster.submit("elastic.sh", *fit, sbatch=sbatch),
        on_cluster.submit(
            *("elastic.sh", *fit), sbatch=sbatch, RDZV_BACKEND="etcd-v2", RDZV_ENDPOINT=etcd
        ),
    ]
    for job in jobs:
        job.reach(12)
    # However long SLURM takes, neither is at its end before the node is back.
    train_at(3)
    # The first node has the script on it; which of the others is lost is all the same.
    assert on_cluster.cluster.control("kill", "node3").returncode == 0
    killed = time.monotonic()
    for job in jobs:
        has_processes(job, "2")
        print(f"{job.run.name}: on two nodes {time.monotonic() - killed:.0f} s after the loss")
        assert resumed(job)[-1] >= 10
    for job in jobs:
        # SLURM has given the node up, and a job waits for another.
        assert replacement(job).ask("JobState") == "PENDING"
        assert replacement(job).ask("TresPerNode") == "gres:gpu:fake:1"
        job.reach(job.step() + 1)
    assert on_cluster.cluster.control("start", "node3").returncode == 0
    for job in jobs:
        has_processes(job, "3")
        assert replacement(job).ask("NodeList") == "node3"
        # Nothing was lost: whoever was there has saved before the newcomer was let in.
        assert "stopped by SIGTERM" in job.log
    # While nobody tells a job which nodes it has, it keeps them, and asks for no others.
    attempts = [layouts(job) for job in jobs]
    assert on_cluster.cluster.control("stop").returncode == 0
    time.sleep(15)
    assert on_cluster.cluster.control("start", "controller").returncode == 0
    for job in jobs:
        job.reach(job.step() + 2)
    assert [layouts(job) for job in jobs] == attempts
    train_at(0)
    for job in jobs:
        assert job.finish(200) == "COMPLETED after 0 restarts", job.log
        assert f"{job.run.name}: finished step {STEPS}\n" in job.log
        metrics = read_metrics(job.run)
        assert [int(row[0]) for row in metrics if row[2] == "loss"] == list(range(1, STEPS + 1))
        assert difference(metrics, alone, steps=20) < 1e-5
        assert difference(metrics, alone, steps=STEPS) < 1e-2
        assert abs(value(metrics, "val_accuracy") - value(alone, "val_accuracy")) < 0.01
        assert replacement(job).finish() in (
            "COMPLETED after 0 restarts",
            "CANCELLED after 0 restarts",
        )


def test_an_elastic_job_is_requeued_by_its_signal(on_cluster: Project) -> None:
    fit = (*FIT, "--trainer.max_epochs=1", "--model.seconds=[1, 0]")
    # Of one node alone it would begin, too, and once more with the other, if that is slow to start.
    sbatch = ("--nodes=2", "--gpus-per-node=1")
    job = on_cluster.submit("elastic.sh", *fit, sbatch=sbatch, NODES_MIN="2")
    job.reach(3)
    job.signal()
    assert job.finish(200) == "COMPLETED after 1 restarts", job.log
    assert job.log.count("resumed from") == 1
    steps = [str(step) for step in range(1, 24)]
    assert [row[0] for row in read_metrics(job.run) if row[2] == "loss"] == steps
    assert replacements(job) == []


@pytest.mark.parametrize("script", ["train.sh", "elastic.sh"])
def test_ranks_are_told_of_a_sigterm_to_the_batch_script(on_cluster: Project, script: str) -> None:
    fit = (*FIT, "--model.seconds=[1]", "--trainer.checkpoint_every_n_epochs=99")
    sbatch = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1")
    job = on_cluster.submit(script, *fit, sbatch=sbatch, NODES_MIN="1", SAVE_SECONDS="5")
    job.reach(2)
    job.signal("TERM")
    assert job.finish(200).startswith("FAILED after 0 restarts"), job.log
    assert f"{job.run.name}: preempted SIGUSR1 step " in job.log.splitlines()[-1]
    assert list(job.run.glob("checkpoints/step-*"))


def test_an_elastic_job_whose_code_raises_is_not_restarted_for_ever(on_cluster: Project) -> None:
    fit = (*PLAIN, "--model=subject.Failing")
    job = on_cluster.submit("elastic.sh", *fit, sbatch=("--nodes=2", "--gpus-per-node=1"))
    assert job.finish(200) == "FAILED after 0 restarts", job.log
    assert "ValueError: planted on purpose" in job.log
    last = job.log.splitlines()[-1]
    assert last.startswith(f"{job.run.name}: failed 3 failures without progress after step 0"), last
