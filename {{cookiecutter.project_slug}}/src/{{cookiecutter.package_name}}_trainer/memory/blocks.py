"""Find repeated blocks of a model: modules of one class in a ``ModuleList`` or ``Sequential``."""

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Modules with children that occur several times, as one class, in a container; each once.

    Nested blocks come after the blocks that contain them.
    """
    found = {id(block): block for each in module.modules() for block in _blocks_in(each)}
    return list(found.values())


def _blocks_in(container: nn.Module) -> list[nn.Module]:
    if not isinstance(container, _CONTAINERS):
        return []
    blocks = list(container.children())
    is_repetition = (
        len(blocks) > 1
        and len({type(each) for each in blocks}) == 1
        and not isinstance(blocks[0], _CONTAINERS)
        and all(any(each.children()) for each in blocks)
    )
    return blocks if is_repetition else []
