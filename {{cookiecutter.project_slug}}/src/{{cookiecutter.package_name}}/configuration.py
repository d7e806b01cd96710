"""Reads the command line and its YAML files, and finds every mistake before anything starts.

jsonargparse parses, checks types and makes the objects. It stops at its first error, so once it
has found one, the rest is looked for here: each value is given to it alone.
"""

import argparse
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from . import strategy_help
from .results import Results
from .trainer import DataModule, Trainer, TrainingModule, legacy, redaction
from .trainer.checkpoint import resolve
from .trainer.errors import CheckpointError, ConfigurationError, Problems, nearest

_SECTIONS: dict[str, type] = {"trainer": Trainer, "model": TrainingModule, "data": DataModule}
_CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Run:
    """What a command is to work on."""

    trainer: Trainer
    model: TrainingModule
    data: DataModule | None
    checkpoint: str | None
    results: Results


class _Parser(ArgumentParser):
    """Lists strategies in its help, and writes options of the trainer in today's spelling."""

    def format_help(self, *arguments: Any, **options: Any) -> str:
        # In this order: what is imported for the list would be listed as types of an option too.
        text: str = super().format_help(*arguments, **options)
        return f"{text}\nstrategies:\n{strategy_help.overview()}\n"

    def dump(self, cfg: Namespace, **options: Any) -> str:
        if isinstance(trainer := cfg.get("trainer"), Namespace):
            cfg = cfg.clone()
            for name, value in legacy.translate(trainer.as_dict()).items():
                cfg.trainer[name] = value
        text: str = super().dump(cfg, **options)
        return text


def make_parser(program: str, command: str) -> ArgumentParser:
    """The parser of one of :data:`COMMANDS`."""
    parser = _Parser(
        prog=f"{program} {command}",
        exit_on_error=False,
        allow_abbrev=False,
        description=_HELP[command],
    )
    parser.add_argument(
        "--config", action=ActionConfigFile, help="a YAML file; may be given several times"
    )
    parser.add_class_arguments(Trainer, "trainer")
    parser.add_subclass_arguments(
        TrainingModule, "model", required=True, help="class path of what is trained"
    )
    parser.add_subclass_arguments(
        DataModule, "data", help="class path of where its batches come from"
    )
    if command in _WITH_CHECKPOINT:
        help_text = "a run's directory or a checkpoint, whose weights are used"
        parser.add_argument(f"--{_CHECKPOINT}", type=str | None, default=None, help=help_text)
    _tidy_help(parser)
    return parser


def _tidy_help(parser: ArgumentParser) -> None:
    """Leave older spellings out of the help and of what is written; have strategies explained."""
    older = {f"trainer.{name}" for name in legacy.ARGUMENTS}
    for action in parser._actions:
        if action.dest.removesuffix(".help") in older:
            action.help = argparse.SUPPRESS
        elif action.dest == strategy_help.OPTION:
            action.metavar = "NAME"
            action.help = "show the options and limits of a strategy, and exit"


_HELP = {
    "fit": "Train a model.",
    "validate": "Validate a model on its validation data.",
    "test": "Test a model on its test data.",
    "predict": "Write a model's predictions for its prediction data.",
    "find_batch_size": "Find the largest batch that a device can train on.",
}
COMMANDS = tuple(_HELP)
_WITH_CHECKPOINT = ("validate", "test", "predict")


def describe_command(command: str) -> str:
    """One line on what a command does."""
    return _HELP[command]


def read_run(program: str, command: str, arguments: Sequence[str]) -> Run:
    """Parse, check and make what a command works on.

    Raises:
        ConfigurationError: one line for every mistake, in whatever part.
        SystemExit: after ``--help`` or ``--print_config``.
    """
    parser = make_parser(program, command)
    try:
        parsed = parser.parse_args(list(arguments))
    # jsonargparse lets through what a user's class or file raises while it is looked at.
    except Exception as error:
        raise ConfigurationError(_find_mistakes(arguments, command) or [_one_line(error)]) from None
    if not isinstance(parsed.trainer, Namespace):
        raise ConfigurationError(_find_mistakes(arguments, command))
    problems = Problems()
    made: dict[str, Any] = dict.fromkeys(_SECTIONS)
    # In this order: making the trainer seeds what the model draws its weights from.
    for section in ("trainer", "data", "model"):
        with problems:
            trainer: Trainer | None = made["trainer"]
            is_model = section == "model" and trainer is not None
            with trainer.building() if trainer and is_model else nullcontext():
                made[section] = _make(parser, parsed, section)
    if command == "fit" and made["trainer"] is not None and made["model"] is not None:
        with problems:
            made["trainer"].check_fit(made["model"])
    checkpoint = _checkpoint(parsed.get(_CHECKPOINT), problems)
    problems.raise_any()
    made["trainer"].configuration = parser.dump(parsed, skip_unset=False)
    root, name = Path(parsed.trainer.default_root_dir), parsed.trainer.run_name
    results = Results(checkpoint, root, name)
    return Run(**made, checkpoint=str(checkpoint) if checkpoint else None, results=results)


def _checkpoint(given: str | None, problems: Problems) -> Path | None:
    """The checkpoint itself, once: a run that still trains may have a newer one a moment later."""
    if given is None:
        return None
    if not Path(given).is_dir():
        problems.add(
            f"checkpoint={given!r}: no such directory; give a run's directory or a checkpoint"
        )
        return None
    try:
        return resolve(given)
    except CheckpointError as error:
        problems.lines.extend(error.problems)
        return None


