"""``ddp_spawn`` and ``ddp_fork`` to a bad end: what is said, what is left, and who lives on."""

import signal

import psutil
import pytest
from test_interruption import has_noted_an_interrupt
from test_launch import wait_for_ranks
from test_launch_functions import METHODS, run_script, started, write
from tests.project import PATIENCE, run

from processes import assert_nothing_left, at_root, running, wait_for
from torch_versions import quiet_gloo

FAILS = """
import psutil

def attempt(module):
    fit = make(sys.argv[1], max_epochs=1)
    try:
        fit.fit(module)
    except (RankError, UserError) as error:
        print(f"{type(error).__name__}: {error}")
    family = psutil.Process().children(recursive=True)
    print("left:", [each for each in family if "resource_tracker" not in " ".join(each.cmdline())])
    return fit
attempt(Raises())
attempt(RaisesUserError())
print("steps:", attempt(Net()).global_step)
"""


@quiet_gloo
@pytest.mark.parametrize("strategy", METHODS)
def test_the_parent_hears_of_a_failure_and_lives_on(tmp_path, strategy):
    done = run_script(tmp_path, FAILS, strategy)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "RankError: Traceback (most recent call last):"
    assert "in training_step" in done.stdout
    assert lines[-6:] == [
        "rank 1: ArithmeticError: planted on rank 1",
        "left: []",
        "UserError: a planted mistake",
        "left: []",
        "left: []",
        "steps: 5",
    ]
    assert "planted" not in done.stderr


@pytest.mark.parametrize(
    ("strategy", "name", "code", "last"),
    [
        ("ddp_spawn", "Raises", 1, "rank 1: ArithmeticError: planted on rank 1"),
        ("ddp_fork", "RaisesUserError", 2, "error: a planted mistake"),
    ],
)
def test_the_command_line_says_a_failure_once(tmp_path, strategy, name, code, last):
    done = run(started(strategy, name), cwd=tmp_path, extra=at_root())
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == last, done.stderr
    assert done.stderr.count(last) == 1
    assert done.stderr.count("Traceback (most recent call last)") == (1 if code == 1 else 0)
    assert_nothing_left(tmp_path)


INTERRUPTED = """
try:
    make(sys.argv[1]).fit(Sleeps())
except KeyboardInterrupt:
    print("interrupted")
    make(sys.argv[1], max_steps=1).fit(Net())
    print("trained")
"""


@quiet_gloo
@pytest.mark.parametrize("strategy", METHODS)
def test_a_second_interrupt_ends_the_ranks_at_once_and_not_the_parent(tmp_path, strategy):
    with running([write(tmp_path, INTERRUPTED), strategy], tmp_path) as process:
        ranks = wait_for_ranks(tmp_path, process)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: all(has_noted_an_interrupt(rank.pid) for rank in ranks), process)
        process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
        assert alive == []
        output, error = process.communicate(timeout=PATIENCE)
        assert (output, error) == ("interrupted\ntrained\n", "")


@pytest.mark.parametrize(
    ("strategy", "number"),
    [("ddp_spawn", signal.SIGKILL), ("ddp_fork", signal.SIGKILL), ("ddp_fork", signal.SIGTERM)],
)
@pytest.mark.slow
def test_a_parent_that_is_ended_takes_its_ranks_along(tmp_path, strategy, number):
    variables = at_root() | {"TRAINER_SAVE_SECONDS": "2"}
    with running([write(tmp_path, INTERRUPTED), strategy], tmp_path, extra=variables) as process:
        ranks = wait_for_ranks(tmp_path, process)
        process.send_signal(number)
        assert process.wait(PATIENCE) == -number
        _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
        assert alive == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]
)
def test_ranks_that_are_still_importing_end_too(tmp_path, number):
    script = write(tmp_path, "make('ddp_spawn').fit(Sleeps())")
    with running([script], tmp_path, fresh=True) as process:
        family = wait_for(lambda: both_importing(process.pid), process)
        process.send_signal(number)
        process.wait(PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert alive == []


def both_importing(parent: int) -> list[psutil.Process]:
    """The two children of a process that are spawned, once they are there."""
    children = psutil.Process(parent).children()
    spawned = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return spawned if len(spawned) == 2 else []
