"""Create the loggers of a trainer; all errors in them are reported at once."""

from collections.abc import Mapping

from ..errors import ConfigurationError, Problems, shown
from ..options import class_paths
from .base import Logger
from .loggers import BUILT_IN


def create(given: object, problems: Problems) -> dict[str, Logger]:
    """Create the loggers of the trainer's argument, by name; nothing is opened yet.

    Args:
        given: A logger, or a list: loggers, names of built-in loggers, class paths, or dicts with
            ``class_path``, ``init_args`` and ``name``.
        problems: Collects one line per error.
    """
    if isinstance(given, Logger):
        given = [given]
    if not isinstance(given, list | tuple):
        problems.add(f"loggers={shown(given)}: give a list of loggers, or of names")
        return {}
    made: dict[str, Logger] = {}
    for index, each in enumerate(given):
        with problems:
            logger = _create(f"loggers[{index}]", each)
            if logger.name in made:
                raise ConfigurationError(_about_two(made[logger.name], logger))
            made[logger.name] = logger
    return made


def _create(where: str, given: object) -> Logger:
    entry, named = given, {}
    if isinstance(given, Mapping):
        entry = {key: each for key, each in given.items() if key != "name"}
        named = {key: each for key, each in given.items() if key == "name"}
    logger = class_paths.create(where, entry, Logger, BUILT_IN)
    kind = type(logger)
    if kind.write is Logger.write:
        raise ConfigurationError(f"{where}: {kind.__name__} has no write(step, epoch, values)")
    name = named.get("name", logger.name or kind.__name__)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{where}.name={shown(name)}: expected str")
    if kind in BUILT_IN.values() and name != kind.name:
        raise ConfigurationError(f"{where}.name={name!r}: it is always {kind.name!r}")
    logger.name = name
    return logger


def _about_two(first: Logger, second: Logger) -> str:
    if first is second or type(second) in BUILT_IN.values():
        return f"loggers: {second.name!r} is given twice; give it once"
    return f"loggers: two are named {second.name!r}; give each its own name"
