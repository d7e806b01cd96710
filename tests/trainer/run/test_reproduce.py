"""The command ``reproduce``: equal runs are bit-equal, and what was planted is found and named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from my_project_trainer.cli import command as cli
from my_project_trainer.tools.reproduce import compare
from tests.project import PACKAGE, run

import reproduce_subject as subject
from processes import at_root

OPTIONS = {
    "model": "reproduce_subject.Line",
    "data": "reproduce_subject.Bytes",
    "data.folder": "data",
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": "2",
    "trainer.global_batch_size": "4",
    "trainer.log_every_n_steps": "3",
    "trainer.loggers": "[csv]",
    "trainer.run_name": "run",
    "trainer.enable_progress_bar": "false",
}
RUN = Path("runs/run")
# The first, where the project lies in no repository.
UNCHANGED = (
    "commit: unknown, here and in the record: the code is not compared",
    "nothing differs from the record",
)


def fit(**others: str) -> list[str]:
    options = OPTIONS | {f"trainer.{name}": value for name, value in others.items()}
    return ["fit", *(word for name, value in options.items() for word in (f"--{name}", value))]


@pytest.fixture
def recorded(apart: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of 12 steps in the working directory."""
    subject.write_data(tmp_path / "data")
    cli.main(fit(record_hashes="true"))
    capsys.readouterr()
    return RUN


@pytest.fixture
def again(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Reproduce the run: the exit code and the lines."""

    def reproduce(*words: str) -> tuple[int, list[str]]:
        code = 0
        try:
            cli.main(["reproduce", str(RUN), *words])
        except SystemExit as error:
            code = int(error.code or 0)
        return code, lines(capsys.readouterr().out)

    return reproduce


def lines(printed: str) -> list[str]:
    starts = "reproduce: "
    return [line.removeprefix(starts) for line in printed.splitlines() if line.startswith(starts)]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_an_equal_run_is_bit_equal(recorded, again):
    equal = "bit-equal: 12 steps, 1 rank, up to step 12; 12 logged values"
    code, (unchanged, last) = again()
    assert (code, last) == (0, equal)
    assert unchanged in UNCHANGED
    made = RUN.with_name("run-reproduced")
    assert (made / "metrics.csv").read_bytes() == (RUN / "metrics.csv").read_bytes()
    # And again, which replaces that one; up to a step, which is not logged.
    code, (_, last) = again("--at", "5")
    assert (code, last) == (0, "bit-equal: 5 steps, 1 rank, up to step 5; 4 logged values")
    assert json.loads((made / "run.json").read_text())["attempts"][-1]["last_step"] == 5


def test_what_is_planted_is_found_and_named(recorded, again, tmp_path):
    """A package's version and a file that is not read change nothing else."""
    record, config = RUN / "run.json", RUN / "config.yaml"
    contents = {path: path.read_bytes() for path in (record, config, *Path("data").iterdir())}

    def planted(path: Path, change: Callable[[dict[str, Any]], object] | None = None) -> list[str]:
        if change is None:
            path.write_bytes(b"\xff" + contents[path][1:])
        else:
            edit(path, change)
        code, printed = again()
        path.write_bytes(contents[path])
        assert code == ("bit-equal" not in printed[-1])
        return [line for line in printed if line not in UNCHANGED]

    of_package = planted(
        record, lambda given: given["attempts"][0]["packages"].update({"torch": "1.0"})
    )
    assert re.fullmatch(r"package: torch: [\w.+]+, recorded 1\.0", of_package[0])
    assert of_package[-1].startswith("bit-equal")
    unread = planted(Path("data/unread.bin"))
    assert unread[0] == f"data: {tmp_path}/data/unread.bin: its content differs"
    assert unread[-1].startswith("bit-equal")
    read = planted(Path("data/read.bin"))
    assert read[0] == f"data: {tmp_path}/data/read.bin: its content differs"
    assert re.match(r"step [1-6], rank 0: data is the first that differs: the batch: ", read[1])
    rate = planted(config, lambda given: given["model"]["init_args"].update(rate=0.01 + 1e-8))
    assert rate[0].startswith("step 1, rank 0: options is the first that differs: options of the")
    seed = planted(config, lambda given: given["trainer"].update(seed=1))
    assert seed[0] == "seed: 1, recorded 0"
    assert seed[1].startswith("before the first step, rank 0: random is the first that differs")
    # The value that differs, too.
    assert seed[2].startswith("metrics.csv differs first at step 1: loss is ")


def test_steps_in_which_a_difference_may_have_begun_are_named(recorded, again):
    """A run has hashes of logged steps by default."""
    kept = [0, 3, 6]
    assert again()[0] == 0
    for name in ("run", "run-reproduced"):
        path = RUN.with_name(name) / "hashes" / "rank-00000.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(lines[step])}\n" for step in kept))
    path.write_text(path.read_text().replace(lines[6]["gradients"], "0"))
    is_equal, (line,) = compare.compare(RUN, RUN.with_name("run-reproduced"), 12)
    assert not is_equal
    assert line.startswith("step 6, rank 0: gradients is the first that differs: the backward pass")
    assert line.endswith("; steps 4 to 5, in which it may have begun, are recorded with "
                         "--trainer.record_hashes true only")  # fmt: skip


