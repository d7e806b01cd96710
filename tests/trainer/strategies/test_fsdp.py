"""What the matrix does not say of fsdp: what a rank holds, evaluation, tied weights, units."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.checkpoint import Checkpoint, resolve
from my_project_trainer.errors import UserError
from my_project_trainer.launch.start import run_in_processes
from my_project_trainer.strategies.fsdp import units
from my_project_trainer.strategies.fsdp.fsdp import FSDP
from safetensors.torch import load_file
from tests.project import succeed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fitting
from fitting import Descends, quiet
from my_project.tasks.language_model import LanguageModel
from sharding_subject import SAMPLES, TOKENS, WIDTH, Block, Overflows, Tied

ON_THREE = pytest.param("fsdp", 3, marks=pytest.mark.slow)
SHARDED = pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("fsdp", 2),
        ON_THREE,
        pytest.param("hsdp", 3, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    """Runs the subject once under a strategy, and gives its folder."""

    @cache
    def folder(strategy: str, devices: int, *words: str) -> Path:
        path = tmp_path_factory.mktemp(f"{strategy}-{devices}-")
        succeed(["-m", "sharding_subject", path, strategy, str(devices), *words])
        return path

    return folder


@pytest.mark.slow
@SHARDED
@pytest.mark.parametrize("words", [(), ("meta",)])
def test_tied_weights_train_and_predict_as_in_one_process(results, strategy, devices, words):
    alone = load_file(results("single_device", 1, *words) / "weights.safetensors")
    sharded = load_file(results(strategy, devices, *words) / "weights.safetensors")
    assert alone["predictions"].shape == (SAMPLES, TOKENS)
    assert alone.keys() == sharded.keys()
    for key, value in alone.items():
        assert torch.allclose(value, sharded[key], rtol=0, atol=2e-5), key
    assert torch.equal(sharded["tokens.weight"], sharded["head.weight"])


@SHARDED
def test_validation_counts_each_sample_once(results, strategy, devices):
    alone = json.loads((results("single_device", 1) / "values.json").read_text())
    sharded = json.loads((results(strategy, devices) / "values.json").read_text())
    assert sharded["count"] == alone["count"] == SAMPLES
    assert sharded["largest"] == alone["largest"]
    assert sharded["accuracy"] == pytest.approx(alone["accuracy"], abs=1e-6)
    assert sharded["val_loss"] == pytest.approx(alone["val_loss"], abs=1e-5)


@SHARDED
def test_no_thread_of_a_process_group_is_left(results, strategy, devices):
    # One of gloo's may abort the end of the interpreter.
    for rank in range(devices):
        threads = (results(strategy, devices) / f"threads-{rank}").read_text().splitlines()
        assert threads
        assert [thread for thread in threads if "gloo" in thread] == []


@pytest.mark.parametrize(("strategy", "devices"), [("fsdp", 2), ON_THREE])
def test_a_rank_holds_its_shard_of_everything(results, strategy, devices):
    folder = results(strategy, devices)
    held = [json.loads((folder / f"held-{rank}.json").read_text()) for rank in range(devices)]
    count = sum(parameter.numel() for parameter in Tied().parameters())
    assert sum(rank["parameters"] for rank in held) == count
    assert sum(rank["states"] for rank in held) == 2 * count
    # Parameters are sharded along their first dimension: into rows, which may not divide evenly.
    assert max(rank["parameters"] for rank in held) <= count / devices + 12 * 4 * WIDTH


def test_a_module_that_is_still_sharded_is_refused(tmp_path):
    made = fitting.fit(module := Tied(str(tmp_path)), tmp_path, strategy="fsdp", max_steps=1)
    line = "Tied is still sharded from a previous fit; create it again, and give a"
    with pytest.raises(UserError, match=line):
        made.validate(module)


@pytest.mark.slow
def test_an_overflow_that_one_rank_sees_has_all_leave_the_step_out(tmp_path):
    how = {"strategy": "fsdp", "devices": 2, "precision": "16-mixed", "max_steps": 1}
    how |= {"strategy_options": {"unit_classes": ["Linear"]}}  # one is called by itself
    module = {"module": "sharding_subject.Overflows", "init": {"folder": str(tmp_path)}}
    assert fitting.fits(tmp_path, [{"name": "run", **module, **how}]) == [{"run": ""}] * 2
    state = Checkpoint(resolve(tmp_path / "run")).state()
    quiet(max_steps=1)  # seeds as that of the fit does
    before = Overflows().state_dict()
    assert [name for name in before if not before[name].equal(state["model"][name])] == []
    assert [optimizer["state"] for optimizer in state["optimizers"]] == [{}]
    assert state["precision"]["scale"] == 2.0**14


def test_units_by_size_are_the_smallest_that_are_large_enough():
    model = Tied()
    chosen = [name for name, _ in units.choose_units(model, None, 200)]
    # A block has 16 + 288 + 264 parameters; the tied ones are the root's.
    assert chosen == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert [name for name, _ in units.choose_units(model, None, 500)] == ["blocks.0", "blocks.1"]
    assert units.choose_units(model, None, 10_000) == []


def test_repeated_blocks_may_be_left_whole():
    for smallest in (200, 500):
        chosen_units = units.choose_units(Tied(), None, smallest, whole_blocks=True)
        assert [name for name, _ in chosen_units] == ["blocks.0", "blocks.1"]
    block = nn.Sequential(*(Block() for _ in range(2)))
    model = nn.ModuleDict({"first": Block(), "blocks": nn.ModuleList([block, nn.Linear(99, 9)])})
    chosen = [name for name, _ in units.choose_units(model, None, 200, whole_blocks=True)]
    assert chosen == ["blocks.0.0", "blocks.0.1", "first.up", "first.down", "blocks.1"]


def test_a_call_inside_a_unit_is_explained():
    def inside() -> None:
        raise RuntimeError("aten.addmm.default got mixed torch.Tensor and DTensor, need to …")

    with pytest.raises(UserError) as raised, units.explain_sharded_use():
        inside()
    line = inside.__code__.co_firstlineno + 1
    assert str(raised.value) == (
        f"a parameter is used while it is sharded (test_fsdp.py, line {line}): call full_tensor() "
        "on it; or the whole block of fsdp, which its own forward gathers, or name smaller units, "
        "such as --trainer.strategy_options.unit_classes [Linear]"
    )
    with pytest.raises(RuntimeError, match="another"), units.explain_sharded_use():
        raise RuntimeError("another")


class Forces(fitting.Descends, lr=0.5):
    """Its loss is of the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch.requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        loss = (forces - x).square().mean()
        self.log("loss", loss)
        return loss


