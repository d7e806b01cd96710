"""Merge the options of a command line and its files into one dict of sections."""

import argparse
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from ..errors import ConfigurationError, Problems, nearest, shorten
from ..options import Options
from . import config_files

CLASSES = ("model", "data")
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
# Arguments of a class that another one has replaced: those that the new class takes are kept.
FORMER = "init_args of the former class"
PRINT = "print_config"


class Parser(argparse.ArgumentParser):
    """Reports errors like the other commands; the last word of ``prog`` is the command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self.prog.rpartition(' ')[2]}: {message}")


def split(words: Sequence[str], problems: Problems) -> Iterator[tuple[str, str]]:
    """Split ``--key value`` and ``--key=value`` into pairs."""
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            problems.add(f"{shorten(repr(word))} is not an option; options begin with --")
            continue
        key, has_value, value = word[2:].partition("=")
        if not has_value and key != PRINT and left and not left[0].startswith("--"):
            value = left.pop(0)
        if value or key == PRINT:
            yield key, value
        else:
            problems.add(f"--{shorten(key)}: no value is given; use null for none")


def gather(
    options: Iterable[tuple[str, str]], sections: Collection[str], problems: Problems
) -> dict[str, Any]:
    """Merge files and options by section; a later one wins.

    Values of options that are no lists or dicts are kept as text: the option's type says what they
    mean. Raises ConfigurationError if a file cannot be read, which may cause the other errors.
    """
    given: dict[str, Any] = {}
    unreadable = Problems()
    for key, text in _ordered(options):
        if key == "config":
            with unreadable:
                for name, value in config_files.read(text).items():
                    with problems:
                        _add(given, str(name), value, sections)
        elif key != PRINT:
            with problems:
                _add_option(given, key, text, sections)
    unreadable.raise_any()
    return given


def _ordered(options: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The options in their order, but between two files a class before its arguments."""
    names = {f"{name}{key}" for name in CLASSES for key in ("", ".class_path")}
    places, files = [], 0
    for option in options:
        files += option[0] == "config"
        places.append((files, option[0] != "config", option[0] not in names, option))
    return [place[-1] for place in sorted(places, key=lambda place: place[:-1])]


def _add_option(given: dict[str, Any], key: str, text: str, sections: Collection[str]) -> None:
    section, *path = key.split(".")
    parsed = config_files.value(f"--{shorten(key)}", text)
    is_text = not isinstance(parsed, dict | list) and (path or parsed is not None)
    value: Any = text if is_text else parsed
    if section in CLASSES and path and path[0] not in CLASS_KEYS:
        path = ["init_args", *path]
    if path and path[-1].endswith("+"):
        path[-1] = path[-1][:-1]
        value = [*_found(given, section, path), *_listed(value)]
    for part in reversed(path):
        value = {part: value}
    _add(given, section, value, sections)


def _found(given: dict[str, Any], section: str, path: Sequence[str]) -> list[Any]:
    """The list that an option extends."""
    found = given.get(section)
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    if found is None and section == "trainer":
        found = getattr(Options, path[0], None)
    return _listed(found)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _add(given: dict[str, Any], section: str, value: Any, sections: Collection[str]) -> None:
    if section not in sections:
        known = nearest(section, sections)
        raise ConfigurationError(f"{shorten(section)}: there is no such section{known}")
    if section == "trainer" and not isinstance(value, dict):
        empty = "is empty; give its options by name, or leave it out"
        raise ConfigurationError(
            f"trainer: {empty if value is None else 'give its options by name'}"
        )
    if section in CLASSES and isinstance(value, str):
        value = {"class_path": value}
    before = given.get(section)
    if section in CLASSES and isinstance(before, dict) and isinstance(value, dict):
        name = before.get("class_path")
        if name is not None and value.get("class_path", name) != name:
            before = {FORMER: before.get("init_args")}
    given[section] = merged(before, value)


def merged(before: Any, value: Any) -> Any:
    """The second value; of two dicts, one with the values of both, recursively."""
    if not (isinstance(before, dict) and isinstance(value, dict)):
        return value
    return before | {key: merged(before.get(key), each) for key, each in value.items()}
