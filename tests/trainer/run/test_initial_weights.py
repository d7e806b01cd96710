"""A new run starts from weights: of a run, a checkpoint or a file, under every strategy."""

import json
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.callbacks import EMA
from my_project_trainer.checkpoint import Checkpoint, resolve
from my_project_trainer.cli import export, load_weights
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import averaging_subject
import fitting
from fitting import assert_close, fits
from initial_weights_subject import STEPS, Net, fit
from processes import at_root

pytestmark = pytest.mark.usefixtures("apart")


def saved(name: str) -> dict[str, Tensor]:
    return fitting.saved(Path("runs") / name)


@pytest.fixture
def expected(apart: None) -> dict[str, Tensor]:
    """The weights after three steps in one process, from those of ``runs/source``."""
    fit(averaging_subject.Net(), "source", max_steps=5)
    start = Net()
    load_weights(start, "runs/source")
    fit(start, "expected", global_batch_size=4)
    return saved("expected")


OPTIONS = {**averaging_subject.OPTIONS, "mesh": {"data": 1, "shard": 2}}


def train(expected: dict[str, Tensor], *words: str) -> None:
    """Train on two ranks by each STRATEGY, or meta:STRATEGY, from ``runs/source``."""
    shared = {"devices": 2, "global_batch_size": 4, "max_steps": STEPS, "limit_val_batches": 0}
    runs = []
    for word in words:
        meta, _, strategy = word.rpartition(":")
        how = {"strategy": strategy, "strategy_options": OPTIONS.get(strategy)}
        model = {"name": word.replace(":", "-"), "module": "initial_weights_subject.Net"}
        runs.append({**model, **shared, **how, "weights": "source", "meta_device": bool(meta)})
    folder = Path("runs").resolve()
    fits(folder, runs, cwd=folder, extra=at_root())
    for run in runs:
        assert_close(saved(str(run["name"])), expected)


def test_two_ranks_start_from_weights_as_one_does(expected: dict[str, Tensor]) -> None:
    train(expected, "ddp", "fsdp", "sequential", "meta:fsdp", "meta:sequential")
    [attempt] = json.loads(Path("runs/meta-fsdp/run.json").read_text())["attempts"]
    assert (attempt["weights"], attempt["resumed_from"]) == ("source", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("ddp_zero1", "mesh", "meta:mesh"), marks=pytest.mark.exhaustive),
        pytest.param(
            ("deepspeed_stage_3", "meta:deepspeed_stage_3", "deepspeed_stage_1"),
            marks=pytest.mark.needs("deepspeed"),
        ),
        pytest.param(("ddp_sharded",), marks=pytest.mark.needs("fairscale")),
    ],
)
def test_other_strategies_start_from_weights(words, expected):
    train(expected, *words)


def test_a_file_and_the_average_of_a_run(expected: dict[str, Tensor], capsys: Any) -> None:
    export.run("", ["runs/source", "--format", "safetensors", "--output", "all.safetensors"])
    capsys.readouterr()
    made = fit(Net(), "file", weights=Path("all.safetensors"), global_batch_size=4)
    assert made.global_step == STEPS
    assert "weights: 8 of 8 from all.safetensors\n" in capsys.readouterr().err
    assert_close(saved("file"), expected)
    # What other programs write: of shared weights one name only, in several files.
    weights = load_file("all.safetensors")
    del weights["sequential_module.2.weight"]
    Path("several").mkdir()
    for name, value in weights.items():
        save_file({name: value}, f"several/{name}.safetensors")
    fit(Net(), "several", weights="several", global_batch_size=4)
    assert_close(saved("several"), expected)
    fit(averaging_subject.Net(), "averages", callbacks=[EMA(0.9)])
    average = Checkpoint(resolve(Path("runs/averages"))).state()["callbacks"]["EMA"]["average"]
    module = Net()
    capsys.readouterr()
    fit(module, "from_average", weights="runs/averages", callbacks=[_KeepsStart()], max_steps=1)
    assert "weights: the average of EMA, which validations" in capsys.readouterr().err
    for name, value in average.items():
        assert torch.equal(_KeepsStart.weights[name], value)


class _KeepsStart(trainer.Callback):
    weights: dict[str, Tensor] = {}  # noqa: RUF012 (shared on purpose)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        type(self).weights = {name: value.clone() for name, value in module.state_dict().items()}


