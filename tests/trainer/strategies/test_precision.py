"""What autocast and what parameters compute in, and the scaler of fp16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.strategies import precision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from fitting import Descends, quiet

HALVES = pytest.mark.parametrize(
    ("name", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)]
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)],
)
def test_a_product_is_computed_in(name: str, dtype: torch.dtype) -> None:
    mixed = precision.Precision(name, "cpu")
    with mixed.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is dtype
    assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32
    assert (mixed.scaler is not None) is (name == "16-mixed")


@HALVES
def test_a_module_is_cast_and_nothing_else_is_done(name: str, dtype: torch.dtype) -> None:
    half = precision.Precision(name, "cpu")
    assert (half.parameter_dtype, half.dtype, half.scaler) == (dtype, None, None)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), MeanMetric())
    module.register_buffer("rotations", torch.ones(2, dtype=torch.complex64))
    module.tied = module[0].weight
    weight, counted = module[0].weight, module[1].num_batches_tracked
    half.cast((*module.parameters(), *module.buffers()))
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert module[0].weight is weight is module.tied
    assert module[1].running_var.dtype is dtype
    assert (module[1].num_batches_tracked, counted.dtype) == (counted, torch.int64)
    assert module.rotations.dtype is torch.complex64
    assert module[2].mean_value.dtype is torch.float32
    with half.autocast():
        assert module[:2](torch.ones(4, 2, dtype=dtype)).dtype is dtype


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed"])
def test_other_precisions_leave_parameters_as_they_are(name: str) -> None:
    module = nn.Linear(2, 2).double()
    precision.Precision(name, "cpu").cast((*module.parameters(), *module.buffers()))
    assert module.weight.dtype is torch.float64


class Net(Descends, lr=0.5, momentum=0.9):
    """Asks in each step what it computes in, and with which labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        assert labels.dtype is torch.int64
        loss = cross_entropy(self.layer(x), labels)
        self.seen |= {x.dtype, self.layer.weight.dtype, loss.dtype}
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.argmax(1) % 3), batch_size=8)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def run(folder: Path, name: str, steps: int, resume: Any = None, strategy: str = "auto") -> Any:
    """A trained module, its optimizer and its trainer."""
    torch.manual_seed(0)
    module = Net()
    how = {"strategy": strategy, "precision": name, "max_steps": steps, "resume": resume}
    alone = quiet(default_root_dir=folder, **how)
    optimizers: list[SGD] = []
    made = module.configure_optimizers
    module.configure_optimizers = lambda: optimizers.append(made()) or optimizers[0]
    alone.fit(module)
    return module, optimizers[0], alone


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "dp"])
@HALVES
def test_a_run_computes_steps_and_saves_in_half(tmp_path, strategy, name, dtype) -> None:
    module, optimizer, alone = run(tmp_path, name, 9, strategy=strategy)
    assert module.seen == {dtype}
    (momentum, *_) = [slot["momentum_buffer"] for slot in optimizer.state.values()]
    assert momentum.dtype is module.layer.weight.dtype is dtype
    state = checkpoint.Checkpoint(checkpoint.resolve(alone.run_directory)).state()
    assert state["model"]["layer.weight"].dtype is dtype
    assert state["model"]["layer.weight"].equal(module.layer.weight)
    assert {output.dtype for output in alone.predict(module)} == {dtype}


