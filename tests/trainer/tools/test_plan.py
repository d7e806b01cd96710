"""``plan``: batch, steps and memory of a fit on devices that are not here."""

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import strategies
from my_project_trainer.strategies import registry
from my_project_trainer.strategies.memory import Memory, Sizes
from my_project_trainer.tools.isolated import Child, Failure
from my_project_trainer.tools.plan import planning
from my_project_trainer.tools.plan.trace import extrapolated, largest_unit
from tests.project import ROOT, run

MiB = 2**20
# Of one process: 10 parameters of a million elements, Adam; activations shrink in backward.
SIZES = Sizes(
    parameters=40 * MiB,
    gradients=40 * MiB,
    optimizer=80 * MiB,
    moments=[(0, 30 * MiB), (20 * MiB, 20 * MiB), (40 * MiB, 10 * MiB)],
    step=8 * MiB,
    numels=[MiB] * 10,
    unit=4 * MiB,
    devices=4,
)


def plan(*words: str, code: int = 0) -> Any:
    """The JSON that a command prints, or its errors."""
    done = run(["-m", "my_project", "plan", *words, "--json"])
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.fixture(scope="module")
def digits() -> Any:
    """A plan of 2 nodes of 4 CPUs; with all that a config, and options, may say."""
    words = ["--config", "configs/digits.yaml", "--devices", "2", "--num_nodes", "2"]
    words += ["--memory", "4G", "--accelerator", "cpu", "--trainer.learning_rate_scaling", "sqrt"]
    words += ["--trainer.reference_batch_size", "16", "--trainer.learning_rate_warmup_steps", "5"]
    return plan(*words, "--trainer.accumulate_grad_batches", "2")


def test_facts_are_those_of_the_fit(digits: Any):
    facts = digits["facts"]
    expected = {"replicas": 4, "micro_batch": 8, "accumulate": 2, "effective_batch": 64}
    expected |= {"steps_per_epoch": 22, "total_steps": 550, "parameters": 21_386}
    assert expected.items() <= facts.items()
    assert facts["scaled_learning_rates"] == [0.003 * 2]
    assert facts["warmup_steps"] == 5
    assert facts["available"] == int(4 * 2**30 * 0.9) - 2**29


def test_rows_have_the_bytes_of_a_rank(digits: Any):
    rows = {row["name"]: row["memory"] for row in digits["rows"]}
    full = digits["facts"]["whole_model"]
    assert rows["ddp"]["parameters"] == full["parameters"]
    assert full["gradients"] == 21_386 * 4
    # Adam: two numbers for each, and a step count of 4 bytes for each of 8 parameters.
    assert full["optimizer"] == pytest.approx(2 * 21_386 * 4, abs=8 * 8)
    assert rows["ddp"]["gradients"] == full["gradients"]
    assert rows["ddp"]["mark"] == "derived"
    assert rows["fsdp"]["mark"] == rows["hsdp"]["mark"] == "measured", digits["notes"]
    # Shards over 4 ranks and over the 2 of a node; buffers are whole.
    for name, ranks in (("fsdp", 4), ("hsdp", 2)):
        assert rows[name]["gradients"] == pytest.approx(full["gradients"] / ranks, rel=0.1)
        assert rows[name]["optimizer"] == pytest.approx(full["optimizer"] / ranks, rel=0.1)
    assert digits["simplest"] == "ddp"


def test_what_does_not_fit_is_left_out_with_the_reason(digits: Any):
    reasons = {name: why for why, names in digits["left_out"].items() for name in names}
    assert "uses 1 device and 2 were requested" in reasons["single_device"]
    assert "no parallelize_plan" in reasons["tensor_parallel"]
    assert "runs on 1 node and there are 2" in reasons["ddp_spawn"]
    assert sorted([*[row["name"] for row in digits["rows"]], *reasons]) == sorted(registry.names())


