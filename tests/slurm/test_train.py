"""`sbatch slurm/train.sh` on several nodes: the numbers, the ways to launch, and how it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .jobs import PLAIN, PYTHON, Job, Project, difference, read_metrics, search_path, value

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
NODES = ("--nodes=2", "--gpus-per-node=2")
SMALL = ("--nodes=2", "--gpus-per-node=1")


def test_ranks_on_two_nodes_train_as_one_process(on_cluster: Project) -> None:
    fit = (*PLAIN, "--model.dropout=0", "--trainer.max_epochs=6")
    tasks = on_cluster.submit("train.sh", *fit, sbatch=NODES)
    torchrun = on_cluster.submit("train.sh", *fit, sbatch=NODES, LAUNCH="torchrun")
    alone = on_cluster.fit_alone("alone", *fit)
    for job, source in (tasks, "srun"), (torchrun, "torchelastic"):
        assert job.finish(200) == "COMPLETED after 0 restarts", job.log
        layout = json.loads((job.run / "run.json").read_text())["attempts"][-1]["layout"]
        assert (layout["world_size"], layout["num_nodes"], layout["source"]) == (4, 2, source)
        metrics = read_metrics(job.run)
        assert len({row[0] for row in metrics}) == 6 * 22
        assert difference(metrics, alone, steps=20) < 1e-5
        # Sums in another order: Adam makes more of it with every step.
        assert difference(metrics, alone, steps=132) < 1e-2
        assert value(metrics, "val_accuracy") == value(alone, "val_accuracy") > 0.9
        assert f"{job.run.name}: finished step 132\n" in job.log
        logs = [f"rank-{rank}.log" for rank in (1, 2, 3)]
        assert sorted(path.name for path in (job.run / "logs").iterdir()) == logs
    assert (tasks.run / "metrics.csv").read_bytes() == (torchrun.run / "metrics.csv").read_bytes()
    # The record of a job is enough to run it again on as many nodes.
    again = on_cluster.submit(
        "train.sh", "reproduce", f"runs/{tasks.run.name}", "--at", "40", sbatch=NODES
    )
    assert again.finish(200) == "COMPLETED after 0 restarts", again.log
    assert again.run != tasks.run
    equal = r"reproduce: bit-equal: \d+ steps, 4 ranks, up to step 32;"
    assert re.search(equal, again.log), again.log
    # Neither the ports that were told nor the outcomes are left.
    assert not list(on_cluster.folder.rglob(".rendezvous-*"))
    assert not list(on_cluster.folder.rglob(".outcome-*"))


@pytest.mark.parametrize("launch", ["tasks", "torchrun"])
def test_a_job_whose_code_raises_ends_with_the_reason(on_cluster: Project, launch: str) -> None:
    fit = (*PLAIN, "--model=subject.Failing")
    job = on_cluster.submit("train.sh", *fit, sbatch=SMALL, LAUNCH=launch)
    assert job.finish(200) == "FAILED after 0 restarts", job.log
    assert job.ask("ExitCode") != "0:0"
    last = job.log.splitlines()[-1]
    assert last == f"{job.run.name}: failed rank 1: ValueError: planted on purpose"


def test_horovod_is_started_by_mpirun(on_cluster: Project) -> None:
    fit = (*PLAIN, "--model.dropout=0", "--trainer.max_epochs=1")
    plain_rate = "--trainer.strategy_options={scale_learning_rate: false}"
    of_job = ("--trainer.strategy=horovod", plain_rate)
    job = on_cluster.submit("train.sh", *fit, *of_job, sbatch=SMALL)
    alone = on_cluster.fit_alone("alone-horovod", *fit)
    assert job.finish(200) == "COMPLETED after 0 restarts", job.log
    record = json.loads((job.run / "run.json").read_text())["attempts"][-1]
    layout = record["layout"]
    assert (layout["world_size"], layout["num_nodes"], layout["source"]) == (2, 2, "openmpi")
    assert record["strategy"] == "horovod"
    assert difference(read_metrics(job.run), alone, steps=20) < 1e-5


@pytest.mark.parametrize("strategy", ["hsdp", "deepspeed_stage_3"])
def test_parameters_are_sharded_over_tasks(on_cluster: Project, strategy: str) -> None:
    fit = (*PLAIN, "--model.dropout=0", "--trainer.max_epochs=1")
    job = on_cluster.submit("train.sh", *fit, f"--trainer.strategy={strategy}", sbatch=NODES)
    alone = on_cluster.fit_alone(f"alone-{strategy}", *fit)
    assert job.finish(200) == "COMPLETED after 0 restarts", job.log
    record = json.loads((job.run / "run.json").read_text())["attempts"][-1]
    layout = record["layout"]
    assert (layout["world_size"], layout["num_nodes"], layout["source"]) == (4, 2, "srun")
    assert record["strategy"] == strategy
    metrics = read_metrics(job.run)
    assert difference(metrics, alone, steps=20) < 1e-5
    assert value(metrics, "val_accuracy") == pytest.approx(value(alone, "val_accuracy"), abs=1e-3)


def test_without_gpus_tasks_are_counted(on_cluster: Project) -> None:
    sbatch = ("--nodes=3", "--gpus-per-node=0", "--ntasks-per-node=1")
    fit = (*PLAIN, "--trainer.max_epochs=1", "--trainer.global_batch_size=60")
    job = on_cluster.submit("train.sh", *fit, sbatch=sbatch)
    assert job.finish(200) == "COMPLETED after 0 restarts", job.log
    layout = json.loads((job.run / "run.json").read_text())["attempts"][-1]["layout"]
    assert (layout["world_size"], layout["num_nodes"]) == (3, 3)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"VENV": "/nowhere"}, "my-project: there is no /nowhere/bin/python in "),
        ({"LAUNCH": "ssh"}, "my-project: LAUNCH=ssh is unknown; use tasks, torchrun or mpirun"),
        ({"CONTAINER": "docker"}, "my-project: CONTAINER=docker is unknown; use "),
        ({"MAX_REQUEUES": "a[$(touch canary)]"}, "my-project: MAX_REQUEUES=a[$(touch canary)]: "),
    ],
)
def test_a_wrong_setting_is_one_line(
    on_cluster: Project, variables: dict[str, str], line: str
) -> None:
    job = on_cluster.submit("train.sh", "--trainer.accelerator=cpu", sbatch=(), **variables)
    assert job.finish() == "FAILED after 0 restarts"
    assert job.log.startswith(line)
    assert job.log.count("\n") == 1
    assert not list(on_cluster.folder.parent.rglob("canary"))


def test_a_job_from_another_folder_says_where_to_submit(on_cluster: Project) -> None:
    script = str(on_cluster.folder / "slurm" / "train.sh")
    above = on_cluster.folder.parent
    name = on_cluster.cluster.slurm("sbatch", "--parsable", script, cwd=above)
    job = Job(Project(on_cluster.cluster, above), name)
    assert job.finish() == "FAILED after 0 restarts"
    assert job.log == ("train.sh: submit it in the project's folder: sbatch slurm/train.sh …\n")


def test_a_container_is_given_the_project_and_the_gpus(on_cluster: Project, tmp_path: Path) -> None:
    """A made-up apptainer writes down its options, and runs Python with the image's variables."""
    stub = tmp_path / "apptainer"
    stub.write_text(
        "#!/bin/bash\nexport PYTHONPATH=${APPTAINERENV_PYTHONPATH:-/app/src}\n"
        'printf "%s\\n" "PYTHONPATH=$PYTHONPATH" "$@" >> "$STUB_LOG"\n'
        'until [ "$1" = "an image.sif" ]; do shift; done\n'
        'shift 2\nexec "$STUB_PYTHON" "$@"\n'
    )
    stub.chmod(0o755)
    log = tmp_path / "log"
    fit = (*PLAIN, "--trainer.max_epochs=1")
    job = on_cluster.submit(
        *("train.sh", *fit),
        sbatch=("--nodes=1", "--gpus-per-node=1"),
        PATH=f"{tmp_path}:{search_path()}",
        STUB_LOG=str(log),
        STUB_PYTHON=str(PYTHON),
        CONTAINER="apptainer",
        IMAGE="an image.sif",
        MOUNTS="/data:/data",
        VENV="/nowhere",
    )
    assert job.finish(200) == "COMPLETED after 0 restarts", job.log
    folder = str(on_cluster.folder)
    expected = ["exec", "--bind", f"{folder},/data:/data", "--pwd", folder, "--nv"]
    expected += ["an image.sif", "python", "-m", "my_project", "fit"]
    words = log.read_text().splitlines()
    paths = {word for word in words if word.startswith("PYTHONPATH=")}
    assert paths == {f"PYTHONPATH={folder}/src"}  # not the code in the image
    assert expected in [words[start : start + len(expected)] for start in range(len(words))]
    assert words[-2:] == ["report", f"runs/job-{job.id}"]  # at its end, in the container too
