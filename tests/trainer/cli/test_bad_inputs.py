"""The attack: each of the bad inputs ends with code 2 and a clear line for every mistake."""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from my_project_trainer.cli import command as cli
from my_project_trainer.cli import configuration
from my_project_trainer.errors import ConfigurationError
from tests.project import ROOT

import bad_inputs
from bad_inputs import Bad

OPTIONS = inspect.signature(trainer.Trainer).parameters
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
SOURCES = ROOT / "src"
LONGEST = 1100
PRINT = "--print_config"
OF_THIS_MACHINE = [("accelerator", "gpu"), ("num_nodes", "2"), ("num_nodes", "1000000")]


class Model(trainer.TrainingModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        raise NotImplementedError


class NeedsWidth(trainer.TrainingModule):
    def __init__(self, width: int) -> None:
        super().__init__()


class Refuses(trainer.TrainingModule):
    """One that refuses what it is given."""

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be at least 1, not {width}")


class Exits(trainer.TrainingModule):
    def __init__(self) -> None:
        sys.exit(0)


class Crashes(trainer.TrainingModule):
    def __init__(self, width: int = -3) -> None:
        super().__init__()
        self.layer = __import__("torch").nn.Linear(width, 1)


class NoNumber(trainer.DataModule):
    """Data whose error is an OSError without a number."""

    def __init__(self, path: str = "") -> None:
        raise OSError("the archive is damaged")


pytestmark = pytest.mark.usefixtures("nothing_runs")

MODEL = ("--model", f"{__name__}.Model")
RIGHT = (*MODEL, "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines that end a fit before it starts, each without its first word."""
    code: object = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(cli._COMMANDS, "fit", _fail)
        try:
            cli.main(["fit", *words])
        except SystemExit as ended:
            code = ended.code
    output, error = capsys.readouterr()
    assert code == 2, error[-2000:]
    assert output == ""
    lines = error.splitlines()
    assert all(line.startswith("error: ") for line in lines), error[-2000:]
    return [line.removeprefix("error: ") for line in lines]


def _fail(run: Any) -> None:
    raise AssertionError("it was not refused")


def check(bad: Bad, lines: list[str]) -> None:
    """Each line is clear, and each mistake has one."""
    assert lines, bad
    for line in lines:
        assert 12 < len(line) < LONGEST, (bad.what, line)
        assert "Traceback" not in line
        assert not re.search(
            r": None\b|<built-in|object at 0x", line.partition("expected")[0][-99:]
        )
    assert len(set(lines)) == len(lines), lines
    for named in bad.named:
        pattern = "|".join(map(re.escape, named.split("|")))
        assert any(re.search(pattern, line) for line in lines), (bad.what, named, lines)
    assert len(lines) <= max(len(bad.named), 1), (bad.what, lines)


def attack(inputs: list[Bad], attempt: Callable[[Bad], list[str]]) -> None:
    """Try all, and report all that are not refused as they should be; none of them starts."""
    wrong = []
    for bad in inputs:
        try:
            check(bad, attempt(bad))
        except Exception as error:
            wrong.append(f"{bad.what}: {type(error).__name__}: {str(error)[:700]}")
    assert not wrong, f"{len(wrong)} of {len(inputs)}:\n" + "\n".join(wrong)


KINDS: dict[str, Callable[[], list[Bad]]] = {
    "options": lambda: list(bad_inputs.options()),
    "files": lambda: list(bad_inputs.files()),
    "environments": lambda: list(bad_inputs.environments()),
    "arguments from Python": lambda: list(bad_inputs.arguments(DEFAULTS)),
}


def test_there_are_enough() -> None:
    counts = {kind: len(make()) for kind, make in KINDS.items()}
    assert sum(counts.values()) >= 600, counts


# The quick tests try some of each kind, the slow ones all.
ALL = pytest.param(1, id="all", marks=[pytest.mark.slow, pytest.mark.exhaustive])
some_or_all = pytest.mark.parametrize("step", [pytest.param(20, id="some"), ALL])


@some_or_all
def test_bad_options(step: int, capsys: pytest.CaptureFixture[str]) -> None:
    def attempt(bad: Bad) -> list[str]:
        lines = refused(capsys, *RIGHT, *bad.words)
        # On a login node, too, unless it is this machine that has no GPU or no second node.
        is_here = (bad.words[0][10:], *bad.words[1:]) in OF_THIS_MACHINE
        if not (is_here or bad.words[0].startswith(PRINT)):
            assert refused(capsys, *RIGHT, *bad.words, PRINT) == lines
        return lines

    attack(KINDS["options"]()[::step], attempt)


@some_or_all
def test_bad_files(step: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def attempt(bad: Bad) -> list[str]:
        path = tmp_path / "bad.yaml"
        path.write_bytes(bad.file or b"")
        model = () if b"model" in (bad.file or b"") else MODEL
        return refused(capsys, *model, *RIGHT[2:], "--config", str(path))

    attack(KINDS["files"]()[::step], attempt)


@some_or_all
def test_bad_environments(step, capsys, monkeypatch):
    def attempt(bad: Bad) -> list[str]:
        with monkeypatch.context() as patched:
            for name, value in bad.variables.items():
                patched.setenv(name, value)
            devices = () if "RANK" in bad.variables else ("--trainer.devices", "2")
            return refused(capsys, *RIGHT, *devices)

    attack(KINDS["environments"]()[::step], attempt)


def test_bad_arguments_from_python() -> None:
    def attempt(bad: Bad) -> list[str]:
        try:
            trainer.Trainer(**{"max_epochs": 1, "accelerator": "cpu", **bad.arguments})
        except ConfigurationError as error:
            lines: list[str] = error.problems
            return lines
        return []

    attack(KINDS["arguments from Python"](), attempt)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3)
    ),
    max_leaves=5,
)
_UNHURRIED = settings(
    deadline=None,
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@_UNHURRIED
@given(name=st.sampled_from(sorted(DEFAULTS)), value=_VALUES)
def test_whatever_value_is_taken_or_refused_in_a_line(name: str, value: Any) -> None:
    if name in ("compile", "deterministic") and value is True:
        return  # a switch of the whole process
    options = {"max_epochs": 1, "accelerator": "cpu", name: value}
    assert_lines(lambda: trainer.Trainer(**options))


@_UNHURRIED
@given(content=st.dictionaries(st.sampled_from(["trainer", "model", "data", "x"]), _VALUES))
def test_whatever_file_is_taken_or_refused_in_a_line(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    words = ["--config", str(path), *RIGHT]
    assert_lines(lambda: configuration.read_work("program", "fit", words))


def assert_lines(attempt: Callable[[], object]) -> None:
    """Nothing is raised but a ConfigurationError of whole lines."""
    lines = ["none"]
    try:
        attempt()
    except ConfigurationError as error:
        lines = error.problems
    assert lines
    assert all("\n" not in line and line.strip() for line in lines)


def test_a_path_in_the_home_directory_and_in_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORK", str(tmp_path / "work"))
    (tmp_path / "c.yaml").write_text("trainer: {max_epochs: 1, default_root_dir: $WORK/r}")
    for word in ("--config=~/c.yaml", "--config=$HOME/c.yaml"):
        work = configuration.read_work("program", "fit", [*MODEL, word])
        assert work.trainer.default_root_dir == tmp_path / "work" / "r"
    (tmp_path / "earlier").mkdir()
    made = trainer.Trainer(max_epochs=1, default_root_dir=Path("~/mine"), resume="~/earlier")
    assert made.default_root_dir == tmp_path / "mine"
    assert made._plan.options.resume == str(tmp_path / "earlier")


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        (
            "Refuses",
            ("--model.width", "-2"),
            r"model: Refuses\(width=-2\) was refused: width must be at least 1, not -2 "
            r"\(test_bad_inputs\.py, line \d+\)",
        ),
        (
            "Crashes",
            (),
            r"model: Crashes\(\) was refused: RuntimeError: Trying to create tensor with negative "
            r"dimension -3.* \(test_bad_inputs\.py, line \d+\)",
        ),
        (
            "Exits",
            (),
            r"model: Exits\(\) was refused: SystemExit: 0 \(test_bad_inputs\.py, line \d+\)",
        ),
        ("NeedsWidth", ("--model.width", "null"), r"model\.width=None: expected int"),
    ],
)
def test_a_class_that_refuses_its_arguments_is_named_with_them(name, words, line, capsys):
    (message,) = refused(capsys, *RIGHT[2:], "--model", f"{__name__}.{name}", *words)
    assert re.fullmatch(line, message), message


def test_an_oserror_without_a_number_says_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refused(capsys, *RIGHT, "--data", f"{__name__}.NoNumber", "--data.path", "a")
    assert line.startswith("data: NoNumber(path='a') was refused: the archive is damaged (")
