"""Tests of the trainer, on a rendered project: RENDERED_PROJECT, or that of `make project`.

They run in the project's environment. `tests.project` and other helpers are the project's own; what
a test runs in processes of its own is found by its name alone: ``preemption_subject.Slow``.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parents[1] / "build" / "test" / "my-project"
PROJECT = Path(os.environ.get("RENDERED_PROJECT") or DEFAULT).resolve()
if not (PROJECT / "tests" / "project.py").is_file():
    raise SystemExit(f"there is no rendered project in {PROJECT}: make project")
FOLDERS = [str(folder) for folder in (PROJECT / "src", PROJECT, HERE)]
sys.path[:0] = FOLDERS
# For the processes that tests start, and for pytest's own workers.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
)

pytest_plugins = ["tests.conftest"]
