"""Tests of the trainer, on a rendered project: PROJECT, or what `make test` has rendered.

They run in the project's environment. `tests.project` and other helpers are the project's own; what
a test runs in processes of its own is found by its name alone: ``preemption_subject.Slow``.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = Path(os.environ.get("PROJECT") or HERE.parents[1] / "build" / "test" / "my-project")
if not (PROJECT / "tests" / "project.py").is_file():
    raise SystemExit(f"there is no rendered project in {PROJECT}: `make project`, or PROJECT=…")
FOLDERS = [str(folder) for folder in (PROJECT.resolve() / "src", PROJECT.resolve(), HERE)]
sys.path[:0] = FOLDERS
# For the processes that tests start, and for pytest's own workers.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
)

pytest_plugins = ["tests.conftest"]
