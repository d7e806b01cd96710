"""`slurm/submit.sh`: what it refuses before a job waits in the queue, and what settings.sh adds."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rendering import ran

from .jobs import PYTHON, Job, Project, _environment, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
CPU = "--trainer.accelerator=cpu"


def submit(project: Project, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    link = project.cluster.slurm("printenv", "SLURM_CONF")
    variables = _environment() | {"SLURM_CONF": link} | extra
    command = ["bash", "slurm/submit.sh", *words]
    return ran(command, cwd=project.folder, env=variables, stdin=subprocess.DEVNULL)


def refusal(project: Project, *words: str, **extra: str) -> str:
    """Return why submit.sh refuses a job, in one line; nothing is in the queue then."""
    done = submit(project, *words, **extra)
    assert (done.returncode, done.stdout) == (2, "")
    assert project.cluster.slurm("squeue", "--noheader", "--me", "--states=PD,R") == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("submit.sh: ")
    return line.removeprefix("submit.sh: ")


def test_a_time_limit_that_no_partition_allows_is_refused(on_cluster: Project) -> None:
    said = "--time={} is more than the partition allows (short: 10:00): the job would never "
    short = ("--partition=short", "slurm/train.sh", CPU)
    assert refusal(on_cluster, *short).startswith(said.format("1-00:00:00"))
    assert refusal(on_cluster, *short, SBATCH_TIMELIMIT="11").startswith(said.format("00:11:00"))
    least = refusal(on_cluster, "--time-min=11", *short)
    assert least.startswith(said.replace("--time", "--time-min").format("00:11:00"))
    # One that allows it is enough, and so is the limit itself, or the least time.
    in_short = (("--partition=short", f"--time{least}") for least in ("=10", "-min=10"))
    for options in (("--partition=short,work",), *in_short, ()):
        done = submit(on_cluster, "--parsable", "--hold", *options, "slurm/train.sh", CPU)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"\d+\n", done.stdout)


def test_a_cpu_build_of_torch_is_refused_for_gpus(on_cluster: Project) -> None:
    venv = str(PYTHON.parent.parent)
    reason = "`make setup VARIANT=cuda`, or --trainer.accelerator cpu"
    said = f"the job asks for GPUs, and torch 2.13.0+cpu in {venv} is a CPU build: {reason}"
    assert refusal(on_cluster, "--nodes=2", "slurm/train.sh") == said
    assert refusal(on_cluster, "--gpus-per-node=0", "--gres=gpu:1", "slurm/elastic.sh") == said
    assert "there is no none/bin/python in " in refusal(on_cluster, "slurm/train.sh", VENV="none")
    # Submitted by sbatch itself, it ends at its start.
    job = on_cluster.submit("train.sh")
    assert job.finish() == "FAILED after 0 restarts"
    assert job.log == f"my-project: {said}\n"
    done = submit(on_cluster, "--hold", "--gpus-per-node=0", "slurm/train.sh")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        (("-N2", "slurm/nothing.sh"), {}, "there is no script in '-N2 slurm/nothing.sh': "),
        ((), {}, "there is no script in '': "),
        (("--time=2", "slurm/train.sh", CPU), {}, "--time=00:02:00 is not more than the 120 s "),
        (("--signal=B:TERM@9", "slurm/train.sh", CPU), {}, "--signal=B:TERM@9: the job would not "),
        (("-o", "no/%j.out", "slurm/train.sh", CPU), {}, "--output="),
        (("slurm/train.sh", CPU, "--config=no.yaml"), {}, "fit refuses its options: "),
        (("slurm/train.sh", CPU, "--model.widht=3"), {}, "fit refuses its options: error: "),
        (("slurm/train.sh", CPU), {"CONTAINER": "pyxis", "IMAGE": "no.sqsh"}, "there is no image "),
        (("slurm/train.sh",), {"PATH": "{bash}"}, "sbatch is not on PATH: "),
    ],
)
def test_what_cannot_train_is_refused(
    on_cluster: Project,
    tmp_path: Path,
    words: tuple[str, ...],
    variables: dict[str, str],
    line: str,
) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    extra = {name: value.format(bash=tmp_path) for name, value in variables.items()}
    assert refusal(on_cluster, *words, **extra).startswith(line)


def test_gres_replaces_the_gpus_of_the_script(on_cluster: Project, tmp_path: Path) -> None:
    """SLURM allocates them, but a step would get the number in the script's line."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\necho "sees $CUDA_VISIBLE_DEVICES"\n')
    python.chmod(0o755)
    job = on_cluster.submit("train.sh", CPU, sbatch=("--gres=gpu:2",), VENV=str(tmp_path))
    job.finish()
    assert "processes: 2 (2 per node) by tasks on node" in job.log
    assert job.log.count("sees 0,1\n") == 2, job.log


def enable(folder: Path, **values: str) -> None:
    """Remove the # from examples in settings.sh: those of variables, and all commands but one."""
    settings = folder / "slurm" / "settings.sh"
    text = settings.read_text()
    for name, value in values.items():
        text, count = re.subn(rf"^# export {name}=\S+", f"export {name}={value}", text, flags=re.M)
        assert count == 1, name
    text, count = re.subn(r"^    # (?=module|source ~|export)", "    ", text, flags=re.M)
    assert count == 3
    settings.write_text(text)


