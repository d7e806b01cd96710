"""``checkpoint_weights="trainable"`` leaves frozen parameters out of checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import CheckpointError, ConfigurationError
from my_project_trainer.checkpoint import Checkpoint, resolve
from my_project_trainer.cli import load_weights
from my_project_trainer.cli.export import _write_weights
from safetensors.torch import load_file
from torch import Tensor

from fitting import fits, quiet
from left_out_subject import STEPS, WIDTH, Adapted

BASE = 3 * (WIDTH + 1) * WIDTH * 4  # bytes
LAYERS = {"Adapted": {"3", "4"}, "Teacher": {"0", "1", "3", "4"}}
OPTIONS = {"max_epochs": 1, "global_batch_size": 8, "checkpoint_weights": "trainable"}
slow = pytest.mark.slow


def make(folder: Path, run_name: str, **options: Any) -> Any:
    return quiet(**OPTIONS | {"default_root_dir": folder, "run_name": run_name} | options)


def saved(run_directory: Path) -> dict[str, Tensor]:
    model = Checkpoint(resolve(run_directory)).state()["model"]
    return {name: value for name, value in model.items() if isinstance(value, Tensor)}


def trained(run_directory: Path) -> dict[str, Tensor]:
    module = Adapted()
    load_weights(module, run_directory)
    return module.state_dict()


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("single_device", 1),
        ("fsdp", 2),
        *(pytest.param(name, 2, marks=slow) for name in ("ddp", "sequential")),
        pytest.param("deepspeed_stage_2", 2, marks=[slow, pytest.mark.needs("deepspeed")]),
    ],
)
def test_a_resume_is_exact(tmp_path: Path, strategy: str, ranks: int) -> None:
    kinds = [*LAYERS] if strategy in ("single_device", "ddp", "fsdp") else ["Adapted"]
    ways = ("whole", {}), ("resumed", {"max_steps": STEPS // 2}), ("resumed", {"resume": "auto"})
    shared = OPTIONS | {"strategy": strategy, "devices": ranks, "default_root_dir": str(tmp_path)}
    runs = [
        {"name": f"{kind}-{way}", "module": f"left_out_subject.{kind}", **shared, **more}
        for kind in kinds
        for way, more in ways
    ]
    assert fits(tmp_path, runs) == [dict.fromkeys((run["name"] for run in runs), "")] * ranks
    for kind in kinds:
        runs = [tmp_path / f"{kind}-whole", tmp_path / f"{kind}-resumed"]
        full, resumed = map(trained, runs)
        assert all(torch.equal(full[name], resumed[name]) for name in full)
        start = Adapted().state_dict()
        # What is frozen at the start and in the end is saved if any code has changed it.
        changed = {name for name in full if not torch.equal(full[name], start[name])}
        assert {name.split(".")[1] for name in changed} == LAYERS[kind]
        assert [saved(run).keys() - {"seen"} for run in runs] == [changed] * 2
    size = sum(file.stat().st_size for file in resolve(tmp_path / "Adapted-whole").iterdir())
    # What is trained, with Adam's moments, is as large as what is left out; and random states.
    assert size < BASE + 40_000 * ranks < 2 * BASE


def test_what_a_checkpoint_has_of_another_network_is_saved_again(tmp_path: Path) -> None:
    for base, count in ((2, 8), (1, 5)):  # biases of both networks are 0
        make(tmp_path, f"{base}", max_steps=2, checkpoint_weights="all").fit(Adapted())
        make(tmp_path, f"{base}", resume="auto").fit(Adapted(base=base))
        assert len(saved(tmp_path / f"{base}")) == count
        kept = trained(tmp_path / f"{base}")["sequential_module.0.weight"]
        assert torch.equal(kept, Adapted().sequential_module[0].weight)


def test_another_network_below_it_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, "run", max_steps=2).fit(Adapted())
    line = r"sequential_module.0.weight was frozen and left out .*: torch.float32 \[128, 128\] "
    for use in (
        lambda: load_weights(Adapted(base=2), tmp_path / "run"),
        lambda: make(tmp_path, "run", resume="auto").fit(Adapted(base=2)),
        lambda: make(tmp_path, "new").test(Adapted(base=2), checkpoint=str(tmp_path / "run")),
    ):
        with pytest.raises(CheckpointError, match=line):
            use()
    weights = {"weights": tmp_path / "run", "checkpoint_weights": "all"}
    with pytest.raises(ConfigurationError, match=line):
        make(tmp_path, "next", **weights).fit(Adapted(base=2))
    make(tmp_path, "next", max_steps=1, **weights).fit(Adapted())
    assert len(saved(tmp_path / "next")) == 11


def test_an_export_has_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "run", max_steps=2).fit(Adapted())
    _write_weights(Checkpoint(resolve(tmp_path / "run")).state()["model"], {}, tmp_path / "file")
    assert len(load_file(tmp_path / "file")) == 5
    line = "the 6 parameters that its checkpoint left out are not in the file"
    assert line in capsys.readouterr().err


def test_what_no_code_gives_is_an_error(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Adapted()
    with pytest.raises(ConfigurationError, match=r"0.weight is frozen and on the meta device"):
        make(tmp_path, "meta").fit(module)
    make(tmp_path, "run", max_steps=1).fit(Adapted())
    with pytest.raises(ConfigurationError, match="a resume would not have those of weights"):
        make(tmp_path, "new", weights=tmp_path / "run")
