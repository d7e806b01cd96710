"""Write results of ``validate``, ``test`` and ``predict`` into the checkpoint's run directory."""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, run_choice, run_directory, run_of, tensor_files
from ..launch import files, output
from ..loop import evaluation
from ..options import redaction


class Results:
    """Output files of one validation, test or prediction, in the run of a checkpoint or a new one.

    ``root``, ``name``: of a new run directory, if the checkpoint has none that is writable.
    ``started_in``: in which paths are shown.
    """

    def __init__(
        self, checkpoint: Path | None, root: Path, name: str | None, started_in: Path
    ) -> None:
        self._root, self._name, self._started_in = root, name, started_in
        self._checkpoint = checkpoint

    def check(self) -> None:
        """Raise ConfigurationError, before anything is computed, if no result could be written."""
        if self._own_run() is None:
            run_choice.check_root(self._root)

    def write_metrics(self, stage: str, metrics: dict[str, float]) -> None:
        """Write the metrics of ``"validation"`` or ``"test"``, and print the path."""
        checkpoint = self._checkpoint
        content = {
            "metrics": metrics,
            "checkpoint": checkpoint and str(files.shown(checkpoint, self._started_in)),
            "step": Checkpoint(checkpoint).step if checkpoint else None,
            "command": redaction.command(sys.argv),
        }
        path, written = self._file(stage, ".json")
        files.write_atomically(path, json.dumps(content, indent=2) + "\n")
        output.print_lines(f"{stage} results {written}")

    def write_predictions(self, outputs: Any) -> None:
        """Write the result of ``Trainer.predict``, and print how much and the path.

        Tensors that join along their first dimension are written as safetensors, anything else as
        it is, of plain types, for ``torch.load``; a table, of dicts of columns, also as CSV.
        """
        named = outputs if isinstance(outputs, dict) else {"predictions": outputs}
        joins = all(map(_join, named.values()))
        path, written = self._file("predictions", ".safetensors" if joins else ".pt")
        with files.replacing(path) as beside:
            if joins:
                named = {name: torch.cat(tensors).contiguous() for name, tensors in named.items()}
                tensor_files.write(beside, named, {"format": "pt"})
            else:
                torch.save(evaluation.plain(outputs), beside)
        kept = {path.suffix}
        if rows := evaluation.table(outputs) if isinstance(outputs, list) else []:
            as_table = path.with_suffix(".csv")
            with (
                files.replacing(as_table) as beside,
                beside.open("w", newline="", encoding="utf-8") as file,
            ):
                writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            kept.add(as_table.suffix)
            written += f" and, as a table, {as_table.name}"
        others = (path.with_suffix(suffix) for suffix in {".pt", ".safetensors", ".csv"} - kept)
        for other in filter(Path.exists, others):
            other.unlink()
            written += f" (removed {other.name})"
        of = "predictions" if joins else "batches of predictions"
        output.print_lines(f"{sum(map(len, named.values()))} {of} {written}")

    def _file(self, stem: str, suffix: str) -> tuple[Path, str]:
        """A file for this checkpoint's results, and what to print once it is written."""
        checkpoint = self._checkpoint
        run = self._own_run() or run_directory.create(self._root, self._name)
        path = run / f"{stem}{f'-{checkpoint.name}' if checkpoint else ''}{suffix}"
        replaced = " (replaced the earlier ones)" if path.exists() else ""
        return path, f"written to {files.shown(path, self._started_in)}{replaced}"

    def _own_run(self) -> Path | None:
        run = run_of(self._checkpoint) if self._checkpoint else None
        return run if run is not None and os.access(run, os.W_OK) else None


def _join(outputs: list[Any]) -> bool:
    """Whether the outputs are tensors that can be concatenated along their first dimension."""
    are_tensors = all(isinstance(output, Tensor) and output.ndim for output in outputs)
    return are_tensors and len({output.shape[1:] for output in outputs}) == 1
