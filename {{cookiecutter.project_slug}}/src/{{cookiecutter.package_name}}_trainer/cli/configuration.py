"""Parse the command line and its YAML files, and report all errors before anything starts.

jsonargparse parses the options, checks their types and creates the objects. It stops at its first
error; ``mistakes.py`` then finds the others.
"""

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings

from ..errors import ConfigurationError, Problems, one_line
from ..module import DataModule, TrainingModule
from ..options import Options, paths, values
from ..options.reading import older
from ..trainer import Trainer
from . import imports, mistakes, saved_runs, strategy_help
from .mistakes import AVERAGED, CHECKPOINT, SECTIONS
from .results import Results

# The help of options is below the fields of a class.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True)
class Work:
    """The objects that a command works on."""

    trainer: Trainer
    model: TrainingModule
    data: DataModule | None
    weights: Mapping[str, Any]
    """Which weights are evaluated: ``checkpoint`` and ``averaged`` of :meth:`Trainer.test`."""
    results: Results


class _Parser(ArgumentParser):
    """Lists strategies in the help, and writes trainer options in their current spelling."""

    def format_help(self, *arguments: Any, **options: Any) -> str:
        # First: otherwise modules imported for the list would be listed as types of an option.
        text: str = super().format_help(*arguments, **options)
        return f"{strategy_help.plain(text)}\nstrategies:\n{strategy_help.overview()}\n"

    def dump(self, cfg: Namespace, **options: Any) -> str:
        if isinstance(trainer := cfg.get("trainer"), Namespace):
            cfg = cfg.clone()
            cfg.trainer = Namespace(older.translate(trainer.as_dict()))
        text: str = super().dump(cfg, **options)
        return text


def make_parser(program: str, command: str) -> ArgumentParser:
    """Create the parser of one of :data:`COMMANDS`."""
    parser = _Parser(
        prog=f"{program} {command}",
        exit_on_error=False,
        allow_abbrev=False,
        description=COMMANDS[command],
    )
    parser.add_argument(
        "--config", action=ActionConfigFile, help="a YAML file; may be given several times"
    )
    parser.add_class_arguments(Options, "trainer")
    for name, kind in older.types.items():
        hidden = argparse.SUPPRESS
        parser.add_argument(f"--trainer.{name}", type=kind, default=hidden, help=hidden)
    parser.add_subclass_arguments(
        TrainingModule, "model", required=True, help="class path of the model"
    )
    parser.add_subclass_arguments(DataModule, "data", help="class path of the data module")
    if command in _WITH_CHECKPOINT:
        help_text = (
            "run directory or checkpoint whose weights are used; best, last: of trainer.run_name; "
            "none: initial weights. Its run's model and data are used unless others are given"
        )
        parser.add_argument(f"--{CHECKPOINT}", type=str | None, default=None, help=help_text)
        help_text = "false: the weights of training, where the checkpoint has their average (EMA)"
        parser.add_argument(f"--{AVERAGED}", type=bool, default=True, help=help_text)
    # For the help only: read_work takes it out.
    trust = "let the configuration of a run name classes of the working directory, too"
    parser.add_argument(imports.TRUST, action="store_true", default=argparse.SUPPRESS, help=trust)

    for action in parser._actions:
        if isinstance(action.default, tuple):
            action.default = list(action.default)  # += extends only lists
    return parser


COMMANDS = {
    "fit": "Train a model.",
    "validate": "Validate a model on its validation data.",
    "test": "Test a model on its test data.",
    "predict": "Write a model's predictions for its prediction data.",
    "find_batch_size": "Find the largest batch that a device can train on.",
    "find_learning_rate": "Find the learning rate at which the loss falls most steeply.",
}
# Not recorded, so that a recorded configuration starts a new run.
_OF_ONE_RUN = ("run_name", "resume", "resume_from_checkpoint", "overwrite")
_WITH_CHECKPOINT = ("validate", "test", "predict")


def read_work(program: str, command: str, given: Sequence[str]) -> Work:
    """Parse and check the arguments, and create the objects of a command.

    Raises:
        ConfigurationError: One line per error, in all sections.
        SystemExit: After ``--help`` or ``--print_config``.
    """
    # On the command line only: a configuration cannot say that it is trusted.
    own = [word for word in given if word != imports.TRUST]
    sections, arguments, problems = list(SECTIONS), own, Problems()
    if command in _WITH_CHECKPOINT:
        sections += [CHECKPOINT, AVERAGED]
        with problems:
            arguments = saved_runs.with_saved_classes(own)
    from_run = arguments != own or saved_runs.reads_config_of_run(own)
    with imports.checked(from_run and own == list(given)):
        if problems.lines:  # there is no such checkpoint
            others = [each for each in mistakes.find(own, sections) if each != mistakes.NO_MODEL]
            raise ConfigurationError([*problems.lines, *others])
        return _read_work(program, command, arguments, sections)


