"""A strategy of the user's own: registered in the model's module, or named by its class path."""

from pathlib import Path

import my_project_trainer as trainer
import pytest
from my_project_trainer import strategies
from my_project_trainer.errors import ConfigurationError
from tests.project import PACKAGE, run, succeed

from processes import at_root

SUBJECT = "function_subject"


def fitted(folder: Path, strategy: str, *arguments: str) -> list[list[str]]:
    """Train on two processes under a strategy; gives what each rank's strategy has noted."""
    done = succeed(command(strategy, *arguments), cwd=folder, extra=at_root())
    assert f"strategy {strategy} on cpu, precision 32-true, 2 processes" in done.stdout
    return [(folder / f"notes-{rank}").read_text().splitlines() for rank in (0, 1)]


def command(strategy: str, *arguments: str) -> list[str]:
    """A short fit by the command line."""
    options = {
        "--model": f"{SUBJECT}.Net",
        "--trainer.strategy": strategy,
        "--trainer.accelerator": "cpu",
        "--trainer.devices": "2",
        "--trainer.max_steps": "1",
        "--trainer.loggers": "[csv]",
    }
    return ["-m", PACKAGE, "fit", *(word for pair in options.items() for word in pair), *arguments]


@pytest.mark.slow
def test_registered_where_the_model_is(tmp_path):
    assert fitted(tmp_path, "mine") == [[f"hello from {rank} of 2", "wraps Net"] for rank in (0, 1)]


def test_named_by_class_path_with_options_of_its_own_and_of_what_it_is_made_from(tmp_path):
    options = ["--trainer.strategy_options", '{"greeting": "hi", "bucket_cap_mb": 1.0}']
    notes = fitted(tmp_path, f"{SUBJECT}.Mine", *options)
    assert [rank[0] for rank in notes] == ["hi from 0 of 2", "hi from 1 of 2"]


def test_in_processes_that_are_spawned(tmp_path):
    notes = fitted(tmp_path, "mine_spawned")
    assert [rank[0] for rank in notes] == ["hello from 0 of 2", "hello from 1 of 2"]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["mine", "--trainer.strategy_options", '{"greting": "hi", "bucket_cap_mb": "x"}'],
            [
                "strategy_options: mine has no option 'greting'; did you mean 'greeting'?",
                "strategy_options.bucket_cap_mb='x': expected float",
            ],
        ),
        (["mien"], ["strategy='mien' is unknown; did you mean 'mine'?"]),
    ],
)
def test_a_mistake_is_said_in_a_line(tmp_path, arguments, lines):
    done = run(command(*arguments), cwd=tmp_path, extra=at_root())
    assert done.returncode == 2
    assert [line.removeprefix("error: ") for line in done.stderr.splitlines()] == lines
    assert list(tmp_path.iterdir()) == []


def test_its_name_is_known_where_something_else_is_wrong(tmp_path):
    words = command("mine")
    words[words.index("--trainer.max_steps")] = "--trainer.max_step"  # before the model
    done = run([*words[:3], *words[5:], *words[3:5]], cwd=tmp_path, extra=at_root())
    line = "trainer.max_step: there is no such option; did you mean"
    names = "'max_steps' or 'max_time' or 'max_epochs'?"
    assert done.stderr.splitlines()[0] == f"error: {line} {names}"
    assert "unknown" not in done.stderr


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests.nowhere.Mine", "No module named 'tests.nowhere'"),
        ("tests.project.Mine", "module 'tests.project' has no attribute 'Mine'"),
        ("tests.project.Path", "is not a Strategy"),
        ("tests.project.run", "is not a Strategy"),
        (".Mine", "give its module too: module.Mine"),
    ],
)
def test_a_class_path_that_is_none(path, reason):
    with pytest.raises(ConfigurationError) as caught:
        strategies.create(path, {})
    assert caught.value.problems == [str(caught.value)]
    assert str(caught.value).startswith(f"strategy={path!r}")
    assert reason in str(caught.value)


def test_a_class_in_place_of_a_strategy():
    line = "strategy=SingleDevice is a class: create an instance"
    with pytest.raises(ConfigurationError, match=line):
        trainer.Trainer(max_steps=1, strategy=trainer.SingleDevice)
