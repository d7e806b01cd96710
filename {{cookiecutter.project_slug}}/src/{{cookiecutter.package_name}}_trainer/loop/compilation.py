"""``torch.compile`` for the modules that steps call, or for repeated blocks (regional).

Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html,
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

import contextlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, Problems, UserError, nearest, refuse, shorten, shown
from ..launch import collectives, output
from ..memory import activation_checkpointing
from ..strategies.fsdp.units import outer_modules

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
    """Raise ConfigurationError if what torch needs to compile is not installed."""
    if value is False:
        return
    lines = []
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        lines.append("compile needs a C++ compiler: install g++, or name one in CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lines.append("compile needs the headers of Python: install python3-dev")
    refuse(lines)


class Compiled:
    """The compiled modules of a model by name, and which of them training steps have called.

    A module inside another one is compiled with it. ``options``: those of ``torch.compile``.
    """

    def __init__(self, modules: Mapping[str, nn.Module], options: Mapping[str, Any]) -> None:
        self._modules, self._options = modules, options
        self._called: set[int] = set()
        self._graphs, self.is_checked = 0, False

    def compiled(self, original: _Forward) -> _Forward:
        """Compile the ``forward`` of a class."""
        compiled: _Forward = torch.compile(original, **self._options)

        # Must be called "forward": a pickled method is looked up by its name in the class.
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Inside another module torch traces this, and must not depend on what changes here.
            if torch.compiler.is_compiling() or self.is_checked or not torch.is_grad_enabled():
                return compiled(module, *args, **kwargs)
            before = _graphs()
            outputs = compiled(module, *args, **kwargs)
            self._graphs += _graphs() - before
            self._called.add(id(module))
            return outputs

        return forward

    def check(self) -> None:
        """After the first training step: UserError if nothing was compiled; note what was not."""
        self.is_checked = True
        called = [name for name, module in self._modules.items() if id(module) in self._called]
        inside = tuple(f"{name}." if name else "" for name in called)
        left = [name for name in self._modules if not f"{name}.".startswith(inside)]
        names = shorten(", ".join(filter(None, left)), 80)
        if self._called and not self._graphs:
            variables = "TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
            raise UserError(f"compile: torch has compiled nothing; unset {variables}")
        own = [
            name.removesuffix("._orig_mod")
            for name, module in self._modules.items()
            if name.endswith("._orig_mod") or vars(module).get("_compiled_call_impl") is not None
        ]
        if own and not self._graphs:
            problem = f"compile: {own[0] or 'the module'} is compiled already, by its own code"
            raise UserError(f"{problem}: leave that out, or compile")
        if not self._graphs:
            raise UserError(
                "compile: nothing is compiled, because training_step calls neither self(...) nor a "
                f"whole module of {names or 'it'}, but methods or layers; name what it calls, as "
                "in --trainer.compile '{regional: [Block]}', or leave compile out"
            )
        if names and collectives.rank() == 0:
            line = f"compile: {names}: not called as a whole in the first step; what the step calls"
            output.print_lines(f"note: {line} of it is not compiled", error=True)


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def applied(
    module: nn.Module, value: bool | Mapping[str, Any], checkpointed: Sequence[str]
) -> Iterator[Compiled | None]:
    """Compile what the steps of a module call, and checkpoint activations, in this context.

    Checkpointed modules are compiled separately, inside of what torch's checkpoint calls twice. The
    arguments are those of the trainer: ``compile`` and ``activation_checkpointing``.
    """
    if value is False:
        with activation_checkpointing.applied(module, checkpointed):
            yield None
            return
    settings = {} if value is True else value
    options: dict[str, Any] = {name: settings.get(name) for name in ("mode", "dynamic") if settings}
    selected = select(module, value, checkpointed)
    compiled = Compiled(selected, options)
    torch.compiler.reset()  # each fit has all of torch's limit of recompilations
    # It is one of a class' forward, of which each module may need as many.
    limits = ("recompile_limit", "accumulated_recompile_limit")
    of_all = {name: getattr(torch.compiler.config, name) * max(1, len(selected)) for name in limits}
    checkpointing = activation_checkpointing.applied(module, checkpointed, compiled.compiled)
    with torch.compiler.config.patch(of_all), checkpointing:  # type: ignore[attr-defined]
        for layer in selected.values():  # a class has one forward, which torch compiles once
            vars(layer)["forward"] = MethodType(compiled.compiled(type(layer).forward), layer)
        try:
            yield compiled
        finally:
            for layer in selected.values():
                del vars(layer)["forward"]
            torch.compiler.reset()


def select(
    module: nn.Module, value: bool | Mapping[str, Any], checkpointed: Sequence[str]
) -> dict[str, nn.Module]:
    """Select the modules that are compiled, by name: the outermost ones that steps call.

    Modules that are checkpointed, contain checkpointed ones, or are inside them, are excluded.
    """
    if value is False:
        return {}
    regional = value.get("regional") if isinstance(value, Mapping) else None
    if not regional:
        root = [] if type(module).forward is nn.Module.forward else [module]
        chosen = [m for m in (*root, *outer_modules(module)) if "forward" not in vars(m)]
        chosen = [m for m in chosen if hasattr(type(m), "forward")]  # no ScriptModule
    elif regional is not True:
        chosen = activation_checkpointing.select(module, regional, "compile.regional")
    elif not (chosen := activation_checkpointing.repeated_blocks(module)):
        raise ConfigurationError(
            "compile.regional: the model has no repeated blocks (a ModuleList of modules of one "
            "class); name what to compile, for example ['Block'], or leave regional out"
        )
    apart = activation_checkpointing.select(module, checkpointed)
    others = set(map(id, apart))
    excluded = {id(m) for outer in apart for m in outer.modules()}
    names = {id(m): name for name, m in module.named_modules()}
    return {
        names[id(m)]: m
        for m in chosen
        if id(m) not in excluded and others.isdisjoint(map(id, m.modules()))
    }
