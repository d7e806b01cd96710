"""Workers of a parameter server that sleep, die, hang or fail; started by its tests.

``python -m parameter_server_subject FOLDER TRAINER SUBJECT``, the last two as JSON. Rank 0 writes
the weights into ``FOLDER/weights.safetensors``, and the staleness of each gradient beside them.
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from my_project_trainer.strategies.asynchronous import parameter_server
from my_project_trainer.strategies.asynchronous.server import Clipping, Server
from safetensors.torch import save_file
from tests.conformance.subject import SAMPLES, Regression
from torch import Tensor

from fitting import quiet

BATCH = 12


class Watched(Server):
    """Notes how many steps were made since the weights on which each gradient was computed."""

    staleness: ClassVar[list[int]] = []

    def _step_with(self, ranks: Sequence[int], clipping: Clipping) -> None:
        self.staleness += [self._version - self._computing[rank] for rank in ranks]
        super()._step_with(ranks, clipping)


class Uneven(Regression):
    """Ranks that differ; counts the samples of a validation.

    ``seconds`` that a rank sleeps in each step, by rank; ``ends``: after which step, and how:
    ``{"2": [7, "SIGKILL"]}``; ``fails``: step of the optimizer; ``stops``: a rank, after an epoch.
    """

    def __init__(
        self,
        seconds: dict[str, float] | None = None,
        ends: Any = None,
        fails: int = 0,
        stops: int | None = None,
        **base: Any,
    ) -> None:
        super().__init__(optimizer="adam", **base)
        self.seconds, self.ends, self.fails = seconds or {}, ends or {}, fails
        self.stops = stops

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = itertools.count(1)

        def fail(*_: Any) -> None:
            if next(steps) == self.fails:
                raise ValueError("bad rate")

        optimizer.register_step_pre_hook(fail)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank = str(self.global_rank)
        time.sleep(self.seconds.get(rank, 0.0))
        step, how = self.ends.get(rank, (None, ""))
        if step == self.trainer.global_step:
            if how == "error":
                raise OSError("the disk is gone")
            os.kill(os.getpid(), getattr(signal, how))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.global_rank == self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self(x) - y).square().mean()


def main(folder: Path, options: dict[str, Any], subject: dict[str, Any]) -> None:
    shared = {"strategy": "parameter_server", "global_batch_size": BATCH, "log_every_n_steps": 1}
    shared |= {"loggers": ["csv"], "default_root_dir": folder, "run_name": "run"}
    run = quiet(**shared | options)
    module = Uneven(**subject)
    parameter_server.Server = Watched  # type: ignore[misc]
    run.fit(module)
    if run.global_rank == 0:
        save_file(module.state_dict(), folder / "weights.safetensors")
        (folder / "staleness.json").write_text(json.dumps(Watched.staleness))


__all__ = ["BATCH", "SAMPLES", "Watched"]

if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
