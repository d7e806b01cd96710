"""The strategy ``xla`` where PyTorch/XLA is not installed: each spelling is refused in one line.

What needs PyTorch/XLA is in ``test_xla_runs.py``.
"""

from dataclasses import replace
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.launch.devices import ENGINE_HARDWARE as HARDWARE
from my_project_trainer.loop.checks import LossRecord
from my_project_trainer.loop.position import Position

hardware = pytest.importorskip("my_project_trainer.strategies.xla")
MISSING = (
    "strategy='xla' needs the package torch_xla, which is not installed: make xla (into an "
    "environment of its own, .venv-xla)"
)


def refusal(**options: Any) -> list[str]:
    """The lines with which a trainer is refused."""
    with pytest.raises(trainer.ConfigurationError) as raised:
        trainer.Trainer(max_steps=1, **options)
    return raised.value.problems


@pytest.fixture
def chips(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have this machine have so many TPU chips."""

    def see(count: int | None) -> None:
        monkeypatch.setattr(hardware, "count_chips", lambda: count)
        monkeypatch.setitem(HARDWARE, "tpu", replace(HARDWARE["tpu"], count=lambda: count))

    return see


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"strategy": "xla"}, MISSING),
        ({"strategy": "xla", "accelerator": "cpu", "devices": 2}, MISSING),
        ({"accelerator": "tpu"}, MISSING),
        ({"tpu_cores": 8}, MISSING),
        ({"tpu_cores": [1]}, MISSING),
        ({"strategy": "xla_fsdp"}, "strategy='xla_fsdp' is unknown; did you mean 'fsdp'?"),
        ({"accelerator": "xla"}, "accelerator='xla' is unknown; known: auto, cpu, cuda, gpu, tpu"),
        (
            {"accelerator": "tpu", "strategy": "ddp"},
            "strategy='ddp' runs on cpu or cuda, not on tpu",
        ),
    ],
)
def test_it_is_refused_in_one_line(nothing_runs: None, options: Any, line: str) -> None:
    assert refusal(**options) == [line]


def test_another_torch_is_refused(nothing_runs, tmp_path, monkeypatch):
    about = tmp_path / "torch_xla-2.9.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n")
    (tmp_path / "torch_xla.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal(strategy="xla", accelerator="cpu") == [
        "torch_xla 2.9.0 works only with torch of the same version, and this is torch "
        f"{torch.__version__}: make xla (into an environment of its own, .venv-xla)"
    ]
    assert trainer.Trainer(max_steps=1, accelerator="auto")._plan.strategy_name == "single_device"


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "mesh", "tensor_parallel"])
def test_sharded_parameters_need_a_newer_torch_than_it(nothing_runs, monkeypatch, strategy):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.0"))
    problem = "sharded parameters need torch 2.10 or newer, and this is torch 2.9.0"
    advice = "use strategy='ddp', or another environment"
    assert refusal(strategy=strategy, accelerator="cpu", devices=2) == [f"{problem}; {advice}"]


@pytest.mark.parametrize(
    ("count", "options", "line"),
    [
        (
            0,
            {"accelerator": "tpu"},
            "accelerator='tpu': this machine has none; use 'cpu' or 'auto'",
        ),
        (4, {"tpu_cores": 8}, "devices=8: there is no device 7 here (known: 0 to 3)"),
        (4, {"tpu_cores": [5]}, "devices=[4]: there is no device 4 here (known: 0 to 3)"),
        (
            4,
            {"accelerator": "tpu", "devices": 2},
            "devices=2: PyTorch/XLA runs on one chip, or on all 4 of this machine; give 1 or "
            "'auto'",
        ),
    ],
)
def test_it_counts_the_chips(nothing_runs, chips, count, options, line):
    chips(count)
    assert line in refusal(**options)


@pytest.mark.parametrize("options", [{}, {"accelerator": "tpu"}, {"tpu_cores": 4}])
def test_all_chips_are_used_where_there_are_some(nothing_runs, chips, monkeypatch, options):
    """As on a TPU machine, but for the packages."""
    chips(4)
    cls = trainer.strategies.find("xla").cls
    monkeypatch.setattr(cls, "limits", replace(cls.limits, packages={}))
    plan = trainer.Trainer(max_steps=1, **options)._plan
    assert plan.strategy_name == "xla"
    assert plan.node_devices == tuple(torch.device("xla", index) for index in range(4))
    assert plan.local_processes == 4


@pytest.mark.parametrize("block", [1, None])
def test_the_first_loss_that_is_not_finite_is_found_in_blocks_of_any_size(block):
    position = Position()
    losses = LossRecord(torch.device("cpu"), position, block)
    for position.global_step, loss in enumerate([1.0, float("nan"), 2.0, float("inf")]):
        losses.note(torch.tensor(loss))
    assert losses.first_step().tolist() == [2.0]