def test_a_gradient_of_a_gradient_needs_gathered_units(apart):
    def loss(**options: Any) -> float:
        """That of the second step."""
        made = quiet(max_epochs=1, log_every_n_steps=1, **options)
        made.fit(Forces(), [torch.ones(4, 6)] * 2)
        return float(made.metrics["loss"])

    by_layer = {"unit_parameters": 1}
    with pytest.raises(UserError, match=r"create_graph=True.*find_unused_parameters true"):
        loss(strategy="fsdp", strategy_options=by_layer)
    gathered = {**by_layer, "find_unused_parameters": True}
    expected = loss(strategy="single_device")
    assert loss(strategy="fsdp", strategy_options=gathered) == pytest.approx(expected, abs=1e-6)


def test_a_gpt_of_twelve_layers_has_twelve_units_and_the_root_on_gpus():
    with torch.device("meta"):
        gpt = LanguageModel(layers=12, width=768, heads=12)
    strategy = FSDP()
    strategy.device = torch.device("cuda")
    assert list(strategy._choose_units(gpt)) == [f"blocks.{layer}" for layer in range(12)]
    strategy.device = torch.device("cpu")
    assert len(strategy._choose_units(gpt)) == 37


class ManualChildren(Descends):
    """Manual optimization, and parameters where they cannot be sharded."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(2))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.parts[1].bias = self.parts[0].bias


def test_with_manual_optimization_each_parameter_is_in_one_child():
    with pytest.raises(trainer.ConfigurationError) as caught:
        quiet(strategy="fsdp", max_steps=1).check_fit(ManualChildren())
    assert [line.split(" of the")[0] for line in caught.value.problems] == [
        "own is in none",
        "parts.0.bias is in 2",
    ]
    assert all("strategy='ddp'" in line for line in caught.value.problems)


def test_attention_is_one_unit():
    with torch.device("meta"):
        layer = nn.Sequential(nn.TransformerEncoderLayer(1024, 8, batch_first=True))
    chosen = [name for name, _ in units.choose_units(layer, None, 1_000_000)]
    assert chosen == ["0.self_attn", "0.linear1", "0.linear2"]
    inner = [name for name, _ in units.choose_units(layer, ["NonDynamicallyQuantizableLinear"], 1)]
    assert inner == []


class Encoder(Descends):
    """Attention in each of its forms: in an encoder, which in validation takes paths of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, missing: Tensor) -> Tensor:
        x = self.encoder(x, src_key_padding_mask=torch.arange(5) >= 5 - missing[:, None])
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x[:, 0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, missing, y = batch
        loss = (self(x, missing) - y).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, missing, y = batch
        self.log("val_loss", (self(x, missing) - y).square().mean())

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(12, 5, 16, generator=torch.Generator().manual_seed(1))
        # Samples are shorter by up to two, and filled up at their end.
        missing = torch.arange(12) % 3
        return DataLoader(TensorDataset(x, missing, x.mean((1, 2))[:, None]), batch_size=6)

    val_dataloader = train_dataloader


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "bound"),
    [("32-true", 1e-5), pytest.param("bf16-mixed", 2e-2, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("smallest", [100, 1100, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_torchs_own_transformer_trains_and_validates_as_in_one_process(
    tmp_path, precision, bound, smallest
):
    # Torch's own path for inference fails under autocast on CPUs.
    torch.backends.mha.set_fastpath_enabled(precision == "32-true")
    options = {"precision": precision, "global_batch_size": 6, "max_epochs": 2, "loggers": ["csv"]}
    sharded = {"strategy": "fsdp", "strategy_options": {"unit_parameters": smallest}, "devices": 2}
    train = partial(fitting.fit, Encoder(), tmp_path / "sharded", **sharded, **options)
    run_in_processes("fork", 2, lambda: str(train()), {})
    fitting.fit(Encoder(), tmp_path / "alone", **options)
    torch.backends.mha.set_fastpath_enabled(True)
    for name in ("loss", "val_loss"):
        one, two = (fitting.logged(tmp_path / way / "run", name) for way in ("alone", "sharded"))
        assert len(one) >= 2
        assert two == pytest.approx(one, abs=bound)


def test_units_by_class():
    chosen = units.choose_units(Tied(), ["Block"], 1)
    assert [name for name, _ in chosen] == ["blocks.0", "blocks.1"]
    nested = units.choose_units(Tied(), ["Linear", "Block"], 1)
    assert [name for name, _ in nested][-2:] == ["blocks.0", "blocks.1"]
    assert "head" not in dict(nested)


def test_a_class_that_is_not_there_is_named():
    with pytest.raises(UserError, match="no module of class 'Blok'; did you mean 'Block'"):
        units.choose_units(nn.Sequential(Block()), ["Blok"], 1)


def test_a_mistake_is_a_line():
    options = {"parameter_dtype": "bfloat16", "reduce_dtype": "bf16"}
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", strategy="fsdp", max_steps=1, strategy_options=options)
    assert [line.split(": expected")[0] for line in caught.value.problems] == [
        "strategy_options.parameter_dtype='bfloat16'",
        "strategy_options.reduce_dtype='bf16'",
    ]