def test_an_equal_part_of_a_run_says_which_steps_are_not_compared(tmp_path):
    for name in ("recorded", "reproduced"):
        (tmp_path / name / "hashes").mkdir(parents=True)
        lines = [json.dumps({"step": step, "weights": "ab"}) for step in (0, 1, 50)]
        lines.append('{"step":')  # a process was killed while it wrote
        (tmp_path / name / "hashes" / "rank-00000.jsonl").write_text("\n".join(lines))
    ends = {50: "2 steps, 1 rank, up to step 50; 0 logged values"}
    ends[20] = "1 step, 1 rank, up to step 1; 0 logged values"
    ends[20] += "; steps 2 to 20 are recorded with --trainer.record_hashes true only"
    for last, end in ends.items():
        result = compare.compare(tmp_path / "recorded", tmp_path / "reproduced", last)
        assert result == (True, [f"bit-equal: {end}"])


def test_the_last_step_of_an_attempt_need_not_be_recorded_again(tmp_path):
    def compared(recorded, reproduced):
        for name, steps in (("recorded", recorded), ("reproduced", reproduced)):
            path = tmp_path / name / "hashes" / "rank-00000.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f'{{"step": {step}, "weights": "ab"}}\n' for step in steps))
        return compare.compare(tmp_path / "recorded", tmp_path / "reproduced", 16)

    assert compared((0, 1, 8, 16), (0, 1, 16))[0]
    is_equal, lines = compared((0, 1, 8, 16), (0, 1))  # it ended earlier
    assert not is_equal
    assert lines[0].startswith("step 8: rank 0 has not recorded it again")


