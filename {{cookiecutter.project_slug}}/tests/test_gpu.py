"""On a GPU: one process, ddp over NCCL, mixed precision, and the choice of an idle one."""

import json
from pathlib import Path

import pytest
import torch

from .checkpointed_subject import FEATURES, Network
from .project import fit, load, missing, require, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

SHORT = ["--trainer.accelerator", "gpu", "--trainer.devices", "1", "--trainer.max_epochs", "4"]


def trained(folder: Path, *options: str) -> dict[str, float]:
    """The newest values of a short run on the digits."""
    done = run(
        fit(*SHORT, "--trainer.run_name", "run", "--trainer.default_root_dir", folder, *options),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (attempt,) = json.loads((folder / "run" / "run.json").read_text())["attempts"]
    assert attempt["device"] == "cuda:0"
    rows = (folder / "run" / "metrics.csv").read_text().splitlines()[1:]
    return {row.split(",")[2]: float(row.split(",")[3]) for row in rows}


# Without 16-true, in which the eps of the digits' AdamW is 0.
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_spawn", "ddp_fork", "ddp2"])
def test_trains(tmp_path, strategy, precision):
    values = trained(tmp_path, "--trainer.strategy", strategy, "--trainer.precision", precision)
    assert values["val_accuracy"] > 0.85


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp_zero1", "fsdp", "hsdp", "ddp_sharded", "fairscale_fsdp"),
        *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
        *("deepspeed_stage_2_offload", "deepspeed_stage_3_offload"),
    ],
)
def test_trains_where_memory_is_divided(tmp_path, strategy, precision):
    if strategy.startswith("deepspeed"):
        require(missing("deepspeed"))
    elif strategy in ("ddp_sharded", "fairscale_fsdp"):
        require(missing("fairscale"))
    values = trained(tmp_path, "--trainer.strategy", strategy, "--trainer.precision", precision)
    assert values["val_accuracy"] > 0.85


def test_activations_are_computed_again_in_less_memory():
    peaks, gradients = [], []
    for names in ([], ["Block"]):
        torch.manual_seed(0)
        network = Network().cuda()
        batch = torch.randn(100_000, FEATURES, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        with load("trainer.activation_checkpointing").applied(network, names):
            network(batch).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        gradients.append([each.grad for each in network.parameters()])
    assert peaks[1] < 0.8 * peaks[0]
    assert all(map(torch.equal, *gradients))


def test_ddp_over_nccl_equals_one_process(tmp_path):
    alone, together = (
        trained(tmp_path / strategy, "--trainer.strategy", strategy, "--model.dropout", "0")
        for strategy in ("single_device", "ddp")
    )
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_a_resumed_run_equals_the_whole_one(tmp_path):
    options = ["--trainer.deterministic", "true", "--trainer.log_every_n_steps", "1"]
    trained(tmp_path / "whole", *options)
    part = tmp_path / "part"
    trained(part, *options, "--trainer.max_steps", "7", "--trainer.checkpoint_every_n_steps", "1")
    trained(part, *options, "--trainer.resume", "auto")
    logs = [(tmp_path / name / "run" / "metrics.csv").read_text() for name in ("whole", "part")]
    assert logs[0] == logs[1]


def test_an_idle_gpu_is_chosen():
    idle_gpus = load("trainer.idle_gpus")
    gpus = idle_gpus.read_gpus()
    assert len(gpus) == torch.cuda.device_count()
    assert idle_gpus.choose(gpus, 1)[0] in range(len(gpus))


def test_dp_runs_two_replicas_on_one_gpu(tmp_path):
    dp = load("trainer.strategies.dp")
    module = torch.nn.Linear(3, 2).to("cuda")
    x = torch.randn(5, 3)
    outputs = [
        dp.replicate(module, torch.device("cuda", 0), is_first=index == 0)(piece)
        for index, piece in enumerate(dp.scatter(x, [torch.device("cuda", 0)] * 2))
    ]
    dp.gather(outputs, torch.device("cuda", 0)).sum().backward()
    gradient = module.weight.grad.clone()
    module.weight.grad = None
    module(x.cuda()).sum().backward()
    assert torch.allclose(gradient, module.weight.grad)
