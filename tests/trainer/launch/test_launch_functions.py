"""``ddp_spawn`` and ``ddp_fork`` from scripts: what comes back, and what is said when it cannot."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.project import PACKAGE, PATIENCE, environment, run, succeed

from fitting import logged, saved
from processes import assert_nothing_left, at_root
from torch_versions import quiet_gloo

SUBJECT = "function_subject"
METHODS = [pytest.param("ddp_spawn", marks=pytest.mark.slow), "ddp_fork"]
HEAD = f"""
import json, os, sys
import torch
from safetensors.torch import save_file
from {PACKAGE}_trainer import Trainer, UserError
from {PACKAGE}_trainer.launch.failures import RankError
from {SUBJECT} import *

def make(strategy, **options):
    return Trainer(**{{
        "accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 2,
        "log_every_n_steps": 1, "loggers": ["csv"], "enable_progress_bar": False, **options
    }})
"""


def write(folder: Path, body: str, guard: str = "if __name__ == '__main__':") -> Path:
    """A user's script: what is to be run stands under a guard."""
    path = folder / "script.py"
    path.write_text(f"{HEAD}\n{guard}\n{textwrap.indent(textwrap.dedent(body), '    ')}")
    return path


def run_script(folder: Path, body: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run([write(folder, body), *arguments], cwd=folder, extra=at_root())


def started(strategy: str, name: str) -> list[str | Path]:
    """A fit of one subject on two processes, by the command line."""
    arguments = ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.max_epochs"]
    subject = ["1", "--trainer.strategy", strategy, "--model", f"{SUBJECT}.{name}"]
    return ["-m", PACKAGE, "fit", *arguments, *subject, "--trainer.loggers", "[csv]"]


WHOLE = """
first = make(sys.argv[1], run_name="first")
net = Looks()
first.fit(net)
after_first = {name: tensor.clone() for name, tensor in net.state_dict().items()}
report = {
    "metrics": first.metrics,
    "steps": first.global_step,
    "epoch": first.current_epoch,
    "directory": os.path.relpath(first.run_directory),
    "validated": first.validate(net),
    "tested": first.test(net),
}
predicted = torch.cat(first.predict(net))
report["left"] = [first.global_step, os.path.relpath(first.run_directory)]
report["buffer"] = net.fits.tolist()
second = make(sys.argv[1], run_name="second", max_epochs=1)
second.fit(net)
if second.global_rank == 0:
    save_file(after_first, "first.safetensors")
    save_file(net.state_dict() | {"predicted": predicted}, "second.safetensors")
    with open("report.json", "w") as file:
        json.dump(report, file)
"""


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the same script gives under ddp, whose ranks run it whole."""
    folder = tmp_path_factory.mktemp("ddp")
    done = run_script(folder, WHOLE, "ddp")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("strategy", METHODS)
def test_everything_comes_back_as_under_ddp(tmp_path, by_ddp, strategy):
    done = run_script(tmp_path, WHOLE, strategy)
    assert done.returncode == 0, done.stderr
    for name in ("first", "second"):
        ours = load_file(tmp_path / f"{name}.safetensors")
        theirs = load_file(by_ddp / f"{name}.safetensors")
        assert "body.1.running_mean" in ours
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert logged(tmp_path / "runs" / name) == logged(by_ddp / "runs" / name)
        weights = saved(tmp_path / "runs" / name)
        assert all(torch.equal(ours[key], weights[key]) for key in weights)
    report, theirs = (json.loads((path / "report.json").read_text()) for path in (tmp_path, by_ddp))
    assert report == theirs
    assert report["directory"] == "runs/first"
    assert (report["steps"], report["buffer"]) == (10, [1.0, 1.0])
    assert report["left"] == [10, "runs/first"]  # a prediction does not forget the fit
    assert {"loss", "val_loss", "lr"} <= report["metrics"].keys()
    # A thread of gloo's that is left may abort the end of a process that does not just stop.
    threads = [path.read_text() for path in tmp_path.glob("threads-*")]
    assert len(threads) == (2 if strategy == "ddp_spawn" else 0)
    assert not any("gloo" in names for names in threads)
    # Each rank saw what it had written itself.
    assert [(tmp_path / f"sees-{rank}").read_text() for rank in (0, 1)] == ["0.0", "1.0"]


def test_weights_that_forked_ranks_would_share_are_refused(tmp_path):
    done = run_script(tmp_path, "make('ddp_fork').fit(Net().share_memory())")
    assert "UserError: model.body.0.weight is in shared memory, to which all " in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_forks_after_the_parent_has_computed_with_threads(tmp_path):
    done = run_script(
        tmp_path,
        """
        class Computes(Net):
            def on_fit_start(self):
                compute()
        def compute():
            weight = torch.randn(1000, 1000, requires_grad=True)
            (torch.randn(1000, 1000) @ weight).square().sum().backward()
        torch.set_num_threads(2)
        for attempt in range(10):
            compute()
            fork = make("ddp_fork", max_steps=2)
            fork.fit(Computes())
            print("trained", attempt, fork.global_step, torch.get_num_threads(), flush=True)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"trained {attempt} 2 2" for attempt in range(10)]


