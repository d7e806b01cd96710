"""Write results of ``validate``, ``test`` and ``predict`` into the checkpoint's run directory."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, run_directory, run_of
from ..launch import files
from ..options import redaction


class Results:
    """Output files of one validation, test or prediction.

    Args:
        checkpoint: The checkpoint that was evaluated; ``None``: the module's initial weights.
        root: Directory of runs, for a new run directory if the checkpoint has none that is
            writable.
        name: Name of that new run; default: the time.
    """

    def __init__(self, checkpoint: Path | None, root: Path, name: str | None) -> None:
        self._checkpoint = checkpoint
        self._root = root
        self._name = name
        self._started_in = Path.cwd()

    def write_metrics(self, stage: str, metrics: dict[str, float]) -> None:
        """Write the metrics of ``"validation"`` or ``"test"``, and print the path."""
        path = self._path(stage, ".json")
        checkpoint = self._checkpoint
        content = {
            "metrics": metrics,
            "checkpoint": str(checkpoint) if checkpoint else None,
            "step": Checkpoint(checkpoint).step if checkpoint else None,
            "command": redaction.command(sys.argv),
        }
        replaced = _replaced(path)
        files.write_atomically(path, json.dumps(content, indent=2) + "\n")
        print(f"{stage} results written to {self._shown(path)}{replaced}", flush=True)

    def write_predictions(self, predictions: Mapping[str, Any]) -> None:
        """Write tensors of predictions by name, and print their number and the path."""
        from ..checkpoint import stored_tensors

        path = self._path("predictions", ".safetensors")
        replaced = _replaced(path)
        with files.replacing(path) as beside:
            stored_tensors.write(beside, predictions, {})
        count = sum(map(len, predictions.values()))
        written = f"{count} predictions written to {self._shown(path)}"
        print(f"{written}{replaced}", flush=True)

    def _shown(self, path: Path) -> Path:
        return files.shown(path, self._started_in)

    def _path(self, stem: str, suffix: str) -> Path:
        # One file per checkpoint: results of other checkpoints are kept.
        step = f"-{self._checkpoint.name}" if self._checkpoint else ""
        return self._directory() / f"{stem}{step}{suffix}"

    def _directory(self) -> Path:
        run = _run_of(self._checkpoint) if self._checkpoint else None
        return run or run_directory.create(self._root, self._name)


def _run_of(checkpoint: Path) -> Path | None:
    """The run directory of a checkpoint, if it is writable."""
    found = run_of(checkpoint.absolute())
    if found is None or not os.access(found, os.W_OK):
        return None
    return found


def _replaced(path: Path) -> str:
    return " (replaced the earlier ones)" if path.exists() else ""
