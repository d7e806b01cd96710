"""Ranks that die, hang, leave or read less: the run ends, and says which one, and where."""

import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from tests.project import PACKAGE, fit, run, succeed

from processes import assert_nothing_left, at_root, running, wait_for

SUBJECT = "fault_subject"
TIMEOUT = 5.0  # expires
# What may be added to timeout_seconds before a run has ended, on however busy a machine: half of
# the timeout that holds unless another is given.
MORE = 300.0
# Where nobody waits for a timeout.
SOON = 300
EVERY = ["--trainer.max_epochs", "1", "--trainer.loggers", "[csv]"]
LAUNCHERS = ["ours", "torchrun", "ddp_spawn", "ddp_fork"]
slow = pytest.mark.slow


# expires
def command(launcher, folder, *arguments, processes=2, timeout=TIMEOUT) -> list[str | Path]:
    """A fit on so many processes, by our own launcher, torchrun, or a strategy that launches."""
    strategy = launcher if launcher.startswith("ddp_") else "ddp"
    shared = fit(
        *EVERY,
        *("--trainer.strategy", strategy),
        *("--trainer.strategy_options", f"{{timeout_seconds: {timeout}}}"),
        *("--trainer.global_batch_size", str(8 * processes)),
        *("--trainer.default_root_dir", folder),
        *arguments,
    )
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc-per-node={processes}", *shared]
    return [*shared, "--trainer.devices", str(processes), "--trainer.accelerator", "cpu"]


class Ended(NamedTuple):
    """A run that has failed; ``seconds``: from the fault to the end."""

    code: int
    error: str
    seconds: float

    @property
    def last(self) -> str:
        """The line that a user reads first."""
        return self.error.rstrip().rpartition("\n")[2]


def fail(launcher, fault, folder, rank=1, processes=2, model="Fails", more=()) -> Ended:
    """Have a rank fail in its third step; nothing may be left of the run."""
    options = ["--model", f"{SUBJECT}.{model}", "--model.fault", fault, "--model.rank", str(rank)]
    arguments = command(launcher, folder, *options, *more, processes=processes)
    done = run(arguments, cwd=folder, extra=at_root())
    seconds = time.time() - float((folder / "struck").read_text())
    assert_nothing_left(folder)
    return Ended(done.returncode, done.stderr, seconds)


@pytest.mark.parametrize("launcher", [pytest.param("ddp_spawn", marks=slow), "ddp_fork"])
def test_a_rank_that_is_killed_is_named(tmp_path, launcher):
    ended = fail(launcher, "is_killed", tmp_path)
    assert ended.seconds < SOON
    assert ended.code == 1
    advice = "if nobody sent it, memory ran out: see docs/trouble.md#a-rank-was-killed\n"
    assert ended.error == f"rank 1 was killed by SIGKILL; {advice}"


@pytest.mark.parametrize(
    ("launcher", "code"), [pytest.param("ours", 128 + signal.SIGSEGV, marks=slow), ("ddp_fork", 1)]
)
def test_a_rank_that_a_fault_ends_is_shown_with_its_stack(tmp_path, launcher, code):
    ended = fail(launcher, "faults", tmp_path)
    assert ended.seconds < SOON
    assert ended.code == code
    assert ended.error.startswith("rank 1 stood at:\n  File ")
    assert " in training_step\n" in ended.error
    assert ended.last == "rank 1 was killed by SIGSEGV"


def test_a_forward_of_synchronized_batchnorm_on_one_rank_is_named(tmp_path):
    synchronized = ["--trainer.sync_batchnorm", "true"]
    ended = fail("ddp_fork", "none", tmp_path, rank=0, model="ForwardsAlone", more=synchronized)
    problem = "all ranks take part in SyncBatchNorm's forward in training mode"
    assert ended.last == f"{problem}: call it on each of them, or after module.eval()"


def test_a_rank_that_aborts_is_named_though_its_peer_waits(tmp_path):
    ended = fail("ddp_fork", "aborts", tmp_path, rank=0)
    assert ended.last == "rank 0 was killed by SIGABRT"
    assert ended.error.startswith("rank 0 stood at:\n")
    assert ended.error.splitlines()[-2].endswith(" in aborts")


