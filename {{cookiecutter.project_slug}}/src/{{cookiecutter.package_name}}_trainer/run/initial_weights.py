"""The weights that a new run starts from."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, find_tensors, read_all, resolve, run_choice
from ..errors import CheckpointError, ConfigurationError, Problems, shown
from ..launch import collectives, files
from ..module import TrainingModule
from ..options import Options

_SUFFIX = ".safetensors"
_MOST_NAMES = 5


def check(options: Options, problems: Problems) -> None:
    """Check whether there are such weights; ``problems`` collects one line per error."""
    if options.weights is not None and options.resume is None:
        with problems:
            _source(Path(options.weights))


def check_module(
    options: Options, started_in: Path, module: TrainingModule, problems: Problems
) -> None:
    """Check whether the weights fit a module; ``problems`` collects one line per error.

    A run that may resume may have no use for them.
    """
    if options.weights is not None and options.resume is None:
        with problems:
            _fitting(module, _read(_source(started_in / options.weights))[0], options)


def load(options: Options, started_in: Path, module: TrainingModule) -> list[str]:
    """Load the weights of the options into a module that no strategy has changed yet.

    Those of parameters on the meta device are loaded when a strategy allocates them.

    Returns:
        Lines to print.

    Raises:
        UserError: They cannot be read, or do not fit.
    """
    if options.weights is None:
        return []
    # Once: a running training may write a newer checkpoint at any time.
    path = Path(collectives.broadcast(str(_source(started_in / options.weights))))
    if not _has_files(path):
        run_choice.whole(path)
    weights, remarks = _read(path)
    fitting, others = _fitting(module, weights, options)
    own = module.state_dict()
    waiting = {name: each for name, each in fitting.items() if getattr(own[name], "is_meta", False)}
    here = {name: each for name, each in fitting.items() if name not in waiting}
    module.load_state_dict(read_all(here), strict=False)
    module.trainer_state = replace(module.trainer_state, weights=waiting)
    shown_path = files.shown(path, started_in)
    lines = [f"weights: {len(fitting)} of {len(own)} from {shown_path}", *remarks]
    return lines + ([f"weights that do not fit are left out: {others}"] if others else [])


def _has_files(path: Path) -> bool:
    """Whether a path is a file, or a directory of files, rather than a checkpoint or a run."""
    return path.is_file() or (any(path.glob(f"*{_SUFFIX}")) and not (path / "state.json").exists())


def _source(path: Path) -> Path:
    if (path.is_file() and path.suffix != _SUFFIX) or not path.exists():
        kind = "not a safetensors file" if path.exists() else "no such file or directory"
        raise ConfigurationError(
            f"weights={shown(str(path))}: {kind}; give a run directory, a checkpoint, or a "
            f"{_SUFFIX} file"
        )
    try:
        return path if _has_files(path) else resolve(path)
    except CheckpointError as error:
        raise ConfigurationError([f"weights: {line}" for line in error.problems]) from None


def _read(source: Path) -> tuple[dict[str, Any], list[str]]:
    """Weights by name, not read yet, and lines to print."""
    try:
        if _has_files(source):
            return dict(find_tensors(source)), []
        return Checkpoint(source).weights()
    except CheckpointError as error:
        raise ConfigurationError([f"weights: {line}" for line in error.problems]) from None


def _fitting(
    module: TrainingModule, weights: Mapping[str, Any], options: Options
) -> tuple[dict[str, Any], str]:
    """The weights that a module takes, and in words which ones do not fit.

    Raises:
        ConfigurationError: All must fit and some do not, or none fits.
    """
    own = module.state_dict()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    given = {id(each) for name, each in parameters.items() if name in weights}
    common = [name for name in own if name in weights]
    shapes = {name: (_shape(weights[name]), _shape(own[name])) for name in common}
    different = {name: each for name, each in shapes.items() if each[0] != each[1]}
    kinds = {
        # One of several names of a shared parameter is enough.
        "missing": (n for n in own if n not in weights and id(parameters.get(n)) not in given),
        "unexpected": (name for name in weights if name not in own),
        "of another shape": (f"{name} {a}, here {b}" for name, (a, b) in different.items()),
    }
    listed = {kind: _listed(names) for kind, names in kinds.items()}
    others = "; ".join(f"{kind}: {names}" for kind, names in listed.items() if names)
    fitting = {name: weights[name] for name in common if name not in different}
    if others and (options.weights_strict or not fitting):
        hint = "weights_strict=False uses the others" if fitting else "none fits"
        raise ConfigurationError(
            f"weights={shown(options.weights)} do not fit {type(module).__name__}: {others}; {hint}"
        )
    return fitting, others


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    rest = len(found) - _MOST_NAMES
    return ", ".join(found[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
