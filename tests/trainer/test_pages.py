"""Commands on the pages of a project are accepted, and code on them is Python."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from my_project_trainer.cli import configuration
from my_project_trainer.errors import ConfigurationError
from tests.project import PACKAGE, ROOT, run

PAGES = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"]
# Of files that a user has: a run, a class, weights, a text.
OWN = re.compile(
    r"runs/RUN|lora\.|reviews\.|my_module\.|my_data\.|tasks\.line\.|houses|book\.txt|"
    r"--trainer\.weights|cluster\.yaml"
)
# Given by the launcher that starts the command.
LAUNCHED = re.compile(r"^(?:\S*run |mpiexec |deepspeed )|horovod|--trainer.strategy ddp2")
# An engine, a package or a compiler that is not installed, and hardware that is not there.
MISSING = re.compile(r"is not installed|needs the package|compile needs|this machine has none")
TRAINS = ("fit", "find_batch_size", "find_learning_rate")


def blocks(language: str = "") -> Iterator[tuple[str, str]]:
    """Yield the code blocks of a language, each with its page; those without one are commands."""
    for page in PAGES:
        found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        yield from ((page.name, code) for kind, code in found if kind == language)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of pages that train from a config, each with its page."""
    for page, block in blocks():
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "my_project" not in words or OWN.search(line) or LAUNCHED.search(line):
                continue
            words = words[words.index("my_project") + 1 :]
            if words[0] in TRAINS and "--help" not in words:
                yield page, words


@pytest.mark.usefixtures("apart")
def test_commands_on_the_pages_are_accepted() -> None:
    found = list(commands())
    assert len(found) > 20
    os.chdir(ROOT)  # where the configs are
    wrong = []
    for page, words in found:
        try:
            configuration.read_work("my-project", words[0], words[1:])
        except ConfigurationError as error:
            if not MISSING.search(str(error)):
                wrong.append(f"{page}: {shlex.join(words)}: {error}")
    assert wrong == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_commands_on_the_pages_run(tmp_path: Path) -> None:
    """Each of them, for some steps on the CPU."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    short = ["--trainer.accelerator", "cpu", "--trainer.max_steps", "3"]
    short += ["--trainer.limit_val_batches", "1", "--trainer.loggers", "[]"]
    failed, count = [], 0
    for words in dict.fromkeys(tuple(words) for _, words in commands()):
        done = run(["-m", PACKAGE, *words, *short], cwd=tmp_path)
        if done.returncode == 2 and MISSING.search(done.stderr):
            continue
        count += 1
        if done.returncode != 0:
            failed.append(f"{shlex.join(words)}: {done.stderr[-2000:]}")
    assert failed == []
    assert count > 20


def test_code_on_the_pages_is_python() -> None:
    found = list(blocks("python"))
    assert len(found) > 25
    for page, code in found:
        inside = re.match(r"return|self\.", code)  # of a method
        text = f"def f(self):\n    {code}" if inside else code
        compile(text.replace(", …)", ")"), page, "exec")