def assert_accused(ended: Ended, fault: str, rank: int, processes: int) -> None:
    """One rank alone is said to hang, where it does, and in time."""
    assert ended.seconds < TIMEOUT + MORE
    assert ended.code == 1
    pattern = r"^rank (\d) \(process \d+\) [a-z ]+ at:\n((?:  File .*\n)+)"
    [(number, stack)] = re.findall(pattern, ended.error, re.M)
    assert int(number) == rank
    calls = [line.rpartition(" in ")[2] for line in stack.splitlines()]
    if fault == "is_stopped":
        # Woken to tell where it is, it has perhaps gone on within its step.
        assert "training_step" in calls
    else:
        assert calls[-2:] == ["training_step", fault]
    others = " and ".join(str(other) for other in range(processes) if other != rank)
    names = f"ranks {others}" if processes > 2 else f"rank {others}"
    assert ended.last.startswith(f"rank {rank} hangs: {names} timed out (Timed out waiting 5000ms ")
    for word in others.split(" and "):
        assert f"rank {word} waited at:\n" in ended.error


@pytest.mark.parametrize(
    ("launcher", "fault", "rank", "processes"),
    [
        ("ours", "loops", 1, 3),
        ("ddp_spawn", "is_stopped", 0, 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("ours", "is_stopped", 1, 2),
                ("ours", "holds_the_interpreter", 0, 2),
                ("ddp_spawn", "loops", 1, 3),
                ("ddp_fork", "is_stopped", 1, 2),
                ("ddp_fork", "holds_the_interpreter", 0, 3),
            ]
        ),
    ],
)
@slow
def test_a_rank_that_hangs_is_named_with_its_stack(tmp_path, launcher, fault, rank, processes):
    ended = fail(launcher, fault, tmp_path, rank, processes)
    assert_accused(ended, fault, rank, processes)
    assert "Traceback" not in ended.error


@slow
@pytest.mark.parametrize(
    "fault", ["loops", pytest.param("holds_the_interpreter", marks=pytest.mark.exhaustive)]
)
def test_with_torchrun_a_rank_that_hangs_prints_its_stack(tmp_path, fault):
    ended = fail("torchrun", fault, tmp_path)
    assert ended.seconds < TIMEOUT + MORE
    assert ended.code == 1
    [printed] = re.findall(r"^Timeout .*\n(?:Thread .*\n|  File .*\n|\n)+", ended.error, re.M)
    assert re.search(rf" in {fault}\n  File .* in training_step\n", printed)


@slow
def test_a_rank_that_came_late_to_where_all_wait_is_not_accused(tmp_path):
    model = ["--model", f"{SUBJECT}.Fails", "--model.fault", "loops", "--model.rank", "0"]
    late = [*model, "--model.late", "1"]
    expiring = command("ours", tmp_path, *late, processes=3, timeout=15)  # expires
    done = run(expiring, cwd=tmp_path, extra=at_root())
    assert re.search(r"^rank 1 (waited|\(process \d+\) stands) at:\n", done.stderr, re.M)
    assert re.match(r"rank 0 hangs: ranks? (1 and )?2 timed out \(", done.stderr.splitlines()[-1])


@slow
@pytest.mark.parametrize(
    "launcher", [pytest.param("ddp_spawn", marks=pytest.mark.exhaustive), *("ours", "ddp_fork")]
)
@pytest.mark.parametrize(
    "seconds", [0.5, *(pytest.param(delay, marks=pytest.mark.exhaustive) for delay in (0.0, 1.1))]
)
def test_a_rank_that_is_stopped_at_any_moment_is_named(tmp_path, launcher, seconds):
    never = ["--model.fault", "loops", "--model.step", "1000000000", "--trainer.max_epochs", "1000"]
    model = ["--model", f"{SUBJECT}.Fails", *never, "--trainer.checkpoint_every_n_steps", "5"]
    with running(command(launcher, tmp_path, *model), tmp_path) as process:
        file = tmp_path / "rank-1"  # which a rank writes in a step
        rank = psutil.Process(int(wait_for(lambda: file.exists() and file.read_text(), process)))
        time.sleep(seconds)
        rank.send_signal(signal.SIGSTOP)
        _, error = process.communicate(timeout=TIMEOUT + MORE)
    assert process.returncode == 1
    assert re.search(r"^rank 1 \(process \d+\) is stopped at:\n  File ", error, re.M)
    assert "rank 1 hangs: rank 0 timed out" in error
    assert_nothing_left(tmp_path)


