"""Refuse optimizers that compute an element from others, where a process steps only some of them.

They are known by their names in torch and widely used libraries, such as timm, pytorch_optimizer,
transformers and bitsandbytes; ``is_elementwise`` of an optimizer or its class overrides this.
"""

import re
from collections.abc import Iterable
from typing import Literal

from torch.optim import Optimizer

Cut = Literal["elements", "parameters"]

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


def problems_of(optimizers: Iterable[Optimizer], cut: Cut) -> list[str]:
    """One line for each optimizer that cannot step slices of parameters, or some of them."""
    known = _OF_ALL if cut == "parameters" else f"{_OF_ALL}|{_OF_PARAMETER}"
    names = {type(each).__name__: None for each in optimizers if _uses_others(each, known)}
    return [
        f"configure_optimizers gave {name}, which uses other {cut} than those that a process "
        "steps; use another, such as AdamW, or strategy='ddp', or set "
        f"{name}.is_elementwise = True to train anyway"
        for name in names
    ]


def _uses_others(optimizer: Optimizer, known: str) -> bool:
    marked = getattr(optimizer, "is_elementwise", None)
    if marked is not None:
        return not marked
    wrapped = (each for each in vars(optimizer).values() if isinstance(each, Optimizer))
    classes = (each.__name__.lower() for each in type(optimizer).__mro__)
    is_known = any(re.fullmatch(known, name) for name in classes)
    return is_known or any(_uses_others(each, known) for each in wrapped)
