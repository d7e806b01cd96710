"""Merge the options of a command line and its files into one dict of sections.

Values are merged as they were written, and converted once: jsonargparse, which converts them, would
replace a dict by a later one, and require all arguments of a class in the first file.
"""

import argparse
import inspect
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

from ..errors import ConfigurationError, Problems, nearest, shorten
from ..options import Options, class_paths, conversion
from ..options.values import Text
from . import config_files

CLASSES = ("model", "data")
PRINT = "print_config"
_CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_CLASS_KEYS = ("class_path", "init_args")
_GROWING, _LIST = list | tuple | Mapping, list | tuple | Text | None


class Parser(argparse.ArgumentParser):
    """Reports errors like the other commands; the last word of ``prog`` is the command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self.prog.rpartition(' ')[2]}: {message}")


def split(words: Sequence[str], problems: Problems) -> Iterator[tuple[str, str]]:
    """Split ``--key value`` and ``--key=value`` into pairs."""
    left = list(words)
    while left:
        if not (word := left.pop(0)).startswith("--"):
            problems.add(f"{shorten(repr(word))} is not an option; options begin with --")
            continue
        key, has_value, value = word[2:].partition("=")
        if not has_value and key != PRINT and left and not left[0].startswith("--"):
            value = left.pop(0)
        if value or key == PRINT:
            yield key, value
        else:
            advice = "name a YAML file" if key == "config" else "give one: true, or null for none"
            problems.add(f"--{shorten(key)}: no value is given; {advice}")


class _Added(list[Any]):
    """Items that ``--key+`` appends to a list."""


class _Keys(dict[str, Any]):
    """What ``--key.name`` sets in a dict, or of an object."""


def gather(
    options: Iterable[tuple[str, str]], sections: Collection[str], problems: Problems
) -> dict[str, Any]:
    """Merge files and options by section; a later one wins. Raises if a file cannot be read."""
    config: dict[str, Any] = {}
    unreadable = Problems()
    for key, text in _ordered(options):
        if key == "config":
            with unreadable:
                for name, value in config_files.read(text).items():
                    with problems:
                        _add(config, str(name), value, sections)
        elif key != PRINT:
            with problems:
                section, *path = key.split(".")
                value = _nested(section, path, config_files.word(f"--{shorten(key)}", text))
                _add(config, section, value, sections)
    unreadable.raise_any()
    return config


def _ordered(options: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The options in their order, but between two files a class before its arguments."""
    names = {"config", *(f"{name}{key}" for name in CLASSES for key in ("", ".class_path"))}
    for _, between in itertools.groupby(options, key=lambda option: option[0] == "config"):
        yield from sorted(between, key=lambda option: option[0] not in names)


def _nested(section: str, path: Sequence[str], value: Any) -> Any:
    """The value of an option as a file would have it."""
    if path and path[-1].endswith("+"):
        path = [*path[:-1], path[-1][:-1]]
        value = _Added(_listed(value))
    for key in reversed(path):
        value = _Keys({key: value})
    return _with_arguments(value) if path and section in CLASSES else value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _add(config: dict[str, Any], section: str, value: Any, sections: Collection[str]) -> None:
    if section not in sections:
        known = nearest(section, sections)
        raise ConfigurationError(f"{shorten(section)}: there is no such section{known}")
    before = config.get(section)
    if section == "trainer":
        if not isinstance(value, dict):
            raise ConfigurationError("trainer: give its options by name, or leave it out")
        extended = [name for name, item in value.items() if isinstance(item, _Added)]
        before = {name: getattr(Options, name, None) for name in extended} | (before or {})
    elif isinstance(value, Text) and value.meaning is None:
        value = None
    elif section in CLASSES and isinstance(value, str):
        value = {"class_path": value}
    config[section] = merged(before, value)


def merged(before: Any, value: Any) -> Any:
    """The second value; of two dicts, one with the values of both, recursively.

    A class that replaces another one keeps the arguments that it takes.
    """
    if isinstance(value, _Added):
        return [*_listed(before), *value]
    if isinstance(value, dict) and isinstance(before, str) and _CLASS_PATH.fullmatch(before):
        before = {"class_path": before}
    if isinstance(before, dict) and "class_path" in before:
        before, value = _of_class(before, value)
    if not isinstance(value, dict):
        return value
    before = before if isinstance(before, dict) else type(value)()
    missing = before if isinstance(before, _Keys) else None  # a default that is not known
    for key, item in value.items():
        if isinstance(item, _Added) and not isinstance(before.get(key, missing), _LIST):
            advice = "before it, name the class of the object, or give the whole list"
            raise ConfigurationError(f"{key}+ appends to a list that is not known; {advice}")
    after = {
        key: item if item == {} and key != "init_args" else merged(before.get(key), item)
        for key, item in value.items()
    }
    return before | after if missing is None else _Keys(before | after)


def _of_class(before: dict[Any, Any], value: Any) -> tuple[dict[Any, Any], Any]:
    """A class and its arguments, to be merged with what comes after it."""
    value = {"class_path": value} if isinstance(value, str) else value
    if isinstance(value, dict):
        value = _with_arguments(value)
        if (path := value.get("class_path", before["class_path"])) != before["class_path"]:
            arguments, known = before.get("init_args"), _defaults(path)
            kept = arguments.items() if isinstance(arguments, dict) else ()
            before = {"init_args": {key: item for key, item in kept if key in known}}
        given, later = before.get("init_args") or {}, value.get("init_args") or {}
        new = [name for name, item in later.items() if isinstance(item, _Added | _Keys)]
        known = _defaults(path) if new else {}
        new = [n for n in new if known.get(n) is not None and given.get(n, known) is not None]
        extended = {name: _so_far(known[name], given.get(name)) for name in new}
        before = before | ({"init_args": given | extended} if extended else {})
    return before, value


def _so_far(default: Any, given: Any) -> Any:
    """What an option extends: what was given before, or in a dataclass also what it has."""
    if not is_dataclass(default) or not isinstance(given, dict | None):
        return default if given is None else given
    values = {field.name: getattr(default, field.name, None) for field in fields(default)}
    growing = {n: x for n, x in values.items() if isinstance(x, _GROWING) or is_dataclass(x)}
    return (given or {}) | {n: _so_far(x, (given or {}).get(n)) for n, x in growing.items()}


def _with_arguments(section: dict[Any, Any]) -> dict[Any, Any]:
    """A class with its arguments under ``init_args``, which options may leave out."""
    keys = {key: value for key, value in section.items() if key in _CLASS_KEYS}
    rest = {key: value for key, value in section.items() if key not in _CLASS_KEYS}
    if rest and keys.get("init_args"):
        rest = merged(keys["init_args"], rest)
    return keys | {"init_args": rest} if rest else keys


def _defaults(path: Any) -> dict[str, Any]:
    """Defaults of a class' arguments, with those that it passes on to a parent; else ``None``."""
    try:
        known, _ = conversion.parameters(class_paths.imported("", str(path), object))
    except (ConfigurationError, ValueError):  # said later
        return {}
    empty = inspect.Parameter.empty
    return {name: None if default is empty else default for name, (_, default) in known.items()}
