"""What saves and resumes hold in memory and read, counted in bytes; nothing here is timed."""

import gc
import io
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from my_project_trainer.checkpoint import fill_module, stored_tensors, tensor_files
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.checkpoint.writing import Checkpoints
from my_project_trainer.strategies import optimizer_state
from my_project_trainer.strategies.base import Strategy
from my_project_trainer.strategies.optimizers import Optimization
from tests.project import succeed
from torch import nn

from checkpoint_subject import read
from memory_subject import LAYERS, TENSOR, WIDTH, Counting, Layers

MODEL = LAYERS * TENSOR
MOMENTS = 2 * MODEL  # Adam's
SMALL = 2048  # counts of steps, and an element of each tensor whose shard is padded
# Which part of the model and of the moments a rank of n has, and reads.
SHARES = {
    "ddp": (lambda n: 1, lambda n: 1),
    "ddp_zero1": (lambda n: 1, lambda n: n),
    "ddp_sharded": (lambda n: 1, lambda n: n),
    "fsdp": (lambda n: n, lambda n: n),
    "deepspeed_stage_2": (lambda n: 1, lambda n: n),
    "deepspeed_stage_3": (lambda n: n, lambda n: n),
}
ENGINES = {
    **dict.fromkeys(("deepspeed_stage_2", "deepspeed_stage_3"), "deepspeed"),
    "ddp_sharded": "fairscale",
}


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """The folder into which so many ranks have written, of torch's strategies or an engine's."""

    @cache
    def folder(ranks: int, engine: str) -> Path:
        made = tmp_path_factory.mktemp("memory")
        names = [name for name in SHARES if ENGINES.get(name, "torch") == engine]
        succeed(["-m", "memory_subject", made, str(ranks), *names], engine=engine)
        return made

    return folder


def marks(strategy: str) -> list[pytest.MarkDecorator]:
    """Engines write and read what each rank has of ZeRO's states as torch's strategies do."""
    engine = ENGINES.get(strategy)
    return [pytest.mark.slow, pytest.mark.needs(engine)] if engine else []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", [pytest.param(name, marks=marks(name)) for name in SHARES])
def test_a_rank_holds_its_shards_and_one_tensor(noted, strategy, ranks):
    folder = noted(ranks, ENGINES.get(strategy, "torch"))
    of_model, of_moments = (share(ranks) for share in SHARES[strategy])
    for rank in range(ranks):
        record = json.loads((folder / f"{strategy}-{rank}.json").read_text())
        resume = record["resume"]
        # Parameters are there before.
        assert MOMENTS // of_moments <= resume["held"] <= MOMENTS // of_moments + TENSOR + SMALL
        share = MODEL // of_model + MOMENTS // of_moments
        assert share <= resume["read"] <= share + SMALL
        written = (folder / f"{strategy}-second").rglob(f"rank-{rank:05d}.safetensors")
        assert record["save"]["held"] <= max(path.stat().st_size for path in written) + TENSOR


@pytest.mark.filterwarnings("ignore:for layers:UserWarning")  # that nothing is copied
def test_host_memory_has_one_tensor_while_replicated_state_is_loaded_on_a_device(tmp_path):
    trained, strategy = Layers(), Strategy()
    optimizer = trained.configure_optimizers()
    trained.training_step(torch.ones(1, 1, WIDTH), 0).backward()
    optimizer.step()
    state = optimizer_state.optimizer_state(optimizer, optimizer_state.parameter_names(trained))
    saved = {"model": trained.state_dict(), "optimizers": [state]}
    Checkpoints(tmp_path).save(1, saved, {})
    strategy.module = Layers().to("meta")  # stands for a GPU
    other = strategy.module.configure_optimizers()
    with Counting() as counting:
        stored = Checkpoint(tmp_path / "step-00000001").stored_state()
        strategy.load_state(stored, Optimization([other], []))
    assert [len(values) for values in other.state.values()] == [3] * LAYERS
    assert counting.held <= TENSOR + SMALL


