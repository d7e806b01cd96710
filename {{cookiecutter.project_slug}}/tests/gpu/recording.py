"""A plugin of pytest that writes down each result at once, a line of JSON each, for run.py.

So what was found survives a process that a GPU's error ends. It is loaded by ``-p``, and writes
where the variable GPU_RESULTS says.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "GPU_RESULTS"
# After one of these nothing runs on the GPU in this process any more.
FATAL = ("CUDA error", "CUDA driver error", "NCCL error")
_session: pytest.Session | None = None


def pytest_collection_finish(session: pytest.Session) -> None:
    global _session  # noqa: PLW0603 - the hook of a report is not given its session
    _session = session
    _write({"collected": [item.nodeid for item in session.items]})


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"begins": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    values = [str(value) for name, value in report.user_properties if name == "found"]
    message = _message(report)
    _write(
        {
            "test": report.nodeid,
            "outcome": report.outcome,
            "found": values[-1] if values else "",
            "message": message,
            "seconds": report.duration,
        }
    )
    is_fatal = any(words in message for words in FATAL) and "out of memory" not in message
    if report.failed and is_fatal and _session is not None:
        _session.shouldstop = "the GPU can no longer be used in this process"


def _message(report: pytest.TestReport) -> str:
    """The reason of a skip, or the first line of what was raised."""
    longrepr: Any = report.longrepr
    if report.skipped:
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(longrepr or "")).splitlines()
    return lines[0] if lines else ""


def _write(entry: dict[str, Any]) -> None:
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
