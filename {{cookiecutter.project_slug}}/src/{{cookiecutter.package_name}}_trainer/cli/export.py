"""The command ``export``: write the model of a run into a file for use without this code."""

import argparse
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint, run_of, tensor_files
from ..errors import ConfigurationError, Problems, UserError, one_line, shown
from ..launch import files, output
from ..module import TrainingModule, hooks
from ..options import values
from . import arguments, imports
from .loading import classes_of, load_module, read_weights, resolve_option

COMMAND = "export"
HELP = "Write the weights or the model of a run into a file."
_ONNX_BYTES = 2**31  # ONNX files are protobuf messages, which cannot be larger


def run(program: str, words: Sequence[str]) -> None:
    """Run the command with the words after it; ``program`` is for its help."""
    args = _parser(program).parse_args(words)
    path, file = _checked_paths(args, _FORMATS[args.format])
    checkpoint, averaged = Checkpoint(path), args.averaged == "true"
    model = classes_of(path).get("model")
    metadata = {"class_path": str(model["class_path"])} if model else {}
    metadata["step"] = str(checkpoint.step)
    if args.format == "safetensors":
        exported: Any = read_weights(checkpoint, averaged=averaged)
    else:
        exported = load_module(path, averaged=averaged, trust=args.trust)
    try:
        with files.replacing(file) as beside:
            _FORMATS[args.format].write(exported, metadata, beside)
            with beside.open("rb") as written:
                os.fsync(written.fileno())
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({one_line(error)})") from None
    output.print_lines(f"step {checkpoint.step} exported to {files.shown(file, Path.cwd())}")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = arguments.Parser(prog=f"{program} {COMMAND}", description=HELP, allow_abbrev=False)
    run = "a run directory, or a checkpoint, such as runs/RUN/best"
    parser.add_argument("run", metavar="RUN", help=run)
    formats = "; ".join(f"{name}: {kind.content}" for name, kind in _FORMATS.items())
    parser.add_argument("--format", required=True, choices=_FORMATS, help=formats)
    where = "the file; default: exported-step-N in the run directory"
    parser.add_argument("--output", metavar="FILE", help=where)
    averaged = "false: the weights of training, where the checkpoint has an average of them (EMA)"
    parser.add_argument("--averaged", choices=("true", "false"), default="true", help=averaged)
    trust = "let the configuration of the run name a class of the working directory, too"
    parser.add_argument(imports.TRUST, action="store_true", help=trust)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


class _Format(NamedTuple):
    suffix: str
    content: str
    write: Callable[[Any, dict[str, str], Path], None]  # weights or a module, with metadata
    packages: tuple[str, ...] = ()


def _checked_paths(args: argparse.Namespace, kind: _Format) -> tuple[Path, Path]:
    problems = Problems()
    checkpoint = file = None
    if missing := [name for name in kind.packages if importlib.util.find_spec(name) is None]:
        install = f"make {args.format}, or pip install '.[{args.format}]'"
        problems.add(f"--format {args.format} needs {' and '.join(missing)}: {install}")
    with problems:
        checkpoint = resolve_option("RUN", args.run)
    with problems:
        if args.output is not None:
            file = Path(values.expand_path("--output", args.output))
            if file.suffix != kind.suffix:
                written = f"--format {args.format} writes {kind.suffix} files"
                advice = f"name it {file.stem}{kind.suffix}"
                raise ConfigurationError(f"--output={shown(args.output)}: {written}; {advice}")
        elif checkpoint is not None:
            if (directory := run_of(checkpoint)) is None:
                raise ConfigurationError(f"{checkpoint}: is not in a run; add --output FILE")
            file = directory / f"exported-{checkpoint.name}{kind.suffix}"
        if file is not None:
            if file.is_dir() or (file.exists() and not args.overwrite):
                other = "name another file"
                instead = other if file.is_dir() else "add --overwrite, or give --output FILE"
                raise ConfigurationError(f"{file}: exists; {instead}")
            if not os.access(file.parent, os.W_OK):
                folder = f"{file.parent} is not a directory that can be written to"
                raise ConfigurationError(f"{file}: {folder}")
    problems.raise_any()
    return checkpoint or Path(), file or Path()


