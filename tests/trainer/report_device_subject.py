"""Fits on the emulated GPU, whose waits are recorded as CUDA's are; by test_report_checks.py.

``python -m report_device_subject FOLDER``
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from torch.profiler import record_function

import emulated_gpu
from emulated_subject import on_emulated_gpu
from report_subject import Model, fit

_note = emulated_gpu.note


def note(kind: Any, what: str) -> None:
    """Record a wait in the profile, too, as CUPTI does."""
    _note(kind, what)
    if kind == "waits":
        with record_function("cudaStreamSynchronize"):
            pass


def main(folder: Path) -> None:
    """A step that reads its loss, one that does not, and one whose gradient scaler does."""
    with on_emulated_gpu(), mock.patch.object(emulated_gpu, "note", note):
        for name, reads, precision in (
            ("reads", True, "32-true"),
            ("healthy", False, "32-true"),
            ("scaled", False, "16-mixed"),
        ):
            fit(folder / name, Model(reads=reads), 64, accelerator="gpu", precision=precision)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
