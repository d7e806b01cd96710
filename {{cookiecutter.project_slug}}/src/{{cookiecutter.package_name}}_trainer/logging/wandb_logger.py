"""Weights & Biases."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ..options import redaction
from .base import LoggedRun
from .remote import RemoteLogger, require


class WandbLogger(RemoteLogger):
    """A run at Weights & Biases, with the configuration of this run; files are in ``wandb/``.

    W&B cannot continue a run offline: after a resume, the newest ``wandb/offline-run-*`` has all
    values of the run, and ``wandb sync`` of it replaces what was synced of earlier ones.

    Args:
        project: Name of the project; default: W&B's own (``WANDB_PROJECT``).
        mode: ``"offline"``: write files only, for ``wandb sync``; default: W&B's own
            (``WANDB_MODE``).
    """

    name = "wandb"
    _run: Any

    def __init__(
        self, project: str | None = None, mode: Literal["online", "offline"] | None = None
    ) -> None:
        require("wandb")
        self.project, self.mode = project, mode

    def server(self) -> str | None:
        """W&B's, or that of ``WANDB_BASE_URL``, unless files are written only."""
        import wandb

        settings = wandb.setup().settings
        is_online = (self.mode or settings.mode) == "online"
        return settings.base_url if is_online else None

    def open(self, run: LoggedRun, known: str | None) -> str:
        """Open the run."""
        import wandb

        with _redacted_command():
            self._run = wandb.init(
                project=self.project,
                name=run.name,
                id=known,
                resume="allow",
                config=dict(run.configuration),
                dir=str(run.directory),
                mode=self.mode,
            )
        # W&B's own step cannot stand still, as for a validation after the values of a step.
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            for step, values in self.sent():
                self.send(step, values)
        return str(self._run.id)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Log values over ``step``."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run."""
        super().close()
        self._run.finish()


@contextlib.contextmanager
def _redacted_command() -> Iterator[None]:
    """Redact secrets in ``sys.argv``, which W&B records and uploads."""
    words = sys.argv
    sys.argv = redaction.command(words)
    try:
        yield
    finally:
        sys.argv = words
