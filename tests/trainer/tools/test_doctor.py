"""`doctor`: planted faults are found, each by its place; nothing is found in the examples."""

import json
import multiprocessing
import re
import resource
import socket
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer import strategies
from my_project_trainer.cli import command as cli
from my_project_trainer.cli import configuration
from my_project_trainer.cli.configuration import Work
from my_project_trainer.errors import UserError
from my_project_trainer.tools.doctor import checks, fit, machine
from my_project_trainer.tools.doctor.checks import Check
from my_project_trainer.tools.isolated import Child
from tests.project import PACKAGE, ROOT, run, succeed

import doctor_subject

CPU = ("--trainer.accelerator", "cpu", "--trainer.max_steps", "4")


def words(model: str, *others: str) -> list[str]:
    return ["--model", f"doctor_subject.{model}", "--data", "doctor_subject.Data", *CPU, *others]


def read(model: str, *others: str) -> Work:
    return configuration.read_work("project", "fit", words(model, *others))


def checked(model: str, check: Any = fit._step, *others: str, seconds: float = 60) -> list[Check]:
    return checks.run("step", partial(check, read(model, *others)), seconds)


def named(lines: list[Check], name: str) -> list[Check]:
    return [check for check in lines if check.name == name]


pytestmark = pytest.mark.usefixtures("apart")


@pytest.mark.parametrize("model", ["Waits", "WaitsManually"])
def test_each_planted_wait_is_found_by_its_line_and_nothing_else(model: str) -> None:
    waits = named(checked(model), "waits")
    lines = {int(check.found.split(":")[1]) for check in waits}
    expected = dict(doctor_subject.planted())
    assert {expected.get(line, f"line {line}") for line in lines} == set(range(1, 40))
    assert {check.status for check in waits} == {"warning"}


@pytest.mark.parametrize("name", ["digits", "gan", "gpt"])
def test_nothing_waits_in_the_examples(name: str) -> None:
    config = ROOT / "configs" / f"{name}.yaml"
    if not config.exists():
        pytest.skip(f"{config.name} was deleted")
    work = configuration.read_work("project", "fit", ["--config", str(config), *CPU])
    lines = checks.run("step", partial(fit._step, work), 100)
    assert {line.status for line in lines} == {"ok"}, lines
    assert {line.name for line in lines} >= {"step", "waits", "unused parameters"}


def test_parameters_that_a_step_does_not_use_are_named() -> None:
    (check,) = named(checked("Faulty"), "unused parameters")
    assert check.status == "warning"
    assert check.found == "rare, unused.weight: not used in each step"
    assert "find_unused_parameters" in check.advice


def test_a_loss_that_is_a_sum_over_samples_is_named() -> None:
    for model, status, text in (
        ("Plain", "ok", "does not double with the batch"),
        ("Sums", "warning", "doubles with the batch"),
    ):
        (check,) = named(checked(model), "loss")
        assert (check.status, check.found) == (status, text)


def test_what_cannot_be_pickled_is_named_by_its_path() -> None:
    module, data = named(checked("Faulty", fit._model), "pickling")
    assert data.status == "ok"
    assert module.status == "warning"
    assert module.found.startswith('model.lock["a"] is of type _thread.lock')
    assert [check.status for check in checked("Plain", fit._model)] == ["ok", "ok"]


def test_batchnorm_is_a_warning_with_several_replicas() -> None:
    for devices, status in (("1", "ok"), ("2", "warning")):
        results = checked("Faulty", fit._model, "--trainer.devices", devices)
        (norm,) = named(results, "BatchNorm")
        assert (norm.status, norm.found.split(":")[0]) == (status, "layers.2")
        assert "sync_batchnorm true" in norm.advice
        assert "parameter_server" in norm.advice
    sync = ("--trainer.sync_batchnorm", "true", "--trainer.devices", "2")
    assert named(checked("Faulty", fit._model, *sync), "BatchNorm") == []


@pytest.mark.parametrize(
    ("model", "status", "line"),
    [
        ("Raises", "fails", r"ValueError in doctor_subject.py:\d+: no such file: https://\S+"),
        ("Ends", "fails", "its process ended with exit code 7"),
        ("Hangs", "unknown", "it took longer than 3 s"),
    ],
)
def test_a_check_that_fails_is_a_line(model: str, status: str, line: str) -> None:
    (check,) = checked(model, seconds=3 if model == "Hangs" else 60)
    assert check.status == status
    assert re.match(f"not checked: {line}", check.found), check.found
    assert "secret" not in checks.report([check], is_json=True)


def test_the_run_s_folder_is_kept() -> None:
    assert fit._alone(read("Plain", "--trainer.default_root_dir=~")).default_root_dir == Path.home()


def start_method() -> str:
    return multiprocessing.get_start_method()


def test_workers_of_a_new_interpreter_start_as_those_of_a_fit() -> None:
    """A spawned process would spawn them; its death would leave their semaphores to a warning."""
    assert Child(start_method, 60, "spawn").result() == start_method()


def test_more_workers_are_suggested_for_a_slow_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_SECONDS_EACH", 0.3)
    reads = partial(read, "Plain", "--data.seconds", "0.02")
    (check,) = checks.run("workers", partial(fit._workers, reads), 100)
    assert check.status == "warning", check
    assert int(re.match(r"use num_workers=(\d+)", check.advice)[1]) > 0


