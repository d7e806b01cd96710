"""The interface of loggers, and how they are created: by name, class path, or as objects."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigurationError, Problems, shown
from ..options import Options, class_paths, redaction

Outcome = Literal["finished", "failed", "stopped", "preempted"]


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told of a run.

    ``directory``: the run directory; ``name``: its name, which is the same after a resume;
    ``configuration``: the sections ``trainer``, ``model`` and ``data`` of the command line with
    all defaults, or the ``trainer`` of a script, and ``hyperparameters``; secrets are redacted.
    """

    directory: Path
    name: str
    configuration: Mapping[str, Any]

    @classmethod
    def of(cls, directory: Path, options: Options, configuration: str | None) -> "LoggedRun":
        """Describe a run by its configuration (YAML), in a script by the trainer's options."""
        if configuration is None:
            sections = {"trainer": {name: _plain(value) for name, value in vars(options).items()}}
        else:
            import yaml

            sections = yaml.safe_load(configuration)
        return cls(directory, directory.name, redaction.value(sections))


def hyperparameters(*owners: Any) -> dict[str, Any]:
    """Merge the ``hparams`` of modules into values for YAML; secrets are redacted."""
    hparams = [owner.hparams for owner in owners if isinstance(owner.hparams, Mapping)]
    merged = {name: value for values in hparams for name, value in values.items()}
    return {"hyperparameters": redaction.value(_plain(merged))} if merged else {}


def _plain(value: Any) -> Any:
    """A value as a configuration file could contain it; objects are shown."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else shown(value)


class Logger:
    """Writes the values of a run; override :meth:`write`, and other methods if you need them.

    It is created on every rank, but its methods are called on rank 0 only, by the process that
    trains: open files and connections in :meth:`start`, and do not wait long. If a method raises, a
    warning says so, and this logger is not called any more; training continues.

    Example::

        class PrintLogger(Logger):
            def write(self, step, epoch, values):
                print(step, dict(values))
    """

    experiment: Any = None
    """The service's own object, for images, figures and text; ``None``: it writes numbers only."""
    name: str = ""
    """Name of this logger in the run, unique in ``Trainer(loggers=…)``; default: its class."""
    outcome: Outcome = "finished"
    """How the fit has ended, when :meth:`close` is called; ``"preempted"``: by a signal, after it
    saved a checkpoint; ``"stopped"``: by Ctrl-C or ``sys.exit``."""

    def start(self, run: LoggedRun) -> None:
        """Called before any other method, once per fit."""

    def write(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write values, of one step or of an epoch or validation that ended with it.

        Args:
            step: Number of optimizer steps so far.
            epoch: The epoch, counted from 0.
            values: Values by name, reduced over all ranks.
        """
        raise NotImplementedError

    def write_speed(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write the speed of the steps since the last logged one; by default as other values.

        Its names begin with ``"speed/"``, those of ``SystemMonitor`` with ``"system/"``. Unlike
        other values, they differ from run to run.
        """
        self.write(step, epoch, values)

    def position(self) -> int:
        """Position in the log, to save in a checkpoint for :meth:`resume`."""
        return 0

    def resume(self, position: int | None, step: int) -> None:
        """Called after :meth:`start` if the run continues: remove what is after the checkpoint.

        Steps after the checkpoint are trained, and written, again. By default nothing is removed.

        Args:
            position: :meth:`position` when the checkpoint was saved; ``None``: it had no such log.
            step: Step of the checkpoint.
        """

    def close(self) -> None:
        """Called at the end of a fit, also if it fails; :attr:`outcome` says how it has ended."""


class NoLogger:
    """Stands for a logger where none is open: what is called of it does nothing."""

    def __getattr__(self, name: str) -> "NoLogger":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> "NoLogger":
        return self


BUILT_IN = {
    "csv": f"{__package__}.loggers.CSVLogger",
    "tensorboard": f"{__package__}.loggers.TensorBoardLogger",
    "wandb": f"{__package__}.remote_loggers.WandbLogger",
    "mlflow": f"{__package__}.remote_loggers.MLflowLogger",
}
"""Their class paths by name: a file is imported when one of them is used."""


def create(loggers: object, problems: Problems) -> dict[str, Logger]:
    """Create the loggers of the trainer's option, by name; ``problems``: one line per error."""
    if isinstance(loggers, Logger):
        loggers = [loggers]
    if not isinstance(loggers, list | tuple):
        problems.add(f"loggers={shown(loggers)}: give a list of loggers, or of names")
        return {}
    made: dict[str, Logger] = {}
    for index, item in enumerate(loggers):
        with problems:
            logger = _create(f"loggers[{index}]", item)
            if logger.name in made:
                line = f"two are named {logger.name!r}; give it once, or each its own name"
                raise ConfigurationError(f"loggers: {line}")
            made[logger.name] = logger
    return made


def _create(where: str, item: object) -> Logger:
    entry = dict(item) if isinstance(item, Mapping) else item
    name = entry.pop("name", None) if isinstance(entry, dict) else None
    logger = class_paths.create(where, entry, Logger, BUILT_IN)
    kind = type(logger)
    if kind.write is Logger.write:
        raise ConfigurationError(f"{where}: {kind.__name__} has no write(step, epoch, values)")
    name = (logger.name or kind.__name__) if name is None else name
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{where}.name={shown(name)}: expected str")
    if f"{kind.__module__}.{kind.__qualname__}" in BUILT_IN.values() and name != kind.name:
        raise ConfigurationError(f"{where}.name={name!r}: it is always {kind.name!r}")
    logger.name = name
    return logger
