"""How many ranks a job starts: what public scripts ask for, what is printed, what is started."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rendering import render

from .jobs import PLAIN, PYTHON, SUBJECT, Cluster, Job, Project, search_path
from .test_submit import submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
# In place of Python: a line for each process that is started.
STAND_IN = """#!/bin/bash
n=1
for word in "$@"; do [[ $word != --nproc-per-node=* ]] || n=${word#*=}; done
while ((n-- > 0)); do echo "started on $SLURMD_NODENAME with ${CUDA_VISIBLE_DEVICES:-none}"; done
"""
# Of another job, in which sbatch is called.
INHERITED = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "5", "SLURM_NPROCS": "5"}
INHERITED |= {"SLURM_NTASKS_PER_NODE": "5", "SLURM_GPUS_ON_NODE": "7", "SLURM_GPUS": "9"}
INHERITED |= {"SLURM_GPUS_PER_TASK": "3", "SLURM_CPUS_PER_TASK": "9"}
INHERITED |= {"SLURM_TRES_PER_TASK": "cpu:3"}
TORCHRUN = {"LAUNCH": "torchrun"}
UNEVEN = "LAUNCH=torchrun starts as many processes on each node; SLURM plans 2,1"
GPUS = "--gpus=4 gives nodes different numbers of GPUs, this one 2; use --gpus-per-node"
TWICE = "--ntasks=3 is not --ntasks-per-node=2 on all nodes; give one of them"
COMPONENTS = "this is a batch script of one component; "


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an environment with that Python."""
    python = tmp_path_factory.mktemp("venv") / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return str(python.parent.parent)


def started(job: Job) -> list[int]:
    """Return how many processes each node has started, as many as the job has said."""
    log = job.log
    (said,) = re.findall(r"processes: (\d+) \((?:at most )?\d+ per node\) by ", log)
    lines = re.findall(r"started on node(\d) with ", log)
    assert len(lines) == int(said), log
    return sorted((lines.count(node) for node in {*lines}), reverse=True)


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ("--nodes=2", {}, [1, 1]),
        ("-N 2 -p work", {}, [1, 1]),
        ("--nodes=2 --gpus-per-node=2", {}, [2, 2]),
        ("--nodes=2 --gpus-per-node=2 --ntasks-per-node=2", {}, [2, 2]),
        ("--nodes=2 --gpus-per-node=2 --ntasks=4", {}, [2, 2]),
        ("--nodes=2 --gpus-per-node=2 -n 2", {}, [1, 1]),
        ("--nodes=2 --gpus-per-node=2 --ntasks=3", {}, [2, 1]),
        ("--nodes=2 --gpus-per-node=2 --ntasks=3", TORCHRUN, UNEVEN),
        ("--nodes=2 --ntasks=3 --ntasks-per-node=2", {}, TWICE),
        ("--ntasks=4", {}, [4]),
        ("--ntasks=8 --cpus-per-gpu=2", {}, [8]),
        ("--nodes=2 --gpus-per-node=2 --ntasks-per-node=1", {}, [1, 1]),
        ("--nodes=2 --gpus-per-node=2 --ntasks-per-node=1", TORCHRUN, [2, 2]),
        ("--nodes=2 --gpus-per-node=2 --ntasks=2", TORCHRUN, [2, 2]),
        ("--nodes=2 --gpus-per-node=2 --ntasks-per-node=2", TORCHRUN, [2, 2]),
        ("--gpus=2", {}, [2]),
        ("-N2 -G 4", {}, [2, 2]),
        ("--nodes=3 --gpus=4", {}, GPUS),
        ("--gpus-per-task=1 --ntasks=2", {}, [2]),
        ("--nodes=2 --gpus-per-task=1 --ntasks-per-node=2", TORCHRUN, [2, 2]),
        ("--ntasks-per-gpu=1 --gpus-per-node=2", {}, [2]),
        ("--gres=gpu:2 --cpus-per-task=1", {}, [2]),
        ("--gres=gpu:fake:2", {}, [2]),
        ("--nodes=2 --gpus-per-node=0", {}, [1, 1]),
        ("--nodes=2 --gpus-per-node=0 --ntasks-per-node=3", TORCHRUN, [3, 3]),
        ("--exclusive --gpus-per-node=2", {}, [2]),
        ("--nodes=2-3 --ntasks-per-node=2", {}, [2, 2, 2]),
        ("--nodes=2", INHERITED, [1, 1]),
        ("--nodes=2 --gpus-per-node=0", INHERITED, [1, 1]),
        ("--ntasks=3", INHERITED, [3]),
        ("--nodes=2 --gpus-per-node=2", {"SBATCH_EXPORT": "NONE"} | TORCHRUN, [2, 2]),
        ("--nodes=1 : --nodes=1", {}, COMPONENTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_asked_for_is_printed_and_started(
    on_cluster: Project, stand_in: str, options: str, variables: dict[str, str], expected: object
) -> None:
    words = ("--parsable", *options.split(), "slurm/train.sh", "--trainer.accelerator=cpu")
    done = submit(on_cluster, *words, **variables, VENV=stand_in)
    assert done.returncode == 0, done.stderr
    job = Job(on_cluster, done.stdout.strip())
    job.finish()
    if isinstance(expected, str):
        assert job.log.startswith(f"my-project: {expected}"), job.log
        assert job.log.count("\n") == 1
        return
    assert started(job) == expected
    lacks = "--ntasks-per-node=1" in options or options.endswith("-n 2")
    assert ("; note: the job asks for 1 processes" in job.log.replace(": note", "; note")) == (
        lacks and "LAUNCH" not in variables
    )


def test_sbatch_itself_in_another_job_starts_what_is_asked_for(
    on_cluster: Project, stand_in: str
) -> None:
    """No variable of the other job is taken for one of this job."""
    for options, expected in (("--nodes=2", [1, 1]), ("--ntasks=3", [3])):
        sbatch = tuple(options.split())
        variables = INHERITED | {"VENV": stand_in}
        job = on_cluster.submit("train.sh", *PLAIN, sbatch=sbatch, **variables)
        job.finish()
        assert started(job) == expected


def test_settings_reach_a_job_that_exports_nothing(on_cluster: Project, stand_in: str) -> None:
    """As words; and it says that variables have not."""
    words = ("train.sh", f"VENV={stand_in}", "LAUNCH=torchrun", *PLAIN)
    job = on_cluster.submit(*words, sbatch=("--gpus-per-node=2",), SBATCH_EXPORT="NONE")
    job.finish()
    assert started(job) == [2]
    assert " by torchrun on node" in job.log
    assert job.log.startswith("my-project: note: sbatch has exported no variables (--export)")


@pytest.mark.parametrize("command", ["salloc bash", "srun bash"])
def test_what_is_no_batch_job_is_a_line(on_cluster: Project, command: str) -> None:
    words = f"{command} slurm/train.sh 2>&1 || true"
    printed = on_cluster.cluster.slurm("bash", "-c", words, cwd=on_cluster.folder)
    assert printed.count(COMPONENTS) == 1, printed
    assert not list(on_cluster.folder.glob("runs/job-*"))


@pytest.fixture(scope="module")
def on_cpus(can_start: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Return a project on a cluster that knows no GPUs, and whose host names do not resolve."""
    cluster = Cluster(tmp_path_factory.mktemp("cpus") / "slurm")
    done = cluster.control("up", "2", "none", "machine")
    assert done.returncode == 0, done.stderr
    folder = render(tmp_path_factory.mktemp("project"))
    Path(folder, "subject.py").write_text(SUBJECT, encoding="utf-8")
    yield Project(cluster, folder)
    done = cluster.control("down")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["train.sh", "elastic.sh"])
def test_a_cluster_without_gpus_and_with_other_host_names_trains(
    on_cpus: Project, script: str
) -> None:
    options = ("--parsable", "--nodes=2", "--gpus-per-node=0", "--ntasks-per-node=2")
    fit = (*PLAIN, "--trainer.max_epochs=1")
    variables = TORCHRUN | {"GLOO_SOCKET_IFNAME": "eth0", "NODES_MIN": "2"}
    done = submit(on_cpus, *options, f"slurm/{script}", *fit, **variables)
    assert done.returncode == 0, done.stderr
    job = Job(on_cpus, done.stdout.strip())
    assert job.finish() == "COMPLETED after 0 restarts", job.log
    assert ": finished step 22" in job.log


def test_ranks_that_do_not_find_each_other_end_at_once(on_cpus: Project, tmp_path: Path) -> None:
    """Each would train alone: a container that hides SLURM's variables."""
    stub = tmp_path / "apptainer"
    stub.write_text(
        "#!/bin/bash\n"
        'until [ "$1" = image ]; do shift; done\nshift 2\n'
        'exec env -i OMP_NUM_THREADS=1 PATH="$PATH" PYTHONPATH="$APPTAINERENV_PYTHONPATH" \\\n'
        '  TRAINER_WORLD_SIZE="$APPTAINERENV_TRAINER_WORLD_SIZE" "$STUB_PYTHON" "$@"\n'
    )
    stub.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{search_path()}", "STUB_PYTHON": str(PYTHON)}
    variables |= {"CONTAINER": "apptainer", "IMAGE": "image"}
    options = ("--parsable", "--nodes=2", "--gpus-per-node=0", "slurm/train.sh")
    job = Job(on_cpus, submit(on_cpus, *options, *PLAIN, **variables).stdout.strip())
    assert job.finish() == "FAILED after 0 restarts", job.log
    said = "TRAINER_WORLD_SIZE=2 processes are started, but this one is one of 1, read from none; "
    assert said in job.log
