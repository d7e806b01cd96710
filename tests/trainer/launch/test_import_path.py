"""Where the command finds the user's classes: in its working directory, after all else."""

import sys
from pathlib import Path

import pytest
from my_project_trainer.cli import command as cli
from tests.project import PACKAGE, run

from processes import at_root

CODE = f"from {PACKAGE}_trainer.cli import main; main([]); import json, own; print(json, own)"


@pytest.mark.parametrize("folders", [[], [""], ["HERE"]])
def test_the_working_directory_comes_last(tmp_path, monkeypatch, folders):
    """As a console script finds it, or where Python itself has it already."""
    monkeypatch.chdir(tmp_path)
    folders = [str(tmp_path) if folder == "HERE" else folder for folder in folders]
    monkeypatch.setattr(sys, "path", [*folders, "/somewhere"])
    cli.main([])
    assert sys.path == ([*folders, "/somewhere"] if folders else ["/somewhere", str(tmp_path)])


@pytest.mark.slow
def test_python_s_own_way_to_leave_it_out_counts(tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    assert run(["-c", CODE], cwd=tmp_path, extra=at_root(), fresh=True).returncode == 0
    for how in ({"PYTHONSAFEPATH": "1"}, {}):
        flag = [] if how else ["-P"]
        done = run([*flag, "-c", CODE], cwd=tmp_path, extra=at_root() | how, fresh=True)
        assert done.returncode == 1
        assert "No module named 'own'" in done.stderr
