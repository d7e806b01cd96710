"""The sections of a configuration that name a class: checked, and their objects created."""

import functools
import inspect
from typing import Any

from jsonargparse import ArgumentParser

from ..errors import ConfigurationError, Problems, one_line, shorten, shown
from ..module import DataModule, TrainingModule
from ..options import class_paths, values
from .arguments import CLASS_KEYS, FORMER

BASES: dict[str, type] = {"model": TrainingModule, "data": DataModule}


def check(name: str, given: Any) -> tuple[type, dict[str, Any]]:
    """Check the section ``"model"`` or ``"data"``, whose arguments may be text.

    Returns its class, and the section as jsonargparse reads it. ConfigurationError has one line per
    error.
    """
    if not isinstance(given, dict) or not isinstance(path := given.get("class_path"), str):
        raise ConfigurationError(
            f"{name}: give a class_path, and what the class takes under init_args"
        )
    problems, cls = Problems(), BASES[name]
    for key in given.keys() - {*CLASS_KEYS, FORMER}:
        problems.add(f"{name}.{shorten(str(key))}: unknown; use class_path and init_args")
    arguments, former = given.get("init_args") or {}, given.get(FORMER)
    if not isinstance(arguments, dict):
        problems.add(f"{name}.init_args={shown(arguments)}: give them by name")
    with problems:
        cls = class_paths.imported(f"{name}.class_path={shown(path)}", path, BASES[name])
    if not problems.lines:
        if isinstance(former, dict):
            known = inspect.signature(cls).parameters
            arguments = {key: former[key] for key in former if key in known} | arguments
        values.check_arguments(name, cls, arguments, problems)
    problems.raise_any()
    section = {key: each for key, each in given.items() if key != FORMER}
    return cls, section | {"init_args": arguments}


def create(name: str, cls: type, section: dict[str, Any]) -> Any:
    """Create the object of a checked section; ConfigurationError if its class refuses it."""
    parser = _parser()
    try:
        parsed = parser.parse_object({name: section})
    except Exception as error:  # importing a class that is an argument may raise anything
        raise ConfigurationError(f"{name}: {one_line(error)}") from None
    try:
        return parser.instantiate(parsed)[name]
    except Exception as error:
        # jsonargparse wraps exceptions of the user's class in an error of types.
        cause = error.__cause__ if isinstance(error, ValueError) and error.__cause__ else error
        arguments = {key: parsed[name].init_args.get(key) for key in section["init_args"]}
        raise values.refused(name, cls, arguments, cause) from None


@functools.cache
def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    for name, base in BASES.items():
        parser.add_subclass_arguments(base, name)
    return parser
