"""Read the command line and its YAML files, and report all errors before anything starts."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from .. import strategies
from ..checkpoint import run_directory
from ..errors import Problems, foreign, shorten
from ..launch import output, reports
from ..module import DataModule, TrainingModule
from ..options import Options, class_paths, reading, values
from ..run import plan
from ..trainer import Trainer
from . import arguments, config_files, imports, loading
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
_OF_ONE_RUN = ("run_name", "resume", "overwrite")  # not recorded, to start a new run
_HELP = ("-h", "--help", "--model.help", "--data.help")
_UNCHECKED = "unchecked"
_AUTO = (
    "ddp for several devices or processes, ddp_notebook for them in a notebook, else single_device"
)
# The help of options is below the fields of a class.
set_parsing_settings(docstring_parse_attribute_docstrings=True)
foreign.load()


@dataclass(frozen=True)
class Work:
    trainer: Trainer
    model: TrainingModule
    data: DataModule | None
    weights: Mapping[str, Any]  # ``checkpoint`` and ``averaged`` of :meth:`Trainer.test`
    results: Results


class _Parser(ArgumentParser):
    def format_help(self, *arguments: Any, **options: Any) -> str:
        # First: otherwise modules imported for the list would be listed as types of an option.
        with warnings.catch_warnings(action="ignore"):  # of classes of older names
            text: str = super().format_help(*arguments, **options)
        return f"{_plain(text)}\nstrategies:\n{overview()}\n"


def _help_parser(program: str, command: str) -> ArgumentParser:
    parser = _Parser(
        prog=f"{program} {command}",
        exit_on_error=False,
        print_config=None,  # its help is of flags that are not taken
        description=COMMANDS[command],
    )
    help_text = "a YAML file; may be given several times"
    parser.add_argument("--config", action=ActionConfigFile, help=help_text)
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
    help_text = (
        "print the configuration, or what is refused before processes start: what optimizers, "
        f"loaders or checkpoints contain is not read; ={_UNCHECKED}: without creating the model"
    )
    parser.add_argument(f"--{arguments.PRINT}", nargs="?", help=help_text)
    trust = "let the configuration of a run name classes of the working directory, too"
    parser.add_argument(imports.TRUST, action="store_true", help=trust)
    return parser


@dataclass
class Checked:
    """Valid sections: the trainer's options, the classes, and the checkpoint to load."""

    trainer: dict[str, Any]
    classes: dict[str, class_paths.Specified[Any]]
    checkpoint: Path | None
    averaged: bool


def read_work(program: str, command: str, argv: Sequence[str]) -> Work:
    """Create the objects of a command, as :func:`read_sections`; one line per error."""
    problems = Problems()
    with read_sections(program, command, argv, problems) as checked:
        work = _create(command, checked, problems)
    if work.trainer.is_global_zero and not reports.is_reported():
        # Those of the command line only: a file may serve several commands.
        keys = [f"{key}.".split(".") for key, _ in arguments.split(argv, Problems())]
        names = {key[1].removesuffix("+"): None for key in keys if key[0] == "trainer"}
        if unused := reading.unused(command, names):
            output.print_once(f"note: {command} does not use {', '.join(unused)}")
    return work


@contextmanager
def read_sections(
    program: str, command: str, argv: Sequence[str], problems: Problems
) -> Iterator[Checked]:
    """Parse and check the arguments of a command; in the context, its objects may be created."""
    # On the command line only: a configuration cannot say that it is trusted.
    words = [word for word in argv if word != imports.TRUST]
    for position, word in enumerate(words):
        if word.partition("=")[0] in _HELP:
            _help_parser(program, command).parse_args(words[position : position + 2])  # exits
    options = list(arguments.split(words, problems))
    evaluation = ("checkpoint", "averaged") if command in _WITH_CHECKPOINT else ()
    files = [Path(values.expand_path("--config", text)) for key, text in options if key == "config"]
    checkpoint = None
    is_of_run = any(run_directory.is_run(file.resolve().parent) for file in files)
    with imports.checked(is_of_run and words == list(argv)):
        sections = arguments.gather(options, ["trainer", *BASES, *evaluation], problems)
    if evaluation:
        with problems:
            checkpoint = loading.find_checkpoint(sections)
            is_of_run |= _add_classes_of(checkpoint, sections)
    with imports.checked(is_of_run and words == list(argv)):
        checked = _check(sections, checkpoint, problems)
        if (how := dict(options).get(arguments.PRINT)) is not None:
            if how not in ("", _UNCHECKED):
                problems.add(f"--{arguments.PRINT}={shorten(how)}: nothing, or {_UNCHECKED}")
            problems.raise_any()
            if not how:
                # All checks of fit but those of its devices.
                _made(command, checked, problems, plan.make_elsewhere, plan.check_module)
            output.print_lines(_resolved(checked).removesuffix("\n"), is_result=True)
            sys.exit(0)
        yield checked


