"""How long saves hold up training, synchronous and asynchronous ones: prints JSON lines.

python benchmarks/checkpoint_stall.py FOLDER ROUNDS QUICK

A stall is the time of a save until training continues, and the time for which the optimizer of the
next step waits. A save that starts before the last one is complete waits for it, which is not
counted: in a run, saves are less frequent.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import Trainer
from my_project_trainer.loop.fit import FitLoop
from torch.utils.data import DataLoader

from memory_subject import GPT, QUICK, SIZE, Size, Tokens

SAVES = 4  # the first one touches the memory of its copies


class Clock:
    """Times saves; `stalls`: seconds of each."""

    def __init__(self) -> None:
        self.stalls: list[float] = []
        self._save = FitLoop._save_once
        clock = self

        def save(loop: FitLoop) -> None:
            if loop.fit.position.saved_at == loop.fit.position.global_step:
                return
            loop.checkpoints.wait()
            started = time.perf_counter()
            clock._save(loop)
            clock.stalls.append(time.perf_counter() - started)

        setattr(FitLoop, "_save_once", save)  # noqa: B010


def fit(clock: Clock, folder: Path, size: Size, asynchronous: bool) -> dict[str, float]:
    """Seconds of a stall: the first, and the mean of the others; and of the whole fit."""
    clock.stalls.clear()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2 * SAVES,
        run_name="run",
        loggers=[],
        enable_progress_bar=False,
        default_root_dir=folder,
        checkpoint_every_n_steps=2,
        async_checkpoints=asynchronous,
    )
    started = time.perf_counter()
    trainer.fit(GPT(size, lambda: DataLoader(Tokens(2 * SAVES + 1, lambda: None), batch_size=1)))
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "run")
    first, *others = clock.stalls[:SAVES]
    return {"first": first, "others": sum(others) / len(others), "fit": seconds}


def main() -> None:
    folder, rounds, quick = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "quick"
    torch.set_num_threads(2)
    clock, size = Clock(), QUICK if quick else SIZE
    for number in range(rounds):
        found: dict[str, Any] = {"round": number}
        for name in ("sync", "async") if number % 2 else ("async", "sync"):
            found[name] = fit(clock, folder, size, name == "async")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
