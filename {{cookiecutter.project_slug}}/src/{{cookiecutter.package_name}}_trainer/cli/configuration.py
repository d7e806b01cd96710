"""Read the command line and its YAML files, and report all errors before anything starts."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from ..checkpoint import run_directory
from ..errors import Problems
from ..module import DataModule, TrainingModule
from ..options import Options, class_paths, paths, values
from ..options.class_paths import Specified
from ..options.reading import older
from ..trainer import Trainer
from . import arguments, config_files, imports, saved_runs, strategy_help
from .results import Results

COMMANDS = {
    "fit": "Train a model.",
    "validate": "Validate a model on its validation data.",
    "test": "Test a model on its test data.",
    "predict": "Write a model's predictions for its prediction data.",
    "find_batch_size": "Find the largest batch that a device can train on.",
    "find_learning_rate": "Find the learning rate at which the loss falls most steeply.",
}
BASES: dict[str, type] = {"model": TrainingModule, "data": DataModule}
_WITH_CHECKPOINT = ("validate", "test", "predict")
# Not recorded, so that a recorded configuration starts a new run.
_OF_ONE_RUN = ("run_name", "resume", "overwrite")
_NO_MODEL = "model: not given; name its class in a config file or by --model CLASS"
# The help of options is below the fields of a class.
set_parsing_settings(docstring_parse_attribute_docstrings=True)
older.load()


@dataclass(frozen=True)
class Work:
    """The objects that a command works on."""

    trainer: Trainer
    model: TrainingModule
    data: DataModule | None
    weights: Mapping[str, Any]
    """Which weights are evaluated: ``checkpoint`` and ``averaged`` of :meth:`Trainer.test`."""
    results: Results
    shows_progress: bool


class _Parser(ArgumentParser):
    """Lists strategies in the help."""

    def format_help(self, *arguments: Any, **options: Any) -> str:
        # First: otherwise modules imported for the list would be listed as types of an option.
        text: str = super().format_help(*arguments, **options)
        return f"{strategy_help.plain(text)}\nstrategies:\n{strategy_help.overview()}\n"


def _help_parser(program: str, command: str) -> ArgumentParser:
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
    for name, help_text in (("model", "class path of the model"), ("data", "of the data module")):
        parser.add_subclass_arguments(BASES[name], name, help=help_text)
    if command in _WITH_CHECKPOINT:
        help_text = (
            "run directory or checkpoint whose weights are used; best, last: of trainer.run_name; "
            "none: initial weights. Its run's model and data are used unless others are given"
        )
        parser.add_argument("--checkpoint", help=help_text)
        help_text = "false: the weights of training, where the checkpoint has their average (EMA)"
        parser.add_argument("--averaged", type=bool, default=True, help=help_text)
    trust = "let the configuration of a run name classes of the working directory, too"
    parser.add_argument(imports.TRUST, action="store_true", help=trust)
    return parser


@dataclass
class Checked:
    """What is right in the sections: the trainer's options, classes, and which weights are used."""

    trainer: dict[str, Any]
    classes: dict[str, Specified[Any]]
    checkpoint: Path | None
    averaged: bool


def read_work(program: str, command: str, given: Sequence[str]) -> Work:
    """Parse and check the arguments, and create the objects of a command.

    Raises:
        ConfigurationError: One line per error, in all sections.
        SystemExit: After ``--help`` or ``--print_config``.
    """
    problems = Problems()
    with read_sections(program, command, given, problems) as checked:
        return _create(command, checked, problems)


@contextmanager
def read_sections(
    program: str, command: str, given: Sequence[str], problems: Problems
) -> Iterator[Checked]:
    """Parse and check the arguments of a command; in the context, its objects may be created.

    Args:
        program: For the help.
        command: One of :data:`COMMANDS`.
        given: The words after the command.
        problems: Collects one line per error.

    Raises:
        ConfigurationError: A file cannot be read.
        SystemExit: After ``--help`` or ``--print_config``.
    """
    # On the command line only: a configuration cannot say that it is trusted.
    words = [word for word in given if word != imports.TRUST]
    for position, word in enumerate(words):
        if word == "-h" or word.partition("=")[0].endswith(("--help", ".help")):
            _help_parser(program, command).parse_args(words[position : position + 2])  # exits
    options = list(arguments.split(words, problems))
    evaluation = ("checkpoint", "averaged") if command in _WITH_CHECKPOINT else ()
    checkpoint, is_of_run = None, any(map(_is_in_run, options))
    with imports.checked(is_of_run and words == list(given)):
        sections = arguments.gather(options, ["trainer", *BASES, *evaluation], problems)
    if evaluation:
        with problems:
            checkpoint = _find_checkpoint(sections)
            is_of_run |= _add_classes_of(checkpoint, sections)
    with imports.checked(is_of_run and words == list(given)):
        checked = _check(sections, checkpoint, problems)
        if arguments.PRINT in dict(options):
            problems.raise_any()
            sys.stdout.write(_resolved(checked))
            sys.exit(0)
        yield checked


