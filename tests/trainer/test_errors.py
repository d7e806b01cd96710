"""One line a problem, all problems at once."""

import pytest
from my_project_trainer import errors


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
