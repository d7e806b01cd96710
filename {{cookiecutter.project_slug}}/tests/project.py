"""The package under test, found below src/, so that no test spells its name.

Use it as ``from .project import PACKAGE, trainer, load``: ``load("trainer.sampling")`` is a module
of the package.
"""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
PACKAGE = next(path.parent.name for path in sorted((ROOT / "src").glob("*/__init__.py")))


def load(name: str) -> ModuleType:
    """A module of the package, by its name inside it."""
    return importlib.import_module(f"{PACKAGE}.{name}")


trainer = load("trainer")

# A test is one process of its own, whatever has started it.
_CLUSTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process' variables, without those of a launch, and one thread a process."""
    kept = {name: value for name, value in os.environ.items() if name not in _CLUSTER}
    return kept | {"OMP_NUM_THREADS": "1"} | dict(extra or {})


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    extra: Mapping[str, str] | None = None,
    timeout: float = 100,
) -> "subprocess.CompletedProcess[str]":
    """Run Python with arguments to its end; a process group that takes too long is killed whole."""
    with start(arguments, cwd=cwd, extra=extra) as process:
        try:
            output, error = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


def start(
    arguments: Sequence[str | Path], *, cwd: Path = ROOT, extra: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Start Python with arguments, as leader of a process group."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def fit(*arguments: str | Path) -> list[str | Path]:
    """Arguments of a ``fit`` on the digits."""
    return ["-m", PACKAGE, "fit", "--config", ROOT / "configs" / "digits.yaml", *arguments]
