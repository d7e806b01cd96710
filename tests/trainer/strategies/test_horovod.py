"""Horovod under its own driver: rates by its size, and what it says where it cannot run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from my_project_trainer.errors import UserError
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.strategies.horovod.horovod import Horovod, _is_exact
from my_project_trainer.strategies.precision import Precision
from test_fairscale import difference
from tests.conformance.horovod_rows import horovodrun
from tests.project import ROOT, fit, mpirun, run, succeed

from fitting import logged

SHORT = [
    *("--trainer.max_epochs", "2", "--trainer.loggers", "[csv]", "--trainer.accelerator", "cpu"),
    *("--trainer.log_every_n_steps", "1", "--model.dropout", "0", "--trainer.run_name", "run"),
    *("--trainer.global_batch_size", "64"),
]
HOROVOD = ["--trainer.strategy", "horovod"]


def trained(folder: Path, *options: str, processes: int = 1) -> Path:
    """A short run on the digits, of Horovod if on more than one process."""
    by = horovodrun(processes) if processes > 1 else []
    succeed(fit(*SHORT, "--trainer.default_root_dir", folder, *options), by=by)
    return folder


@pytest.mark.needs("horovod")
def test_a_build_for_cpus_is_refused_on_gpus():
    import horovod.torch as hvd

    assert not hvd.nccl_built()  # the wheel that is tested here is such a build
    with pytest.raises(UserError, match="Horovod was built for CPUs only; build it where nvcc is"):
        Horovod().connect(Layout(), [torch.device("cuda")], Precision("32-true", "cuda"))


def test_fusion_is_off_where_sums_are_to_be_exact():
    assert (_is_exact("cpu"), _is_exact("cuda")) == (True, False)
    torch.use_deterministic_algorithms(True)
    try:
        assert _is_exact("cuda")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.needs("horovod")
def test_rates_are_multiplied_by_the_size_unless_told_not_to(tmp_path):
    scaled = trained(tmp_path / "scaled", *HOROVOD, processes=2)
    unscaled = (*HOROVOD, "--trainer.strategy_options", "{scale_learning_rate: false}")
    not_scaled = trained(tmp_path / "not", *unscaled, processes=2)
    alone = trained(tmp_path / "alone")
    linear = ("--trainer.learning_rate_scaling", "linear", "--trainer.reference_batch_size", "32")
    twice = trained(tmp_path / "twice", *linear)
    assert set(logged(scaled / "run", "lr")) == {0.006}
    assert set(logged(not_scaled / "run", "lr")) == {0.003}
    assert len(logged(scaled / "run", "loss")) == 44
    # Forty steps of Adam carry roundings of 1e-7 to 3e-4.
    for one, other in ((not_scaled, alone), (scaled, twice)):
        losses = logged(other / "run", "loss")
        assert logged(one / "run", "loss") == pytest.approx(losses, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "processes"),
    [
        ("Odd", 2),
        ("Thawing", 2),
        pytest.param("Odd", 4, marks=pytest.mark.exhaustive),
        pytest.param("Waiting", 4, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.needs("horovod")
def test_a_model_that_is_easily_got_wrong(tmp_path, subject, processes):
    short = {"devices": processes, "max_epochs": 2, "global_batch_size": 4}
    horovod = {"strategy": "horovod", "strategy_options": {"scale_learning_rate": False}}
    for name, options, by in (
        ("alone", {**short, "devices": 1}, []),
        ("run", {**short, **horovod}, horovodrun(processes)),
    ):
        (tmp_path / name).mkdir()
        succeed(["-m", "odd_subject", tmp_path / name, subject, json.dumps(options)], by=by)
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-5


@pytest.mark.parametrize(
    ("cuda", "has_nvcc", "operations", "built"),
    [
        ("13.0", True, "", "nccl"),
        ("13.0", True, "cpu", "cpu"),
        ("13.0", False, "", "cpu"),
        (None, True, "", "cpu"),
        (None, False, "MPI", "mpi"),
    ],
)
def test_it_is_built_for_gpus_where_torch_and_nvcc_are(tmp_path, cuda, has_nvcc, operations, built):
    script = ROOT / "requirements" / "horovod.sh"
    sources = {
        "torch/__init__.py": "__version__ = '2.13.0'; from . import version",
        "torch/version.py": f"cuda = {cuda!r}",
        "torch/utils/__init__.py": "",
        "torch/utils/cpp_extension.py": f"CUDA_HOME = {str(tmp_path)!r}",
        "bin/nvcc": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "nvcc").chmod(0o755 if has_nvcc else 0o644)
    variables = {"PYTHONPATH": str(tmp_path), "HOROVOD_WHEELS": str(tmp_path / "wheels")}
    variables |= {"HOROVOD_GPU_OPERATIONS": operations, "HOROVOD_WITHOUT_MPI": "1"}
    # Without a compiler: it stops before it would download anything.
    done = subprocess.run(
        ["bash", "-x", script, sys.executable],
        env=os.environ | variables | {"CXX": "no-compiler"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "to build Horovod, first: apt-get install g++" in done.stderr
    assert f".gloo.{built}." in re.findall(r"^\+ key=(.*)$", done.stderr, re.MULTILINE)[-1]


def test_it_does_not_start_processes_itself():
    done = run(fit(*SHORT, *HOROVOD, "--trainer.devices", "2"))
    assert done.returncode == 2
    assert "strategy='horovod' on 2 devices is started by horovodrun -np N" in done.stderr


def test_another_launcher_is_refused():
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = run([*torchrun, *fit(*SHORT, *HOROVOD)])
    assert done.returncode != 0
    assert "is started by horovodrun -np N … or mpirun -np N …, not by torchelastic" in done.stderr


@pytest.mark.needs("horovod", "mpirun")
def test_processes_that_do_not_see_one_another_are_refused(tmp_path):
    # As where Horovod was built without MPI.
    gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    options = [*SHORT, *HOROVOD, "--trainer.default_root_dir", tmp_path]
    done = run(fit(*options), by=mpirun(2), extra=gloo)
    assert done.returncode != 0
    assert "Horovod counts 1 process(es) where openmpi started 2" in done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--trainer.precision", "bf16-mixed"], "Horovod's collectives do not support bfloat16"),
        (["--trainer.precision", "bf16-true"], "Horovod's collectives do not support bfloat16"),
        (
            ["--trainer.learning_rate_scaling", "linear", "--trainer.reference_batch_size", "32"],
            "Horovod multiplies rates by its size already",
        ),
        (
            ["--trainer.strategy_options", "{compression: bf16}"],
            "compression='bf16': expected Literal",
        ),
    ],
)
def test_refuses_with_the_reason(options, reason):
    done = run(fit(*SHORT, *HOROVOD, "--trainer.devices", "1", *options))
    assert done.returncode == 2
    assert reason in done.stderr
