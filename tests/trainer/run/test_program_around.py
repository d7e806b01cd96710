"""What belongs to the program around a fit: its threads, its exceptions, its kernel."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import UserError
from my_project_trainer.launch.signals import Interrupted
from my_project_trainer.strategies.fsdp import state
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet

LOADER: DataLoader[Any] = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
ANOTHER = r"^another thread of this process runs a trainer"


class PrunedError(Exception):
    """As Optuna's TrialPruned: a caller catches it by its class."""


class Line(Descends, lr=1.0):
    def __init__(self, prunes: bool = False) -> None:
        super().__init__()
        self.weight, self.prunes = torch.nn.Parameter(torch.zeros(1)), prunes
        self.inside: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.prunes:
            raise PrunedError("at step 0")
        if self.inside is not None:
            self.inside()
        return (batch[0] * self.weight).mean()


def fit(folder: Path, model: Line, **options: Any) -> float:
    """Fit; the weight of two steps is -2."""
    made = quiet(**{"default_root_dir": folder, "max_epochs": 1} | options)
    made.fit(model, LOADER)
    return model.weight.item()


def test_two_runs_at_once_are_refused_and_one_in_a_thread_trains(tmp_path: Path) -> None:
    outcomes: list[Any] = []

    def other() -> None:
        try:
            outcomes.append(fit(tmp_path, Line()))
        except UserError as error:
            outcomes.append(str(error))

    def in_thread() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    model = Line()
    model.inside = in_thread
    assert fit(tmp_path, model, max_steps=1) == -1.0
    assert outcomes[0].startswith("another thread of this process runs a trainer")
    model.inside = other  # in a hook of the run itself, whose random numbers it would draw
    assert fit(tmp_path, model, max_steps=1) == -2.0
    assert outcomes[1] == outcomes[0]
    model.inside = quiet  # seeds the generators
    with pytest.raises(UserError, match=ANOTHER):
        fit(tmp_path, model, max_steps=1)
    in_thread()
    assert outcomes[2] == -2.0
    early = quiet(max_steps=1)

    def start() -> None:
        with pytest.raises(UserError, match=ANOTHER):
            early.fit(Line(), LOADER)

    model.inside, model.on_fit_start = None, start
    with pytest.raises(UserError, match=ANOTHER):
        fit(tmp_path, model, max_steps=1)  # it may have begun with other random numbers


@pytest.mark.parametrize(
    "strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)]
)
def test_an_exception_of_a_rank_arrives_as_itself(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(PrunedError, match="at step 0") as caught:
        fit(tmp_path, Line(prunes=True), strategy=strategy, devices=2)
    assert "PrunedError: at step 0" in str(caught.value.__cause__)


def test_a_notebook_shows_one_line_of_an_interrupt() -> None:
    line = "interrupted: saved after step 3; resume with: Trainer(resume='runs/a')"
    assert Interrupted(3, "runs/a", False)._render_traceback_() == [line]


def test_numbers_of_the_program_s_own_tensors_are_read_as_before(tmp_path: Path) -> None:
    inside, model = [], Line()
    model.inside = lambda: inside.append(state.READ in state.HANDLERS)
    fit(tmp_path, model, strategy="fsdp")
    assert inside == [True, True]
    assert state.READ not in state.HANDLERS  # nor has torch an own one
