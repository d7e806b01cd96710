"""Print the Python that `make test-gpu` uses: the first whose torch sees a GPU.

usage: python tests/gpu/find_python.py [--any] [--venv FOLDER] [PYTHON]

It asks PYTHON alone where that is given; else FOLDER's, an active environment's, then those on
PATH. With --any a torch without a GPU is enough, for a dry run on the CPU. Nothing is installed;
where there is none, one line says why not, and what to do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = ("python3", "python", "python3.11", "python3.12", "python3.13")
# Prints "ok", or why not. A line before it may be torch's own.
PROBE = """
import sys
def answer():
    if sys.version_info < (3, 11):
        return "is older than Python 3.11"
    try:
        import torch
    except ImportError:
        return "has no torch"
    version = torch.__version__
    if tuple(map(int, version.split("+")[0].split(".")[:2])) < (2, 10):
        return f"has torch {version}, older than 2.10"
    if sys.argv[1] == "any" or torch.cuda.is_available():
        return "ok"
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return f"has torch {version} ({build}), which sees no GPU"
print(answer())
"""
ADVICE = (
    "name another by PYTHON=…, or install one into .venv by `make setup VARIANT=cuda` (several GB)"
)


def candidates(venv: str | None) -> list[str]:
    """Return the Pythons to ask, the likeliest first, each once."""
    folders = [venv, os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")]
    inside = [Path(folder).absolute() / "bin" / "python" for folder in folders if folder]
    pythons = [str(path) for path in inside if path.exists()]
    pythons += filter(None, map(shutil.which, NAMES))
    # Not by where links lead: an environment's Python is a link to the one that it was made of.
    return list(dict.fromkeys(pythons))


def why_not(python: str, needs: str) -> str | None:
    """Return why a Python cannot be used; ``None`` if it can."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE, needs], capture_output=True, text=True, timeout=600
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({type(error).__name__})"
    answer = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word"]
        # A traceback ends with the reason; what is no Python says it first.
        return f"fails: {lines[-1 if lines[0].startswith('Traceback') else 0].strip()}"
    return None if answer == "ok" else answer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--any", action="store_true")
    parser.add_argument("--venv")
    parser.add_argument("python", nargs="?")
    options = parser.parse_args(arguments)
    needs = "any" if options.any else "gpu"
    asked = [options.python] if options.python else candidates(options.venv)
    reasons = []
    for python in asked:
        reason = why_not(python, needs)
        if reason is None:
            print(shutil.which(python) or python)
            return 0
        reasons.append(f"{python} {reason}")
    wanted = "that can import torch" if options.any else "whose torch sees a GPU"
    print(f"no Python here {wanted}: {'; '.join(reasons)}; {ADVICE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