@slow
@pytest.mark.parametrize(
    ("launcher", "rank"), [("ours", 1), pytest.param("torchrun", 0, marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_never_comes_is_named(tmp_path, launcher, rank):
    model = ["--model", f"{SUBJECT}.NeverComes", "--model.rank", str(rank)]
    # expires
    done = run(command(launcher, tmp_path, *model, timeout=3), cwd=tmp_path, extra=at_root())
    assert time.time() - float((tmp_path / "struck").read_text()) < 3 + MORE
    assert done.returncode == (1 if launcher == "torchrun" else 75)
    assert f"error: rank {rank} did not join within 3 s" in done.stderr
    assert launcher == "torchrun" or len(done.stderr.splitlines()) == 1
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        ("ddp_fork", 1),
        pytest.param("ours", 0, marks=slow),
        *(pytest.param(name, 0, marks=[slow, pytest.mark.exhaustive]) for name in LAUNCHERS[1:]),
    ],
)
def test_a_rank_that_leaves_without_an_error_ends_all(tmp_path, launcher, rank):
    ended = fail(launcher, "exits", tmp_path, rank)
    assert ended.seconds < SOON
    assert ended.code == 1
    told = f"rank {rank}: error: user code called sys.exit(0) in step 3, before fit ended (File "
    assert told in ended.error
    assert re.search(r"in exits\): return instead, or raise an error$", ended.error, re.M)


@pytest.mark.parametrize("launcher", ["ddp_fork", pytest.param("ours", marks=slow)])
def test_a_rank_that_is_gone_without_a_word_ends_all(tmp_path, launcher):
    ended = fail(launcher, "leaves", tmp_path)
    assert ended.seconds < SOON
    assert ended.code == 1
    reason = "user code, or a library, called os._exit(0)"
    assert ended.last == f"rank 1 ended with exit code 0 before its work was done: {reason}"


def test_a_rank_that_leaves_with_a_code_is_said_to(tmp_path):
    ended = fail("ddp_fork", "exits_with_3", tmp_path)
    assert ended.seconds < SOON
    assert re.search(r"in training_step\n  File .* in exits_with_3\nrank 1: ", ended.error)
    assert ended.last == "rank 1: sys.exit(3) was called"


SCRIPT = f"""
import sys
from {PACKAGE}_trainer import Trainer
from {PACKAGE}.tasks.digits import Digits
from {SUBJECT} import Fails
if __name__ == "__main__":
    options = {{"max_epochs": 1, "devices": 2, "accelerator": "cpu", "loggers": ["csv"]}}
    Trainer(strategy=sys.argv[1], **options).fit(Fails("raises"), Digits(batch_size=16))
"""


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=slow)])
def test_a_script_s_error_is_shown_once(tmp_path, strategy):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(["script.py", strategy], cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "rank 1: ArithmeticError: planted"
    assert done.stderr.count("raise ArithmeticError") == 1
    assert_nothing_left(tmp_path)


@slow
@pytest.mark.parametrize("launcher", ["ours", "torchrun"])
def test_a_failure_is_reported_though_a_save_never_ends(tmp_path, launcher):
    saving = ["--trainer.async_checkpoints", "true", "--trainer.checkpoint_every_n_steps", "1"]
    more = [*saving, "--model.step", "1"]  # the next save would wait for the first
    ended = fail(launcher, "raises", tmp_path, model="FailsWhileSaving", more=more)
    assert ended.code == 1
    assert "rank 1: ArithmeticError: planted" in ended.error
    assert "hangs" not in ended.error


@slow
def test_an_error_that_torchrun_shows_is_the_rank_s_own(tmp_path):
    ended = fail("torchrun", "raises_and_ends_late", tmp_path, processes=3)
    assert "ArithmeticError: planted" in ended.error
    assert "waited" not in ended.error
    assert "Connection closed" not in ended.error


UNEVEN = ["--data", f"{SUBJECT}.UnevenBatches", "--trainer.global_batch_size", "null"]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("ours", marks=slow),
        *(pytest.param(name, marks=[slow, pytest.mark.exhaustive]) for name in LAUNCHERS[1:-1]),
        LAUNCHERS[-1],
    ],
)
def test_loaders_of_different_lengths_are_refused(tmp_path, launcher):
    done = run(command(launcher, tmp_path, *UNEVEN), cwd=tmp_path, extra=at_root())
    reason = "rank 0 has 5, rank 1 has 4; give each the same number, or set uneven_inputs='join'"
    line = f"error: the ranks' loaders give different numbers of batches: {reason}"
    if launcher == "torchrun":
        assert line in done.stderr.splitlines()
        return
    assert done.returncode == 2
    lines = [re.sub(r"^rank \d: ", "", text) for text in done.stderr.splitlines()]
    assert [text for text in lines if not text.startswith("note: ")] == [line]
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("launcher", [pytest.param("ours", marks=slow), "ddp_fork"])
def test_loaders_of_different_lengths_are_joined(tmp_path, launcher):
    join = [*UNEVEN, "--trainer.uneven_inputs", "join"]
    done = succeed(command(launcher, tmp_path, *join), cwd=tmp_path, extra=at_root())
    assert "done after 5 steps" in done.stdout
