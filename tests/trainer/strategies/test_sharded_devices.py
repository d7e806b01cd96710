"""Where the tensors of sharded strategies lie, asked without a GPU.

A fake process group takes part in every collective at once, so that meshes of GPUs can be made
where there are none; what would move there raises an error. Torch's meta device stands for one.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
import torch.distributed as dist
from my_project_trainer.checkpoint import fill_module
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.checkpoint import writing as checkpoint_writer
from my_project_trainer.data import randomness
from my_project_trainer.strategies import optimizer_state as states
from my_project_trainer.strategies import optimizers as optimization
from my_project_trainer.strategies.deepspeed import deepspeed
from my_project_trainer.strategies.fsdp import fsdp
from my_project_trainer.strategies.precision import Precision
from my_project_trainer.strategies.replicated import dp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchmetrics.classification import MulticlassAccuracy

META = torch.device("meta")
KEYS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def connect() -> Iterator[Callable[[int, int], None]]:
    """Takes a rank's place in a group whose other ranks are not there."""

    def take(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield take
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(local: Tensor, rows: int) -> DTensor:
    """A DTensor over GPUs whose shard lies where it is, as under ``offload``."""
    world: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(world, "cuda", mesh_dim_names=("shard",))
    meta = TensorMeta(torch.Size([rows, *local.shape[1:]]), local.stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has it be an error to move a tensor to a GPU, also where there is one."""
    to = Tensor.to

    def only_here(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert "cuda" not in f"{args} {kwargs}"
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", only_here)


@pytest.mark.usefixtures("no_gpu")
def test_a_checkpoint_of_shards_in_main_memory_never_leaves_it(connect, tmp_path):
    connect(0, 1)
    module = nn.Linear(2, 4, bias=False)
    module.weight = nn.Parameter(sharded(torch.arange(8.0).view(4, 2), 4))
    optimizer = torch.optim.Adam(module.parameters())
    module.weight.grad = sharded(torch.ones(4, 2), 4)
    optimizer.step()
    moments = states.optimizer_state(optimizer, states.parameter_names(module))
    state = {"model": dict(module.state_dict()), "optimizer": moments}
    checkpoint_writer.Checkpoints(tmp_path).save(1, state, {})
    stored = checkpoint.Checkpoint(tmp_path / "step-00000001").stored_state()
    other = nn.Linear(2, 4, bias=False)
    other.weight = nn.Parameter(sharded(torch.zeros(4, 2), 4))
    again = torch.optim.Adam(other.parameters())
    fill_module(other, stored["model"])
    states.load_optimizer_state(again, stored["optimizer"], states.parameter_names(other))
    for one, two in (
        (module.weight, other.weight),
        *((optimizer.state[module.weight][key], again.state[other.weight][key]) for key in KEYS),
    ):
        assert torch.equal(one._local_tensor, two._local_tensor)
        assert two._local_tensor.device.type == "cpu"


class Counts(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer, and moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(1)

    def _apply(self, fn: Any, recurse: bool = True) -> "Counts":
        super()._apply(fn, recurse)
        self.seen = fn(self.seen)
        return self


class Own(trainer.TrainingModule):
    """Holds all kinds of state itself, beside a layer that is sharded."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.accuracy = MulticlassAccuracy(3)
        self.counts = Counts()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("automatic", [True, False])
def test_fsdp_places_all_that_it_does_not_divide(connect, monkeypatch, automatic):
    connect(0, 1)
    strategy = fsdp.FSDP()
    strategy.device, strategy.precision = META, Precision("32-true", "cpu")
    world: Any = dist.group.WORLD
    monkeypatch.setattr(strategy, "make_mesh", lambda: DeviceMesh.from_group(world, "cpu"))
    monkeypatch.setattr(strategy, "start_equal", lambda *arguments: None)
    # Parameters cannot become those of the meta device in place, and would get memory there.
    monkeypatch.setattr(strategy, "_shard", lambda unit: None)
    monkeypatch.setattr(fsdp.meta_device.Initializer, "materialize", lambda self, part: {})
    module = Own(automatic)
    strategy.place(module)
    state = {
        **dict(module.named_buffers()),
        "temperature": module.temperature,
        "accuracy": module.accuracy.tp,
        "accuracy's default": module.accuracy._defaults["tp"],
        "counts": module.counts.seen,
    }
    assert {name: value.device for name, value in state.items()} == dict.fromkeys(state, META)
    assert {"scale", "table", "norm.running_mean"} <= state.keys()


def fused_on(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer there, and an optimizer that keeps all of its state there."""
    layer = nn.Linear(2, 2, bias=False, device=device)
    return layer, torch.optim.AdamW(layer.parameters(), fused=device == META)


@pytest.fixture
def saved() -> dict[str, Any]:
    """The state of an optimizer that is not fused, and has stepped."""
    layer, optimizer = fused_on(torch.device("cpu"))
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = states.optimizer_state(optimizer, states.parameter_names(layer))
    return state


def test_a_fused_optimizer_gets_its_steps_on_the_device_and_stays_fused(saved):
    layer, optimizer = fused_on(META)
    states.load_optimizer_state(optimizer, saved, states.parameter_names(layer))
    assert {value.device for value in optimizer.state[layer.weight].values()} == {META}
    assert optimizer.param_groups[0]["fused"]


def test_one_that_is_not_fused_keeps_them_in_main_memory(saved):
    layer, optimizer = fused_on(torch.device("cpu"))
    saved["param_groups"][0]["fused"] = True
    states.load_optimizer_state(optimizer, saved, states.parameter_names(layer))
    assert optimizer.state[layer.weight]["step"].device.type == "cpu"
    assert not optimizer.param_groups[0]["fused"]


# --- what is read on the CPU while a GPU writes it -----------------------------------------------


class OnGPU:
    """A number on a GPU, as gradient scaling knows it; a copy that waits is all that it gives."""

    device = torch.device("cuda", 0)

    def cpu(self) -> Tensor:
        """A copy that is there when the call returns."""
        return torch.full((), 0.5)


def test_the_scale_of_offloaded_gradients_has_arrived_before_it_is_used():
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.grad = torch.full((2, 2), 4.0)
    optimizer = torch.optim.SGD(layer.parameters())
    Precision("16-mixed", "cpu").scaler._unscale_grads_(optimizer, OnGPU(), OnGPU(), False)
    assert layer.weight.grad.tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize(("device", "reads"), [("cpu", True), ("cuda", False)])
def test_an_offloaded_fused_optimizer_reads_no_overflow_from_a_gpu(monkeypatch, device, reads):
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)
    scaler = Precision("16-mixed", "cpu").scaler
    scaler._device = device
    seen, attribute = [], "_step_supports_amp_scaling"
    note = lambda _, stepped: seen.append(getattr(stepped, attribute))  # noqa: E731
    monkeypatch.setattr(torch.amp.GradScaler, "step", note)
    scaler.step(optimizer)
    assert seen == [reads]
    assert getattr(optimizer, attribute) is True  # as torch has made it


def test_deepspeed_clips_offloaded_gradients_after_their_copies(monkeypatch):
    events: list[str] = []
    gradient = torch.tensor([3.0, -3.0])

    def gradients() -> Iterator[Tensor]:
        events.append("read")
        yield gradient

    strategy = deepspeed.DeepSpeed()
    strategy.device = torch.device("cuda", 0)
    strategy.zero = SimpleNamespace(cpu_offload=True, loss_scale=2.0)
    strategy.slices = SimpleNamespace(gradients=gradients, are_offloaded=True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"wait {device}"))
    strategy.clip(optimization.Optimization([], []), 1.0, "value")
    assert events == ["wait cuda:0", "read"]
    assert gradient.tolist() == [2, -2]


# --- dp: several GPUs in one process -------------------------------------------------------------

GPUS = [torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cuda", 1)]


def test_a_replica_computes_on_its_own_gpu(monkeypatch):
    current: list[Any] = [None]

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Replica(torch.nn.Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return batch, current[-1]

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(dp.moving, "move", lambda piece, *_: piece)
    monkeypatch.setattr(dp, "replicate", lambda *_, **__: Replica())
    monkeypatch.setattr(dp, "gather", lambda outputs, _: outputs)
    outputs = dp.ReplicatedStep(Own(automatic=True), GPUS)("training", torch.arange(3), 0)
    assert outputs == [(torch.tensor([i]), device) for i, device in enumerate(GPUS)]


def test_the_generators_of_all_replicas_are_saved(monkeypatch):
    states = {device: torch.tensor([index]) for index, device in enumerate(GPUS[:2])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    update = lambda state, device: states.update({device: state})  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_rng_state", update)
    saved = randomness.full_state(GPUS)
    before = dict(states)
    states.update(dict.fromkeys(states, torch.tensor([7])))
    randomness.set_full_state(saved, GPUS)
    assert states == before
    # One GPU's is named as ever, also where others were beside it.
    randomness.set_full_state(saved, [GPUS[1]])
    assert states[GPUS[1]].tolist() == [0]