def _is_in_run(option: tuple[str, str]) -> bool:
    """Whether an option is a file in a run directory."""
    key, text = option
    if key != "config":
        return False
    return run_directory.is_run(Path(paths.expand("--config", text)).resolve().parent)


def _find_checkpoint(sections: Mapping[str, Any]) -> Path | None:
    trainer = sections.get("trainer", {})
    root, name = trainer.get("default_root_dir"), trainer.get("run_name")
    return saved_runs.find_checkpoint(
        sections.get("checkpoint"),
        root if isinstance(root, str) else str(Options.default_root_dir),
        name if isinstance(name, str) else None,
    )


def _add_classes_of(checkpoint: Path | None, sections: dict[str, Any]) -> bool:
    """Add the classes of the checkpoint's run if no model is given; whether it did."""
    if checkpoint is None or "class_path" in (sections.get("model") or {}):
        return False
    saved = saved_runs.classes_of(checkpoint)
    for name, section in saved.items():
        own = sections.get(name) or {}
        sections[name] = own if "class_path" in own else arguments.merged(section, own)
    return bool(saved)


def _check(sections: Mapping[str, Any], checkpoint: Path | None, problems: Problems) -> Checked:
    found = dict[str, Specified[Any]]()
    # First, because the modules of these classes may register the trainer's strategy.
    for name, base in BASES.items():
        if sections.get(name) is not None:
            with problems:
                found[name] = class_paths.read(name, sections[name], base, {})
    today, options = values.hints(Options), sections.get("trainer", {})
    expected = {**today, **older.types}
    trainer = values.convert("trainer.", expected, options, problems, values.fitting, today)
    averaged = True
    with problems:
        averaged = values.fitting("averaged", bool, sections.get("averaged", True))
    # The model may be that of a checkpoint that is not found.
    if sections.get("model") is None and not any(
        line.startswith(("model:", "checkpoint")) for line in problems.lines
    ):
        problems.add(_NO_MODEL)
    return Checked(trainer, found, checkpoint, averaged)


def _create(command: str, checked: Checked, problems: Problems) -> Work:
    # After an error, a model that may take minutes to create is not.
    names = [name for name in ("data", "model") if name == "data" or not problems.lines]
    made: dict[str, Any] = {"data": None}
    # The trainer first: creating it sets the seed with which the model initializes its weights.
    with problems:
        made["trainer"] = Trainer(**checked.trainer)
    for name in names:
        if name in checked.classes:
            meta = made["trainer"].building() if name == "model" and "trainer" in made else None
            with problems, meta or nullcontext():
                made[name] = checked.classes[name].create()
    if command == "fit" and made.keys() >= {"trainer", "model"}:
        with problems:
            made["trainer"].check_fit(made["model"])
    problems.raise_any()
    made["trainer"].configuration = _resolved(checked, _OF_ONE_RUN)
    # Absolute, like the trainer's: user code may change the working directory.
    root, path = made["trainer"].default_root_dir.absolute(), checked.checkpoint
    weights = {"checkpoint": str(path) if path else None, "averaged": checked.averaged}
    results = Results(path, root, checked.trainer.get("run_name"))
    shows = bool(checked.trainer.get("enable_progress_bar", Options.enable_progress_bar))
    return Work(**made, weights=weights, results=results, shows_progress=shows)


def _resolved(checked: Checked, without: Sequence[str] = ()) -> str:
    """The whole configuration with defaults, in today's spelling."""
    defaults = {each.name: each.default for each in fields(Options)}
    trainer = defaults | older.translate(checked.trainer)
    sections: dict[str, Any] = {
        "trainer": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in trainer.items()
            if name not in without
        }
    }
    sections |= {name: found.recorded() for name, found in checked.classes.items()}
    return config_files.dump(sections)