def _add_classes_of(checkpoint: Path | None, sections: dict[str, Any]) -> bool:
    """Add the classes of the checkpoint's run if no model is given; whether it did."""
    if checkpoint is None or "class_path" in (sections.get("model") or {}):
        return False
    saved = loading.classes_of(checkpoint)
    for name, section in saved.items():
        chosen = sections.get(name) or {}
        sections[name] = chosen if "class_path" in chosen else arguments.merged(section, chosen)
    return bool(saved)


def _check(sections: Mapping[str, Any], checkpoint: Path | None, problems: Problems) -> Checked:
    classes = dict[str, class_paths.Specified[Any]]()
    for name, base in BASES.items():  # first: their modules may register the trainer's strategy
        if sections.get(name) is not None:
            with problems:
                classes[name] = class_paths.read(name, sections[name], base, {})
    today, options = values.hints(Options), sections.get("trainer", {})
    known = {**today, **foreign.types}
    trainer = values.convert("trainer.", known, options, problems, values.fitting, today)
    averaged = True
    with problems:
        averaged = values.fitting("averaged", bool, sections.get("averaged", True))
    # The model may be that of a checkpoint that is not found.
    is_lost = checkpoint is None and sections.get("checkpoint") not in (None, "none")
    is_known = any(line.startswith(("model:", "checkpoint")) for line in problems.lines)
    if sections.get("model") is None and not (is_known or is_lost):
        why = f", and {loading.why_no_model(checkpoint)}" if checkpoint else ""
        problems.add(f"model: not given{why}; name its class in a config file or by --model CLASS")
    return Checked(trainer, classes, checkpoint, averaged)


def _create(command: str, checked: Checked, problems: Problems) -> Work:
    # Absolute, like the trainer's: user code may change the working directory.
    started_in, path = Path.cwd(), checked.checkpoint and checked.checkpoint.absolute()
    made = _made(command, checked, problems, lambda options: Trainer(**options), Trainer.check_fit)
    made["trainer"].configuration = _resolved(checked, _OF_ONE_RUN)
    root = made["trainer"].default_root_dir.absolute()
    weights = {"checkpoint": str(path) if path else None, "averaged": checked.averaged}
    results = Results(path, root, checked.trainer.get("run_name"), started_in)
    if command != "fit":
        results.check()
    return Work(**made, weights=weights, results=results)


def _made(
    command: str,
    checked: Checked,
    problems: Problems,
    make: Callable[[Mapping[str, Any]], Any],
    check_fit: Callable[[Any, TrainingModule], None],
) -> dict[str, Any]:
    """Create the objects of a command; ``make``: a trainer, or a plan of it on another machine."""
    # After an error, a model that may take minutes to create is not.
    names = [name for name in ("data", "model") if name == "data" or not problems.lines]
    made: dict[str, Any] = {"data": None}
    with problems:  # the trainer first: it sets the seed with which the model is initialized
        made["trainer"] = make(checked.trainer)
    for name in names:
        if name in checked.classes:
            meta = made["trainer"].building() if name == "model" and "trainer" in made else None
            with problems, meta or nullcontext():
                made[name] = checked.classes[name].create()
    if command == "fit" and made.keys() >= {"trainer", "model"}:
        with problems:
            check_fit(made["trainer"], made["model"])
    problems.raise_any()
    return made


def _resolved(checked: Checked, without: Sequence[str] = ()) -> str:
    """The whole configuration with defaults, in today's spelling."""
    defaults = {field.name: field.default for field in fields(Options)}
    trainer = defaults | reading.SEEDED | foreign.translate(checked.trainer)
    kept = {name: value for name, value in trainer.items() if name not in without}
    classes = {name: specified.recorded() for name, specified in checked.classes.items()}
    return config_files.dump({"trainer": kept, **classes})


def overview() -> str:
    """All registered strategies, one line each."""
    lines = {"auto": _AUTO}
    for name in strategies.names():
        entry = strategies.find(name)
        first = entry.summary or (inspect.getdoc(entry.cls) or "").split("\n\n")[0]
        lines[name] = " ".join(_plain(first).split()).rstrip(".")
    width = max(map(len, lines)) + 2
    return "\n".join(f"  {name:{width}}{line}" for name, line in lines.items())


def _plain(text: str) -> str:
    """A text without the marks of docstrings and of types."""
    text = re.sub(r"Annotated\[(\w+),\s+([^\]]*)\]", r"\1 \2", text)
    return re.sub(r":\w+:`(?:[^`]*[.~])?([^`]*)`", r"\1", text).replace("``", "")
