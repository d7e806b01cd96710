"""Hashes of steps: which are recorded, and that training is the same with and without them."""

import json
from pathlib import Path
from typing import Any

import torch
from my_project_trainer.data.hashing import Hash
from my_project_trainer.loop import hashes

import reproduce_subject as subject
from fitting import quiet


class Unsized(subject.Bytes):
    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        return type("Batches", (), {"__iter__": lambda _: iter(loader)})()


def fit(name: str, data: Any = None, **options: Any) -> tuple[bytes, list[Any]]:
    """What a fit has logged, and its last weights and random numbers."""
    steps = {"max_steps": 8, "log_every_n_steps": 3}
    trainer = quiet(**{"run_name": name, "loggers": ["csv"], **steps, **options})
    module = subject.Line()
    trainer.fit(module, data or subject.Bytes("data"))
    state = [*module.state_dict().values(), torch.get_rng_state()]
    return (Path("runs") / name / "metrics.csv").read_bytes(), [tensor.tolist() for tensor in state]


def lines(name: str) -> list[dict[str, Any]]:
    path = Path("runs") / name / hashes.DIRECTORY / "rank-00000.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def recorded(name: str) -> list[int]:
    return [line["step"] for line in lines(name)]


def test_training_is_the_same_with_hashes(apart, tmp_path, monkeypatch):
    subject.write_data(tmp_path / "data")
    cases = {"none": False, "logged": None, "each": True}
    results = [fit(name, record_hashes=case) for name, case in cases.items()]
    assert results[0] == results[1] == results[2]
    assert recorded("none") == []
    assert recorded("logged") == [0, 1, 3, 6, 8]
    assert recorded("each") == list(range(9))
    # A part that has no hash does not end training.
    monkeypatch.setattr(Hash, "_add_tensor", lambda self, tensor: self.nothing)
    assert fit("without", record_hashes=True) == results[0]
    assert recorded("without") == []


def test_ever_fewer_logged_steps_are_recorded(apart, tmp_path):
    subject.write_data(tmp_path / "data")
    fit("often", max_steps=20, log_every_n_steps=1)
    assert recorded("often") == [0, 1, 2, 4, 8, 16, 20]
    # Three epochs of six batches, whose number is not known before: each may be the last.
    fit("unknown", Unsized("data"), max_steps=None, max_epochs=3, log_every_n_steps=2)
    assert recorded("unknown") == [0, 1, 2, 4, 6, 8, 12, 16, 18]


def test_the_factor_of_the_warm_up_counts(apart, tmp_path):
    subject.write_data(tmp_path / "data")
    scaled = {"learning_rate_scaling": "linear", "reference_batch_size": 2, "max_steps": 1}
    for steps in (4, 5):
        fit(f"warm-{steps}", learning_rate_warmup_steps=steps, **scaled)
    (_, first), (_, second) = lines("warm-4"), lines("warm-5")
    assert [name for name, text in first.items() if text != second[name]] == ["options", "weights"]


def test_hashes_after_the_step_of_a_resume_are_removed(tmp_path: Path) -> None:
    path = tmp_path / hashes.DIRECTORY / "rank-00003.jsonl"
    path.parent.mkdir()
    lines = [f'{{"step": {step}, "data": "0"}}\n' for step in (0, 1, 3, 6)]
    path.write_text("".join(lines) + '{"step": 9, "da')
    hashes.truncate(tmp_path, 8)
    assert path.read_text() == "".join(lines)
    hashes.truncate(tmp_path, 3)
    assert path.read_text() == "".join(lines[:3])
