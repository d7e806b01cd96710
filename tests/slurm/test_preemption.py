"""Jobs that are stopped: what is told from what, and that nothing is lost."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

import pytest

from .jobs import PLAIN, Job, Project, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
SMALL = ("--nodes=2", "--gpus-per-node=1")
# Random numbers too must go on where they were: dropout, and images that are shifted at random.
NOISY = (*PLAIN, "--data.shift=1", "--model=subject.Slow", "--model.dropout=0.2")


@pytest.fixture(scope="module")
def undisturbed(on_cluster: Project) -> Job:
    """Return a run of 66 steps on two nodes of one rank that nothing has stopped."""
    job = on_cluster.submit("train.sh", *NOISY, sbatch=SMALL)
    assert job.finish(200) == "COMPLETED after 0 restarts", job.log
    return job


def assert_same(job: Job, other: Job) -> None:
    ours, theirs = ((one.run / "metrics.csv").read_bytes() for one in (job, other))
    assert ours == theirs
    assert ours.count(b",loss,") == 66
    runs = {path.name for path in job.run.parent.glob(f"{job.run.name}*")}
    assert runs == {job.run.name}


def test_a_run_that_is_stopped_twice_equals_an_undisturbed_one(
    on_cluster: Project, undisturbed: Job
) -> None:
    first, second = random.randint(3, 25), random.randint(28, 40)  # noqa: S311 - not a secret
    print(f"stopped after steps {first} and {second}")
    job = on_cluster.submit("train.sh", *NOISY, "--model.seconds=[0.5, 0.5, 0]", sbatch=SMALL)
    job.reach(first)
    job.signal()
    until(lambda: job.has_requeued(1), "requeue")
    job.reach(second)
    on_cluster.cluster.slurm("scontrol", "requeue", job.id)
    assert job.finish(200) == "COMPLETED after 2 restarts", job.log
    assert f"{job.run.name}: SIGUSR1: the ranks are told to save" in job.log
    assert job.log.count("resumed from") == 2
    assert job.log.count("requeued (1 of at most 20)") == 1
    assert_same(job, undisturbed)


def test_a_job_goes_on_after_its_time_limit(on_cluster: Project, undisturbed: Job) -> None:
    # Its 66 steps last longer than the 110 s until SLURM looks for the limit that is set below.
    fit = (*NOISY, "--model.seconds=[3, 0]")
    sbatch = (*SMALL, "--signal=B:USR1@1")
    job = on_cluster.submit("train.sh", *fit, sbatch=sbatch, LAUNCH="torchrun")
    # Limited only now: a busy machine may take long until the first step.
    job.reach(1)
    hours, minutes, seconds = map(int, job.ask("RunTime").split(":"))
    limit = hours * 60 + minutes + (1 if seconds < 40 else 2)
    on_cluster.cluster.slurm("scontrol", "update", f"JobId={job.id}", f"TimeLimit={limit}")
    # Again, where a busy machine does not finish within the limit then either. SLURM looks for
    # limits every 30 s, and sends the signal up to that much earlier.
    assert re.fullmatch(r"COMPLETED after [1-9] restarts", job.finish(200)), job.log
    assert "saved after step" in job.log
    assert_same(job, undisturbed)


def test_requeues_are_bounded(on_cluster: Project) -> None:
    job = on_cluster.submit("train.sh", *NOISY, "--model.seconds=[1]", MAX_REQUEUES="1")
    job.reach(1)
    job.signal("TERM")
    job.signal()
    until(lambda: job.has_requeued(1), "requeue")
    job.reach(job.step() + 2)
    job.signal("USR2")  # as other launchers ask for
    assert job.finish(200) == "FAILED after 1 restarts"
    assert "; not requeued (MAX_REQUEUES=1). To resume: sbatch " in job.log.splitlines()[-1]


def has_started(job: Job, times: int) -> bool:
    return job.log.count("started") == times


def test_a_job_that_makes_no_step_is_not_requeued_for_ever(
    on_cluster: Project, tmp_path: Path
) -> None:
    """Its time limit is below the lead of its signal, which comes before the ranks are ready."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/bash\necho started\nexec sleep 600\n")
    python.chmod(0o755)
    job = on_cluster.submit("train.sh", *PLAIN, sbatch=("--nodes=1",), VENV=str(tmp_path))
    for start in (1, 2, 3):
        until(partial(has_started, job, start), lambda: job.log)
        job.signal()
    assert job.finish() == "FAILED after 2 restarts", job.log
    said = "not requeued (3 attempts without a step after step 0: --time leaves too little "
    assert said in job.log.splitlines()[-1]
    assert not list(on_cluster.folder.glob("runs/.requeues-*"))


def test_a_canceled_job_does_not_come_back(on_cluster: Project) -> None:
    job = on_cluster.submit("train.sh", *NOISY, "--model.seconds=[1]", sbatch=SMALL)
    job.reach(2)
    # Even one that is about to be requeued.
    job.signal()
    on_cluster.cluster.slurm("scancel", job.id)
    assert job.finish() == "CANCELLED after 0 restarts", job.log
    assert "requeued" not in job.log
    assert "saved after step" in job.log


def test_slurm_s_own_preemption_brings_a_job_back(on_cluster: Project, undisturbed: Job) -> None:
    job = on_cluster.submit("train.sh", *NOISY, "--model.seconds=[0.5, 0]", sbatch=SMALL)
    job.reach(5)
    urgent = on_cluster.cluster.slurm(
        *("sbatch", "--parsable", "--partition=urgent", "--exclusive", "--nodes=3"),
        *("--output=/dev/null", "--wrap=exit 0"),
    )
    assert job.finish(200) == "COMPLETED after 1 restarts", job.log
    assert Job(on_cluster, urgent).finish() == "COMPLETED after 0 restarts"
    assert_same(job, undisturbed)


def test_a_lost_node_brings_a_job_back(on_cluster: Project, undisturbed: Job) -> None:
    fit = (*NOISY, "--model.seconds=[0.5, 0]", "--trainer.checkpoint_every_n_steps=5")
    job = on_cluster.submit("train.sh", *fit, sbatch=(*SMALL, "--exclude=node1"))
    job.reach(12)
    assert on_cluster.cluster.control("kill", "node3").returncode == 0
    until(lambda: job.has_requeued(1), lambda: f"requeue:\n{job.log}")
    assert on_cluster.cluster.control("start", "node3").returncode == 0
    assert job.finish(200) == "COMPLETED after 1 restarts", job.log
    assert_same(job, undisturbed)
