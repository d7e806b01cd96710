"""What the configuration of a run names is imported from the package and installed ones only."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from my_project_trainer import ConfigurationError
from my_project_trainer.cli import command as cli
from my_project_trainer.cli import load_module
from tests.project import ROOT

pytestmark = pytest.mark.usefixtures("apart")
DIGITS = ("--config", str(ROOT / "configs" / "digits.yaml"))
ONE = ("--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.loggers", "[]")
OWN = """
from pathlib import Path
from my_project.tasks.image_classifier import ImageClassifier
from my_project_trainer import Callback, Strategy
from my_project_trainer.logging import Logger
Path("ran").touch()
class M(ImageClassifier): pass
class C(Callback): pass
class L(Logger): pass
class S(Strategy): pass
"""


@pytest.fixture
def foreign(apart: None) -> Iterator[Path]:
    """A run with the package's model, to which somebody has added a file of their own."""
    before = set(sys.modules)
    how = ("--trainer.fast_dev_run", "false", "--trainer.max_steps", "1")
    cli.main(["fit", *DIGITS, *ONE, *how, "--trainer.run_name", "foreign"])
    Path("runs/foreign/evil.py").write_text(OWN)
    yield Path("runs/foreign")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("runs", "foreign", "linked", "link", "mine"):
            del sys.modules[name]


def name_in(run: Path, section: str, **values: Any) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config[section] |= values
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def refused(capsys: Any, *words: str | Path) -> str:
    """The line with which a command is refused, before code of the run has run."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    assert ended.value.code == 2
    assert not Path("ran").exists()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    [line] = lines
    return str(line)


UNTRUSTED = "is neither in this package nor installed, and is named by a run's configuration"


def every_way(capsys: Any, run: Path, expected: str, trust: bool = False) -> None:
    words = ["--trust"] * trust
    for line in (
        refused(capsys, "test", "--checkpoint", run, *ONE, *words),
        refused(capsys, "export", run, "--format", "torch_export", *words),
        refused(capsys, "fit", "--config", run / "config.yaml", *ONE, *words),
    ):
        assert expected in line
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        load_module(run, trust=trust)
    assert not Path("ran").exists()


def test_code_of_a_run_directory_is_never_imported(foreign, tmp_path, capsys, monkeypatch):
    Path("linked").symlink_to(foreign, target_is_directory=True)
    Path("link.py").symlink_to(foreign / "evil.py")
    in_run = "is in a run directory ({}), and code of a run is never imported; move it"
    for path, folder in (
        ("runs.foreign.evil.M", "foreign"),
        ("linked.evil.M", "linked"),
        ("link.M", "foreign"),
    ):
        name_in(foreign, "model", class_path=path)
        for trust in (False, True):
            every_way(capsys, foreign, in_run.format(folder), trust)
        assert in_run.format(folder) in refused(capsys, "fit", *DIGITS, *ONE, "--model", path)
    elsewhere = tmp_path / "elsewhere" / "foreign"
    shutil.copytree(foreign, elsewhere, symlinks=True)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    name_in(elsewhere, "model", class_path="foreign.evil.M")
    every_way(capsys, elsewhere, in_run.format("foreign"), trust=True)
    monkeypatch.chdir(elsewhere)
    name_in(Path(), "model", class_path="evil.M")
    every_way(capsys, Path(), UNTRUSTED)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("data", {"class_path": "runs.foreign.evil.M"}),
        ("trainer", {"callbacks": ["runs.foreign.evil.C"]}),
        ("trainer", {"loggers": [{"class_path": "runs.foreign.evil.L"}]}),
        ("trainer", {"strategy": "runs.foreign.evil.S"}),
    ],
)
def test_nor_is_that_of_other_classes(foreign, capsys, section, values):
    name_in(foreign, section, **values)
    config, cpu = ("--config", foreign / "config.yaml"), ONE[:4]
    for command in (("fit",), ("test", "--checkpoint", "none")):
        assert "code of a run is never imported" in refused(capsys, *command, *config, *cpu)


def test_other_code_of_the_working_directory_needs_trust(foreign: Path, capsys: Any) -> None:
    Path("mine.py").write_text(OWN)
    Path("runs/evil.py").write_text(OWN)
    (foreign / "trusted.yaml").write_text("trust: true\n")
    line = refused(capsys, "test", "--checkpoint", foreign, "--config", foreign / "trusted.yaml")
    assert "trust: there is no such section" in line
    for path in ("mine.M", "runs.evil.M"):
        name_in(foreign, "model", class_path=path)
        every_way(capsys, foreign, f"{path.partition('.M')[0].rpartition('.')[2]}.py {UNTRUSTED}")
    name_in(foreign, "model", class_path="mine.M")
    cli.main(["test", "--checkpoint", str(foreign), "--trust", *ONE])
    assert Path("ran").exists()
    assert load_module(foreign).__module__ == "mine"  # imported already
    del sys.modules["mine"]
    assert load_module(foreign, trust=True).__module__ == "mine"
    cli.main(["fit", *DIGITS, *ONE, "--trainer.fast_dev_run", "1", "--model", "mine.M"])
