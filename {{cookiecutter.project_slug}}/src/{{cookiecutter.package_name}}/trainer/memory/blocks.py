"""The repeated blocks of a model: modules of one class, in a ``ModuleList`` or a ``Sequential``."""

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Modules that have parts of their own and are several of a class in a container, each once.

    Those inside others are among them, after these.
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