@quiet_gloo
def test_trains_in_a_thread_and_what_a_module_keeps_besides_tensors_comes_back(tmp_path):
    done = run_script(
        tmp_path,
        """
        from concurrent.futures import ThreadPoolExecutor
        class Counts(Net):
            seen = 0
            def on_train_epoch_end(self):
                self.seen += 1
            def get_extra_state(self):
                return {"seen": self.seen}
            def set_extra_state(self, state):
                self.seen = state["seen"]
        net, fork = Counts(), make("ddp_fork")
        with ThreadPoolExecutor(1) as executor:
            executor.submit(fork.fit, net).result()
        print(net.seen, fork.global_step)
        """,
    )
    assert (done.stdout, done.stderr) == ("2 10\n", "")


def test_a_script_without_a_guard_is_told_so_once(tmp_path):
    script = write(tmp_path, "make('ddp_spawn').fit(Net())", guard="if True:")
    done = run([script], cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("put the call under: if __name__ == '__main__':") == 1
    assert list(tmp_path.iterdir()) == [script]
    assert_nothing_left(tmp_path)


def started_by_its_name(script: Path) -> subprocess.CompletedProcess[str]:
    """What Python does with a script in the working directory, in processes of its own."""
    words, where = [sys.executable, script.name], {"cwd": script.parent, "timeout": PATIENCE}
    texts = {"env": environment(at_root()), "capture_output": True, "text": True}
    return subprocess.run(words, check=False, **where, **texts)


@pytest.mark.slow
def test_what_starts_the_script_once_per_rank_must_be_a_script(tmp_path):
    body = """
import multiprocessing
def child():
    for strategy in ("ddp", "ddp_fork"):
        try:
            make(strategy).fit(Net())
        except UserError as error:
            print(error)
if not os.environ.get("RANK"):
    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join()
os.chdir("inner")
done = "done" + os.environ.get("RANK", "")
if not os.path.exists("skip") or done == "done":
    make("ddp", max_steps=1, max_epochs=None).fit(Net())
    print(done)
"""
    inner = tmp_path / "inner"
    inner.mkdir()
    script = write(tmp_path, body)
    done = started_by_its_name(script)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("done0", "done1"))
    line = "a process of multiprocessing cannot start this command once per rank, and exit like"
    assert line in done.stdout
    assert "a daemonic process, such as a worker of multiprocessing.Pool, cannot" in done.stdout
    assert (inner / "runs").is_dir()
    (inner / "skip").touch()
    ended = started_by_its_name(script)
    assert ended.returncode == 1
    assert "ended with exit code 0 before it reached the trainer: each rank runs" in ended.stderr


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_a_rank_has_no_terminal_for_a_debugger(tmp_path, strategy):
    body = f"Net.on_fit_start = lambda _: breakpoint()\nmake('{strategy}').fit(Net())"
    done = run_script(tmp_path, body)
    assert done.returncode
    assert "breakpoint(): one of several processes has no terminal; set devices" in done.stderr


@pytest.mark.slow
def test_a_script_on_standard_input_can_be_forked_only(tmp_path):
    text = """
for strategy in ("ddp_spawn", "ddp", "ddp_fork"):
    try:
        make(strategy, run_name=strategy).fit(Net())
    except UserError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-"],
        input=HEAD + text,
        cwd=tmp_path,
        env=environment(at_root()),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    spawn, copies = done.stdout.splitlines()
    assert "standard input) has none; write it into a file, or use strategy='ddp_n" in spawn
    assert "a script on standard input, has no command to start once per rank" in copies
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["ddp_fork"]


def test_what_a_session_defines_is_not_spawned(tmp_path):
    session = f"{HEAD}\nclass Own(Net): ...\nmake('ddp_spawn').fit(Own())"
    done = run(["-c", session], cwd=tmp_path, extra=at_root())
    assert "UserError: processes that are spawned import the script" in done.stderr
    assert list(tmp_path.iterdir()) == []


UNPICKLABLE = """
for call in (
    lambda: make("ddp_spawn").fit(WithLambda()),
    lambda: make("ddp_spawn").fit(Net(), WithFile()),
    lambda: make("ddp_spawn").fit(Net(), loader(9, collate_fn=lambda x: x)),
    lambda: make("ddp_spawn").fit(Net(), None, loader(9, collate_fn=lambda x: x)),
    lambda: make("ddp_fork").predict(PredictsLambda()),
):
    try:
        call()
    except UserError as error:
        print(error)
"""


@quiet_gloo
def test_what_cannot_be_pickled_is_named(tmp_path):
    done = run_script(tmp_path, UNPICKLABLE)
    assert done.returncode == 0, done.stderr
    *pickled, predicted = done.stdout.splitlines()
    assert predicted.startswith("predict_step returned a function, ")
    texts = [line.partition(", which cannot be pickled; ")[0] for line in pickled]
    assert [re.sub(r" \S*<lambda>$", " a lambda", line) for line in texts] == [
        "model.head.activation is a lambda",
        "data.file is of type _io.TextIOWrapper",
        "data.collate_fn is a lambda",
        "val_dataloader.collate_fn is a lambda",
    ]
    assert all(line.endswith("or use strategy='ddp', which pickles nothing") for line in pickled)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_what_cannot_be_pickled_trains_elsewhere(tmp_path, strategy):
    # And what was overridden for the parent does not hold for its ranks: each would be alone.
    variables = at_root() | {"TRAINER_CLUSTER": "none"}
    done = succeed(started(strategy, "WithLambda"), cwd=tmp_path, extra=variables)
    assert "layout: 2 processes on 1 node" in done.stdout
    assert "total steps 5" in done.stdout