def test_lines_for_slurm_are_compared(digits: Any, tmp_path: Path):
    assert any("--nodes=1, and the plan has 2" in line for line in digits["disagreements"])
    assert planning.disagreements(tmp_path, 8, 4, "cuda") == []
    (tmp_path / "slurm").mkdir()
    script = tmp_path / "slurm" / "train.sh"
    script.write_text("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=a100:4\n#SBATCH --ntasks=32\n")
    assert planning.disagreements(tmp_path, 8, 4, "cuda") == [
        "slurm/train.sh: #SBATCH --nodes=2, and the plan has 4: give sbatch --nodes=4",
        "slurm/train.sh: #SBATCH --gpus-per-node=a100:4, and the plan has 8: give sbatch "
        "--gpus-per-node=8",
    ]
    settings = "export SBATCH_GPUS_PER_NODE=a100:8\n# export SBATCH_NODES=9\n"
    (tmp_path / "slurm" / "settings.sh").write_text(settings)
    assert len(planning.disagreements(tmp_path, 8, 4, "cuda")) == 1
    (tmp_path / "slurm" / "settings.sh").unlink()
    script.write_text("#SBATCH --time=1:00\n")
    assert planning.disagreements(tmp_path, 1, 1, "cpu") == []
    # Without such a line, a job has one node and no GPU.
    assert planning.disagreements(tmp_path, 1, 2, "cuda") == [
        "no #SBATCH line says nodes, and the plan has 2: give sbatch --nodes=2",
        "no #SBATCH line says gpus-per-node, and the plan has 1: give sbatch --gpus-per-node=1",
    ]


def test_all_mistakes_are_reported_at_once():
    words = ["--config", "configs/digits.yaml", "--devices", "0", "--accelerator", "gqu"]
    words += ["--trainer.precision", "17", "--model.width", "wide", "--trainer.strategy", "fsdq"]
    error = plan(*words, code=2)
    lines = [
        "devices=0 is not a device",
        "--accelerator='gqu'",
        "--memory: not given",
        "precision='17'",
    ]
    for line in [*lines, "model.width", "strategy='fsdq' is unknown; did you mean 'fsdp'"]:
        assert line in error, error


@pytest.mark.parametrize("model", ["WithNumpy", "WithOperator"])
def test_what_fake_tensors_cannot_do_takes_real_steps(model: str):
    words = ["--devices", "2", "--memory", "4G", "--accelerator", "cpu", "--trainer.max_steps", "9"]
    output = plan("--model", f"plan_subject.{model}", *words)
    assert any("two real steps of 1 and 2 samples" in note for note in output["notes"])
    width = 512
    assert output["facts"]["whole_model"]["gradients"] == 2 * (width * width + width) * 4
    assert {row["name"] for row in output["rows"]} >= {"ddp", "fsdp"}


def test_a_step_that_hangs_ends_at_the_time_limit():
    words = ["--devices", "1", "--memory", "4G", "--accelerator", "cpu", "--trainer.max_steps", "9"]
    error = plan("--model", "plan_subject.Endless", *words, "--seconds", "1", code=2)
    # The step, or on a busy machine all of the plan.
    assert re.search("took longer than (1|12) s", error)


