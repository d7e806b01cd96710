"""Which hooks a class overrides, and whether they can be called."""

import inspect
import re

from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import nearest

_LOOKS_LIKE_A_HOOK = re.compile(
    r"on_.*_(start|end|checkpoint|eval|train|save|load)|on_(before|after)_.*"
)
# Other hooks of Lightning that are not called here.
_OTHER_HOOKS = (
    *("training_epoch_end", "validation_epoch_end", "test_epoch_end", "tbptt_split_batch"),
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("configure_gradient_clipping", "configure_callbacks", "configure_model"),
    *("configure_sharded_model", "transfer_batch_to_device", "toggle_optimizer"),
    *("init_ddp_connection", "configure_ddp", "setup", "teardown", "on_keyboard_interrupt"),
)


def is_overridden(owner: object, base: type, name: str) -> bool:
    """Whether an object has its own version of a method of a base class."""
    method = getattr(owner, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def problems_of_names(cls: type, base: type) -> list[str]:
    """One line for each method that looks like a hook, and is none of the base class."""
    known = [name for name in dir(base) if name.startswith("on_")]
    return [
        f"{cls.__name__}.{name} would not be called: it is no hook{nearest(name, known)}"
        for name in dir(cls)
        if name in _OTHER_HOOKS or _LOOKS_LIKE_A_HOOK.fullmatch(name)
        if not hasattr(base, name)
    ]


def problems_of_signatures(owner: object, base: type) -> list[str]:
    """One line for each overridden hook that cannot be called with the hook's arguments."""
    lines = []
    for name, hook in vars(base).items():
        if name.startswith("_") or not callable(hook) or not is_overridden(owner, base, name):
            continue
        expected = list(inspect.signature(hook).parameters)[1:]
        own = inspect.signature(getattr(owner, name))
        try:
            own.bind(*expected)
        except TypeError:
            shown = own.replace(return_annotation=own.empty)
            lines.append(
                f"{type(owner).__name__}.{name} takes {shown}; it is called with "
                f"({', '.join(expected)})"
            )
    return lines


def problems_of_lazy(module: nn.Module) -> list[str]:
    """A line if layers have no parameters yet, because no batch has passed them."""
    lazy = [
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if any(map(is_lazy, [*part.parameters(recurse=False), *part.buffers(recurse=False)]))
    ]
    advice = "pass a batch through them in __init__ or in setup"
    return [f"{type(module).__name__}: {', '.join(lazy)}: not initialized; {advice}"] * bool(lazy)


def problems_of_max_norm(module: nn.Module) -> list[str]:
    """One line for each embedding that changes its weight in a forward, of a module on ranks."""
    return [
        f"{name or type(module).__name__}: max_norm changes the rows that a forward reads, in its "
        "process only: ranks would have other weights; renormalize the whole weight in "
        "on_train_batch_end (torch.renorm), or use devices=1"
        for name, each in module.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
    ]
