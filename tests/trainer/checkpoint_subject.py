"""Saves and reads small checkpoints, and changes them."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.checkpoint.writing import Checkpoints

STATE = {"model": {"weight": torch.arange(6.0), "bias": torch.zeros(2)}, "epoch": 3}
OWN = {"random/torch": torch.arange(16, dtype=torch.uint8)}


def save(directory: Path, step: int = 1, state: Any = None, **options: Any) -> Path:
    writer = Checkpoints(directory, **options)
    writer.save(step, STATE if state is None else state, OWN)
    writer.close()
    return directory / f"step-{step:08d}"


def read(path: Path) -> Any:
    """Everything that can be read of a checkpoint."""
    checkpoint = Checkpoint(path)
    checkpoint.check_contents()
    checkpoint.rank_local_state(0)
    return checkpoint.state()


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a checkpoint's state.json, under a checksum that is right."""
    content = change(json.loads((path / "state.json").read_text())["content"])
    frame(path, content if isinstance(content, str) else json.dumps(content))


def frame(path: Path, content: str) -> None:
    """Write a state.json around any content."""
    checksum = zlib.crc32(content.encode())
    (path / "state.json").write_text(f'{{"crc32": "{checksum:08x}", "content":\n{content}\n}}\n')


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