def test_a_child_that_ends_or_fails_is_named():
    with pytest.raises(Failure, match="SIGKILL"):
        Child(lambda: os.kill(os.getpid(), signal.SIGKILL), 60.0).result()
    with pytest.raises(Failure, match="ZeroDivisionError"):
        Child(lambda: 1 // 0, 60.0).result()
    assert Child(lambda: 2, 60.0).result() == 2
    child = Child(threading.Event().wait, 0.1)
    with pytest.raises(Failure, match="took longer than"):
        child.result()
    assert not child._process.is_alive()


def peak(name: str, sizes: Sizes = SIZES) -> float:
    """Beside the 16 MiB that a process on CPUs needs for any model."""
    return memory(name, sizes).peak / MiB - 16


def memory(name: str, sizes: Sizes = SIZES) -> Memory:
    return strategies.create(name, {}).memory(sizes)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_each_strategy_declares_its_memory(name: str, accelerator: str):
    sizes = Sizes(**{**vars(SIZES), "accelerator": accelerator})
    need = memory(name, sizes)
    assert need.peak >= need.parameters + need.optimizer
    assert need.peak <= 2 * 160 * MiB + 200 * MiB
    # A GPU's context is in the margin.
    assert memory("single_device", sizes).peak / MiB == 170 + (16 if accelerator == "cpu" else 0)


def test_the_memory_of_strategies():
    # Parameters and states 120; the most of gradients and activations is 50, of a step 48.
    assert peak("single_device") == 120 + 50
    # All gradients, in buckets, beside the most activations.
    assert peak("ddp") == 120 + 40 + 30
    # A rank of 4 has the states of 3 of 10 parameters.
    assert memory("ddp_zero1").optimizer == 24 * MiB
    assert peak("ddp_zero1") == 40 + 24 + 40 + 30
    # A quarter of each, gradients as they come, and what is gathered.
    fsdp = memory("fsdp")
    assert (fsdp.parameters, fsdp.gradients, fsdp.optimizer) == (10 * MiB, 10 * MiB, 20 * MiB)
    assert peak("fsdp") == 30 + 30 + 16
    assert peak("hsdp", Sizes(**{**vars(SIZES), "devices": 2, "nodes": 2})) == 60 + 30 + 16 + 0


@pytest.mark.needs("deepspeed")
def test_the_memory_of_zero():
    # The optimizer also has a copy of its parameters; a flat step needs twice its gradients.
    assert memory("deepspeed_stage_1").optimizer == 30 * MiB
    # gloo gathers the parameters in a copy.
    assert memory("deepspeed_stage_2").gathered == 40 * MiB
    assert memory("deepspeed_stage_3").parameters == 10 * MiB
    # In backward: a bucket of 4 million elements, and the largest gradient.
    bucket, engine = 4e6 * 4 / MiB, 45
    assert peak("deepspeed_stage_2") == pytest.approx(engine + 40 + 30 + 30 + bucket + 4)
    assert peak("deepspeed_stage_1") == pytest.approx(engine + 40 + 30 + 40 + bucket)
    # A gradient of 24 MiB is larger than the bucket.
    large = Sizes(**{**vars(SIZES), "numels": [6 * MiB, *[MiB] * 4]})
    assert peak("deepspeed_stage_1", large) == pytest.approx(engine + 40 + 30 + 40 + 24)
    assert peak("deepspeed_stage_2", large) == pytest.approx(engine + 40 + 30 + 30 + bucket + 24)
    third = 10 + 30 + 10 + 24 + 30 + 40 + 24
    assert peak("deepspeed_stage_3", large) == pytest.approx(engine + third)
    on_gpus = Sizes(**{**vars(SIZES), "accelerator": "cuda"})
    offloaded = memory("deepspeed_stage_3_offload", on_gpus)
    assert (offloaded.parameters, offloaded.optimizer) == (0, 0)
    assert offloaded.host == 4 * (10 + 30 + 10) * MiB


def test_only_what_depends_on_the_batch_grows_with_it():
    two = Sizes(**{**vars(SIZES), "moments": [(0, 50 * MiB), (20 * MiB, 30 * MiB)]})
    larger = extrapolated(SIZES, two, 10)
    sizes = [(0, 30 + 9 * 20), (20, 20 + 9 * 10), (40, 10)]
    assert larger.moments == [(first * MiB, second * MiB) for first, second in sizes]


def test_a_unit_is_gathered_without_those_inside_it():
    inside = torch.nn.Linear(1500, 1000)
    outer = torch.nn.Bilinear(1200, 1000, 1)
    outer.inside = inside
    assert largest_unit(torch.nn.ModuleDict({"net": outer}), on_gpus=False) == 4 * 1_501_000


@pytest.mark.slow
def test_a_mesh_runs_its_own_class():
    words = ["--config", str(ROOT / "configs" / "gpt.yaml"), "--devices", "4", "--memory", "4G"]
    options = '{"tensor": 2, "shard": 2}'
    words += ["--trainer.strategy", "mesh", "--trainer.strategy_options", options]
    planned = plan(*words, "--accelerator", "cpu")
    mesh = next(row["memory"] for row in planned["rows"] if row["name"] == "mesh")
    assert mesh["mark"] == "measured", planned["notes"]
    model = planned["facts"]["whole_model"]
    assert mesh["gradients"] == pytest.approx(model["gradients"] / 4, rel=0.1)


@pytest.mark.slow
def test_a_billion_parameters_need_no_memory(tmp_path: Path):
    words = ["--config", str(ROOT / "configs" / "gpt.yaml"), "--devices", "8", "--num_nodes", "4"]
    words += ["--memory", "80G", "--model.layers", "20", "--model.heads", "16"]
    words += ["--model.width", "2048", "--model.context", "256", "--data.context", "256"]
    words += ["--data.batch_size", "8", "--trainer.precision", "bf16-mixed", "--seconds", "900"]
    planned = plan(*words)
    assert planned["facts"]["parameters"] > 1e9
    rows = {row["name"]: row for row in planned["rows"]}
    assert rows["fsdp"]["memory"]["mark"] == "measured", planned["notes"]
    share = planned["facts"]["whole_model"]["gradients"] / 32
    assert rows["fsdp"]["memory"]["gradients"] == pytest.approx(share, rel=0.01)
    assert rows["fsdp"]["largest_batch_size"] > rows["ddp"]["largest_batch_size"] > 8


def test_user_code_that_ends_the_process_is_a_line() -> None:
    words = ("--model=plan_subject.Exits", "--devices=1", "--memory=1G", "--accelerator=cpu")
    said = plan(*words, "--trainer.max_steps=1", code=2)
    assert said == "error: user code called sys.exit(0): return instead, or raise an error\n"