def _make(parser: ArgumentParser, parsed: Namespace, section: str) -> Any:
    only = Namespace({section: parsed.get(section)})
    if section == "trainer":
        return Trainer(**parsed.trainer.as_dict())
    if only[section] is None:
        return None
    alone = ArgumentParser(exit_on_error=False)
    alone.add_subclass_arguments(_SECTIONS[section], section)
    instantiate: Callable[[Namespace], Namespace] = getattr(
        alone, "instantiate", alone.instantiate_classes
    )
    try:
        return instantiate(only)[section]
    except ValueError as error:
        # jsonargparse wraps what the user's class raises into an error about types.
        cause = error.__cause__ or error
    except OSError as error:
        cause = error
    if isinstance(cause, OSError):
        raise ConfigurationError(f"{section}: {cause.strerror}: {cause.filename}") from None
    raise cause


# --- finding every mistake ---------------------------------------------------------------------


def _find_mistakes(arguments: Sequence[str], command: str) -> list[str]:
    problems = Problems()
    given: dict[str, Any] = {}
    for key, text in _options(arguments, problems):
        if key == "config":
            with problems:
                _merge(given, _read_file(text))
            if problems.lines:
                return problems.lines  # what else is missing may stand in the file
        elif key not in (_CHECKPOINT, "print_config", "help"):
            _put(given, key.split("."), _value(text))
    known = {*_SECTIONS, *([_CHECKPOINT] if command in _WITH_CHECKPOINT else [])}
    for key in given.keys() - known:
        problems.add(f"{key}: there is no such section{nearest(str(key), known)}")
    # First, since what they are imported from may register the trainer's strategy.
    for section in ("model", "data"):
        if given.get(section) is not None:
            _check_class(section, given[section], problems)
    _check_trainer(given.get("trainer") or {}, problems)
    if given.get("model") is None:
        problems.add("model: not given; name its class in a config file or by --model CLASS")
    return problems.lines


def _options(arguments: Sequence[str], problems: Problems) -> Iterator[tuple[str, str]]:
    """``--key value`` and ``--key=value`` as pairs."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("--"):
            problems.add(f"{word!r} is no option; options begin with --")
            continue
        key, has_value, value = word[2:].partition("=")
        if not has_value and position < len(arguments) and not arguments[position].startswith("--"):
            value = arguments[position]
            position += 1
        yield key, value


def _read_file(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--config {path}: not YAML ({' '.join(str(error).split())[:200]})"
        ) from None
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"--config {path}: holds no sections; known: {', '.join(_SECTIONS)}"
        )
    return content


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    section, *rest = path
    if not rest:
        if isinstance(value, str) and section in ("model", "data"):
            value = {"class_path": value}
        tree[section] = value
        return
    below = tree.setdefault(section, {})
    if not isinstance(below, dict):
        below = tree[section] = {"class_path": below}
    if section in ("model", "data") and rest[0] not in ("class_path", "init_args"):
        rest = ["init_args", *rest]
    _put(below, rest, value) if len(rest) == 1 else _put_deep(below, rest, value)


def _put_deep(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _check_trainer(values: Any, problems: Problems) -> None:
    if not isinstance(values, dict):
        problems.add("trainer: give its options by name")
        return
    good = _check_values("trainer", Trainer, values, problems)
    with problems:
        Trainer(**good)


def _check_class(section: str, value: Any, problems: Problems) -> None:
    entry = {"class_path": value} if isinstance(value, str) else value
    if not isinstance(entry, dict) or not isinstance(entry.get("class_path"), str):
        problems.add(f"{section}: give a class_path, and what the class takes under init_args")
        return
    for key in entry.keys() - {"class_path", "init_args"}:
        problems.add(f"{section}.{key}: unknown; use class_path and init_args")
    with problems:
        cls = _find_class(section, entry["class_path"])
        before = len(problems.lines)
        good = _check_values(section, cls, entry.get("init_args") or {}, problems)
        if section == "data" and len(problems.lines) == before:
            cls(**good)


def _find_class(section: str, path: str) -> type:
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(
            f"{section}.class_path={path!r}: give its module too: module.{path}"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigurationError(f"{section}.class_path={path!r}: {_one_line(error)}") from None
    base = _SECTIONS[section]
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigurationError(f"{section}.class_path={path!r} is no {base.__name__}")
    return found


def _check_values(
    section: str, cls: type, values: Mapping[str, Any], problems: Problems
) -> dict[str, Any]:
    """Give each value alone to jsonargparse; return those that it takes."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    good: dict[str, Any] = {}
    for name, value in values.items():
        if name not in parameters:
            if not takes_any:
                suggestion = nearest(str(name), parameters)
                problems.add(f"{section}.{name}: there is no such option{suggestion}")
            continue
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, section, skip=set(parameters) - {name})
        try:
            good[name] = parser.parse_object({section: {name: value}})[section][name]
        except Exception:  # whatever jsonargparse finds wrong with this one value
            expected = parameters[name].annotation
            shown = redaction.value({name: value})[name]
            problems.add(
                f"{section}.{name}={shown!r}: expected {inspect.formatannotation(expected)}"
            )
    for name, parameter in parameters.items():
        is_named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and is_named and name not in values:
            problems.add(f"{section}.{name}: not given, and it has no default")
    return good


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{' '.join(lines[:2])[:300]}" if lines else type(error).__name__
