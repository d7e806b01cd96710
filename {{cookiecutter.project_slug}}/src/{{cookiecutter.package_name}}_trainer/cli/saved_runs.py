"""What the files of a run say about it: its checkpoints by name, its model and its data."""

from pathlib import Path
from typing import Any

from ..checkpoint import find_link, is_link, resolve, run_of
from ..errors import CheckpointError, ConfigurationError, shown
from ..options import paths
from . import config_files
from .arguments import CLASSES


def find_checkpoint(given: str | None, root: str, run_name: str | None) -> Path | None:
    """The checkpoint that ``--checkpoint`` refers to; ``None``: initial weights.

    ``given``: a run directory, a checkpoint, ``none``, or ``best``, ``best-VALUE`` or ``last``
    of the run ``run_name`` in ``root``. Raises ConfigurationError if there is none.
    """
    if given is None:
        raise ConfigurationError(
            "checkpoint: not given; add --checkpoint with a run directory or a checkpoint, or "
            "--checkpoint none for the module's initial weights"
        )
    if given == "none":
        return None
    if not is_link(given) or Path(given).exists():
        return resolve_given("checkpoint", given)
    folder = Path(paths.expand("default_root_dir", root))
    if run_name is None:
        raise ConfigurationError(
            f"checkpoint={given}: of which run? Add --trainer.run_name RUN, or give "
            f"{folder.name}/RUN/{given}"
        )
    return _resolve(find_link(folder / run_name, given))


def resolve_given(name: str, given: str) -> Path:
    """The checkpoint of a path on the command line; ConfigurationError, with the option's name."""
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
    """The ``model`` and ``data`` of the run of a checkpoint; none if a script started it."""
    run = run_of(checkpoint)
    if run is None or not (run / "config.yaml").is_file():
        return {}
    found = config_files.read(str(run / "config.yaml"))
    return {
        name: each
        for name in CLASSES
        if isinstance(each := found.get(name), dict) and isinstance(each.get("class_path"), str)
    }
