"""Into which units a module is cut: what is gathered, computed and let go together."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from ...errors import UserError, nearest
from ...memory.blocks import repeated_blocks

_TORCH = Path(torch.__file__).parent
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def choose_units(
    module: nn.Module, classes: Sequence[str] | None, smallest: int, *, whole_blocks: bool = False
) -> list[tuple[str, nn.Module]]:
    """Modules that become units, inner ones before those around them; the rest is the root's.

    A parameter that is used in several places stays with the module that holds all of them.

    Args:
        module: the whole.
        classes: names of classes, each of whose modules is a unit; ``None``: by size.
        smallest: by size: parameters that a unit has at least, those of inner units not counted.
        whole_blocks: by size: nothing inside a repeated block (a transformer's layer) is a unit.
            Each unit is a collective of its own: a few large ones are faster, and take more memory.

    Returns:
        names and modules.

    Raises:
        UserError: no module is of one of the classes.
    """
    if classes is not None:
        _check(module, classes)
    inside = _inside_blocks(module) if whole_blocks else set()
    uses = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    units: list[tuple[str, nn.Module]] = []
    taken: set[int] = set()
    for name, each in _inner_first(module):
        own = [p for p in each.parameters() if id(p) not in taken]
        is_unit = (
            type(each).__name__ in classes
            if classes is not None
            else id(each) not in inside and sum(p.numel() for p in own) >= smallest
        )
        within = Counter(id(p) for _, p in each.named_parameters(remove_duplicate=False))
        is_closed = all(uses[key] == count for key, count in within.items())
        if own and is_unit and is_closed and not isinstance(each, CONTAINERS):
            units.append((name, each))
            taken.update(map(id, own))
    return units


def _inside_blocks(module: nn.Module) -> set[int]:
    """Ids of what is inside a repeated block, but for the blocks inside it."""
    blocks = repeated_blocks(module)
    inside = {id(part) for block in blocks for part in block.modules()}
    return inside - set(map(id, blocks))


def _inner_first(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules that may be gathered for themselves, each after those that it holds.

    Attention computes with the weight of its last layer without calling that layer: so it is
    gathered as one. torch's transformer layers do so too, but not where a unit, which has hooks, is
    inside them.
    """
    attention = [each for each in module.modules() if isinstance(each, nn.MultiheadAttention)]
    inside = {id(part) for each in attention for part in each.modules() if part is not each}
    found = [
        (name, each)
        for name, each in module.named_modules()
        if each is not module and id(each) not in inside
    ]
    return sorted(found, key=lambda entry: -entry[0].count("."))


@contextlib.contextmanager
def explaining_calls_inside() -> Iterator[None]:
    """Say in a line what torch means where a step calls what is inside a unit, but not the unit.

    Raises:
        UserError: it does.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if not Path(each.filename).is_relative_to(_TORCH)]
        at = f"{Path(own[-1].filename).name}, line {own[-1].lineno}"
        raise UserError(
            f"a parameter is used while it is sharded ({at}): a unit is gathered while its own "
            "forward runs; call the whole block, or name smaller units, such as "
            "--trainer.strategy_options.unit_classes [Linear]"
        ) from error


def _check(module: nn.Module, classes: Sequence[str]) -> None:
    known = {type(each).__name__ for each in module.modules() if each is not module}
    lines = [
        f"strategy_options.unit_classes: the model has no module of class {each!r}"
        f"{nearest(each, known)}"
        for each in classes
        if each not in known
    ]
    if lines:
        raise UserError(lines)