class Other(Net):
    """Another head, a further layer, and none of the frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module[3] = nn.Identity()
        self.sequential_module[2] = nn.Linear(6, 5)
        self.sequential_module[4] = nn.Linear(5, 3)
        self.head = nn.Parameter(torch.ones(2))


def test_weights_that_do_not_fit_are_named(expected: dict[str, Tensor], capsys: Any) -> None:
    names = (
        "missing: head; unexpected: sequential_module.3.weight, sequential_module.3.bias; of "
        "another shape: sequential_module.2.weight (6, 6), here (5, 6), sequential_module.2.bias "
        "(6,), here (5,), sequential_module.4.weight (3, 6), here (3, 5)"
    )
    with pytest.raises(trainer.ConfigurationError) as raised:
        fit(Other(), "strict", weights="runs/source")
    advice = "weights_strict=False uses the others"
    assert raised.value.problems == [f"weights='runs/source' do not fit Other: {names}; {advice}"]
    assert not Path("runs/strict").exists()
    callback, module = _KeepsStart(), Other()
    how = {"weights": "runs/source", "weights_strict": False, "callbacks": [callback]}
    fit(module, "other", max_steps=1, **how)
    said = capsys.readouterr().err
    assert "weights: 3 of 7 from runs/source/checkpoints/step-00000005\n" in said
    assert f"note: weights that do not fit are left out: {names}\n" in said
    fitting = ("sequential_module.0.weight", "sequential_module.0.bias", "sequential_module.4.bias")
    for name in fitting:
        assert torch.equal(callback.weights[name], saved("source")[name])
    assert torch.equal(callback.weights["head"], torch.ones(2))
    save_file({"x": torch.ones(1)}, "x.safetensors")
    with pytest.raises(trainer.ConfigurationError, match="unexpected: x; none fits"):
        fit(Net(), "none", weights="x.safetensors", weights_strict=False)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"weights": "gone"}, "weights='.*gone': no such file or directory; give a run directory"),
        ({"weights": "model.pt"}, "weights='.*model.pt': not a safetensors file; give a run"),
        ({"weights": "empty"}, "weights: .*empty: no checkpoint there; give a run directory or"),
        ({"weights_strict": False}, "weights_strict=False: only with weights, and none are given"),
    ],
)
def test_what_has_no_weights_is_refused(options: dict[str, Any], line: str) -> None:
    Path("model.pt").write_bytes(b"x")
    Path("empty").mkdir()
    with pytest.raises(trainer.ConfigurationError, match=line):
        trainer.Trainer(accelerator="cpu", devices=1, **options)


def test_a_damaged_file_is_refused() -> None:
    Path("bad.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(trainer.ConfigurationError, match=r"weights: .*bad.safetensors: damaged"):
        fit(Net(), "bad", weights="bad.safetensors")


def test_a_run_that_resumes_does_not_start_from_weights(expected, capsys):
    how: dict[str, Any] = {"weights": "runs/source", "resume": "auto", "global_batch_size": 4}
    fit(Net(), "requeued", max_steps=2, **how)
    assert "weights: 8 of 8 from" in capsys.readouterr().err
    Path("runs/source").rename("runs/moved")  # a requeued job does not need it
    for steps, resume in ((STEPS, "auto"), (STEPS + 1, "runs/requeued")):
        fit(Net(), "requeued", **how | {"max_steps": steps, "resume": resume})
        said = capsys.readouterr().err
        assert "note: weights=runs/source is not used: the run is resumed\n" in said
        assert f"resumed from runs/requeued/checkpoints/step-0000000{steps - 1}" in said
        if steps == STEPS:
            assert_close(saved("requeued"), expected)


def test_learning_rates_are_tried_from_the_weights(expected: dict[str, Tensor]) -> None:
    def losses(**options: Any) -> list[str]:
        made = trainer.Trainer(accelerator="cpu", devices=1, run_name="rates", **options)
        module = Net()
        if not options:
            load_weights(module, "runs/source")
        made.find_learning_rate(module, steps=20)
        return Path("runs/rates/learning_rates.csv").read_text().splitlines()

    assert losses(weights="runs/source") == losses()
