"""`slurm/sweep.sh`, and options that a shell would run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from rendering import ran

from .jobs import PLAIN, PYTHON, Job, Project, _environment, read_metrics, until, value

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
HOSTILE = (
    *("$(touch canary)", "`touch canary`", "x; touch canary #", "x && touch canary"),
    *("' $(touch canary) '", '" $(touch canary) "', "a[$(touch canary)]"),
    *("${IFS}touch${IFS}canary", "two  spaces and a *", "x\ntouch canary"),
)


def sweep(project: Project, *arguments: str, succeeds: bool = True, **extra: str) -> str:
    if succeeds:
        path = str(project.folder / "src")
        command = ("bash", "slurm/sweep.sh", *arguments)
        return project.cluster.slurm(*command, cwd=project.folder, PYTHONPATH=path, **extra)
    environment = _environment() | {"SLURM_CONF": project.cluster.slurm("printenv", "SLURM_CONF")}
    done = ran(["bash", "slurm/sweep.sh", *arguments], cwd=project.folder, env=environment)
    assert (done.returncode, done.stdout.count("Submitted")) == (2, 0)
    return done.stderr


def command(job: Job) -> list[str]:
    recorded: list[str] = json.loads((job.run / "run.json").read_text())["attempts"][-1]["command"]
    return recorded


def config(job: Job) -> dict[str, dict[str, object]]:
    loaded: dict[str, dict[str, object]] = yaml.safe_load((job.run / "config.yaml").read_text())
    return loaded


def test_each_line_of_the_grid_is_a_run(on_cluster: Project) -> None:
    grid = on_cluster.folder / "a grid.txt"
    grid.write_text(
        "# width and rate\n"
        "--model.width 4 --model.learning_rate 0.001\n"
        "\n"
        "--model.width 4 --model.learning_rate '0.01'  # it's \"high\" # \r\n"
        '  --model.width=12 "--trainer.default_root_dir=runs/two words"'
    )
    common = (*PLAIN, "--trainer.max_epochs=1", "--model.learning_rate=0.5")
    options = ("--at-once=2", "-N", "1", "a grid.txt", *common)
    printed = sweep(on_cluster, *options, SBATCH_EXPORT="NONE")
    assert printed.splitlines()[:3] == [
        "1: --model.width 4 --model.learning_rate 0.001",
        "2: --model.width 4 --model.learning_rate '0.01'  ",
        '3:   --model.width=12 "--trainer.default_root_dir=runs/two words"',
    ]
    # Tasks that begin later are not led astray by a file that has changed.
    grid.write_text("--model.width 99\n")
    array = printed.split()[-1]
    settings: dict[str, tuple[object, object]] = {}
    for task in "123":
        job = Job(on_cluster, f"{array}_{task}")
        assert job.ask("ArrayTaskThrottle") == "2"
        assert job.finish(200) == "COMPLETED after 0 restarts", job.log
        if task == "3":
            moved = job.run.parent / "two words" / job.run.name
            moved.rename(job.run)
        init_args = config(job)["model"]["init_args"]
        assert isinstance(init_args, dict)
        settings[task] = (init_args["width"], init_args["learning_rate"])
        assert read_metrics(job.run)[-1][0] == "22"
    assert settings == {"1": (4, 0.001), "2": (4, 0.01), "3": (12, 0.5)}


def test_tasks_share_a_study(on_cluster: Project) -> None:
    """By the file of a local sweep, with choices that a shell would run, and a requeued task."""
    if subprocess.run([PYTHON, "-c", "import optuna"], capture_output=True).returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("Optuna is missing: make engines")
    pace, file = on_cluster.folder / "pace", on_cluster.folder / "a study.yaml"
    pace.write_text("0.2")
    command = [*PLAIN, "--trainer.max_epochs=1", "--model=subject.Slow", f"--model.pace={pace}"]
    choices = list(HOSTILE[:3])
    content = {
        "command": ["--config=configs/digits.yaml", *command],
        "metric": "val_loss",
        "direction": "minimize",
        "search": {"model.note": {"choices": choices}},
    }
    file.write_text(yaml.safe_dump(content))
    array = sweep(on_cluster, "--at-once=2", "--nodes=1", file.name).split()[-1]
    first, second, third = (Job(on_cluster, f"{array}_{task}") for task in "123")
    trial = on_cluster.folder / "runs" / "sweep-a study" / "trial-0"
    until(lambda: len(read_metrics(trial)) > 3, lambda: first.log)
    owner = first if "trial-0:" in first.log else second
    owner.signal()
    pace.write_text("0")
    for job in (first, second, third):
        assert job.finish(200) == f"COMPLETED after {int(job is owner)} restarts", job.log
    notes = []
    for number in range(3):
        rows = read_metrics(trial.with_name(f"trial-{number}"))
        assert rows[-1][0] == "22"
        said = f"trial-{number}: val_loss {value(rows, 'val_loss'):.6g}"
        assert any(said in job.log.splitlines() for job in (first, second, third)), said
        loaded = yaml.safe_load((trial.with_name(f"trial-{number}") / "config.yaml").read_text())
        notes.append(loaded["model"]["init_args"]["note"])
    assert notes == choices
    assert not list(on_cluster.folder.parent.rglob("canary"))
    left = (str(PYTHON), "sweeps/sweep.py", file.name, "left")
    assert on_cluster.cluster.slurm(*left, cwd=on_cluster.folder, PYTHONPATH="src").startswith(
        "0\n"
    )


def test_more_lines_than_an_array_may_have_are_a_line(on_cluster: Project) -> None:
    grid, before = on_cluster.folder / "long.txt", {*on_cluster.folder.glob("runs/.sweep-*")}
    grid.write_text("--model.width 4\n" * 1001)
    words = "bash slurm/sweep.sh long.txt 2>&1 || true"
    printed = on_cluster.cluster.slurm("bash", "-c", words, cwd=on_cluster.folder)
    said = "sweep.sh: long.txt is 1001 tasks, and this cluster allows 1000 in an array: split it"
    assert printed.splitlines()[-1] == said
    grid.write_text("--model.width 4\n")
    sweep(on_cluster, "--test-only", "--nodes=1", "long.txt", *PLAIN)
    assert {*on_cluster.folder.glob("runs/.sweep-*")} == before


def test_a_stopped_task_brings_only_itself_back(on_cluster: Project) -> None:
    (on_cluster.folder / "slow.txt").write_text("--model.seconds=[0.5,0]\n" * 2)
    common = (*PLAIN, "--trainer.max_epochs=1", "--model=subject.Slow")
    array = sweep(on_cluster, "slow.txt", *common).split()[-1]
    first, last = (Job(on_cluster, f"{array}_{task}") for task in "12")
    first.reach(3)
    # SLURM gives the last task the id of the whole array.
    last.reach(3)
    last.signal()
    assert last.finish(200) == "COMPLETED after 1 restarts", last.log
    assert first.finish(200) == "COMPLETED after 0 restarts", first.log
    assert read_metrics(last.run)[-1][0] == "22"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nowhere.txt",), "sweep.sh: there is no file nowhere.txt: "),
        (("--time", "1", "grid"), "sweep.sh: there is no file grid: "),
        (("--at-once=a[$(touch canary)]", "g"), "sweep.sh: --at-once=a[$(touch canary)]: "),
        (("README.md",), "sweep.sh: README.md, line "),
        (("/dev/null",), "sweep.sh: there is no file /dev/null: "),
        (("--array=2-3%9", "two.txt"), "submit.sh: --array=2-3%9: the file has lines 1 to 2, and "),
        (("--gpus-per-node=0", "two.txt"), "submit.sh: two.txt, line 2: run_name='it s': use "),
    ],
)
def test_a_mistake_is_one_line(on_cluster: Project, arguments: tuple[str, ...], line: str) -> None:
    (on_cluster.folder / "two.txt").write_text("--model.width 4\n--trainer.run_name 'it s'\n")
    error = sweep(on_cluster, *arguments, succeeds=False)
    assert error.startswith(line)
    assert error.count("\n") == 1


def test_no_option_is_run(on_cluster: Project) -> None:
    """Every option reaches the trainer as it was given; the folder has such a name too."""
    notes = [f"--model.note={text}" for text in HOSTILE]
    fit = (*PLAIN, "--model=subject.Slow", "--trainer.max_epochs=1", *notes)
    submitted = [
        on_cluster.submit(script, *fit, sbatch=("--nodes=1",), **variables)
        for script, variables in (
            ("train.sh", {}),
            ("train.sh", {"LAUNCH": "torchrun"}),
            ("train.sh", {"LAUNCH": "mpirun"}),
            ("elastic.sh", {}),
        )
    ]
    for job in submitted:
        assert job.finish(200) == "COMPLETED after 0 restarts", job.log
        assert command(job)[-len(fit) :] == list(fit)

    # A file of lines holds no line break in an option.
    on_lines = [note for note in notes if "\n" not in note]
    line = " ".join("'" + note.replace("'", "'\"'\"'") + "'" for note in on_lines)
    (on_cluster.folder / "hostile.txt").write_text(line)
    task = sweep(on_cluster, "hostile.txt", *fit[: -len(notes)]).split()[-1] + "_1"
    job = Job(on_cluster, task)
    assert job.finish(200) == "COMPLETED after 0 restarts", job.log
    assert command(job)[-len(on_lines) :] == on_lines

    assert not list(on_cluster.folder.parent.rglob("canary"))
    assert not Path("canary").exists()


def test_an_unknown_option_ends_an_elastic_job_too(on_cluster: Project) -> None:
    fit = ("--trainer.accelerator=cpu", "--trainer.max_epoch=3")
    job = on_cluster.submit("elastic.sh", *fit, sbatch=("--nodes=2",))
    assert job.finish(200) == "FAILED after 0 restarts", job.log
    assert job.log.splitlines()[-1].startswith(f"{job.run.name}: failed error: ")
    assert "max_epoch" in job.log.splitlines()[-1]
