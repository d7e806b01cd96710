"""Strategies are found by their folders: engines can be removed, and strategies added, by files."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
from my_project_trainer import strategies
from my_project_trainer.launch import cluster, failures
from my_project_trainer.strategies import Registration
from tests.project import PACKAGE, ROOT, run, succeed

from my_project.tasks import gan

SOURCE = ROOT / "src" / f"{PACKAGE}_trainer"
FOLDERS = Path("strategies")
ENGINES = ("deepspeed", "fairscale", "horovod", "xla")
HERE = [name for name in ENGINES if (SOURCE / FOLDERS / name / "__init__.py").exists()]
each_engine = pytest.mark.parametrize("engine", HERE)


def declared(engine: str) -> Any:
    return importlib.import_module(f"{PACKAGE}_trainer.strategies.{engine}").REGISTRATION


def naming(words: set[str], folder: Path) -> list[str]:
    """Lines of the package's files outside a folder, and ``legacy/``, that hold some words."""
    pattern = re.compile("|".join(map(re.escape, sorted(words))), re.IGNORECASE)
    return [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*"))
        if path.is_file()
        and path.suffix != ".pyc"
        and not {folder, SOURCE / "legacy"} & {*path.parents}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_outside_its_folder_names_an_engine(engine):
    names = set(declared(engine).strategies) if engine in HERE else set()
    assert naming({engine, *names}, SOURCE / FOLDERS / engine) == []


def test_a_name_outside_the_folder_would_be_found():
    assert naming({"DDPZERO1"}, SOURCE / FOLDERS / "fsdp") != []


# Lists all names, makes each strategy, and trains a step.
REMOVED = """
import json, sys
import torch
from torch.utils.data import DataLoader
from PACKAGE_trainer.cli import configuration
from PACKAGE_trainer import Trainer, TrainingModule, strategies
from PACKAGE_trainer.launch import cluster
from PACKAGE_trainer.run import environment

class Line(TrainingModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch, batch_idx):
        return ((self.weight * batch - 1) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)

def trained(strategy):
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "enable_progress_bar": False}
    model = Line()
    data = DataLoader(torch.ones(2, 1), batch_size=2)
    Trainer(strategy=strategy, run_name=strategy, loggers=[], **options).fit(model, data)
    return model.weight.item()

print(json.dumps({
    "file": strategies.__file__,
    "made": {name: type(strategies.create(name, {})).__name__ for name in strategies.names()},
    "overview": [line.split()[0] for line in configuration.overview().splitlines()],
    "sources": [source.name for source in cluster.SOURCES],
    "variables": sorted(environment.KNOWN),
    "weights": [trained(name) for name in sys.argv[1:]],
}))
""".replace("PACKAGE", PACKAGE)


def copied(folder: Path) -> Path:
    """A copy of the package's sources, in which files may be removed and added."""
    copy = folder / SOURCE.name
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy / FOLDERS


def told(folder: Path, *trained: str) -> dict[str, Any]:
    """What a copy of the package says of itself, in a process of its own."""
    done = succeed(["-c", REMOVED, *trained], cwd=folder, extra={"PYTHONPATH": str(folder)})
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(result["file"]).is_relative_to(folder)
    return result


@pytest.mark.parametrize("removed", [*([name] for name in HERE), HERE], ids="-".join)
@pytest.mark.slow
def test_an_engine_is_removed_with_its_folder(tmp_path, removed):
    folder = copied(tmp_path)
    for engine in removed:
        shutil.rmtree(folder / engine)
    gone = {name for engine in removed for name in declared(engine).strategies}
    left = [name for name in strategies.names() if name not in gone]
    assert {"single_device", "ddp", "fsdp"} <= set(left)
    assert gone
    facts = told(tmp_path, "single_device", "ddp")
    assert list(facts["made"]) == left
    assert facts["overview"] == ["auto", *left]
    assert facts["weights"] == [0.5, 0.5]
    launchers = {source.name for one in removed for source in declared(one).cluster_sources}
    assert not launchers & set(facts["sources"])
    assert not {name for one in removed for name in declared(one).variables} & {*facts["variables"]}


@each_engine
def test_an_engine_is_registered_without_being_imported(engine):
    code = f"import sys, {PACKAGE}_trainer; print({engine!r} in sys.modules)"
    assert run(["-c", code]).stdout == "False\n"


def test_torch_s_compiler_is_not_imported_with_the_trainer():
    """It takes as long as torch itself, which a command that prints a line would wait for."""
    code = f"import sys, {PACKAGE}_trainer.cli; print('torch._dynamo' in sys.modules)"
    assert run(["-c", code], fresh=True).stdout == "False\n"


def test_sources_are_asked_in_their_order():
    order = ["torchelastic", "horovod", "openmpi", "hydra", "jsrun", "deepspeed"]
    order += ["srun", "environment", "nodes", "none"]
    engines = {source.name for engine in HERE for source in declared(engine).cluster_sources}
    absent = {"horovod", "deepspeed"} - engines
    assert [kind.name for kind in cluster.SOURCES] == [name for name in order if name not in absent]


# The one that the page about writing a strategy shows.
PAGE = (ROOT / "docs" / "how-to" / "strategy.md").read_text()
SIGN = PAGE.split("**1. One file")[1].split("```python\n")[1].split("```")[0]
FOLDER = """
from ..registry import Entry, Registration
REGISTRATION = Registration(
    {
        "lazy": Entry("strategy:Lazy"),
        "lazy_slow": Entry("strategy:Lazy", "slow", {"factor": 0.5}, base="lazy", launcher="spawn"),
    }
)
"""
IN_FOLDER = '''
from ..base import Strategy

class Lazy(Strategy):
    """Steps by a part of the gradient."""
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
    def step(self, optimization, *, ends=True):
        for parameter in optimization.parameters:
            parameter.grad *= self.factor
        return super().step(optimization, ends=ends)
'''


def test_a_strategy_is_added_by_a_file_or_a_folder(tmp_path):
    folder = copied(tmp_path)
    (folder / "sign.py").write_text(SIGN)
    (folder / "lazy").mkdir()
    (folder / "lazy" / "__init__.py").write_text(FOLDER)
    (folder / "lazy" / "strategy.py").write_text(IN_FOLDER)
    result = told(tmp_path, "sign", "lazy", "lazy_slow")
    assert set(result["made"]) - set(strategies.names()) == {"sign", "lazy", "lazy_slow"}
    assert result["made"]["sign"] == "SignSGD"
    assert result["made"]["lazy"] == result["made"]["lazy_slow"] == "Lazy"
    assert {"sign", "lazy", "lazy_slow"} <= set(result["overview"])
    # From weight 0 the gradient is -2: its sign, all of it, and half of it, at a rate of 0.25.
    assert result["weights"] == [0.25, 0.5, 0.25]


def test_two_folders_cannot_declare_one_name(tmp_path):
    (copied(tmp_path) / "sign.py").write_text(SIGN.replace('"sign"', '"fsdp"'))
    done = run(["-c", REMOVED], cwd=tmp_path, extra={"PYTHONPATH": str(tmp_path)})
    assert "strategies.sign declares strategy 'fsdp', which exists already" in done.stderr


def test_a_preset_is_part_of_what_its_name_makes():
    spawned: Any = strategies.create("ddp_spawn", {"bucket_cap_mb": 1.0})
    plain = strategies.create("ddp", {})
    assert (spawned.limits.launcher, spawned.limits.max_nodes) == ("spawn", 1)
    assert (plain.limits.launcher, plain.limits.max_nodes) == ("subprocess", None)
    assert spawned.bucket_cap_mb == 1.0
    assert type(spawned) is type(plain)


def test_strategies_are_found_in_a_zip_file_too(tmp_path, monkeypatch):
    (tmp_path / "zipped").mkdir()
    for name in ("__init__", "module"):
        (tmp_path / "zipped" / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path, "zipped"))
    strategies.registry.discover("zipped", importlib.import_module("zipped").__path__)
    assert "zipped.module" not in sys.modules  # it was read


