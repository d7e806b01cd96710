"""``checkpoint_weights="trainable"`` leaves frozen parameters out of checkpoints."""

from pathlib import Path

import pytest
import torch
from my_project_trainer import CheckpointError, ConfigurationError
from my_project_trainer.checkpoint import Checkpoint
from my_project_trainer.cli import load_weights
from my_project_trainer.cli.export import _write_weights
from my_project_trainer.cli.loading import read_weights
from safetensors.torch import load_file
from tests.project import run
from torch import Tensor

from left_out_subject import STEPS, WIDTH, Adapted, make

BASE = 3 * (WIDTH + 1) * WIDTH * 4  # bytes
WAYS = [
    pytest.param("single_device", 1, id="single_device"),
    pytest.param("ddp", 2, id="ddp", marks=pytest.mark.slow),
    pytest.param("fsdp", 2, id="fsdp"),
    pytest.param("sequential", 2, id="sequential", marks=pytest.mark.slow),
    pytest.param(
        "deepspeed_stage_2",
        2,
        id="deepspeed_stage_2",
        marks=[pytest.mark.slow, pytest.mark.needs("deepspeed")],
    ),
]


def newest(folder: Path, name: str) -> Checkpoint:
    return Checkpoint(folder / name / "checkpoints" / f"step-{STEPS:08d}")


def trained(folder: Path, name: str) -> dict[str, Tensor]:
    module = Adapted()
    load_weights(module, folder / name)
    return module.state_dict()


@pytest.mark.parametrize(("strategy", "ranks"), WAYS)
def test_a_resume_is_exact_without_what_is_frozen(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    done = run(["-m", "left_out_subject", tmp_path, strategy, str(ranks)])
    assert done.returncode == 0, done.stderr
    paths = [newest(tmp_path, name).path for name in ("whole", "resumed")]
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in paths]
    # What is trained, with Adam's moments, is as large as what is left out; and random states.
    assert max(sizes) < BASE + 40_000 * ranks < 2 * BASE
    whole, resumed = trained(tmp_path, "whole"), trained(tmp_path, "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert torch.equal(whole["sequential_module.0.weight"], Adapted().sequential_module[0].weight)
    assert not torch.equal(
        whole["sequential_module.3.weight"], Adapted().sequential_module[3].weight
    )


def test_another_network_below_it_is_an_error(tmp_path: Path) -> None:
    make(str(tmp_path), "run", max_steps=2).fit(Adapted())
    line = r"sequential_module.0.weight was frozen and left out .*: torch.float32 \[128, 128\] "
    for use in (
        lambda: load_weights(Adapted(base=2), tmp_path / "run"),
        lambda: make(str(tmp_path), "run", resume="auto").fit(Adapted(base=2)),
        lambda: make(str(tmp_path), "new").test(Adapted(base=2), checkpoint=str(tmp_path / "run")),
    ):
        with pytest.raises(CheckpointError, match=line):
            use()
    weights = {"weights": tmp_path / "run", "checkpoint_weights": "all"}
    with pytest.raises(ConfigurationError, match=line):
        make(str(tmp_path), "next", **weights).fit(Adapted(base=2))
    module = Adapted()
    make(str(tmp_path), "next", max_steps=1, **weights).fit(module)
    assert len(newest_weights(tmp_path, "next")) == 11


def newest_weights(folder: Path, name: str) -> dict[str, Tensor]:
    [path] = (folder / name / "checkpoints").glob("step-*")
    weights = read_weights(Checkpoint(path), averaged=False)
    return {name: each for name, each in weights.items() if isinstance(each, Tensor)}


def test_an_export_has_what_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(str(tmp_path), "run", max_steps=2).fit(Adapted())
    assert sorted(newest_weights(tmp_path, "run")) == [
        "seen",
        *(f"sequential_module.{layer}.{kind}" for layer in (3, 4) for kind in ("bias", "weight")),
    ]
    [path] = (tmp_path / "run" / "checkpoints").glob("step-*")
    _write_weights(read_weights(Checkpoint(path), averaged=False), {}, tmp_path / "file")
    assert len(load_file(tmp_path / "file")) == 5
    line = "the 6 parameters that its checkpoint left out are not in the file"
    assert line in capsys.readouterr().err


def test_what_no_code_gives_is_an_error(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Adapted()
    with pytest.raises(ConfigurationError, match=r"0.weight is frozen and on the meta device"):
        make(str(tmp_path), "meta").fit(module)
    make(str(tmp_path), "run", max_steps=1).fit(Adapted())
    with pytest.raises(ConfigurationError, match="a resume would not have those of weights"):
        make(str(tmp_path), "new", weights=tmp_path / "run")


@pytest.mark.needs("deepspeed")
def test_stage_3_keeps_all() -> None:
    line = "does not support checkpoint_weights='trainable': its engine gathers and frees"
    with pytest.raises(ConfigurationError, match=line):
        make(".", "run", strategy="deepspeed_stage_3", devices=2)
