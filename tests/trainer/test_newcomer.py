"""The path of a newcomer: doctor, plan, fit, report, reproduce, each as the one before it says.

`make demo` renders and installs; the commands start here, in the installed project.
"""

import json
import shlex
import time
from pathlib import Path

import pytest
from tests.project import ROOT, run

CONFIG = ("--config", str(ROOT / "configs" / "digits.yaml"))
SHORT = ("--trainer.max_epochs", "2", "--trainer.devices", "2")


@pytest.mark.slow
def test_each_command_leads_to_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {}

    def command(*words: str) -> list[str]:
        started = time.monotonic()
        done = run(["-m", "my_project", *words], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        times[words[0]] = f"{words[0]} {time.monotonic() - started:.0f} s"
        return done.stdout.splitlines()

    assert command("doctor", *CONFIG)[-1].startswith("a fit can start: 0 fails")
    planned = command("plan", *CONFIG, "--devices", "2", "--memory", "8G", "--accelerator", "cpu")
    (named,) = (line for line in planned if line.startswith("the simplest that fits: "))
    _, strategy = shlex.split(named.partition(": ")[2])
    trained = command("fit", *CONFIG, *SHORT, "--trainer.strategy", strategy)
    (line,) = (line for line in trained if line.startswith("report: "))
    program, report, directory = shlex.split(line.removeprefix("report: "))
    assert (program, report) == ("my-project", "report")
    (written,) = command("report", directory)
    assert (tmp_path / written.removeprefix("report written to ")).stat().st_size > 100_000
    assert command("reproduce", directory)[-1].startswith("reproduce: bit-equal: ")
    attempts = json.loads((tmp_path / directory / "run.json").read_text())["attempts"]
    assert [each["ended"] for each in attempts] == ["finished step 44"]
    with capsys.disabled():
        print(f" {', '.join(times.values())}", end="")
