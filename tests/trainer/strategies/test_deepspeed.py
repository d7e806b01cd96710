"""DeepSpeed: its configuration, its launcher, and what only it does. The rest is in the matrix."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conformance.rows import ROUNDING
from tests.conformance.test_conformance import difference
from tests.project import ROOT, fit, missing, require, run, succeed

from deepspeed_subject import GROUPED, RESUMED, WARMUP, WAYS, warmed_up
from fitting import logged

SHORT = [
    *("--trainer.max_epochs", "1", "--trainer.loggers", "[csv]", "--trainer.accelerator", "cpu"),
    *("--trainer.log_every_n_steps", "1", "--model.dropout", "0", "--trainer.run_name", "run"),
]
STAGE_2 = ["--trainer.strategy", "deepspeed_stage_2"]


@pytest.mark.needs("deepspeed")
def test_an_optimizer_that_cannot_be_compiled_is_one_line(tmp_path):
    optimizer = {"type": "Adam", "params": {"lr": 0.001}}
    config = tmp_path / "deepspeed.json"
    config.write_text(json.dumps({"optimizer": optimizer}))
    options = ["--trainer.strategy", "deepspeed", "--trainer.strategy_options.config", str(config)]
    extra = {"CXX": "no-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    arguments = fit(*SHORT, *options, "--trainer.default_root_dir", tmp_path)
    done = run(arguments, extra=extra, engine="deepspeed")
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert line.startswith("error: DeepSpeed cannot create Adam (")
    assert "add torch_adam: true to the params" in line
    config.write_text(json.dumps({"optimizer": {**optimizer, "params": {"torch_adam": True}}}))
    done = succeed([*arguments, "--trainer.overwrite", "true"], extra=extra, engine="deepspeed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of what two processes train with DeepSpeed, and of what one trains without."""
    require(missing("deepspeed"))
    folders = {number: tmp_path_factory.mktemp(f"on-{number}-") for number in (0, 2)}
    for number, folder in folders.items():
        train(folder, number, *(way for way in WAYS if "ddp" not in way))
    return folders[2], folders[0]


def train(folder: Path, processes: int, *ways: str, **more: Any) -> None:
    arguments = [folder, str(processes), json.dumps(more), *ways]
    succeed(["-m", "deepspeed_subject", *arguments], engine="deepspeed")


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    ("way", "bound"),
    [
        ("warm-up", ROUNDING),
        ("own optimizer", 1e-5),
        # Gradients far above DeepSpeed's own bound.
        ("steep", 2e-5),
        ("second copy", 1e-5),
        *((way, ROUNDING) for way in WAYS if way.startswith("sometimes")),
        *((way, 1e-5) for way in WAYS if way.startswith("grouped deepspeed")),
    ],
)
def test_equals_one_process(trained, way, bound):
    ours, alone = trained
    assert difference(ours / f"{way}.safetensors", alone / f"{way}.safetensors") <= bound


@slow
@pytest.mark.parametrize("way", RESUMED)
def test_resumes_to_the_last_bit(trained, way):
    files = (trained[0] / f"{way}{suffix}.safetensors" for suffix in ("", "-stopped", "-resumed"))
    uninterrupted, stopped, resumed = map(load_file, files)
    assert len(stopped["losses"]) == 6
    assert all(torch.equal(uninterrupted[key], resumed[key]) for key in uninterrupted)


@slow
def test_rates_are_those_of_its_own_schedule(trained):
    rates = logged(trained[0] / "runs" / "warm-up", "lr")
    assert rates == pytest.approx([warmed_up(step) for step in range(10)])
    assert rates[0] == WARMUP["warmup_min_lr"]
    assert rates[-1] == WARMUP["warmup_max_lr"]


@slow
def test_one_bit_adam_trains_on_compressed_momentum(trained):
    losses = load_file(trained[0] / "one-bit.safetensors")["losses"]
    assert losses[5:].mean() < 0.8 * losses[:5].mean()
    weights = load_file(trained[0] / "one-bit mixed.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def scaler(run_directory: Path) -> dict[str, Any]:
    states = sorted(run_directory.glob("checkpoints/*/state.json"))
    state: dict[str, Any] = json.loads(states[-1].read_text())["content"]["state"]["precision"]
    return state


@slow
def test_steps_that_overflow_are_left_out_and_the_scale_adapts(trained):
    run_directory = trained[0] / "runs" / "overflow"
    assert 128 < scaler(run_directory)["scale"] < 65536
    assert torch.isfinite(torch.tensor(logged(run_directory, "loss"))).all()


@slow
def test_stage_3_evaluates_what_it_has_trained(trained):
    ours, alone = trained
    expected = logged(alone / "runs" / GROUPED.replace(" ", "-"), "val_loss")
    assert len(expected) == 2
    values = logged(ours / "runs" / GROUPED.replace(" ", "-"), "val_loss")
    assert values == pytest.approx(expected, abs=1e-5)
    again = json.loads((ours / "validated.json").read_text())
    assert again["val_loss"] == pytest.approx(expected[-1], abs=1e-5)


@slow
@pytest.mark.parametrize(
    ("first", "on", "then", "there"),
    [
        (GROUPED, 2, "grouped ddp", 0),
        (GROUPED, 3, "grouped deepspeed_stage_2", 2),
        pytest.param("grouped ddp", 2, GROUPED, 3, marks=pytest.mark.exhaustive),
        pytest.param("grouped deepspeed_stage_2", 2, GROUPED, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_goes_on_under_another_strategy(trained, tmp_path, first, on, then, there):
    train(tmp_path / "first", on, first, max_steps=6)
    stopped = tmp_path / "first" / "runs" / first.replace(" ", "-")
    train(tmp_path / "then", there, then, resume=str(stopped))
    expected = load_file(trained[1] / f"{GROUPED}.safetensors")
    actual = load_file(tmp_path / "then" / f"{then}.safetensors")
    for key in expected.keys() - {"losses"}:
        torch.testing.assert_close(actual[key], expected[key], rtol=0, atol=1e-5)


@slow
@pytest.mark.parametrize(
    "launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.exhaustive)]
)
@pytest.mark.needs("deepspeed")
def test_is_started_by(tmp_path, launcher):
    arguments = list(map(str, fit(*SHORT, *STAGE_2, "--trainer.default_root_dir", tmp_path)))
    if launcher == "deepspeed":
        # Its ranks read no stdin, and their Python is the launcher's own.
        script = Path(sys.executable).with_name("deepspeed")
        command = [script, "--num_gpus", "2", "--master_port", "29811", "--module", *arguments[1:]]
    else:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
        command = [*torchrun, *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = succeed(command, extra={"PYTHONPATH": paths}, fresh=True)
    source = {"deepspeed": "deepspeed", "torchrun": "torchelastic"}[launcher]
    assert "2 processes on 1 node, this one rank 0 (local 0 of 2)" in done.stdout
    assert f"read from {source}" in done.stdout
    assert logged(tmp_path / "run", "loss")


@slow
@pytest.mark.needs("deepspeed")
def test_what_it_says_itself_does_not_reach_stdout(tmp_path):
    options = ["--trainer.devices", "2", "--trainer.default_root_dir", tmp_path]
    done = succeed(fit(*SHORT, *STAGE_2, *options), fresh=True)
    assert "strategy deepspeed_stage_2 on cpu" in done.stdout
    assert not [line for line in done.stdout.splitlines() if "DeepSpeed" in line or "[20" in line]
    assert "deprecated" not in done.stderr
