"""Checks a benchmark's folders before it measures for half an hour."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def writable(name: str) -> Path:
    """Return the folder of that name, a type for argparse; refuse one that cannot be written to."""
    folder = Path(name)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name!r}; create it first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder {name!r} cannot be written to")
    return folder
