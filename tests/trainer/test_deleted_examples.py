"""Without the example files that a page names, the rest of a project works.

The template's tests check its types, and collect all of its tests, without any example.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.project import PACKAGE, ROOT, run

KEPT = ("tests/test_deepspeed.py", "tests/test_fairscale.py", "tests/test_horovod.py")
ROWS = "tests/conformance/test_conformance.py"


@pytest.mark.slow
@pytest.mark.needs("ruff")
def test_the_rest_works_without_the_examples(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*_cache", "__pycache__"))
    pages = folder / "docs" / "how-to"
    text = (pages / "delete-examples.md").read_text()
    [lines] = re.findall(r"```\n(rm src/.*?)```", text, re.DOTALL)
    subprocess.run(["bash", "-e", "-c", lines], cwd=folder, check=True)
    assert not any((folder / "configs").iterdir())
    tasks = folder / "src" / PACKAGE / "tasks"
    assert [each.name for each in tasks.glob("*.py")] == ["__init__.py"]

    code = r"```python\n(import torch\n.*?class Line.*?)```"
    [short] = re.findall(code, (folder / "README.md").read_text(), re.DOTALL)
    [own] = re.findall(code, (pages / "model.md").read_text(), re.DOTALL)
    (tasks / "short.py").write_text(short)
    (tasks / "line.py").write_text(own)
    line = f"{PACKAGE}.tasks.line"
    data = ("--data", f"{line}.Points", "--data.batch_size", "25")
    cpu = ("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.max_epochs", "3")
    how: dict[str, Any] = {"cwd": folder, "extra": {"PYTHONPATH": str(folder / "src")}}
    for words in (
        ("-m", "ruff", "check", "."),
        ("-m", PACKAGE, "fit", "--model", f"{line}.Line", *data, *cpu),
        ("-m", PACKAGE, "fit", "--model", f"{PACKAGE}.tasks.short.Line", *cpu),
        (
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *KEPT,
            ROWS,
            "-k",
            "digits or (hsdp and sgd)",
        ),
    ):
        done = run(words, fresh=words[1] == "pytest", **how)
        assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