def test_mistakes_are_told_together_and_nothing_runs(recorded, capsys):
    wrong = ["--trainer.seed", "1", "--model.rate", "2"]
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "nowhere", *wrong])
    error = capsys.readouterr().err
    assert error.count("not an option of reproduce") == 2
    assert "no run.json there; give a run directory, such as runs/RUN" in error
    for words, line in [
        (["--at", "13"], "--at 13: give a step from 1 to 12, the run's last"),
        (["--trainer.run_name", "a b"], "a letter or digit first: give --trainer.run_name NAME"),
        (["--trainer.run_name", "run"], "run_name=run: that is the run itself; give another"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(["reproduce", str(RUN), *words])
        assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("config.yaml", None, "no config.yaml: a script has started it, or the file was removed"),
        ("config.yaml", "trainer: {}\n", "config.yaml names no model: restore the file"),
        ("run.json", "[]", "run.json: damaged; 0 attempts of it can be read; restore it"),
        ("hashes/rank-00000.jsonl", "", "/hashes: no hashes to compare: it is missing, empty or"),
        ("config.yaml", "model: A\ntrainer: {record_hashes: false}", "the run had record_hashes"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(recorded, capsys, file, content, line):
    (RUN / file).unlink()
    if content is not None:
        (RUN / file).write_text(content)
    if "record_hashes" in line:
        (RUN / "hashes/rank-00000.jsonl").unlink()
    with pytest.raises(SystemExit) as ended:
        cli.main(["reproduce", str(RUN)])
    (told,) = capsys.readouterr().err.splitlines()
    assert line in told
    assert ended.value.code == 2
    assert list(Path("runs").iterdir()) == [RUN]


def test_files_that_were_cut_are_not_equal(recorded, again):
    made = RUN.with_name("run-reproduced")
    assert again()[0] == 0
    lines = (RUN / "metrics.csv").read_text().splitlines(keepends=True)
    for file, line in [
        ("hashes/rank-00000.jsonl", "step 2 is missing; the file is damaged or was cut"),
        ("metrics.csv", "11 values are missing, the first is lr of step 1; it was removed or"),
    ]:
        content = (RUN / file).read_text()
        rest = "".join(content.splitlines(keepends=True)[:2])
        (RUN / file).write_text(rest + '{"st')
        is_equal, (first, second) = compare.compare(RUN, made, 12)
        assert not is_equal
        assert first.startswith(f"{RUN / file}: {line}")
        assert second == "the steps that both have recorded are equal"
        (RUN / file).write_text(content)
    # A run that ended early need not have logged its last step.
    (RUN / "metrics.csv").write_text("".join(lines[:-1]))
    edit(RUN / "run.json", lambda given: given["attempts"][0].update(ended="preempted step 12"))
    assert compare.compare(RUN, made, 12)[0]
    (RUN / "metrics.csv").unlink()
    (RUN / "speed.csv").unlink()
    assert compare.compare(RUN, made, 12)[0]


def test_a_run_names_no_class_of_the_working_directory(recorded, again, capsys, tmp_path):
    (tmp_path / "planted.py").write_text("raise SystemExit('it was imported')\n")
    edit(RUN / "config.yaml", lambda given: given["model"].update(class_path="planted.Model"))
    code, _ = again()
    assert code == 2


def command(folder: Path, *words: str, **variables: str) -> Any:
    fresh = "ATEN_CPU_CAPABILITY" in variables  # torch reads it when it is imported
    return run(["-m", PACKAGE, *words], cwd=folder, extra=at_root() | variables, fresh=fresh)


@pytest.mark.slow
def test_two_ranks_preempted_and_resumed_equal_one_attempt(tmp_path):
    subject.write_data(tmp_path / "data")
    two = fit(devices="2", strategy="ddp", record_hashes="true", resume="auto")
    stopped = command(tmp_path, *two, PREEMPT_IN="4")
    assert stopped.returncode == 128 + 10, stopped.stderr
    done = command(tmp_path, *two)
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / RUN / "run.json").read_text())["attempts"]
    assert first["exit_code"] == 128 + 10
    assert 0 < first["last_step"] == second["first_step"] < 12
    assert (second["ended"], second["last_step"], second["exit_code"]) == (
        "finished step 12",
        12,
        0,
    )
    done = command(tmp_path, "reproduce", str(RUN))
    equal = "bit-equal: 12 steps, 2 ranks, up to step 12; 12 logged values"
    unchanged, last = lines(done.stdout)
    assert unchanged in UNCHANGED
    assert last == equal
    assert done.returncode == 0, done.stderr
    # Its first attempt, which had ended early, is compared as far as it came.
    edit(tmp_path / RUN / "run.json", lambda given: given["attempts"].pop())
    done = command(tmp_path, "reproduce", str(RUN))
    assert lines(done.stdout)[-1].startswith(f"bit-equal: {first['last_step']} steps, 2 ranks")
    # On another number of processes.
    done = command(tmp_path, "reproduce", str(RUN), "--trainer.devices", "1")
    output = lines(done.stdout)
    assert "layout: 1 process on 1 node, recorded 2 processes on 1 node" in output
    assert output.index(next(line for line in output if line.startswith("step 1, rank 0: data is")))
    assert done.returncode == 1, done.stderr


@pytest.mark.slow
def test_another_cpu_capability_is_named(tmp_path):
    subject.write_data(tmp_path / "data")
    assert command(tmp_path, *fit()).returncode == 0
    done = command(tmp_path, "reproduce", str(RUN), ATEN_CPU_CAPABILITY="default")
    printed = lines(done.stdout)
    assert "variable: ATEN_CPU_CAPABILITY: default, recorded none" in printed
    (line,) = [text for text in printed if text.startswith("CPU capability: ")]
    assert re.fullmatch(r"CPU capability: (DEFAULT|NO AVX), recorded \w+", line)
    # Its kernels may round otherwise.
    assert done.returncode == ("bit-equal" not in printed[-1])
