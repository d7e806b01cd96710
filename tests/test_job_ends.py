"""How slurm/job.sh ends a job: its exit code, and whether the job is requeued."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rendering import ran

PREEMPTED = "JobId=1 JobName=fit PreemptTime=2026-01-01T00:00:00 Restarts=0"
CANCELED = "JobId=1 JobName=fit PreemptTime=None Restarts=0"


@dataclass
class Job:
    """What a job's script finds at its end.

    `outcome`: what the trainer wrote; `signal`: what the script was sent; `facts`: what SLURM says.
    """

    outcome: str = ""
    code: int = 0
    signal: str = ""
    restarts: int = 0
    facts: str = CANCELED
    variables: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def folder(project: Path, tmp_path: Path) -> Path:
    """Return a folder with the scripts, and a scontrol that records its arguments."""
    shutil.copytree(project / "slurm", tmp_path / "slurm")
    tools = tmp_path / "tools"
    tools.mkdir()
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    scontrol = tools / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$*" >> "$CALLS"\necho "$FACTS"\n', encoding="utf-8")
    scontrol.chmod(0o755)
    return tmp_path


def run(folder: Path, job: Job, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run lines of bash after the scripts of a job."""
    lines = ("source slurm/job.sh", *lines)
    slurm = {
        **{"SUBMIT_DIR": str(folder), "JOB_ID": "1", "JOB_NAME": "fit", "JOB_NUM_NODES": "1"},
        "RESTART_COUNT": str(job.restarts),
    }
    variables = {"ENVIRONMENT": "BATCH", "PATH": f"{folder}/tools:/usr/bin:/bin"}
    variables |= {"VENV": str(folder / "venv")}
    variables |= {"CALLS": str(folder / "calls"), "FACTS": job.facts} | job.variables
    variables |= {f"SLURM_{name}": value for name, value in slurm.items()}
    done = ran(["bash", "-c", "\n".join(lines)], cwd=folder, env=variables)
    assert "command not found" not in done.stderr
    return done


def conclude(folder: Path, job: Job) -> tuple[int, list[str]]:
    """Return the exit code of a job's script, and its calls of scontrol other than `show`."""
    calls = folder / "calls"
    calls.touch()
    done = run(
        folder,
        job,
        f"signal={job.signal}",
        f"if [ -n '{job.outcome}' ]; then echo '{job.outcome}' > \"$TRAINER_OUTCOME\"; fi",
        f"conclude {job.code}",
    )
    asked = calls.read_text(encoding="utf-8").splitlines()
    return done.returncode, [line for line in asked if " show " not in line]


REQUEUED = (0, ["requeue 1"])


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (Job("finished step 9"), (0, [])),
        # srun may end with 0 although a rank has failed.
        (Job("failed rank 1: ValueError: bad", 0), (1, [])),
        (Job("failed rank 1: ValueError: bad", 7), (7, [])),
        (Job("", 0), (1, [])),
        (Job("", 137), (137, [])),
        (Job("preempted SIGUSR1 step 5", 1, "USR1"), REQUEUED),
        (Job("preempted SIGUSR1 step 5", 1, "TERM"), (1, [])),
        (Job("", 1, "USR1"), REQUEUED),
        (Job("", 1, "TERM"), (1, [])),
        (Job("preempted SIGTERM step 5", 1, "TERM", facts=PREEMPTED), REQUEUED),
        (Job("preempted SIGTERM step 5", 1, "TERM"), (1, [])),
    ],
    ids=lambda value: (
        f"{value.outcome} {value.code} {value.signal}" if isinstance(value, Job) else None
    ),
)
def test_a_job_ends_as_its_run_has_ended(
    folder: Path, job: Job, expected: tuple[int, list[str]]
) -> None:
    assert conclude(folder, job) == expected


@pytest.mark.parametrize("restarts", range(4))
def test_a_job_is_requeued_at_most_max_requeues_times(folder: Path, restarts: int) -> None:
    stopped = Job("preempted SIGUSR1 step 5", 1, "USR1", restarts, variables={"MAX_REQUEUES": "2"})
    assert conclude(folder, stopped) == (REQUEUED if restarts < 2 else (1, []))


@pytest.mark.parametrize(
    ("facts", "why"), [("Requeue=0", "--no-requeue"), ("Requeue=1", "scontrol requeue: denied")]
)
def test_a_job_that_slurm_does_not_requeue_says_it_once(folder: Path, facts: str, why: str) -> None:
    refuses = '#!/bin/sh\n[ $1 != requeue ] || { echo denied; exit 1; }\necho " $FACTS "\n'
    (folder / "tools" / "scontrol").write_text(refuses, encoding="utf-8")
    done = run(folder, Job(facts=facts), "sleep() { :; }", "requeue 'preempted step 5'")
    resume = "To resume: sbatch slurm/train.sh … --trainer.run_name job-1"
    said = f"job-1: preempted step 5; not requeued ({why}). {resume}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    assert not list(folder.glob("runs/.requeues-*"))


