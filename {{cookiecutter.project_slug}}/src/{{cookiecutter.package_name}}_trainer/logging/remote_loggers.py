"""Weights & Biases and MLflow, whose values cannot be removed again after a resume."""

import importlib.util
import json
import os
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from ..errors import ConfigurationError, UserError, one_line
from ..launch import files, output
from ..options import redaction
from .logger import LoggedRun, Logger

_SECONDS_TO_ANSWER = 5.0
_MOST_BYTES = 2**30  # of values
# How long MLflow's client tries to reach a server that does not answer any more, unless the user
# sets it: training waits for it, by MLflow's defaults for several minutes.
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class RemoteLogger(Logger):
    """Base of loggers that continue their run at a service when a run resumes.

    A folder of the run directory, with the name of the logger, has the id of the run at the service
    (``run.json``) and all values (``values.jsonl``), so that a resume sends none of them again.
    """

    def server(self) -> str | None:
        """URL of the service, which must answer before the run is opened; ``None``: no server."""
        return None

    def open(self, run: LoggedRun, known: str | None) -> str:
        """Open the run with a known id, or a new one; return its id."""
        raise NotImplementedError

    def send(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def start(self, run: LoggedRun) -> None:
        """Open the run of the service; ConnectionError if it does not answer within five seconds.

        Its own client may wait for minutes.
        """
        if (url := self.server()) is not None:
            _check_answer(url)
        folder = run.directory / self.name
        folder.mkdir(exist_ok=True)
        record, self._values = folder / "run.json", folder / "values.jsonl"
        try:
            known = files.read_json(record, 2**16)["id"] if record.exists() else None
            if self._values.exists():  # without a line that a process was killed in
                os.truncate(self._values, files.read(self._values, _MOST_BYTES).rfind(b"\n") + 1)
            self._last = {name: step for step, values in self.sent() for name in values}
        except (OSError, ValueError, LookupError, TypeError) as error:
            problem = f"{folder}: run.json or values.jsonl cannot be read ({one_line(error)})"
            advice = "restore it, or remove the folder: the service then gets another run"
            raise UserError(f"{problem}; {advice}") from None
        files.write_atomically(record, json.dumps({"id": self.open(run, known)}), mode=0o600)
        self._file = self._values.open("a", encoding="utf-8")

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Send the values that were not sent before a resume."""
        row = {"epoch": epoch, **values}
        if new := {name: value for name, value in row.items() if self._last.get(name, -1) < step}:
            self._file.write(json.dumps([step, new]) + "\n")
            self._file.flush()
            self._last.update(dict.fromkeys(new, step))
            self.send(step, new)

    def close(self) -> None:
        self._file.close()

    def sent(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the step and the values of each earlier call."""
        if self._values.exists():
            for line in files.read(self._values, _MOST_BYTES).splitlines():
                step, values = json.loads(line)
                yield step, values


def _check_answer(url: str) -> None:
    """Raise ConnectionError if a server does not answer; an HTTP or TLS error is an answer."""
    parts = urlsplit(url)
    url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    reasons = [f"within {_SECONDS_TO_ANSWER:g} s"]

    def ask() -> None:
        try:
            urlopen(url, timeout=2 * _SECONDS_TO_ANSWER).close()  # noqa: S310 (of the user)
        except Exception as error:
            reason = getattr(error, "reason", error)
            if not isinstance(error, HTTPError) and not isinstance(reason, ssl.SSLError):
                reasons[:] = [f"({one_line(error)})"]
                return
        reasons.clear()

    # In a thread: a name server that does not answer has other timeouts.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS_TO_ANSWER)
    if reasons:
        raise ConnectionError(f"{url} does not answer {reasons[0]}")


def require(package: str) -> None:
    """Raise ConfigurationError if the package of a logger is not installed."""
    if importlib.util.find_spec(package) is None:
        advice = f"make {package}, or pip install '.[{package}]'"
        raise ConfigurationError(f"loggers: {package!r} needs the package {package}: {advice}")


class WandbLogger(RemoteLogger):
    """A run at Weights & Biases, with the configuration of this run; files are in ``wandb/``.

    W&B cannot continue a run offline: after a resume, the newest ``wandb/offline-run-*`` has all
    values of the run, and ``wandb sync`` of it replaces what was synced of earlier ones.

    Args:
        project: Name of the project; default: W&B's own (``WANDB_PROJECT``).
        mode: ``"offline"``: write files, for ``wandb sync``; default: W&B's own (``WANDB_MODE``).
    """

    name = "wandb"
    experiment: Any = None
    """W&B's run: ``log({"samples": wandb.Image(…), "step": trainer.global_step})``."""

    def __init__(
        self, project: str | None = None, mode: Literal["online", "offline"] | None = None
    ) -> None:
        require("wandb")
        self.project, self.mode = project, mode

    def server(self) -> str | None:
        """W&B's, or that of ``WANDB_BASE_URL``, unless files are written only."""
        import wandb

        settings = wandb.setup().settings
        return settings.base_url if (self.mode or settings.mode) == "online" else None

    def open(self, run: LoggedRun, known: str | None) -> str:
        import wandb

        words, sys.argv = sys.argv, redaction.command(sys.argv)  # W&B records and uploads it
        try:
            self.experiment = wandb.init(
                project=self.project,
                name=run.name,
                id=known,
                resume="allow",
                config=dict(run.configuration),
                dir=str(run.directory),
                mode=self.mode,
                # A run of the program itself is neither taken over nor finished.
                reinit="create_new" if wandb.run is not None else None,
            )
        finally:
            sys.argv = words
        # W&B's own step cannot stand still, as for a validation after the values of a step.
        self.experiment.define_metric("*", step_metric="step")
        if self.experiment.offline:
            for step, values in self.sent():
                self.send(step, values)
        return str(self.experiment.id)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        if "step" in values:
            line = "note: W&B draws values over 'step', so one that is logged as 'step' is left out"
            output.print_once(line)
        self.experiment.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run; the exit code says how."""
        super().close()
        if self.outcome == "preempted":  # to be resumed
            self.experiment.mark_preempting()
        self.experiment.finish(exit_code=0 if self.outcome == "finished" else 1)


class MLflowLogger(RemoteLogger):
    """A run of an MLflow experiment, with the configuration of this run as its parameters.

    Args:
        experiment: Name of the experiment, created if there is none; default: MLflow's own
            (``MLFLOW_EXPERIMENT_NAME``).
        tracking_uri: Server or database, such as ``"sqlite:///mlflow.db"``; default: MLflow's own
            (``MLFLOW_TRACKING_URI``).
    """

    name = "mlflow"
    experiment: Any = None
    """MLflow's client, whose methods take :attr:`run_id`: ``log_image``, ``log_figure`` …"""
    run_id: str
    """Id of the run at MLflow."""

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        require("mlflow")
        self._experiment, self.tracking_uri = experiment, tracking_uri

    def server(self) -> str | None:
        """The tracking server, unless values are written into a database or files."""
        import mlflow

        url = self.tracking_uri or mlflow.get_tracking_uri()
        return url if url.startswith(("http://", "https://")) else None

    def open(self, run: LoggedRun, known: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name, value in _MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        self.experiment = client = MlflowClient(self.tracking_uri)
        self._refused = set[str]()
        if known is not None:
            client.update_run(known, status="RUNNING")
            self.run_id = known
            return known
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        existing = client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else client.create_experiment(name)
        self.run_id = str(client.create_run(experiment, run_name=run.name).info.run_id)
        self._log("params", [Param(*pair) for pair in flat("", run.configuration)])
        return self.run_id

    def send(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._log("metrics", [Metric(name, value, now, step) for name, value in values.items()])

    def _log(self, kind: str, entries: list[Any]) -> None:
        """Log values; one whose name MLflow refuses is left out, which is said once."""
        from mlflow.exceptions import MlflowException

        entries = [entry for entry in entries if entry.key not in self._refused]
        try:
            self.experiment.log_batch(self.run_id, **{kind: entries})
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            for entry in entries if len(entries) > 1 else ():
                self._log(kind, [entry])
            if len(entries) == 1:
                self._refused.add(name := entries[0].key)
                reason = redaction.message(one_line(error))
                line = f"warning: logger 'mlflow' leaves out {name!r}: {reason}"
                output.print_lines(line, error=True)

    def close(self) -> None:
        """Tell MLflow how the run has ended."""
        super().close()
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(self.outcome, "KILLED")
        self.experiment.set_terminated(self.run_id, status)


def flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Values of a configuration by their dotted names."""
    if not isinstance(value, Mapping):
        yield prefix, str(value)
        return
    for key, item in value.items():
        yield from flat(f"{prefix}.{key}" if prefix else str(key), item)