def _write_weights(weights: dict[str, Any], metadata: dict[str, str], file: Path) -> None:
    tensors = {name: value for name, value in weights.items() if not isinstance(value, str)}
    if left_out := len(weights) - len(tensors):
        line = f"the {left_out} parameters that its checkpoint left out are not in the file"
        output.print_lines(line, error=True)
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise UserError(f"{name} is a {kind}; safetensors files contain only tensors")
    tensor_files.write(file, tensors, {"format": "pt", **metadata})


def _write_program(module: TrainingModule, metadata: dict[str, str], file: Path) -> None:
    with file.open("wb") as opened:  # torch requires a suffix of a path
        torch.export.save(_program(module), opened, extra_files=metadata)


def _write_onnx(module: TrainingModule, metadata: dict[str, str], file: Path) -> None:
    name, program = type(module).__name__, _program(module)
    if (size := sum(value.nbytes for value in program.state_dict.values())) >= _ONNX_BYTES:
        line = f"{name} has {size / 2**30:.1f} GiB of weights, and an ONNX file holds less than 2"
        raise UserError(f"{line}: use --format torch_export")
    # Without them it names every package that it has no use for.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        try:
            converted: Any = torch.onnx.export(program, dynamo=True, verbose=False)
        except Exception as error:  # the exporter may raise anything
            reason = one_line(error.__cause__ or error)
            raise UserError(f"{name}.forward: cannot be written as ONNX ({reason})") from None
    converted.model.metadata_props.update(metadata)
    converted.save(file, external_data=False)


def _program(module: TrainingModule) -> torch.export.ExportedProgram:
    """``forward`` with its weights, for a batch of any size."""
    name = type(module).__name__
    if not hooks.is_overridden(module, nn.Module, "forward"):
        raise UserError(f"{name} has no forward to export: define it, or use --format safetensors")
    inputs, keywords = _example(module)
    batch = torch.export.Dim("batch")
    shapes: Any = [{0: batch}] * len(inputs) or {key: {0: batch} for key in keywords}
    try:
        with torch.no_grad():
            return torch.export.export(module, inputs, keywords, dynamic_shapes=shapes)
    except Exception as error:  # torch.export and a user's forward may raise anything
        problem = f"torch.export cannot trace it for batches of any size ({one_line(error)})"
        raise UserError(f"{name}.forward: {problem}") from None


def _example(module: TrainingModule) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    name, value = f"{type(module).__name__}.example_input_array", module.example_input_array
    if value is None:
        advice = "in __init__, set it to inputs of forward, such as torch.zeros(1, 3, 32, 32)"
        raise UserError(f"{name} is not defined: {advice}")
    inputs = value if isinstance(value, tuple) else () if isinstance(value, dict) else (value,)
    keywords = value if isinstance(value, dict) else {}
    tensors = [*inputs, *keywords.values()]
    are_batches = all(isinstance(tensor, Tensor) and tensor.ndim > 0 for tensor in tensors)
    if not are_batches or len({len(tensor) for tensor in tensors}) != 1:
        kinds = "a tensor, a tuple of tensors, or a dict of them by argument of forward"
        raise UserError(f"{name}: give {kinds}, all with the batch as first dimension")
    # Twice: torch.export takes a batch of one sample for a constant.
    twice = [torch.cat([tensor, tensor]) for tensor in tensors]
    return tuple(twice[: len(inputs)]), dict(zip(keywords, twice[len(inputs) :], strict=True))


_FORMATS = {
    "safetensors": _Format(".safetensors", "the weights by name", _write_weights),
    "torch_export": _Format(
        ".pt2", "forward with its weights, for a batch of any size, by torch.export", _write_program
    ),
    "onnx": _Format(".onnx", "the same in the ONNX format", _write_onnx, ("onnx", "onnxscript")),
}
