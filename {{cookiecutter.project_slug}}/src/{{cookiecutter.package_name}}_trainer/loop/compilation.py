"""``torch.compile`` for the whole module, or for its repeated blocks (regional compilation).

Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html,
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, Problems, nearest, shown
from ..memory import activation_checkpointing, repeated_blocks

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
OPTIONS = ("mode", "dynamic", "regional")

_Forward = Callable[..., Any]


def check(value: bool | Mapping[str, Any], problems: Problems) -> None:
    """Collect a line per error in the trainer's ``compile``, as far as possible without a model."""
    if isinstance(value, bool):
        return
    if not value:
        problems.add("compile={}: give true, or options")
    for name in value:
        if name not in OPTIONS:
            problems.add(f"compile has no option {name!r}{nearest(str(name), OPTIONS)}")
    mode, dynamic, regional = (value.get(name) for name in OPTIONS)
    if mode is not None and mode not in MODES:
        problems.add(f"compile.mode={shown(mode)} is unknown{nearest(str(mode), MODES)}")
    if dynamic not in (None, True, False):
        problems.add(f"compile.dynamic={shown(dynamic)}: give true, false or null")
    are_names = isinstance(regional, list | tuple) and all(isinstance(x, str) for x in regional)
    if not (regional in (None, True, False) or (are_names and regional)):
        names = "give true, or a list of names, for example ['Block']"
        problems.add(f"compile.regional={shown(regional)}: {names}")


def check_compiler(value: bool | Mapping[str, Any]) -> None:
    """Raise ConfigurationError if torch needs a C++ compiler to compile, and there is none."""
    if value is not False and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ConfigurationError("compile needs a C++ compiler: install g++, or name one in CXX")


@contextlib.contextmanager
def applied(
    module: nn.Module, value: bool | Mapping[str, Any], checkpointed: Sequence[str]
) -> Iterator[None]:
    """Compile a module, and checkpoint activations of its parts, in this context.

    Checkpointed parts are compiled separately, inside of what torch's checkpoint calls twice; then
    nothing else is compiled, unless regions are requested.

    Args:
        module: The whole model.
        value: Value of the trainer's ``compile``.
        checkpointed: Names of parts that recompute their activations in backward.

    Raises:
        ConfigurationError: A name matches nothing in this model, or it has no repeated blocks.
    """
    if value is False:
        with activation_checkpointing.applied(module, checkpointed):
            yield
        return
    given = {} if value is True else value
    options: dict[str, Any] = {name: given.get(name) for name in ("mode", "dynamic") if given}
    compiled: Callable[[_Forward], _Forward] = partial(torch.compile, **options)
    regions = select(module, value, checkpointed)
    with activation_checkpointing.applied(module, checkpointed, compiled):
        for part in regions:  # all of a class share one forward, which torch compiles once
            vars(part)["forward"] = MethodType(compiled(type(part).forward), part)
        is_whole = not (regions or checkpointed)
        if is_whole:
            module.compile(**options)
        try:
            yield
        finally:
            for part in regions:
                del vars(part)["forward"]
            if is_whole:
                module._compiled_call_impl = None


def select(
    module: nn.Module, value: bool | Mapping[str, Any], checkpointed: Sequence[str]
) -> list[nn.Module]:
    """Select the parts of a model that :func:`applied` compiles separately; its arguments.

    Parts that are checkpointed, contain checkpointed parts, or are inside them, are excluded.
    """
    regional = value.get("regional") if isinstance(value, Mapping) else None
    if not regional:
        return []
    if regional is True:
        found = repeated_blocks(module)
    else:
        found = activation_checkpointing.select(module, regional, "compile.regional")
    if not found:
        raise ConfigurationError(
            "compile.regional: the model has no repeated blocks (a ModuleList of modules of one "
            "class); name what to compile, for example ['Block'], or leave regional out"
        )
    apart = activation_checkpointing.select(module, checkpointed)
    others = {id(part) for part in apart}
    excluded = {id(each) for part in apart for each in part.modules()}
    excluded |= {id(each) for part in found for each in part.modules() if each is not part}
    return [
        part
        for part in found
        if id(part) not in excluded and others.isdisjoint(map(id, part.modules()))
    ]
