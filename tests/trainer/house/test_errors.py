"""One line a problem, all problems at once."""

import errno
import multiprocessing
from multiprocessing import synchronize
from pathlib import Path

import pytest
from my_project_trainer import errors
from my_project_trainer.launch import failures


def test_a_user_error_holds_its_lines() -> None:
    assert errors.UserError("one").problems == ["one"]
    several = errors.ConfigurationError(["one", "two"])
    assert several.problems == ["one", "two"]
    assert str(several) == "one\ntwo"


@pytest.mark.parametrize("kind", ["ConfigurationError", "CheckpointError"])
def test_every_error_of_the_user_is_a_user_error(kind: str) -> None:
    assert issubclass(getattr(errors, kind), errors.UserError)


def test_problems_are_raised_together_and_in_order() -> None:
    problems = errors.Problems()
    with problems:
        raise errors.ConfigurationError(["first", "second"])
    problems.add("third")
    with problems:
        raise errors.ConfigurationError("fourth")
    with pytest.raises(errors.ConfigurationError) as raised:
        problems.raise_any()
    assert raised.value.problems == ["first", "second", "third", "fourth"]


def test_no_problem_raises_nothing() -> None:
    problems = errors.Problems()
    with problems:
        pass
    problems.raise_any()
    assert problems.lines == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_other_errors_pass_through(error: type[BaseException]) -> None:
    problems = errors.Problems()
    with pytest.raises(error), problems:
        raise error
    assert problems.lines == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dpd", "; did you mean 'ddp'?"),
        ("single_devise", "; did you mean 'single_device'?"),
        ("qqqq", "; known: auto, ddp, single_device"),
        ("", "; known: auto, ddp, single_device"),
    ],
)
def test_nearest(name: str, said: str) -> None:
    assert errors.nearest(name, {"single_device", "ddp", "auto"}) == said


def test_nearest_names_all_that_are_close() -> None:
    assert errors.nearest("ad", ["adam", "adamw"]) == "; did you mean 'adam'?"
    assert errors.nearest("adams", ["adam", "adamw"]) == "; did you mean 'adam' or 'adamw'?"


TOO_MANY = (
    "Too many open files: raise the limit (ulimit -n 65536), or lower the loaders' num_workers"
)
FULL = "DataLoader worker (pid 7) is killed by signal: Bus error: /dev/shm is full (in Docker: "


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EMFILE, "Too many open files"), TOO_MANY),
        (OSError(errno.ENFILE, "Too many open files in system"), TOO_MANY),
        (
            RuntimeError("Too many open files. Communication with the workers is no longer"),
            TOO_MANY,
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is"), FULL),
    ],
)
def test_a_limit_of_files_and_of_shared_memory_is_named(error: Exception, line: str) -> None:
    assert (failures.failure_of_machine(error, Path()) or "").startswith(line)


def test_a_machine_without_semaphores_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronize.SemLock, "_make_name", staticmethod(lambda: "x" * 300))
    with pytest.raises(OSError, match="Invalid argument") as raised:
        synchronize.Lock(ctx=multiprocessing.get_context("fork"))
    message = failures.failure_of_machine(raised.value, Path()) or ""
    assert message.startswith("Invalid argument: no semaphore can be made in /dev/shm (in Docker")
