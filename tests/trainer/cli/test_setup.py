"""``prepare_data``, ``setup`` and ``teardown`` of modules and data modules."""

import json
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from tests.project import run, succeed

import setup_subject as subject
from fitting import quiet


def record(folder: Path, strategy: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{strategy}-{rank}.json").read_text())


def make(folder: Path, **options: Any) -> trainer.Trainer:
    return quiet(**{"max_steps": 1, "default_root_dir": folder} | options)


def test_one_rank_prepares_and_all_set_up_before_the_loaders(tmp_path: Path) -> None:
    done = succeed(["-m", "setup_subject", tmp_path, "ddp", "2"])
    subject.main(tmp_path, "single_device", 1, False)
    hooks = ["setup fit", "teardown fit", "setup test", "teardown test"]
    prepared = ["prepare_data", *hooks[:2], "prepare_data", *hooks[2:]]
    first, second = (record(tmp_path, "ddp", rank) for rank in range(2))
    alone = record(tmp_path, "single_device")
    assert [first["calls"], second["calls"], alone["calls"]] == [prepared, hooks, prepared]
    assert first["facts"] == [["fit", 0, 2, True], ["test", 0, 2, True]]
    assert second["facts"] == [["fit", 1, 2, False], ["test", 1, 2, False]]
    assert done.stdout.count("set up for fit\n") == 1
    # The layer that setup created is trained, from the weights of rank 0.
    assert first["test_loss"] == second["test_loss"]
    assert first["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)


def test_an_error_in_prepare_data_ends_all_ranks(tmp_path: Path) -> None:
    done = run(["-m", "setup_subject", tmp_path, "ddp", "2", "fails"])
    assert done.returncode == 1
    assert "no such archive" in done.stderr


def test_layers_that_could_not_be_returned_are_refused(tmp_path: Path) -> None:
    made = make(tmp_path, devices=2, strategy="ddp_fork")
    line = (
        r"Net\.setup changes layer\.(bias|weight): with strategy='ddp_fork', weights are returned"
    )
    with pytest.raises((trainer.UserError, trainer.RankError), match=line):
        made.fit(subject.Net(), subject.Points(tmp_path))


def test_layers_of_setup_are_created_on_the_meta_device_and_checked(tmp_path: Path) -> None:
    meta: list[bool] = []

    class Model(subject.Net):
        def setup(self, stage: str) -> None:
            self.layer = torch.nn.Linear(4, 1)
            meta.append(self.layer.weight.is_meta)

    model = Model()
    make(tmp_path, meta_device=True).fit(model, subject.Points(tmp_path))
    assert meta == [True]
    assert model.layer.weight.isfinite().all()
    unknown = make(tmp_path, activation_checkpointing=["Block"])
    with pytest.raises(trainer.ConfigurationError, match="Block"):
        unknown.fit(Model(), subject.Points(tmp_path))


@pytest.mark.parametrize("command", ["fit", "test"])
def test_hooks_that_cannot_be_called_are_refused_before_training(tmp_path, command):
    class Data(subject.Points):
        def prepare_data(self, force: bool) -> None: ...  # type: ignore[override]

    class Model(subject.Net):
        def setup(self) -> None: ...  # type: ignore[override]

    for module, data, line in (
        (Model(), subject.Points(tmp_path), "Model.setup takes (); it is called with (stage)"),
        (subject.Net(), Data(tmp_path), "Data.prepare_data takes (force: bool) "),
    ):
        with pytest.raises(trainer.ConfigurationError) as caught:
            getattr(make(tmp_path), command)(module, data)
        [found_line] = caught.value.problems
        assert found_line.startswith(line.rstrip())
    assert not list(tmp_path.iterdir())


def test_outside_of_a_run_a_module_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    module = subject.Net()
    assert (module.local_rank, module.world_size, module.is_global_zero) == (0, 1, True)
    module.print("a", "b", sep="-")
    assert capsys.readouterr().out == "a-b\n"


class OfALoss(torch.optim.SGD):
    def step(self, loss: Any, *more: Any, scale: float, **other: Any) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize(
    ("kind", "needs"), [(torch.optim.LBFGS, "a closure"), (OfALoss, "loss, scale, and is")]
)
def test_an_optimizer_whose_step_needs_an_argument_is_refused(tmp_path: Path, kind, needs) -> None:
    class Model(subject.Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return kind(self.layer.parameters())

    problem = f"gave {kind.__name__}, whose step needs {needs}"
    with pytest.raises(trainer.ConfigurationError, match=problem):
        make(tmp_path).fit(Model(), subject.Points(tmp_path))
