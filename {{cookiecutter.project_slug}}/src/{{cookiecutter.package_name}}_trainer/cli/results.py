"""Write results of ``validate``, ``test`` and ``predict`` into the checkpoint's run directory."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, run_directory, run_of, stored_tensors
from ..launch import files
from ..options import redaction


class Results:
    """Output files of one validation, test or prediction of a checkpoint, or of initial weights.

    A checkpoint without a run directory that is writable gets a new one in ``root``; its name is by
    default the time.
    """

    def __init__(self, checkpoint: Path | None, root: Path, name: str | None) -> None:
        self._checkpoint, self._root, self._name = checkpoint, root, name
        self._started_in = Path.cwd()

    def write_metrics(self, stage: str, metrics: dict[str, float]) -> None:
        """Write the metrics of ``"validation"`` or ``"test"``, and print the path."""
        checkpoint = self._checkpoint
        content = {
            "metrics": metrics,
            "checkpoint": str(checkpoint) if checkpoint else None,
            "step": Checkpoint(checkpoint).step if checkpoint else None,
            "command": redaction.command(sys.argv),
        }
        path, written = self._file(stage, ".json")
        files.write_atomically(path, json.dumps(content, indent=2) + "\n")
        print(f"{stage} results {written}", flush=True)

    def write_predictions(self, predictions: Mapping[str, Any]) -> None:
        """Write tensors of predictions by name, and print their number and the path."""
        path, written = self._file("predictions", ".safetensors")
        with files.replacing(path) as beside:
            stored_tensors.write(beside, predictions, {"format": "pt"})
        print(f"{sum(map(len, predictions.values()))} predictions {written}", flush=True)

    def _file(self, stem: str, suffix: str) -> tuple[Path, str]:
        """A file for this checkpoint's results, and what to print once it is written."""
        checkpoint = self._checkpoint
        run = run_of(checkpoint.absolute()) if checkpoint else None
        if run is None or not os.access(run, os.W_OK):
            run = run_directory.create(self._root, self._name)
        path = run / f"{stem}{f'-{checkpoint.name}' if checkpoint else ''}{suffix}"
        replaced = " (replaced the earlier ones)" if path.exists() else ""
        return path, f"written to {files.shown(path, self._started_in)}{replaced}"
