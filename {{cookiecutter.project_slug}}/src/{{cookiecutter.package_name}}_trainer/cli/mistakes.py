"""Find all errors of a command line and its files: jsonargparse stops at its first.

Each value is passed to jsonargparse separately. Errors that it ignores are found here too: empty
sections, and sections that another file replaces by another type.
"""

# Without this file jsonargparse reports one of nine errors, suggests no names, accepts a file whose
# sections have other types, and does not name an unreadable file: the tests of the template show
# it, first of all test_mistakes_in_every_part_are_reported_together.

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Problems, nearest, shorten, shown
from ..module import DataModule, TrainingModule
from ..options import Options, class_paths, values
from ..options.reading import older
from ..trainer import Trainer
from . import config_files

SECTIONS: dict[str, type] = {"trainer": Trainer, "model": TrainingModule, "data": DataModule}
CHECKPOINT, AVERAGED = "checkpoint", "averaged"
NO_MODEL = "model: not given; name its class in a config file or by --model CLASS"
_WITHOUT_VALUE = ("help", "print_config")


def gather(arguments: Sequence[str], sections: Collection[str], problems: Problems) -> Any:
    """Merge files and options by section, as the parser does.

    Args:
        arguments: Command-line arguments after the command.
        sections: Names of the sections.
        problems: Collects a line for each unreadable file and each unknown section.
    """
    given: dict[str, Any] = {}
    unreadable = Problems()
    given_options = list(options(arguments, problems))
    for key, text in given_options:
        if key == "config":
            with unreadable:
                _merge(given, _sections(config_files.read(text), sections, problems))
    problems.lines += unreadable.lines
    if unreadable.lines:
        return given  # other errors may be caused by the unreadable files
    for key, text in given_options:
        name, *rest = key.split(".")
        if name not in sections:
            if name != "config":
                known = nearest(name, sections)
                problems.add(f"{shorten(name)}: there is no such section{known}")
            continue
        with problems:
            found = config_files.value(f"--{shorten(key)}", text)
            _put(given, [name, *rest], found, problems)
    for section in ("model", "data"):
        value = given.get(section)
        if value is not None and not isinstance(_entry(value).get("class_path"), str):
            problems.add(f"{section}: give a class_path, and what the class takes under init_args")
            given[section] = None
    return given


def find(arguments: Sequence[str], sections: Collection[str]) -> list[str]:
    """One line per error."""
    problems = Problems()
    given = gather(arguments, sections, problems)
    if any(line.startswith("--config") for line in problems.lines):
        return problems.lines  # missing values may be in the unreadable file
    # First, because the modules of these classes may register the trainer's strategy.
    for section in ("model", "data"):
        if given.get(section) is not None:
            _check_class(section, given[section], problems)
    trainer = given.get("trainer") or {}
    older_ones = {name: value for name, value in trainer.items() if name in older.types}
    others = {name: value for name, value in trainer.items() if name not in older.types}
    good = older_ones | values.check_arguments("trainer", Options, others, problems)
    with problems:
        Trainer(**good)
    if given.get("model") is None and not any(line.startswith("model:") for line in problems.lines):
        problems.add(NO_MODEL)
    return problems.lines


def _sections(
    content: Mapping[str, Any], sections: Collection[str], problems: Problems
) -> dict[str, Any]:
    """The known, non-empty sections of a file."""
    good: dict[str, Any] = {}
    for key, value in content.items():
        if key not in sections:
            problems.add(
                f"{shorten(str(key))}: there is no such section{nearest(str(key), sections)}"
            )
        elif key == "trainer" and value is None:
            problems.add("trainer: is empty; give its options by name, or leave it out")
        elif key == "trainer" and not isinstance(value, dict):
            problems.add("trainer: give its options by name")
        else:
            good[key] = value
    return good


def options(arguments: Sequence[str], problems: Problems) -> Iterator[tuple[str, str]]:
    """Split ``--key value`` and ``--key=value`` into pairs."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if word == "-h":
            continue
        if not word.startswith("--"):
            problems.add(f"{shorten(repr(word))} is not an option; options begin with --")
            continue
        key, has_value, value = word[2:].partition("=")
        if not has_value and position < len(arguments) and not arguments[position].startswith("--"):
            value = arguments[position]
            position += 1
        if key.split(".")[-1] in _WITHOUT_VALUE:
            continue
        if not value:
            problems.add(f"--{shorten(key)}: no value is given; use null for none")
        else:
            yield key, value


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _put(tree: dict[str, Any], path: list[str], value: Any, problems: Problems) -> None:
    section, *rest = path
    if not rest:
        if isinstance(value, str) and section != CHECKPOINT:
            value = _parse_section(section, value)
        if section == "trainer" and not isinstance(value, dict):
            problems.add("trainer: give its options by name")
        elif isinstance(value, dict) and isinstance(tree.get(section), dict):
            _merge(tree[section], value)
        else:
            tree[section] = value
        return
    below = tree.setdefault(section, {})
    if not isinstance(below, dict):
        below = tree[section] = {"class_path": below}
    if section in ("model", "data") and rest[0] not in ("class_path", "init_args"):
        rest = ["init_args", *rest]
    for part in rest[:-1]:
        if not isinstance(below.get(part), dict):
            below[part] = {}
        below = below[part]
    last = rest[-1]
    if last.endswith("+"):
        last = last[:-1]
        value = [*(below.get(last) or ()), *(value if isinstance(value, list) else [value])]
    below[last] = value


def _parse_section(section: str, text: str) -> Any:
    """Parse a section given as a string: a file, or a class path."""
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return config_files.read(text)
    return text if section == "trainer" else {"class_path": text}


def _entry(value: Any) -> dict[Any, Any]:
    """The section of a class as a dict, whatever its form; empty if nothing is set."""
    if isinstance(value, str):
        return {"class_path": value}
    return value if isinstance(value, dict) else {}


def _check_class(section: str, value: Any, problems: Problems) -> None:
    entry = _entry(value)
    for key in entry.keys() - {"class_path", "init_args", "dict_kwargs"}:
        problems.add(f"{section}.{shorten(str(key))}: unknown; use class_path and init_args")
    arguments = entry.get("init_args") or {}
    if not isinstance(arguments, dict):
        problems.add(f"{section}.init_args={shown(arguments)}: give them by name")
        return
    with problems:
        cls = find_class(section, entry["class_path"])
        before = len(problems.lines)
        good = values.check_arguments(section, cls, arguments, problems)
        if section == "data" and len(problems.lines) == before:
            try:
                cls(**good)
            except Exception as error:  # importing a user's class may raise anything
                raise values.refused(section, cls, good, error) from None


def find_class(section: str, path: str) -> type:
    """Import the class of a section.

    Raises:
        ConfigurationError: It does not exist, or is not a model or data class.
    """
    where = f"{section}.class_path={shown(path)}"
    return class_paths.imported(where, path, SECTIONS[section])
