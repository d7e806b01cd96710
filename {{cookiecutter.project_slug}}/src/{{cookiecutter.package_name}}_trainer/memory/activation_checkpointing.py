"""Activation checkpointing: recompute the activations of parts of a model in backward.

Only the inputs of these parts are kept, which saves memory and costs a second forward of them, by
torch's non-reentrant checkpointing. The model stays the same: objects, classes and state dict.

Source: https://docs.pytorch.org/docs/stable/checkpoint.html (Chen et al. 2016,
https://arxiv.org/abs/1604.06174)
"""

import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigurationError, nearest, refuse, shown

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Maps the forward of a class to its compiled version, during a run that compiles it.
_computed_by: dict[Callable[..., Any], Callable[..., Any]] = {}


@contextlib.contextmanager
def applied(
    module: nn.Module,
    names: Sequence[str],
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Checkpoint the activations of the named parts in this context.

    Random numbers (dropout) are the same in the recomputation. Buffers keep the values of the first
    forward: BatchNorm counts each batch once. Other side effects of a forward happen twice. Parts
    may be nested. Without gradients nothing is recomputed. ``names``: as in :func:`select`.
    ``compiled``: compiles the forward of a class; parts that contain other parts are not compiled.
    """
    layers = [layer for layer in select(module, names) if not _is_applied(layer)]
    for layer in layers:
        vars(layer)["forward"] = MethodType(forward, layer)
    if compiled is not None:
        _computed_by.update({call: compiled(call) for call in _innermost(layers)})
    try:
        yield
    finally:
        if compiled is not None:
            _computed_by.clear()
        for layer in layers:
            del vars(layer)["forward"]


def _innermost(layers: Sequence[nn.Module]) -> set[Callable[..., Any]]:
    """The forwards of parts that contain no other parts, in any instance of their class."""
    known = set(map(id, layers))
    outer = {
        type(layer).forward
        for layer in layers
        if any(id(module) in known for module in layer.modules() if module is not layer)
    }
    return {type(layer).forward for layer in layers} - outer


def check_names(names: Any) -> None:
    if not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        advice = "give a list of names, for example ['Block']"
        raise ConfigurationError(f"activation_checkpointing={shown(names)}: {advice}")


def select(
    module: nn.Module, names: Sequence[str], option: str = "activation_checkpointing"
) -> list[nn.Module]:
    """Select the parts of a model by name, each once; ConfigurationError if one matches nothing.

    ``names``: of classes (``"Block"``), or paths (``"encoder.layer1"``) in whose components ``*``,
    ``?`` and ``[…]`` match as in a shell (``"network.layers.*"``). ``option``: for errors.
    """
    paths = dict(module.named_modules(remove_duplicate=False))  # a part may have several paths
    del paths[""]
    selected: dict[int, nn.Module] = {}
    problems = []
    for name in names:
        meant = [p for path, p in paths.items() if type(p).__name__ == name or matches(path, name)]
        called = [layer for layer in meant if type(layer).forward is not nn.Module.forward]
        if not called:
            problems.append(f"{option}: {_problem(name, paths, meant)}")
        selected |= {id(layer): layer for layer in called}
    problems += [
        f"{option}: a forward of its own was given to a {type(layer).__name__}, "
        "which cannot be replaced; name the parts inside it"
        for layer in selected.values()
        if "forward" in vars(layer) and not _is_applied(layer)
    ]
    refuse(problems)
    return list(selected.values())


def matches(path: str, pattern: str) -> bool:
    """Whether each component of a module's path matches that of a pattern, as in a shell."""
    steps, patterns = path.split("."), pattern.split(".")
    return len(patterns) == len(steps) and all(map(fnmatchcase, steps, patterns))


def _problem(name: str, paths: dict[str, nn.Module], meant: Sequence[nn.Module]) -> str:
    if meant:
        kind = type(meant[0]).__name__
        return f"{name!r} is a {kind}, which is never called itself; name what is in it: '{name}.*'"
    classes = {type(layer).__name__ for layer in paths.values()}
    known = classes | paths.keys()
    # A large model has too many paths to list them all.
    hint = nearest(name, known if difflib.get_close_matches(name, known) else classes)
    return f"nothing in the model is named {name!r}{hint}"


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Modules with children that occur several times, as one class, in a container; each once.

    Nested blocks come after the blocks that contain them.
    """
    kept = dict[nn.Module, None]()
    for container in (child for child in module.modules() if isinstance(child, _CONTAINERS)):
        blocks = list(container.children())
        is_repetition = len(blocks) > 1 and len(set(map(type, blocks))) == 1
        if is_repetition and not isinstance(blocks[0], _CONTAINERS):
            kept |= dict.fromkeys(blocks) if all(any(block.children()) for block in blocks) else {}
    return list(kept)


def _is_applied(layer: nn.Module) -> bool:
    return getattr(vars(layer).get("forward"), "__func__", None) is forward


# Must be called "forward": a pickled method is looked up by its name in the class.
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces the ``forward`` of a part."""
    call = _computed_by.get(type(self).forward, type(self).forward)
    if not torch.is_grad_enabled():
        return call(self, *args, **kwargs)
    names, count = list(kwargs), len(args)

    def run(*values: Any) -> Any:
        return call(self, *values[:count], **dict(zip(names, values[count:], strict=True)))

    return recomputed(self, run, *args, *kwargs.values())


def recomputed(layer: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a part, and call it again in backward instead of keeping activations."""
    return checkpoint(  # positional: torch looks only there for devices whose random state it saves
        run,
        *args,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), buffers_kept(layer)),
    )


@contextlib.contextmanager
def buffers_kept(layer: nn.Module) -> Iterator[None]:
    """Apply changes of a part's buffers in this context to copies."""
    kept = [
        (module._buffers, name, buffer)  # of a ScriptModule, which has no update
        for module in layer.modules()
        for name, buffer in module._buffers.items()
    ]
    for buffers, name, buffer in kept:
        buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for buffers, name, buffer in kept:
            buffers[name] = buffer
