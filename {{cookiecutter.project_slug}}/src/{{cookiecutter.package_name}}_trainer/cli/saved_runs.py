"""What the files of a run say about it: its checkpoints by name, its model and its data."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import BEST, LAST, find_link, resolve, run_directory, run_of
from ..errors import CheckpointError, ConfigurationError, Problems, shown
from ..options import paths
from . import config_files, mistakes
from .mistakes import CHECKPOINT, SECTIONS

NO_CHECKPOINT = "none"
_ROOT = "runs"


def find_checkpoint(given: str | None, root: Path, run_name: str | None) -> Path | None:
    """The checkpoint that ``--checkpoint`` refers to; ``None``: initial weights.

    Args:
        given: A run directory, a checkpoint, ``best``, ``last`` or ``none``.
        root: Directory that contains run directories.
        run_name: Name of the run of which ``best`` and ``last`` are.

    Raises:
        ConfigurationError: There is none.
    """
    if given is None:
        raise ConfigurationError(
            "checkpoint: not given; add --checkpoint with a run directory or a checkpoint, or "
            "--checkpoint none for the module's initial weights"
        )
    if given == NO_CHECKPOINT:
        return None
    if given in (BEST, LAST) and not Path(given).exists():
        if run_name is None:
            raise ConfigurationError(
                f"checkpoint={given}: of which run? Add --trainer.run_name RUN, or give "
                f"{root.name}/RUN/{given}"
            )
        return _resolve(find_link(root / run_name, given))
    return resolve_given(CHECKPOINT, given)


def resolve_given(name: str, given: str) -> Path:
    """The checkpoint that a path on the command line refers to.

    Args:
        name: Name of the option, for errors.
        given: A run directory or a checkpoint.

    Raises:
        ConfigurationError: There is none.
    """
    path = paths.expand(name, given)
    if not Path(path).is_dir():
        raise ConfigurationError(
            f"{name}={shown(given)}: no such directory; give a run directory or a checkpoint"
        )
    return _resolve(path)


def _resolve(path: str | Path) -> Path:
    try:
        return resolve(path)
    except CheckpointError as error:
        raise ConfigurationError(error.problems) from None


def classes_of(checkpoint: Path) -> dict[str, Any]:
    """The ``model`` and ``data`` sections of the run of a checkpoint; empty if it has none.

    A run that a script has started has none.
    """
    run = run_of(checkpoint)
    if run is None or not (run / "config.yaml").is_file():
        return {}
    found = config_files.read(str(run / "config.yaml"))
    return {
        name: each
        for name in ("model", "data")
        if isinstance(each := found.get(name), Mapping) and isinstance(each.get("class_path"), str)
    }


def reads_config_of_run(arguments: Sequence[str]) -> bool:
    """Whether a ``--config`` of a command line is in a run directory."""
    files = [text for key, text in mistakes.options(arguments, Problems()) if key == "config"]
    folders = (Path(paths.expand("--config", each)).resolve().parent for each in files)
    return any(map(run_directory.is_run, folders))


def with_saved_classes(arguments: Sequence[str]) -> list[str]:
    """Complete a command line without a model by model and data of the checkpoint's run.

    Args:
        arguments: Command-line arguments after the command. Their errors are found elsewhere.

    Raises:
        ConfigurationError: There is no such checkpoint.
    """
    given = mistakes.gather(arguments, [*SECTIONS, CHECKPOINT], Problems())
    checkpoint = given.get(CHECKPOINT)
    if given.get("model") is not None or not isinstance(checkpoint, str):
        return list(arguments)
    trainer = given.get("trainer")
    options: Mapping[str, Any] = trainer if isinstance(trainer, Mapping) else {}
    root = Path(paths.expand("default_root_dir", options.get("default_root_dir", _ROOT)))
    path = find_checkpoint(checkpoint, root, options.get("run_name"))
    saved = classes_of(path) if path is not None else {}
    # First, so that options of the command line replace parts of it.
    words = [(f"--{name}", json.dumps(each)) for name, each in saved.items() if not given.get(name)]
    return [*(word for pair in words for word in pair), *arguments]