def test_a_job_without_progress_is_not_requeued_forever(folder: Path) -> None:
    """Three attempts from the same step end it, whether or not its ranks were ready."""
    tried, kept = [], folder / "runs" / ".requeues-1"
    for step in (None, 4, 4, None, 7, 7, None, 7):
        outcome = "" if step is None else f"preempted SIGUSR1 step {step}"
        (folder / "calls").unlink(missing_ok=True)
        tried.append(conclude(folder, Job(outcome, 1, "USR1")) == REQUEUED)
    assert tried == [True] * 7 + [False]
    assert not kept.exists()
    kept.write_text("a[$(touch canary)] 1\n", encoding="utf-8")
    (folder / "calls").unlink()
    assert conclude(folder, Job("", 1, "USR1")) == REQUEUED
    assert kept.read_text(encoding="utf-8") == "0 1\n"
    assert not list(folder.rglob("canary"))


@pytest.mark.parametrize(
    ("restarts", "has_run", "resumed"),
    [
        (0, False, "runs/other"),
        (0, True, "runs/other"),
        (1, False, "runs/other"),
        (1, True, "auto"),
    ],
)
def test_the_user_s_resume_applies_until_the_job_has_a_run_of_its_own(
    folder: Path, restarts: int, has_run: bool, resumed: str
) -> None:
    root = "two words"
    if has_run:
        (folder / root / "job-1").mkdir(parents=True)
        (folder / root / "job-1" / "run.json").touch()
    command = f"set -- --trainer.resume runs/other --trainer.default_root_dir '{root}'"
    variables = {"BASH_ENV": str(folder / "given.sh")}
    (folder / "given.sh").write_text(command + "\n", encoding="utf-8")
    done = run(folder, Job(restarts=restarts, variables=variables), 'printf "%s\\n" "${fit[@]}"')
    words = done.stdout.splitlines()
    # Of an option that is given several times, the last one counts.
    given_values = [words[at + 1] for at, word in enumerate(words) if word == "--trainer.resume"]
    assert given_values[-1] == resumed


def test_a_job_reproduces_a_run_into_a_run_of_its_own(folder: Path) -> None:
    (folder / "given.sh").write_text("set -- reproduce 'runs/a run' --at 5\n", encoding="utf-8")
    variables = {"BASH_ENV": str(folder / "given.sh"), "SLURM_GPUS_ON_NODE": "2"}
    done = run(folder, Job(variables=variables), 'printf "%s\\n" "${fit[@]}"')
    options = ["--trainer.run_name", "job-1", "--trainer.resume", "auto"]
    assert done.stdout.splitlines()[1:] == ["reproduce", "runs/a run", *options, "--at", "5"]
    # It finishes, and says that a step differs.
    assert conclude(folder, Job("failed step 3, rank 0: data is the first", 1)) == (1, [])


def test_the_outcome_of_an_earlier_attempt_is_removed(folder: Path) -> None:
    (folder / "runs").mkdir()
    (folder / "runs" / ".outcome-1").write_text("finished step 9", encoding="utf-8")
    assert conclude(folder, Job("", 1)) == (1, [])


@pytest.mark.parametrize(
    ("container", "code", "expected"),
    [
        ("none", 0, "-m my_project report runs/job-1"),
        ("none", 1, "-m my_project report runs/job-1"),
        (
            *("apptainer", 0),
            "exec --bind {0} --pwd {0} fit.sif python -m my_project report runs/job-1",
        ),
        (
            *("pyxis", 1),
            "--nodes=1 --ntasks=1 --export=ALL --container-image=fit.sif "
            "--container-mounts={0}:{0} --container-workdir={0} --container-env=PYTHONPATH "
            "python -m my_project report runs/job-1",
        ),
    ],
)
def test_a_finished_job_writes_a_report_and_does_not_fail_with_it(
    folder: Path, container: str, code: int, expected: str
) -> None:
    """Only if the project still has the command; and its errors are not the run's outcome."""
    text = f'#!/bin/sh\necho "$*${{TRAINER_OUTCOME-unset}}" > "$CALLS.report"\nexit {code}\n'
    for path in ("venv/bin/python", "tools/apptainer", "tools/srun"):
        (folder / path).unlink(missing_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
        (folder / path).chmod(0o755)
    (folder / "runs" / "job-1").mkdir(parents=True)
    (folder / "runs" / "job-1" / "run.json").touch()
    job = Job("finished step 9", variables={"CONTAINER": container, "IMAGE": "fit.sif"})
    assert conclude(folder, job) == (0, [])
    assert not (folder / "calls.report").exists()
    (folder / "src" / "my_project_trainer" / "tools" / "report").mkdir(parents=True)
    assert conclude(folder, job) == (0, [])
    called = (folder / "calls.report").read_text(encoding="utf-8")
    assert called == expected.format(folder) + "\n"
    (folder / "calls.report").unlink()
    assert conclude(folder, Job("failed rank 1: ValueError: bad", 1))[0] == 1
    assert not (folder / "calls.report").exists()
