"""Choose FSDP units: modules that are gathered, computed and resharded together."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import UserError, nearest, one_line
from ...memory.activation_checkpointing import repeated_blocks

_TORCH = Path(torch.__file__).parent
# Of torch's errors about tensors of several data types.
_OTHER_DTYPE = ("same dtype", "should be the same", "expected scalar type")


def can_shard(parameter: Tensor) -> bool:
    """Whether torch can shard it; others are replicated."""
    return parameter.dim() > 0 and parameter.numel() > 0 and not parameter.is_complex()


def unsharded(module: nn.Module, half: torch.dtype | None) -> list[nn.Parameter]:
    """The parameters of a module that are replicated.

    With ``half``, in which others are gathered, also those of layers with running statistics
    (BatchNorm), which must have these' data type.
    """
    norms = [layer for layer in module.modules() if half and hasattr(layer, "running_mean")]
    of_norms = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    return [p for p in module.parameters() if id(p) in of_norms or not can_shard(p)]


def choose_units(
    module: nn.Module, classes: Sequence[str] | None, smallest: int, *, whole_blocks: bool = False
) -> list[tuple[str, nn.Module]]:
    """Choose the modules of a model that become units, with their names, inner ones first.

    A parameter that is shared stays with the module that contains all its uses. ``classes``: names
    of classes whose modules become units; ``None``: select by size, then ``smallest`` is the
    minimum number of parameters, without those of inner units, and with ``whole_blocks`` no unit is
    inside a repeated block: a few large units are faster, but need more memory.
    """
    known = {type(child).__name__ for child in module.modules() if child is not module}
    if lines := [
        f"strategy_options.unit_classes: the model has no module of class {name!r}"
        f"{nearest(name, known)}"
        for name in classes or ()
        if name not in known
    ]:
        raise UserError(lines)
    blocks = repeated_blocks(module) if whole_blocks else []
    inside = {id(inner) for block in blocks for inner in block.modules()} - set(map(id, blocks))
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    units: list[tuple[str, nn.Module]] = []
    taken: set[int] = set()
    for name, candidate in _inner_first(module):
        parameters = [p for p in candidate.parameters() if id(p) not in taken]
        is_unit = (
            type(candidate).__name__ in classes
            if classes is not None
            else id(candidate) not in inside and sum(p.numel() for p in parameters) >= smallest
        )
        within = Counter(id(p) for _, p in candidate.named_parameters(remove_duplicate=False))
        is_closed = all(uses[key] == count for key, count in within.items())
        if parameters and is_unit and is_closed and not _is_container(candidate):
            units.append((name, candidate))
            taken.update(map(id, parameters))
    return units


def _inner_first(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules that may become units, each after those that it contains.

    Attention uses the weight of its output layer without calling the layer, so it is gathered as
    one. So do torch's transformer layers, unless a unit, which has hooks, is inside them.
    """
    attention = [layer for layer in module.modules() if isinstance(layer, nn.MultiheadAttention)]
    inside = {id(inner) for layer in attention for inner in layer.modules() if inner is not layer}
    candidates = [
        (name, layer)
        for name, layer in module.named_modules()
        if layer is not module and id(layer) not in inside
    ]
    return sorted(candidates, key=lambda entry: -entry[0].count("."))


def _is_container(module: nn.Module) -> bool:
    """Whether a module is never called itself, such as a ``ModuleList``."""
    return getattr(type(module), "forward", None) is nn.Module.forward  # a ScriptModule has none


def outer_modules(module: nn.Module) -> list[nn.Module]:
    """The outermost modules in it that have parameters and a ``forward``."""
    outer: list[nn.Module] = []
    for child in module.children():
        if _is_container(child):
            outer += outer_modules(child)
        elif next(child.parameters(), None) is not None:
            outer.append(child)
    return outer


@contextlib.contextmanager
def explain_sharded_use(half: torch.dtype | None = None) -> Iterator[None]:
    """Raise UserError with an explanation if parameters are used while their unit is sharded."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" in str(error):
            raise UserError(
                "a backward needs parameters of a unit that is sharded again after its first "
                "backward, as the gradient of a gradient does (create_graph=True); set "
                "--trainer.strategy_options.find_unused_parameters true, which gathers all units "
                "for the whole step, or with manual optimization use strategy='ddp_zero1'"
            ) from error
        frames = traceback.extract_tb(error.__traceback__)
        outside = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TORCH)]
        at = f"{Path(outside[-1].filename).name}, line {outside[-1].lineno}"
        if half is not None and any(words in str(error) for words in _OTHER_DTYPE):
            raise UserError(
                f"an operation mixes float32 and half precision ({at}): {one_line(error)}; layers "
                "have weights in half precision, without autocast: cast the other tensor to the "
                "weight's dtype, or set --trainer.strategy_options.parameter_dtype float32, which "
                "computes under autocast"
            ) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise UserError(
            f"a parameter is used while it is sharded ({at}): call full_tensor() on it; or the "
            "whole block of fsdp, which its own forward gathers, or name smaller units, such as "
            "--trainer.strategy_options.unit_classes [Linear]"
        ) from error