@pytest.mark.parametrize("strategy", ["single_device", "fsdp"])
@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        ("32-true", "bf16-true", torch.bfloat16),
        ("bf16-true", "32-true", torch.float32),
        ("16-true", "bf16-mixed", torch.float32),
        ("bf16-mixed", "16-true", torch.float16),
    ],
)
def test_a_checkpoint_of_another_precision_is_cast(tmp_path, strategy, first, second, dtype):
    module, optimizer, alone = run(tmp_path, first, 3)
    again, resumed, _ = run(tmp_path, second, 3, str(alone.run_directory), strategy)
    momenta = [next(iter(state.state.values())) for state in (optimizer, resumed)]
    weights = [model.layer.weight for model in (module, again)]
    for saved, loaded in (weights, [state["momentum_buffer"] for state in momenta]):
        full = loaded.full_tensor() if strategy == "fsdp" else loaded
        assert full.dtype is dtype
        assert full.equal(saved.to(dtype))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("bf16-mixd", "precision='bf16-mixd' is unknown; did you mean 'bf16-mixed' or '16-mixed'?"),
        ("bf16true", "precision='bf16true' is unknown; did you mean 'bf16-true' or '16-true'?"),
        (
            "qq",
            "precision='qq' is unknown; known: 16-mixed, 16-true, 32-true, bf16-mixed, bf16-true",
        ),
    ],
)
def test_an_unknown_name_is_refused(name: str, line: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        precision.Precision(name, "cpu")
    assert raised.value.problems == [line]


def make(gradient: float, name: str = "16-mixed") -> tuple[nn.Parameter, SGD, Any]:
    """A parameter of 1 after the backward of a loss with this gradient."""
    parameter = nn.Parameter(torch.ones(1))
    mixed = precision.Precision(name, "cpu")
    mixed.scale((parameter * gradient).sum()).backward()
    return parameter, SGD([parameter], lr=1.0), mixed


def test_an_optimizer_without_gradients_does_nothing_under_a_scaler() -> None:
    _, _, mixed = make(0.25)
    unused = nn.Parameter(torch.ones(1))
    optimizer = SGD([unused], lr=1.0)
    mixed.unscale([optimizer])
    mixed.step(optimizer)
    mixed.update()
    assert (unused.item(), mixed.state()["_growth_tracker"]) == (1.0, 0)


def test_without_a_scaler_a_loss_is_itself() -> None:
    parameter, optimizer, mixed = make(0.25, "bf16-mixed")
    loss = torch.ones(1)
    assert mixed.scale(loss) is loss
    mixed.unscale([optimizer])
    assert float(parameter.grad) == 0.25
    mixed.update()
    assert mixed.state() == {}


def test_gradients_are_unscaled_once_until_the_next_backward() -> None:
    parameter, optimizer, mixed = make(0.25)
    mixed.unscale([optimizer])
    mixed.unscale([optimizer])
    assert float(parameter.grad) == 0.25
    mixed.step(optimizer)
    mixed.update()
    parameter.grad = None
    mixed.scale((parameter * 0.25).sum()).backward()
    mixed.unscale([optimizer])
    assert float(parameter.grad) == 0.25
    mixed.scale((parameter * 0.25).sum()).backward()
    with pytest.raises(RuntimeError, match="has already been called"):
        mixed.unscale([optimizer])


@pytest.mark.parametrize("clipped", [False, True])
def test_scaled_gradients_step_at_their_own_size(clipped: bool) -> None:
    parameter, optimizer, mixed = make(0.25)
    assert float(parameter.grad) == 0.25 * 32768
    if clipped:
        mixed.unscale([optimizer])
        assert float(parameter.grad) == 0.25
    mixed.step(optimizer)
    mixed.update()
    assert parameter.item() == 0.75
    assert mixed.state()["_growth_tracker"] == 1


@pytest.mark.parametrize("gradients", [(0.25, float("inf")), (float("inf"), 0.25)])
def test_an_overflow_on_one_of_several_meshes_skips_the_step(gradients: tuple[float, ...]) -> None:
    mixed = precision.Precision("16-mixed", "cpu")
    parameters = [nn.Parameter(torch.ones(1)) for _ in gradients]
    for parameter in parameters:
        parameter.device_mesh = object()  # as a DTensor's: torch's foreach kernels take one mesh
    losses = [p * gradient for p, gradient in zip(parameters, gradients, strict=True)]
    mixed.scale(torch.stack(losses).sum()).backward()
    mixed.step(SGD(parameters, lr=1.0))
    mixed.update()
    assert [p.item() for p in parameters] == [1.0, 1.0]
    assert mixed.state()["scale"] == 16384.0


class _Unscaled(Net):
    """Reads the gradients before each step: those of a loss that is the sum of the weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer.weight.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.layer.weight.grad is not None
        assert self.layer.weight.grad.unique().tolist() == [1.0]


def test_a_hook_before_the_step_reads_unscaled_gradients(tmp_path: Path) -> None:
    module = _Unscaled()
    alone = quiet(precision="16-mixed", max_steps=2, default_root_dir=tmp_path)
    alone.fit(module)
    assert alone.global_step == 2


def test_the_scaler_s_state_comes_back() -> None:
    _, optimizer, mixed = make(float("inf"))
    mixed.step(optimizer)
    mixed.update()
    other = precision.Precision("16-mixed", "cpu")
    other.load_state(mixed.state())
    assert other.state() == mixed.state()
    assert float(other.scale(torch.ones(1))) == 16384.0


def test_a_run_of_another_precision_starts_with_a_new_scaler() -> None:
    scaled, plain = precision.Precision("16-mixed", "cpu"), precision.Precision("32-true", "cpu")
    scaled.load_state(plain.state())
    assert scaled.state()["scale"] == 32768.0
    plain.load_state(scaled.state())
    assert plain.state() == {}