@pytest.mark.parametrize(
    ("workers", "measured", "status", "advice"),
    [
        (0, {0: 0.01}, "ok", ""),
        (0, {0: 1.5, 1: 1.5, 2: 0.8}, "warning", "use num_workers=2"),
        (0, {0: 0.5, 1: 0.9, 2: 3.0}, "warning", "use num_workers=1"),
        (4, {0: 1.5, 1: 1.5, 2: 0.8}, "ok", ""),
        (2, {0: 9.0, 1: 8.0, 2: 5.0}, "warning", "use num_workers=2"),
        (8, {0: 9.0, 1: 8.0, 2: 5.0}, "warning", "use num_workers=2"),
    ],
)
def test_the_fewest_workers_that_keep_a_step_fed(workers, measured, status, advice):
    check = fit.suggest(workers, measured, 1.0, "cpu")
    assert (check.status, check.advice.split(",")[0]) == (status, advice)


def test_little_shared_memory_is_a_warning() -> None:
    assert machine.shared_memory(64 * 2**20).status == "warning"
    assert machine.shared_memory(8 * 2**30).status == "ok"


def test_few_open_files_are_a_warning() -> None:
    def limited(files: int) -> Check:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, most), most))
        return [*machine._limits()][-1]

    check = Child(partial(limited, 1024), 60.0).result()
    assert (check.name, check.status) == ("limits", "warning")
    assert check.found.startswith("1024 open files, ")
    assert check.advice.startswith("ulimit -n 65536")


def test_each_engine_is_named_with_its_strategies_or_its_command() -> None:
    lines = [(engine.found, engine.advice) for engine in machine._engines()]
    for strategy in strategies.names():
        for package, command in strategies.find(strategy).limits.packages.items():
            is_there = find_spec(package) is not None
            expected = f"{package} {metadata.version(package) if is_there else 'not installed'}, "
            (entry,) = [line for line in lines if line[0].startswith(expected)]
            assert strategy in entry[0].partition(", for ")[2].split(", ")
            assert entry[1] == ("" if is_there else command)


def test_the_address_of_this_host_is_named() -> None:
    # In a process of its own, as it is run: it chooses an interface for gloo there.
    (check,) = Child(lambda: list(machine._network()), 60.0).result()
    assert check.found.startswith(", ".join(name for _, name in socket.if_nameindex()))
    assert f"; host name {socket.gethostname()}" in check.found
    assert (check.status == "warning") == bool(check.advice)


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.disk("runs", tmp_path / "new" / "runs", "X").status != "fails"
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    check = machine.disk("runs", tmp_path / "runs", "X")
    assert (check.status, check.advice) == ("fails", "set X")


def test_a_program_that_hangs_or_fails_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    for name, script in (("hangs", "sleep 60"), ("refuses", "echo no permission >&2; exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UserError, match=r"hangs: .* timed out"):
        checks.output("hangs", seconds=0.5)
    with pytest.raises(UserError, match="refuses: no permission"):
        checks.output("refuses")
    assert checks.output("missing-program") is None


def test_the_machine_alone_without_any_program(tmp_path: Path) -> None:
    done = succeed(["-m", PACKAGE, "doctor", "--json"], cwd=tmp_path, extra={"PATH": str(tmp_path)})
    report = json.loads(done.stdout)
    assert report["can_start"] is True
    lines = {line["name"]: line for line in report["checks"]}
    assert lines["all-reduce"]["found"].startswith("1 + 2 = 3 on two processes")
    assert lines["torch.compile"]["status"] == "warning"
    assert "SLURM" not in lines
    assert {line["status"] for line in report["checks"]} <= {"ok", "warning"}
    assert list(tmp_path.iterdir()) == []


def doctor(*arguments: str) -> int:
    try:
        cli.main(["doctor", *arguments])
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


def test_a_table_and_json_have_the_same_lines(capsys, monkeypatch):
    results = [Check("step", "ok", "fine"), Check("disk", "warning", "full", "free it")]
    monkeypatch.setattr(machine, "check", lambda work: results)
    assert doctor() == 0
    table = capsys.readouterr().out.splitlines()
    assert doctor("--json") == 0
    lines = json.loads(capsys.readouterr().out)["checks"]
    assert [row["name"] for row in lines] == [line.split()[1] for line in table[:2]]
    assert table[1].split(maxsplit=2)[2] == "full -> free it"
    assert table[-1] == "a fit can start: 0 fails, 0 unknown, 1 warnings"
    results.append(Check("step", "unknown", "not checked: it took longer than 180 s"))
    assert doctor() == 1
    counts = "0 fails, 1 unknown, 1 warnings\n"
    assert capsys.readouterr().out.endswith(f"a fit may not start: {counts}")
    assert doctor("--json") == 1
    assert json.loads(capsys.readouterr().out)["can_start"] is None
    results.append(Check("all-reduce", "fails", "3 + 3 = 7"))
    assert doctor() == 1
    counts = "1 fails, 1 unknown, 1 warnings\n"
    assert capsys.readouterr().out.endswith(f"a fit cannot start: {counts}")


def test_all_errors_of_the_options_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--json", *words("Plain", "--trainer.max_step", "3", "--data.second", "1")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2
    assert "max_steps" in err
    assert "seconds" in err


@pytest.mark.slow
def test_all_checks_of_an_example(tmp_path: Path) -> None:
    config = ["--config", ROOT / "configs" / "digits.yaml", *CPU]
    done = succeed(["-m", PACKAGE, "doctor", "--json", *config], cwd=tmp_path)
    results = [Check(**row) for row in json.loads(done.stdout)["checks"]]
    assert len(named(results, "num_workers")) == 1
    for name in ("step", "waits", "unused parameters", "pickling"):
        assert {check.status for check in named(results, name)} == {"ok"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_faulty_module_can_start_and_a_step_that_raises_cannot(tmp_path: Path) -> None:
    for model, code in (("Faulty", 0), ("Raises", 1)):
        done = run(["-m", PACKAGE, "doctor", *words(model)], cwd=tmp_path, fresh=True)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert ("a fit cannot start" in done.stdout) == bool(code)
