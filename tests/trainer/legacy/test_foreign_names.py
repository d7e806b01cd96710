# ruff: noqa: E501
"""Names of other trainers work, or say in one line what to use here."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.callbacks import BestCheckpoint, EarlyStopping
from my_project_trainer.errors import ConfigurationError, Problems, foreign
from my_project_trainer.legacy.names import rows
from my_project_trainer.options import Options, values
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import quiet

pytestmark = pytest.mark.usefixtures("apart")


def loader(count: int = 16) -> DataLoader[Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x), batch_size=4)


class Module(trainer.TrainingModule):
    """A module as Lightning's users write it: steps without an index."""

    def __init__(self, rate: float = 0.1, *, width: int = 1, **other: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="width")
        self.layer = nn.Linear(4, width)
        self.seen: list[int] = []

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        self.seen.append(len(batch[0]))
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, logger=True)
        return loss

    def validation_step(self, *batch: Any) -> None:
        self.log("val_loss", self.layer(batch[0][0]).pow(2).mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["rate"])


class Data(trainer.DataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def test_dataloader(self) -> Any:
        return loader(8)


def made(**options: Any) -> trainer.Trainer:
    return quiet(**{"max_epochs": 1} | options)


def one_line(kind: type[Exception], work: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        work()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_hyperparameters_are_recorded() -> None:
    class Sub(Module):
        def __init__(self, depth: int = 3) -> None:
            super().__init__(rate=0.25, width=2, api_token="secret")  # noqa: S106

    module, run = Sub(), made(seed=None, max_steps=-1)
    assert module.hparams == {"rate": 0.25, "api_token": "secret", "depth": 3}
    assert module.hparams.rate == 0.25  # type: ignore[attr-defined]
    run.fit(module, datamodule=Data())  # type: ignore[call-arg]
    assert run.run_directory is not None
    record = json.loads((run.run_directory / "run.json").read_text())
    attempts = record if isinstance(record, list) else record["attempts"]
    recorded = attempts[0]["hyperparameters"]
    assert (recorded["rate"], recorded["depth"]) == (0.25, 3)
    assert recorded["api_token"] != "secret"  # noqa: S105
    state = next(run.run_directory.glob("checkpoints/step-*/state.json")).read_text()
    assert '"depth"' in state
    assert "secret" not in state
    assert module.seen == [4, 4, 4, 4]
    other = Module()
    other.save_hyperparameters(Namespace(rate=1.0))
    assert other.hparams["rate"] == 1.0


def test_keywords_of_lightning() -> None:
    stopping = EarlyStopping("val_loss/dataloader_idx_0", verbose=True, strict=False)
    module, run = Module(), made(callbacks=[stopping])
    run.fit(module, train_dataloaders=loader(8), val_dataloaders=[loader(), loader(4)])  # type: ignore[call-arg]
    assert module.seen == [4, 4]  # validation data is never trained on
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= run.metrics.keys()
    expected = run.test(module, loader(8))
    assert run.test(model=module, dataloaders=loader(8), ckpt_path=None) == expected  # type: ignore[call-arg]
    assert run.test(module, datamodule=Data(), ckpt_path="last") == expected  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("line", "work"),
    [
        ("fit: ckpt_path='x'; as it was, but for fit: use Trainer(resume=", lambda: made().fit(Module(), ckpt_path="x")),  # type: ignore[call-arg]
        ("fit: datamodule: data is given, too", lambda: made().fit(Module(), loader(), datamodule=Data())),  # type: ignore[call-arg]
        ("test: verbose=True; leave it out", lambda: made().test(Module(), verbose=True)),  # type: ignore[call-arg]
        ("EarlyStopping: check_finite=True; leave it out: a value that is not finite is no improvement", lambda: EarlyStopping("x", check_finite=True)),  # type: ignore[call-arg]
        ("EarlyStopping: early_stopping_patience=1; use patience", lambda: EarlyStopping("x", early_stopping_patience=1)),  # type: ignore[call-arg]
        ("BestCheckpoint: save_top_k=3; use k", lambda: BestCheckpoint("x", save_top_k=3)),  # type: ignore[call-arg]
        ("BestCheckpoint: dirpath='x'; leave it out: the newest", lambda: BestCheckpoint("x", dirpath="x")),  # type: ignore[call-arg]
        ("callbacks[0].filename: there is no such option; leave it out", lambda: made(callbacks=[{"class_path": "BestCheckpoint", "init_args": {"monitor": "x", "filename": "y"}}])),
        ("lr_scheduler: 'frequency' is not supported; multiply the scheduler's own lengths by it", lambda: fitted(scheduled(frequency=2))),
        ("lr_scheduler: 'name' is not supported; leave it out", lambda: fitted(scheduled(name="lr"))),
        ("configure_optimizers gave 'interval'; give 'optimizer' and 'lr_scheduler': a", lambda: fitted(scheduled({"interval": "step"}))),
        ("log: enable_graph=True; leave it out", lambda: Module().log("x", 1.0, enable_graph=True)),
        ("strategy='ddp_find_unused_parameters_true' is unknown; use 'ddp' with", lambda: made(strategy="ddp_find_unused_parameters_true")),
        ("strategy='' is unknown; known: ", lambda: made(strategy="")),
        ("min_epochs: Trainer has no such argument; leave it out", lambda: made(min_epochs=1)),
        ("num_train_epochs: Trainer has no such argument; use max_epochs", lambda: made(num_train_epochs=1)),
        ("mixed_precision: Trainer has no such argument; use precision", lambda: made(mixed_precision="bf16")),
        ("callbacks[0]='ModelCheckpoint' is no built-in callback and no class path; use BestCheckpoint", lambda: made(callbacks=["ModelCheckpoint"])),
        ("save_hyperparameters: no argument 'nothing'", lambda: Module().save_hyperparameters("nothing")),
    ],
)  # fmt: skip
def test_an_error_says_what_to_use(line: str, work: Callable[[], Any]) -> None:
    assert one_line(ConfigurationError, work).startswith(line)


def test_an_option_of_the_command_line_says_what_to_use() -> None:
    problems = Problems()
    values.convert("trainer.", {"max_epochs": int}, {"num_train_epochs": 2}, problems, print)  # type: ignore[arg-type]
    assert problems.lines == ["trainer.num_train_epochs: there is no such option; use max_epochs"]


def test_attributes_say_what_to_use() -> None:
    for owner in (Module(), trainer.DataModule()):
        line = one_line(AttributeError, lambda owner=owner: owner.logger)
        advice = "use self.log; for images and text, self.logger.experiment in a fit"
        assert line.endswith(f"has no attribute 'logger'; {advice}")
    assert not hasattr(Module(), "_nothing")
    run: Any = made()
    assert one_line(AttributeError, lambda: run.logged_metrics).endswith("; use metrics")
    line = one_line(AttributeError, lambda: Module.load_from_checkpoint)  # type: ignore[attr-defined]
    assert line.endswith("create the module, and use cli.load_weights(module, 'runs/RUN/best')")
    with pytest.raises(ImportError, match="there is no Accelerator; use Trainer"):
        trainer.Accelerator  # noqa: B018
    with pytest.raises(TypeError, match=r"log.. got an unexpected keyword argument 'nothing'"):
        Module().log("loss", 1.0, nothing=True)


def logs(**options: Any) -> Callable[..., Any]:
    """A training step that logs so."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, **options)
        return {"loss": loss}

    return training_step


def returns(make: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """``configure_optimizers`` that returns what is made of an optimizer and a scheduler."""

    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return make(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))

    return {"configure_optimizers": configure}


def indexed(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
    self.log(f"loss_{dataloader_idx}", self.layer(batch[0]).mean(), add_dataloader_idx=True)


TWO = [loader(), loader(8)]
STEPS = 4  # of an epoch
# What everyday code has; methods of the module, options of Trainer, loaders: and values logged.
IDIOMS: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any], set[str]]] = {
    "a step without an index": ({}, {}, [], {"loss"}),
    "a dict of loss": ({"training_step": logs()}, {}, [], {"loss", "loss_epoch"}),
    "log(logger=True)": ({"training_step": logs(logger=True)}, {}, [], {"loss"}),
    "log(prog_bar=True, sync_dist=True)": ({"training_step": logs(prog_bar=True, sync_dist=True)}, {}, [], {"loss"}),
    "log(on_step=False, on_epoch=True)": ({"training_step": logs(on_step=False, on_epoch=True)}, {}, [], {"loss"}),
    "log(rank_zero_only=False)": ({"training_step": logs(rank_zero_only=False)}, {}, [], {"loss"}),
    "log(batch_size=4)": ({"training_step": logs(batch_size=4)}, {}, [], {"loss"}),
    "a list of loaders": ({}, {}, [loader(), TWO], {"val_loss/dataloader_idx_1"}),
    "a list of one loader": ({}, {}, [loader(), TWO[:1]], {"val_loss/dataloader_idx_0"}),
    "dataloader_idx=0, a list": ({"validation_step": indexed}, {}, [loader(), TWO], {"loss_1/dataloader_idx_1"}),
    "dataloader_idx=0, one": ({"validation_step": indexed}, {}, [], {"loss_0"}),
    "max_steps=-1": ({}, {"max_steps": -1}, [], set()),
    "max_epochs=-1": ({}, {"max_epochs": -1, "max_steps": STEPS}, [], set()),
    "seed=None": ({}, {"seed": None}, [], set()),
    "use_distributed_sampler=False": ({}, {"use_distributed_sampler": False}, [], set()),
    "one callback": ({}, {"callbacks": EarlyStopping("val_loss", verbose=True, mode="min")}, [], set()),
    "an optimizer": (returns(lambda o, s: o), {}, [], {"lr"}),
    "two lists": (returns(lambda o, s: ([o], [s])), {}, [], {"lr"}),
    "a scheduler in a dict": (returns(lambda o, s: {"optimizer": o, "lr_scheduler": s}), {}, [], {"lr"}),
    "an interval": (returns(lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step", "frequency": 1}}), {}, [], {"lr"}),
    "precision=32": ({}, {"precision": 32}, [], set()),
    "log_every_n_steps=1": ({}, {"log_every_n_steps": 1, "enable_progress_bar": True}, [], set()),
    "num_sanity_val_steps=0": ({}, {"num_sanity_val_steps": 0}, [], set()),
    "limit_train_batches=1.0": ({}, {"limit_train_batches": 1.0, "limit_val_batches": 2}, [], set()),
    "gradient_clip_val=0.5": ({}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 1}, [], set()),
}  # fmt: skip


@pytest.mark.parametrize("idiom", IDIOMS)
def test_everyday_code_works(idiom: str) -> None:
    methods, options, loaders, logged = IDIOMS[idiom]
    run = fitted(type("Own", (Module,), methods), *loaders, **options)
    assert run.global_step == STEPS
    assert logged <= run.metrics.keys()


def test_the_last_line_names_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    run = made(enable_progress_bar=True, max_epochs=2, callbacks=[BestCheckpoint("val_loss")])
    run.fit(Module(), loader(8), loader())
    value = run.metrics["val_loss"]
    assert f"; best val_loss {value:.4g} at step 4, epoch 1" in capsys.readouterr().out


def fitted(kind: type[Module], *loaders: Any, **options: Any) -> trainer.Trainer:
    run, module = made(**options), kind()
    run.fit(module, *(loaders or (loader(), loader())))
    return run


def scheduled(outside: Any = None, /, **beside: Any) -> type[Module]:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
            entry = {"scheduler": plateau, **beside}
            configured = {"optimizer": optimizer, "lr_scheduler": entry, "monitor": "val_loss"}
            return configured | (outside or {})

    return Scheduled


def test_monitor_may_stand_beside_an_optimizer() -> None:
    run = made(max_epochs=3)
    run.fit(scheduled(frequency=1, strict=True)(), loader(8), loader())
    assert run.metrics["lr"] == pytest.approx(0.01)  # the loss falls, and was to rise


def test_an_optimizer_is_toggled() -> None:
    class Two(Module):
        automatic_optimization = False
        states: list[list[bool]] = []  # noqa: RUF012

        def configure_optimizers(self) -> Any:
            self.other = self.other
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.layer, self.other)]

        def training_step(self, batch: Any) -> None:  # type: ignore[override]
            first, second = self.optimizers()
            for optimizer in (first, second):
                self.toggle_optimizer(optimizer)
                self.states.append([p.requires_grad for p in self.parameters()])
                self.manual_backward(self.other(self.layer(batch[0])).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
            self.states.append([p.requires_grad for p in self.parameters()])

    module = Two()
    module.other = nn.Linear(1, 1)
    module.automatic_optimization = True
    with pytest.raises(ConfigurationError, match="toggle_optimizer: set automatic_optimization ="):
        module.toggle_optimizer(None)
    module.automatic_optimization = False
    made().fit(module, loader(4))
    first, second = [True, True, False, False], [False, False, True, True]
    assert module.states == [first, second, [True] * 4]


def test_each_name_is_once_in_the_table_and_its_option_exists() -> None:
    names = [(entry.where, entry.name) for entry in rows()]
    assert len(names) == len({*names}) > 120
    for row in rows():
        assert row.use
        if row.where == "argument":
            assert not hasattr(Options, row.name), row.name


def test_without_legacy_an_error_is_as_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "load", bool)
    monkeypatch.setattr(foreign, "advice", {})
    monkeypatch.setattr(foreign, "methods", {})
    line = one_line(AttributeError, lambda: trainer.TrainingModule().save_hyperparameters())
    assert line == "'TrainingModule' object has no attribute 'save_hyperparameters'"
    assert Path(sys.modules["my_project_trainer.legacy"].__file__ or "").is_file()