def _read_work(
    program: str, command: str, arguments: Sequence[str], sections: Sequence[str]
) -> Work:
    shapes = Problems()
    mistakes.gather(arguments, sections, shapes)
    if shapes.lines:
        raise ConfigurationError(mistakes.find(arguments, sections))
    parser = make_parser(program, command)
    try:
        parsed = parser.parse_args(_with_expanded_files(arguments))
    # Importing a user's class or file may raise anything, which jsonargparse does not catch.
    except Exception as error:
        raise ConfigurationError(mistakes.find(arguments, sections) or [one_line(error)]) from None
    problems = Problems()
    made: dict[str, Any] = dict.fromkeys(SECTIONS)
    # The trainer first: creating it sets the seed with which the model initializes its weights.
    for section in ("trainer", "data", "model"):
        with problems:
            trainer: Trainer | None = made["trainer"]
            is_model = section == "model" and trainer is not None
            with trainer.building() if trainer and is_model else nullcontext():
                made[section] = _make(parser, parsed, section)
    if command == "fit" and made["trainer"] is not None and made["model"] is not None:
        with problems:
            made["trainer"].check_fit(made["model"])
    checkpoint, name = None, parsed.trainer.run_name
    if command in _WITH_CHECKPOINT and made["trainer"] is not None:
        with problems:  # once: a running training may write a newer one at any time
            root = made["trainer"].default_root_dir
            checkpoint = saved_runs.find_checkpoint(parsed.get(CHECKPOINT), root, name)
    problems.raise_any()
    for own in _OF_ONE_RUN:
        parsed.trainer.pop(own, None)
    made["trainer"].configuration = parser.dump(parsed, skip_unset=False)
    # Absolute, like the trainer's: user code may change the working directory.
    results = Results(checkpoint, Path(made["trainer"].default_root_dir).absolute(), name)
    path = str(checkpoint) if checkpoint else None
    weights = {CHECKPOINT: path, AVERAGED: parsed.get(AVERAGED, True)}
    return Work(**made, weights=weights, results=results)


def _with_expanded_files(arguments: Sequence[str]) -> list[str]:
    """Expand ``~`` and variables in the arguments of ``--config``."""
    words = list(arguments)
    for position, word in enumerate(words):
        option, has_value, value = word.partition("=")
        if option != "--config":
            continue
        if has_value:
            words[position] = f"{option}={paths.expand(option, value)}"
        else:
            words[position + 1] = paths.expand(option, words[position + 1])
    return words


def _make(parser: ArgumentParser, parsed: Namespace, section: str) -> Any:
    only = Namespace({section: parsed.get(section)})
    if section == "trainer":
        return Trainer(**parsed.trainer.as_dict())
    if only[section] is None:
        return None
    cls = mistakes.find_class(section, only[section].class_path)
    given = dict((only[section].get("init_args") or Namespace()).items(branches=True))
    expected, parameters = values.hints(cls), inspect.signature(cls).parameters
    problems = Problems()
    for name, value in given.items():  # jsonargparse takes None for any type
        is_default = name in parameters and parameters[name].default is None
        if value is None and not is_default and not values.fits(expected.get(name, Any), None):
            problems.add(values.refusal(f"{section}.{name}", value, expected[name]))
    problems.raise_any()
    return create(section, cls, only)


def create(section: str, cls: type, given: Namespace) -> Any:
    """Create the object of a parsed section.

    Raises:
        ConfigurationError: Its class refuses its arguments.
    """
    alone = ArgumentParser(exit_on_error=False)
    alone.add_subclass_arguments(SECTIONS[section], section)
    instantiate: Callable[[Namespace], Namespace] = getattr(
        alone, "instantiate", alone.instantiate_classes
    )
    try:
        return instantiate(given)[section]
    except Exception as error:
        # jsonargparse wraps exceptions of the user's class in a type error.
        cause = error.__cause__ if isinstance(error, ValueError) and error.__cause__ else error
        arguments = (given[section].get("init_args") or Namespace()).as_dict()
        raise values.refused(section, cls, arguments, cause) from None