def test_the_contract_and_single_device_may_both_be_subclassed():
    class Mine(trainer.Strategy):
        pass

    class Alone(trainer.SingleDevice):
        pass

    for cls, most in ((Mine, None), (Alone, 1)):
        trainer.register("mine", cls)
        try:
            made = strategies.create("mine", {})
        finally:
            del strategies.registry._ENTRIES["mine"]
        assert type(made) is cls
        assert made.limits.max_devices == most
        assert isinstance(trainer.Trainer(max_steps=1, strategy=cls()), trainer.Trainer)


class EngineError(RuntimeError):
    """What an engine raises where a peer has gone."""


def test_an_engines_error_says_that_a_peer_has_gone(monkeypatch):
    assert not failures.is_lost_peer(EngineError("aborted"))
    assert failures.is_lost_peer(EngineError("aborted"), ["EngineError"])
    monkeypatch.setattr(strategies.registry, "lost_peer_errors", [])
    strategies.registry._add("engine", Registration({}, lost_peer_errors=["EngineError"]))
    passed: list[Any] = []
    caller = f"{PACKAGE}_trainer.trainer.run_external"
    monkeypatch.setattr(caller, lambda *arguments: passed.extend(arguments))
    trainer.Trainer(max_steps=1, accelerator="cpu", devices=1).fit(gan.GAN())
    assert passed[2] == ["EngineError"]
