"""MLflow."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .base import LoggedRun
from .remote import RemoteLogger, require

# Limits of MLflow: characters of a parameter, and parameters in a request.
_LONGEST, _MOST = 500, 100


class MLflowLogger(RemoteLogger):
    """A run of an MLflow experiment, with the configuration of this run as its parameters.

    Args:
        experiment: Name of the experiment, created if there is none; default: MLflow's own
            (``MLFLOW_EXPERIMENT_NAME``).
        tracking_uri: Server or database, such as ``"sqlite:///mlflow.db"``; default: MLflow's own
            (``MLFLOW_TRACKING_URI``).
    """

    name = "mlflow"
    _client: Any
    _id: str

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        require("mlflow")
        self.experiment, self.tracking_uri = experiment, tracking_uri

    def server(self) -> str | None:
        """The tracking server, unless values are written into a database or files."""
        import mlflow

        url = self.tracking_uri or mlflow.get_tracking_uri()
        return url if url.startswith(("http://", "https://")) else None

    def open(self, run: LoggedRun, known: str | None) -> str:
        """Open the run."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(self.tracking_uri)
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._id = known
            return known
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        self._id = made = str(client.create_run(experiment, run_name=run.name).info.run_id)
        parameters = [Param(key, text) for key, text in _flat("", run.configuration)]
        for start in range(0, len(parameters), _MOST):
            client.log_batch(made, params=parameters[start : start + _MOST])
        return made

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        sent = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=sent)

    def close(self) -> None:
        """Mark the run as finished."""
        super().close()
        self._client.set_terminated(self._id)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Values of a configuration by their dotted names."""
    if not isinstance(value, Mapping):
        yield prefix, str(value)[:_LONGEST]
        return
    for key, each in value.items():
        yield from _flat(f"{prefix}.{key}" if prefix else str(key), each)
