"""What people who know other libraries write: it works, or is one line that says what to do."""

import faulthandler
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from my_project_trainer import Callback, DataModule, Trainer, UserError, seed_everything
from my_project_trainer.callbacks import EarlyStopping
from my_project_trainer.options import reading
from test_public_programs import Model, data, make
from torch.utils.data import DataLoader, IterableDataset

pytestmark = pytest.mark.usefixtures("apart")


class Validates(Model):
    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("epoch", float(self.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.epochs += [self.current_epoch] * (self.global_step > 0)


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"max_epochs": 5, "check_val_every_n_epoch": 2}, [1, 3, 4]),
        ({"max_epochs": 2}, [0, 1]),
        ({"max_epochs": None, "max_steps": 3, "check_val_every_n_epoch": 9}, [1]),
    ],
)
def test_the_last_validation_is_of_the_last_epoch(options: Any, epochs: list[int]) -> None:
    model, made = Validates(), make(**options)
    made.fit(model, data(), data())
    assert model.epochs == epochs
    assert made.metrics["epoch"] == epochs[-1]
    assert made.current_epoch == options["max_epochs"] or made.global_step == 3


@pytest.mark.parametrize("options", [{"name": 5}, {"batch_size": -1}, {"batch_size": float("nan")}])
def test_a_name_or_size_that_cannot_be_logged_is_one_line(options: Any) -> None:
    class Logs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log(options.get("name", "value"), 1.0, batch_size=options.get("batch_size"))
            return super().training_step(batch, batch_idx)

    with pytest.raises(UserError, match=r"^log\(.*give a text as the name, and a batch_size from"):
        make().fit(Logs(), data())


class ByItself(torch.optim.SGD):
    """Its own methods change parameters, as those of SAM do."""

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


class Manual(Model):
    """Steps in its second epoch only, and by itself in the fourth."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch == 1:
            self.manual_backward(loss)
            self.optimizers().step()
        elif self.current_epoch == 3:
            self.manual_backward(loss)
            self.optimizers().first_step()
        return loss

    def configure_optimizers(self) -> Any:
        return ByItself(self.parameters(), lr=0.1)


@pytest.mark.parametrize("options", [{}, {"learning_rate_scaling": "linear"}])
def test_an_epoch_of_manual_optimization_without_a_step_is_said(capsys, options):
    reference = {"reference_batch_size": 64} if options else {}
    make(max_epochs=5, **options, **reference).fit(Manual(), data())
    said = re.findall(r"note: epoch (\d): (no step|weights changed)", capsys.readouterr().err)
    changed = [("4", "weights changed")] if options else []
    assert said == [("1", "no step"), ("3", "no step"), *changed, ("5", "no step")]


class SkipsByLightning(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1


class CallsBackward(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (super().training_step(batch, batch_idx) + 1.0) ** 2
        loss.backward()
        return loss


class SavesByLightning(Model):
    def on_train_epoch_end(self) -> None:
        path: Any = "last.ckpt"
        self.trainer.save_checkpoint(path)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (SkipsByLightning, "on_train_batch_start returned -1, which skips nothing: return None"),
        (CallsBackward, "the trainer calls backward and step: remove them from training_step"),
        (SavesByLightning, r"trainer.save_checkpoint\('last.ckpt'\): it takes a function, which"),
    ],
)
def test_what_other_trainers_would_do_is_said(model: Any, line: str) -> None:
    with pytest.raises((UserError, RuntimeError)) as caught:
        make().fit(model(), data())
    notes = getattr(caught.value, "__notes__", [])
    assert re.match(line, "\n".join([*notes, str(caught.value)]))


def test_hooks_and_subclasses_of_other_libraries_would_not_be_called() -> None:
    names = ["on_train_begin", "on_log", "on_evaluate", "on_init_end", "before_fit", "epoch_end"]
    names += ["on_optimizer_step", "on_prediction_step"]
    foreign = type("Foreign", (Callback,), dict.fromkeys(names, lambda *_: None))
    with pytest.raises(UserError) as caught:
        make(callbacks=[foreign()])
    lines = [f"Foreign.{name} would not be called: it is no hook" for name in sorted(names)]
    assert [problem.split(";")[0] for problem in caught.value.problems] == lines
    with pytest.raises(UserError) as refused:
        type("HF", (Trainer,), dict.fromkeys(["compute_loss", "own"], lambda *_: None))
    line = "HF.compute_loss would not be called; use training_step of a TrainingModule"
    assert refused.value.problems == [line]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.ones(1, 1)])


def test_what_is_left_out_is_that_of_the_last_fit() -> None:
    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return data()

        def test_dataloader(self) -> Any:
            return data(3)

    class Tests(Validates):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("count", 1.0, reduce_fx="sum")

    made = make()
    with pytest.raises(UserError, match=r"no module was given, and this trainer has fitted none"):
        made.test()
    made.fit(Tests(), Data())
    assert made.test() == {"count": 3.0}
    stream = DataLoader(Stream(), batch_size=None, collate_fn=lambda item: [item])
    for loader in (data(), stream):
        assert made.validate(dataloaders=loader) == {"epoch": 1.0}  # type: ignore[call-arg]
    model = Tests()
    model.val_dataloader = data  # type: ignore[method-assign]
    made.fit(model, data())
    assert made.metrics["epoch"] == 1.0


def test_seeds_of_workers_are_always_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reading.SEEDED, "seed", 1)
    seed_everything(7, workers=True)
    first = torch.rand(())
    seed_everything(7)
    assert torch.equal(first, torch.rand(()))
    off: Any = False
    with pytest.raises(UserError, match=r"seed_everything: workers=False: leave it out, they are"):
        seed_everything(7, workers=off)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_callbacks_learn_of_an_interruption(error: type[BaseException]) -> None:
    class Learns(Callback):
        def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
            learned.append(error)

    class Raises(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            raise error

    learned: list[BaseException] = []
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        make(callbacks=[Learns()]).fit(Raises(), data())
    assert [type(known) for known in learned] == [error]


def test_a_value_that_may_be_missing_is_not_said_to_end_the_run(capsys):
    make(callbacks=[EarlyStopping("value", strict=False)]).fit(Validates(), data(), data())
    assert "value" not in capsys.readouterr().err


class Writes:
    """What programs put in place of stdout and stderr: it only writes."""

    text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_any_stderr_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", stream := Writes())
    monkeypatch.setattr("sys.stderr", stream)
    Trainer(accelerator="cpu", devices=1, max_epochs=1).fit(Model(), data())
    assert "done after 2 steps" in stream.text
    monkeypatch.setattr("sys.stderr", None)
    make().fit(Model(), data())


def test_forked_ranks_train_beside_a_timer() -> None:
    faulthandler.dump_traceback_later(3600, exit=False)  # as pytest's option faulthandler_timeout
    try:
        made = make(strategy="ddp_fork", devices=2)
        made.fit(Model(), data())
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert made.global_step == 2


def test_a_script_module_is_not_sharded() -> None:
    model = Model()
    model.scripted = torch.jit.script(torch.nn.Linear(1, 1))
    with pytest.raises(UserError, match=r"^scripted is a ScriptModule, which FSDP cannot shard"):
        make(strategy="fsdp").fit(model, data())
    make(strategy="fsdp").fit(Model(), data())


def test_a_test_cannot_be_started_once_per_rank() -> None:
    with pytest.raises(UserError, match=r"^a test cannot start this command once per rank"):
        make(strategy="ddp", devices=2).fit(Model(), data())


def test_a_program_s_own_process_group_is_said(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"^leave init_process_group out of the program"):
            make(strategy="ddp").fit(Model(), data())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
