"""Refuse optimizers that compute an element from others, where a process steps only some of them.

Those of torch and widely used libraries are known by name; a class of anyone else declares it.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch.optim import Optimizer

Cut = Literal["elements", "parameters"]

# Packages whose optimizers are elementwise, except those named below.
EXAMINED = "torch.optim|timm|transformers|pytorch_optimizer|torch_optimizer|bitsandbytes|apex"
# They use other parameters, such as the norm of all gradients, or draw random numbers.
_OF_ALL = (
    "adagc|adai|alig|avagrad|dadapt.*|gravity|kron|(fused.*)?lamb(8bit|32bit)?|lbfgs|magma|prodigy"
)
# They use other elements of the same parameter: norms, factors, projections.
_OF_PARAMETER = (
    "a2grad|adafactor.*|adago|adahessian|adalite|adammini|adamp|adanorm|adashift|adatam|aida|alice|"
    "amos|apollo.*|came|conda|dash|emofact|fadam|fira|flashadamw|fromage|galore.*|larc|"
    "(pytorch)?lars(8bit|32bit)?|lorarite|mars|.*muon.*|nero|.*novograd|racs|ralamb|ranger.*|rose|"
    "scion.*|sgdp|sgdsai|.*shampoo|sm3|soap|spectralsphere|splus|stableadamw|stablespam|swats|tam"
)


def problems_of(
    optimizers: Iterable[Optimizer], cut: Cut, strategy: str, examined: str = EXAMINED
) -> list[str]:
    """One line for each class that cannot step slices of parameters, or some of them.

    ``strategy``: its name; ``examined``: a pattern of packages whose classes are known by name.
    """
    kinds = {type(each): None for found in optimizers for each in _with_inner(found)}
    fits = {kind.__name__: _fits(kind, cut, examined) for kind in kinds}
    return [
        f"configure_optimizers gave {name}, "
        + (
            f"which uses other {cut} than those that a process steps under {strategy}; use "
            f"another, such as AdamW, or strategy='ddp', or set {name}.is_elementwise = True to "
            "train anyway"
            if does_fit is False
            else f"which {strategy} does not know, and steps only some {cut} in a process: set "
            f"{name}.is_elementwise = True if an element's update depends on that element alone, "
            "or is_parameterwise = True if on its parameter alone; otherwise use strategy='ddp'"
        )
        for name, does_fit in fits.items()
        if not does_fit
    ]


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    yield optimizer
    for each in vars(optimizer).values():
        if isinstance(each, Optimizer):
            yield from _with_inner(each)


def _fits(kind: Any, cut: Cut, examined: str) -> bool | None:
    """Whether its step is right for this cut; ``None`` if nothing is known of its step."""
    for index, each in enumerate(kind.__mro__):
        own = vars(each)
        if {"is_elementwise", "is_parameterwise"} & own.keys():
            by_parameter = cut == "parameters" and own.get("is_parameterwise")
            return bool(own.get("is_elementwise") or by_parameter)
        if re.match(rf"({examined})\b", each.__module__):
            known = _OF_ALL if cut == "parameters" else f"{_OF_ALL}|{_OF_PARAMETER}"
            names = (base.__name__.lower() for base in kind.__mro__[index:])
            return not any(re.fullmatch(known, name) for name in names)
        # torch wraps the step of each class that it creates, also an inherited one.
        inherited: Any = getattr(super(each, kind), "step", None)
        if "step" in own and inspect.unwrap(own["step"]) is not inspect.unwrap(inherited):
            return None
    return None
