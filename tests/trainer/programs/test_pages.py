"""Commands on the pages of a project are accepted, and code on them is Python."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from my_project_trainer.cli import configuration, export
from my_project_trainer.errors import ConfigurationError, Problems
from my_project_trainer.tools import report, reproduce
from my_project_trainer.tools.plan import planning
from my_project_trainer.tools.report import page as report_page
from tests.project import PACKAGE, ROOT, run

PAGES = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"]
# Of files that a user has: a run, a class, weights, a text.
OWN = re.compile(
    r"lora\.|reviews\.|my_module\.|my_data\.|tasks\.line\.|houses|book\.txt|"
    r"--trainer\.weights|cluster\.yaml"
)
A_RUN = re.compile(r"(?:runs/)?RUN(/best)?|runs/[\w-]+")
# Given by the launcher that starts the command.
LAUNCHED = re.compile(r"^(?:\S*run |mpiexec |deepspeed )|horovod|--trainer.strategy ddp2")
# An engine, a package or a compiler that is not installed, and hardware that is not there.
MISSING = re.compile(r"is not installed|needs the package|compile needs|this machine has none")
TRAINS = ("fit", "find_batch_size", "find_learning_rate")
NAME = "my-project"


def blocks(language: str = "") -> Iterator[tuple[str, str]]:
    """Yield the code blocks of a language, each with its page; those without one are commands."""
    for page in PAGES:
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        yield from ((page.name, code) for kind, code in fenced if kind == language)


def commands(*, train: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of pages that train from a config, or the others, each with its page."""
    for page, block in blocks():
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "my_project" not in words or OWN.search(line) or LAUNCHED.search(line):
                continue
            words = words[words.index("my_project") + 1 :]
            is_pattern = "[" in line or {"--help", "…"} & {*words} or "…" in line
            needs_run = words[0] in TRAINS and "runs/RUN" in line
            if (words[0] in TRAINS) is train and not is_pattern and not needs_run:
                yield page, words


@pytest.mark.usefixtures("apart")
def test_commands_on_the_pages_are_accepted() -> None:
    pairs = list(commands())
    assert len(pairs) > 20
    os.chdir(ROOT)  # where the configs are
    wrong = []
    for page, words in pairs:
        try:
            configuration.read_work("my-project", words[0], words[1:])
        except ConfigurationError as error:
            if not MISSING.search(str(error)):
                wrong.append(f"{page}: {shlex.join(words)}: {error}")
    assert wrong == []


def read_as(command: str, words: list[str]) -> None:
    """Read the words of a command as it does, which raises ConfigurationError."""
    if command == "plan":
        problems = Problems()
        planning.read_request(NAME, words, problems)
        problems.raise_any()
    elif command == "doctor":
        options = [word for word in words if word != "--json"]
        if options:
            configuration.read_work(NAME, "fit", options)
    elif command == "report":
        report.run(NAME, words)
    elif command == "reproduce":
        reproduce._read(words, f"{NAME} reproduce")
    elif command == "export":
        given_export = export._parser(NAME).parse_args(words)
        export._checked_paths(given_export, export._FORMATS[given_export.format])
    else:
        configuration.read_work(NAME, command, words)


@pytest.mark.usefixtures("apart")
def test_commands_of_runs_and_tools_on_the_pages_are_accepted(tmp_path, monkeypatch):
    pairs = list(commands(train=False))
    assert len(pairs) > 20
    options = {"max_steps": 1, "default_root_dir": str(tmp_path), "run_name": "made"}
    options |= {"loggers": "[csv]", "accelerator": "cpu", "enable_progress_bar": "false"}
    arguments = [f"--trainer.{name}={value}" for name, value in options.items()]
    config = str(ROOT / "configs" / "digits.yaml")
    work = configuration.read_work(NAME, "fit", ["--config", config, *arguments])
    work.trainer.fit(work.model, work.data)
    monkeypatch.setattr(report_page, "written", lambda runs: "")
    os.chdir(ROOT)
    wrong, out = [], str(tmp_path / "page.html")
    for page, (command, *words) in pairs:
        replaced = [str(tmp_path / "made") if A_RUN.fullmatch(word) else word for word in words]
        replaced = [out if word.endswith(".html") else word for word in replaced]
        try:
            read_as(command, replaced)
        except ConfigurationError as error:
            if not MISSING.search(str(error)):
                wrong.append(f"{page}: {command} {shlex.join(words)}: {error}")
    assert wrong == []
    assert {command for _, (command, *_) in pairs} >= {
        *("plan", "doctor", "report", "reproduce", "export", "validate", "test", "predict")
    }


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
    snippets = list(blocks("python"))
    assert len(snippets) > 25
    for page, code in snippets:
        inside = re.match(r"return|self\.", code)  # of a method
        text = f"def f(self):\n    {code}" if inside else code
        compile(text.replace(", …)", ")"), page, "exec")
