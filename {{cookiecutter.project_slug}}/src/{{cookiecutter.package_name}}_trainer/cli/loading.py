"""What the files of a run say about it: its checkpoints by name, its classes, its trained model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, fill_module, read_all, resolve, run_of
from ..checkpoint.left_out import check
from ..checkpoint.run_directory import find_link, is_link
from ..errors import CheckpointError, ConfigurationError, one_line, shown
from ..launch import files, output
from ..module import TrainingModule
from ..options import Options, class_paths, values
from . import config_files, imports
from .arguments import CLASSES


def load_module(run: str | Path, *, averaged: bool = True, trust: bool = False) -> TrainingModule:
    """Create the model of a run, with its class, arguments and trained weights.

    Args:
        run: A run directory, whose newest checkpoint is used; or a checkpoint, such as
            ``"runs/RUN/best"``.
        averaged: Use the average (EMA) of a checkpoint that has one; False: the weights of
            training.
        trust: Import the class also from the working directory, not only from this package and
            installed ones. Modules that are imported already need no trust.

    Returns:
        The module on the CPU, in evaluation mode.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not fit the class.
        ConfigurationError: The run has no configuration, for example because a script has started
            it, or its class cannot be created.

    Example::

        module = load_module("runs/RUN/best")
        with torch.no_grad():
            output = module(inputs)
    """
    path = resolve(run)
    if (section := classes_of(path).get("model")) is None:
        advice = "create the module, and use load_weights"
        raise ConfigurationError(f"{path}: {why_no_model(path)}; {advice}")
    with imports.checked(from_run=not trust):
        module: TrainingModule = class_paths.read("model", section, TrainingModule, {}).create()
    load_weights(module, path, averaged=averaged)
    return module.eval()


def load_weights(module: TrainingModule, run: str | Path, *, averaged: bool = True) -> None:
    """Load the trained weights of a run, or of a checkpoint, into a module.

    ``averaged`` is as in :func:`load_module`.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not fit the module.
    """
    checkpoint = Checkpoint(resolve(run))
    try:
        weights = read_weights(checkpoint, averaged=averaged)
        check(module, weights, checkpoint.path)
        fill_module(module, weights)
    except RuntimeError as error:
        problem = f"does not fit {type(module).__name__} ({one_line(error)})"
        raise CheckpointError(f"{checkpoint.path}: {problem}") from None


def read_weights(checkpoint: Checkpoint, *, averaged: bool) -> dict[str, Any]:
    """Read the whole state dict of a checkpoint's module; prints a line if it is an average."""
    checkpoint.check_contents()
    stored, remarks = checkpoint.weights(averaged)
    for line in remarks:
        output.print_lines(line, error=True)
    return dict(read_all(stored))


def find_checkpoint(sections: Mapping[str, Any]) -> Path | None:
    """The checkpoint that the section ``checkpoint`` refers to; ``None``: initial weights."""
    checkpoint, trainer = sections.get("checkpoint"), sections.get("trainer", {})
    if checkpoint is None:
        trained = "--checkpoint with a run directory or a checkpoint"
        initial = "--checkpoint none for the module's initial weights"
        raise ConfigurationError(f"checkpoint: not given; add {trained}, or {initial}")
    if checkpoint == "none":
        return None
    if not is_link(checkpoint) or Path(checkpoint).exists():
        return resolve_option("checkpoint", checkpoint)
    root, name = trainer.get("default_root_dir"), trainer.get("run_name")
    root = root if isinstance(root, str) else Options.default_root_dir
    folder = Path(values.expand_path("default_root_dir", root))
    if not isinstance(name, str):
        advice = f"Add --trainer.run_name RUN, or give {folder.name}/RUN/{checkpoint}"
        raise ConfigurationError(f"checkpoint={checkpoint}: of which run? {advice}")
    return _resolve(find_link(folder / name, checkpoint))


def resolve_option(name: str, text: str) -> Path:
    """The checkpoint of a path on the command line; ConfigurationError, with the option's name."""
    path = values.expand_path(name, text)
    if not files.pointed(Path(path)).is_dir():
        advice = "give a run directory or a checkpoint"
        raise ConfigurationError(f"{name}={shown(text)}: no such directory; {advice}")
    return _resolve(path)


def _resolve(path: str | Path) -> Path:
    try:
        return resolve(path)
    except CheckpointError as error:
        raise ConfigurationError(error.problems) from None


def classes_of(checkpoint: Path) -> dict[str, Any]:
    """The ``model`` and ``data`` of the run of a checkpoint; none if a script started it."""
    if (run := run_of(checkpoint)) is None or not (run / "config.yaml").is_file():
        return {}
    config = config_files.read(str(run / "config.yaml"))
    classes = {name: item for name in CLASSES if isinstance(item := config.get(name), dict)}
    return {name: item for name, item in classes.items() if isinstance(item.get("class_path"), str)}


def why_no_model(checkpoint: Path) -> str:
    """Why :func:`classes_of` a checkpoint has no model."""
    if (run := run_of(checkpoint)) is None:
        return "it is in no run directory, whose config.yaml would name a model"
    lost = "is missing: a script has started the run, or it was removed"
    return f"{run}/config.yaml {'names no model' if (run / 'config.yaml').is_file() else lost}"