def test_the_examples_in_settings_take_effect(on_cluster: Project, tmp_path: Path) -> None:
    folder = tmp_path / "my project"
    shutil.copytree(on_cluster.folder, folder, ignore=shutil.ignore_patterns("runs"))
    enable(
        folder,
        SBATCH_MEM_PER_NODE="1G",
        SBATCH_QOS="long",
        SBATCH_CONSTRAINT="'fake&fake'",
        SBATCH_GPUS_PER_NODE="fake:2",
        SBATCH_TIMELIMIT="00:07:00",
    )
    # A conda whose environments have a Python that prints what a rank has inherited.
    python = tmp_path / "NAME" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\necho "has $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $LOADED"\n')
    python.chmod(0o755)
    conda = tmp_path / "miniconda3" / "etc" / "profile.d" / "conda.sh"
    conda.parent.mkdir(parents=True)
    conda.write_text('conda() { echo "$UNSET_OF_CONDA"; CONDA_PREFIX=$HOME/$2; }\n')
    project = Project(on_cluster.cluster, folder)
    modules = {"BASH_FUNC_module%%": '() { echo "$UNSET"; export LOADED="${*:2}"; }'}
    done = submit(project, "--parsable", "slurm/train.sh", CPU, HOME=str(tmp_path), **modules)
    assert (done.returncode, done.stderr) == (0, "")
    job = Job(project, done.stdout.strip())
    facts = {"TimeLimit": "00:07:00", "MinMemoryNode": "1G", "Features": "fake&fake"}
    facts |= {"TresPerNode": "gres:gpu:fake:2"}
    assert {name: job.ask(name) for name in facts} == facts
    until(lambda: job.log.count("has ib0 ib0 cuda nccl\n") == 2, lambda: job.log)
    job.finish()
    assert "note: " not in job.log
    # QOS needs accounting, which this cluster does not have; sbatch says what it would ask for.
    said = submit(project, "--test-only", "--verbose", "slurm/train.sh", CPU, HOME=str(tmp_path))
    assert re.search(r"^sbatch: qos +: long$", said.stderr, re.MULTILINE)


# In place of Python: an environment that says which variant of torch it has, and trains on the CPU.
STAND_IN = """#!/bin/bash
kept="${0%/*}/variant"
case "$*" in
"-c import sys;"*) ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*"install_torch.py which") echo cpu ;;
*install_torch.py*) echo "$2" > "$kept" ;;
*'version("torch")'*) if grep -q cuda "$kept"; then echo 2.13.0; else echo 2.13.0+cpu; fi ;;
"-m my_project fit "*) exec "$REAL_PYTHON" "${@/%gpu/cpu}" ;;
esac
"""


def test_the_readme_leads_from_a_login_node_to_gpus(on_cluster: Project, tmp_path: Path) -> None:
    """Its first commands for a cluster, word by word; the nodes have simulated GPUs."""
    readme = (on_cluster.folder / "README.md").read_text()
    block = readme.partition("On the login node, ")[2].partition("```\n")[2].partition("```")[0]
    commands = [line.partition("#")[0].strip() for line in block.splitlines()]
    setup, submission, queue, log = commands
    assert (setup, queue, log) == (
        "make setup VARIANT=cuda",
        "squeue --me",
        "tail -f slurm-JOB.out",
    )
    folder = tmp_path / "my project"
    shutil.copytree(on_cluster.folder, folder, ignore=shutil.ignore_patterns("runs"))
    project = Project(on_cluster.cluster, folder)
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    extra = {"PYTHON": str(python), "REAL_PYTHON": str(PYTHON), "VENV": ".venv"}
    extra |= {"PYTHONPATH": str(folder / "src"), "install": "true"}

    def call(command: str) -> subprocess.CompletedProcess[str]:
        link = project.cluster.slurm("printenv", "SLURM_CONF")
        return ran(command.split(), cwd=folder, env=_environment() | {"SLURM_CONF": link} | extra)

    # Who has not read it gets torch for CPUs, and is told the command before the job waits.
    make = "make --environment-overrides --silent"
    done = call(setup.replace("make", make).replace(" VARIANT=cuda", ""))
    assert done.returncode == 0, done.stderr
    done = call(submission)
    assert done.returncode == 2
    assert f"`{setup}`" in done.stderr
    assert call(queue).stdout.count("\n") == 1
    done = call(setup.replace("make", make))
    assert "torch for cuda replaces torch for cpu in .venv\n" in done.stdout
    done = call(submission)
    assert (done.returncode, done.stderr) == (0, "")
    job = Job(project, done.stdout.split()[-1])
    assert done.stdout == f"Submitted batch job {job.id}\n"
    assert job.finish() == "COMPLETED after 0 restarts", job.log
    assert job.ask("TresPerNode") == "gres:gpu:1"
    assert f"job-{job.id}: processes: 1 (1 per node) by tasks on node" in job.log
    assert "finished" in job.log.splitlines()[-1]
