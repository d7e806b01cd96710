"""Hashes of steps: what changes them, and that training is the same with and without them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Trainer
from my_project_trainer.loop import hashes
from my_project_trainer.loop.hashes import Hash
from torch import Tensor

import reproduce_subject as subject


def hexadecimal(*tensors: Tensor | None) -> str:
    one = Hash()
    one.add(tensors)
    return one.hexadecimal()


def test_every_bit_and_place_counts() -> None:
    before = torch.get_rng_state()
    # More than are multiplied at once.
    given = torch.linspace(-1, 1, hashes._WORDS * 2 + 5)
    found = {hexadecimal(given)}
    for place in (0, 1, hashes._WORDS, -1):
        for bit in (0, 15, 31):
            changed = given.clone()
            changed.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            found.add(hexadecimal(changed))
    # Both signs, which a sum that is not of 64 bits would not see.
    changed = given.clone()
    changed[:2] *= -1
    swapped = given.clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    found |= {hexadecimal(each) for each in (changed, swapped, given[:-1], given.view(1, -1))}
    found |= {hexadecimal(given, None), hexadecimal(given[:5], given[5:])}
    found.add(hexadecimal(given.view(torch.int32)))
    assert len(found) == 1 + 12 + 4 + 2 + 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "kind", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64]
)
def test_all_data_types_have_hashes(kind: torch.dtype) -> None:
    given = torch.arange(7).to(kind)
    changed = given.clone()
    changed[3] = 0
    assert hexadecimal(given) == hexadecimal(given.clone()) != hexadecimal(changed)


def test_other_layouts_have_hashes() -> None:
    image = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    last = image.to(memory_format=torch.channels_last)
    assert hexadecimal(last) == hexadecimal(last.clone(memory_format=torch.preserve_format))
    assert hexadecimal(image[:, 1]) == hexadecimal(image[:, 1])
    rows = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True)
    assert hexadecimal(rows) == hexadecimal(rows.clone()) != hexadecimal(2 * rows)


def fit(monkeypatch: pytest.MonkeyPatch, name: str, **options: Any) -> tuple[bytes, list[Any]]:
    """What a fit has logged, and its last weights and random numbers."""
    shown = {"enable_progress_bar": False, "accelerator": "cpu", "devices": 1, "loggers": ["csv"]}
    trainer = Trainer(max_steps=8, log_every_n_steps=3, run_name=name, **shown, **options)
    module = subject.Line()
    trainer.fit(module, subject.Bytes("data"))
    state = [*module.state_dict().values(), torch.get_rng_state()]
    return (Path("runs") / name / "metrics.csv").read_bytes(), [each.tolist() for each in state]


def recorded(name: str) -> list[int]:
    path = Path("runs") / name / hashes.DIRECTORY / "rank-00000.jsonl"
    return [json.loads(line)["step"] for line in path.open()] if path.exists() else []


def test_training_is_the_same_with_hashes(apart, tmp_path, monkeypatch):
    subject.write_data(tmp_path / "data")
    cases = {"none": False, "logged": None, "each": True}
    found = [fit(monkeypatch, name, record_hashes=each) for name, each in cases.items()]
    assert found[0] == found[1] == found[2]
    assert recorded("none") == []
    assert recorded("logged") == [0, 1, 3, 6, 8]
    assert recorded("each") == list(range(9))
    # A part that has no hash does not end training.
    monkeypatch.setattr(Hash, "_add_tensor", lambda self, tensor: self.nothing)
    assert fit(monkeypatch, "without", record_hashes=True) == found[0]
    assert recorded("without") == []


def test_hashes_after_the_step_of_a_resume_are_removed(tmp_path: Path) -> None:
    path = tmp_path / hashes.DIRECTORY / "rank-00003.jsonl"
    path.parent.mkdir()
    lines = [f'{{"step": {step}, "data": "0"}}\n' for step in (0, 1, 3, 6)]
    path.write_text("".join(lines) + '{"step": 9, "da')
    hashes.truncate(tmp_path, 8)
    assert path.read_text() == "".join(lines)
    hashes.truncate(tmp_path, 3)
    assert path.read_text() == "".join(lines[:3])
