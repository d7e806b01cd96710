"""Draws the report of two runs of the digits, light and dark: report_pictures.py PROJECT FOLDER.

`make docs-screenshots` runs it by the Python of a project; PROJECT is a render. The runs have the
speed of no machine, and one a slow loader, which the report must name. Needs Chromium.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "trainer"))
from browser import opened

FIT = "-m my_project fit --config configs/digits.yaml --trainer.accelerator cpu --trainer.devices 2"
# By the name of a run: its learning rate, and the share of a step in which it waits for data.
RUNS = {"rate-0.003": ("0.003", 0.01), "rate-0.0005": ("0.0005", 0.4)}
SECONDS, SAMPLES = 0.2, 64  # of a step


def draw(project: Path, folder: Path, work: Path) -> None:
    """Train, write the report, and draw it; an AssertionError if it is not as it should be."""
    environment = os.environ | {"PYTHONPATH": "src", "CUDA_VISIBLE_DEVICES": ""}
    for name, (rate, wait) in RUNS.items():
        words = [*FIT.split(), "--trainer.max_epochs", "12", "--model.learning_rate", rate]
        words += ["--trainer.default_root_dir", str(work), "--trainer.run_name", name]
        subprocess.run([sys.executable, *words], cwd=project, env=environment, check=True)
        set_speed(work / name / "speed.csv", wait)
    report = [sys.executable, "-m", "my_project", "report", *(str(work / name) for name in RUNS)]
    subprocess.run(report, cwd=project, env=environment, check=True)
    with opened(work / "browser") as browser:
        for scheme in ("light", "dark"):
            browser.open(work / "rate-0.003" / "report.html", 1100, 1270, scheme)
            causes = browser.run("document.querySelector('.advice').innerText")
            assert re.findall(r"^\S+: [A-Z][\w ]+\.", causes, re.M) == ["rate-0.0005: Slow loader."]
            file = folder / f"report-{scheme}.webp"
            browser.screenshot(file)
            assert 20_000 < file.stat().st_size < 60_000


def set_speed(log: Path, wait: float) -> None:
    """Log the same seconds and share of waiting for every step."""
    values = {"seconds_per_step": SECONDS, "samples_per_second": SAMPLES / SECONDS}
    values |= {"data_wait": wait, "checkpoint_seconds": 0.0, "validation_seconds": 0.0}
    lines = []
    for line in log.read_text().splitlines():
        head, old = line.rsplit(",", 1)
        lines.append(f"{head},{values.get(head.rpartition('/')[2], old)}\n")
    log.write_text("".join(lines))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), Path(made))