def test_asynchronous_saves_reuse_the_memory_of_their_copies(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    counts = []
    for step, shape in enumerate([(3,), (3,), (2,), (5,)]):
        state = {"changes": torch.full(shape, step), "stays": torch.full((2, 2), float(step)).t()}
        rank_local = {"own": torch.full((5,), step)}
        checkpoints.wait()
        with Counting() as counting:
            checkpoints.save(step, state, rank_local)
        counts.append(counting.new)
    checkpoints.close()
    assert counts == [1, 0, 0, 1]
    restored = read(tmp_path / "step-00000003")
    assert restored["changes"].tolist() == [3] * 5
    assert restored["stays"].tolist() == [[3.0, 3.0]] * 2


class OfGPU(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def test_copies_of_a_gpu_s_tensors_have_arrived_and_pin_no_more_memory_than_they_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda start, size, _: pinned.update({start: size}) or 0,
        cudaHostUnregister=pinned.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    events: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: events.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    sizes = [1000, 300, 5]
    for step, more in enumerate((0, 0, 16)):
        state = {str(n): torch.full((n + more,), float(step)).as_subclass(OfGPU) for n in sizes}
        checkpoints.save(step, state, {})
        # Each tensor begins at a multiple of 16 bytes; powers of two would be 4096 + 2048 + 32.
        assert list(pinned.values()) == [4000 + 1200 + 32 + 3 * 4 * more]
        assert len(events) == step + 1
    checkpoints.close()
    assert pinned == {}
    assert read(tmp_path / "step-00000002")["5"].tolist() == [2.0] * 21


@pytest.mark.parametrize("rows", [1, 3])
def test_elements_of_a_flattened_tensor_are_read_from_shards(tmp_path: Path, rows: int) -> None:
    tensor = torch.arange(24.0).view(4, 3, 2)
    for start in range(0, 4, rows):
        shard, file = tensor[start : start + rows], tmp_path / f"{start}.safetensors"
        offsets = json.dumps({"a": {"saved_offsets": [start, 0, 0]}})
        tensor_files.write(file, {"a": shard}, {tensor_files.SHARDING: offsets})
    stored = stored_tensors.find_tensors(tmp_path)["a"]
    for start in range(25):
        for length in {0, 1, 7, 24 - start} & set(range(25 - start)):
            with Counting() as counting:
                values = stored.read_flat(start, length)
            assert values.tolist() == list(range(start, start + length))
            # The rest of two rows of 24 bytes; safetensors looks at a byte of each file.
            assert counting.read <= 4 * length + 40 + 4


def test_a_file_is_mapped_once_and_read_tensors_leave_memory(tmp_path, monkeypatch):
    maps, real = list[int](), mmap.mmap
    fake = SimpleNamespace(**vars(mmap))
    fake.mmap = lambda file, *size, **how: maps.append(file) or real(file, *size, **how)
    monkeypatch.setattr(stored_tensors, "mmap", fake)
    tensors = {str(number): torch.full((2**18,), float(number)) for number in range(8)}
    tensor_files.write(tmp_path / "a.safetensors", tensors, {})
    stored = stored_tensors.find_tensors(tmp_path)
    assert maps == []
    assert all(torch.equal(tensor.read(), tensors[name]) for name, tensor in stored.items())
    assert len(maps) == 1
    (tmp_path / "a.safetensors").unlink()  # as of a checkpoint that is not kept
    assert torch.equal(stored["3"].read(), tensors["3"])
    assert len(maps) == 1
    _, mapped = Path("/proc/self/smaps").read_text().split(f"{tmp_path}/a.safetensors")
    assert int(re.search(r"Rss: +(\d+) kB", mapped)[1]) <= 2**10


def test_hooks_of_a_module_see_tensors_that_are_not_read_yet(tmp_path: Path) -> None:
    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old").view(1, 2)
            bias = state_dict[f"{prefix}bias"]
            state_dict[f"{prefix}bias"] = torch.cat([bias, bias])[:1] + bias[0]
            super()._load_from_state_dict(state_dict, prefix, *rest)

    Checkpoints(tmp_path).save(1, {"old": torch.tensor([1.0, 2.0]), "bias": torch.ones(1)}, {})
    module = Renamed(2, 1)
    fill_module(module, Checkpoint(tmp_path / "step-00000001").stored_state())
    assert module.weight.tolist() == [[1.0, 2.0]]
    assert module.bias.tolist() == [2.0]


def test_what_a_save_and_an_opening_do_does_not_grow_with_the_number_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: calls.update([name]) or call(*a, **k))

    for owner, name in (
        *((io, "open"), (json, "loads"), (stored_tensors, "safe_open"), (os, "fsync")),
        *((ThreadPoolExecutor, "submit"), (torch, "frombuffer")),
    ):
        counted(owner, name)
    counts = []
    for count in (3, 3000):
        state = {"model": {str(index): torch.full((2,), index) for index in range(count)}}
        calls.clear()
        Checkpoints(tmp_path / str(count)).save(1, state, {})
        saving = dict(calls)
        calls.clear()
        assert len(stored_tensors.find_tensors(tmp_path / str(count) / "step-00000001")) == count
        counts.append((saving, dict(calls)))
    assert counts[0] == counts[1]
    # The beginning of the checksum, and the sum; the file, state.json and what was renamed.
    assert counts[0][0] == {"open": 2, "submit": 2, "fsync": 5}
    assert counts[0][1] == {"open": 1, "safe_open": 1, "loads": 2}


def test_the_table_of_many_tensors_is_read_without_garbage_collections(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {str(index): torch.zeros(1) for index in range(3000)}, {})
    collections: list[str] = []
    gc.callbacks.append(collect := lambda phase, _: collections.append(phase))
    try:
        stored = stored_tensors.find_tensors(tmp_path / "step-00000001")
    finally:
        gc.callbacks.remove(collect)
    assert len(stored) == 3000
    assert len(collections) <= 2  # the start and the stop of one, when they are enabled again
    assert gc.isenabled()
