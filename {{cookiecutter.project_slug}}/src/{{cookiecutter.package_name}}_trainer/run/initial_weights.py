"""The weights that a new run starts from."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, fill_module, left_out, resolve, run_choice
from ..checkpoint.stored_tensors import find_tensors
from ..errors import CheckpointError, ConfigurationError, Problems, listed, shown
from ..launch import collectives, files
from ..module import TrainingModule
from ..options import Options

_SUFFIX = ".safetensors"


def check(options: Options, problems: Problems) -> None:
    """Check whether there are such weights; ``problems`` collects one line per error."""
    with problems:
        _source(Path(str(options.weights)))
    if options.checkpoint_weights == "trainable":
        both = "weights and checkpoint_weights='trainable'"
        reason = "a resume would not have those of weights that are frozen"
        problems.add(f"{both}: {reason}; load these in __init__ of the module, or leave one out")


def check_module(options: Options, started_in: Path, module: TrainingModule) -> None:
    _fitting(module, _read(_source(started_in / str(options.weights)))[0], options)


def load(options: Options, started_in: Path, module: TrainingModule) -> list[str]:
    """Load the weights into a module that no strategy has changed yet; return lines to print."""
    # Once: a running training may write a newer checkpoint at any time.
    path = Path(collectives.broadcast(str(_source(started_in / str(options.weights)))))
    if not _has_files(path):
        run_choice.open_checkpoint(path)
    weights, remarks = _read(path)
    fitting, others = _fitting(module, weights, options)
    state, named = module.state_dict(), module.named_parameters(remove_duplicate=False)
    meta = {name: p for name, p in named if p.is_meta}
    # By all names of a shared parameter, so that no layer that has it initializes it.
    values = {id(p): fitting[name] for name, p in meta.items() if name in fitting}
    waiting = {name: values[id(p)] for name, p in meta.items() if id(p) in values}
    here = {name: value for name, value in fitting.items() if name not in waiting}
    fill_module(module, here, strict=False)
    module.trainer_state = replace(module.trainer_state, weights=waiting)
    line = f"weights: {len(fitting)} of {len(state)} from {files.shown(path, started_in)}"
    return [line, *remarks] + [f"weights that do not fit are left out: {others}"] * bool(others)


def leave_to(checkpoint: Checkpoint, module: TrainingModule) -> None:
    """Check omitted parameters; have the strategy skip the initialization of those it loads."""
    if not all(parameter.requires_grad for parameter in module.parameters()):
        left_out.check(module, checkpoint.stored_state().get("model"), checkpoint.path)
    if any(parameter.is_meta for parameter in module.parameters()):
        names = checkpoint.weights(averaged=False)[0]
        module.trainer_state = replace(module.trainer_state, weights=dict.fromkeys(names))


def _has_files(path: Path) -> bool:
    """Whether a path is a file, or a directory of files, rather than a checkpoint or a run."""
    return path.is_file() or (any(path.glob(f"*{_SUFFIX}")) and not (path / "state.json").exists())


def _source(path: Path) -> Path:
    if (path.is_file() and path.suffix != _SUFFIX) or not path.exists():
        kind = "not a safetensors file" if path.exists() else "no such file or directory"
        advice = f"give a run directory, a checkpoint, or a {_SUFFIX} file"
        raise ConfigurationError(f"weights={shown(str(path))}: {kind}; {advice}")
    with _naming_the_option():
        return path if _has_files(path) else resolve(path)


def _read(source: Path) -> tuple[dict[str, Any], list[str]]:
    """Weights by name, not read yet, and lines to print."""
    with _naming_the_option():
        if _has_files(source):
            return dict(find_tensors(source)), []
        return Checkpoint(source).weights()


@contextlib.contextmanager
def _naming_the_option() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise ConfigurationError([f"weights: {line}" for line in error.problems]) from None


def _fitting(
    module: TrainingModule, weights: Mapping[str, Any], options: Options
) -> tuple[dict[str, Any], str]:
    """The weights that a module takes, and in words which ones do not fit."""
    state, fitting = module.state_dict(), dict[str, Any]()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    with _naming_the_option():
        left_out.check(module, weights, "weights")
    present = {id(parameter) for name, parameter in parameters.items() if name in weights}
    missing, different = [], []
    for name, value in state.items():
        if isinstance(weights.get(name), str) and name in parameters:
            continue  # left out
        if name in weights:
            stored, here = _shape(weights[name]), _shape(value)
            if stored == here:
                fitting[name] = weights[name]
            else:
                different.append(f"{name} {stored}, here {here}")
        elif id(parameters.get(name)) not in present:  # not another name of a shared parameter
            missing.append(name)
    unexpected = [name for name in weights if name not in state]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": different}
    others = "; ".join(f"{kind}: {listed(names, 5)}" for kind, names in kinds.items() if names)
    if others and (options.weights_strict or not fitting):
        hint = "weights_strict=False uses the others" if fitting else "none fits"
        raise ConfigurationError(
            f"weights={shown(options.weights)} do not fit {type(module).__name__}: {others}; {hint}"
        )
    return fitting, others


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)
