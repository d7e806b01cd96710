"""What the emulated GPU says of single operations; for emulated_subject.py."""

from collections.abc import Callable
from typing import Any

import torch

from emulated_counts import counting
from emulated_gpu import NAME


def detected() -> dict[str, Any]:
    """What the emulated device says of single operations."""
    device = torch.device(NAME, 0)
    x, rows = torch.arange(4.0, device=device), torch.tensor([0, 1], device=device)
    pinned = torch.ones(4).pin_memory()
    works: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(),
        "float": lambda: float(x[0]),
        "bool": lambda: bool(x[0] > 1),
        "tolist": x.tolist,
        "cpu": x.cpu,
        "nonzero": x.nonzero,
        "mask": lambda: x[x > 1],
        "masked_select": lambda: x.masked_select(x > 1),
        "equal": lambda: torch.equal(x, x),
        "number": lambda: torch.tensor(1.0, device=device),
        "to device": lambda: torch.ones(4).to(device),
        "copy_ to device": lambda: x.clone().copy_(torch.ones(4)),
        "copy_ to host": lambda: torch.ones(4).copy_(x),
        "synchronize": lambda: torch.get_device_module(device).synchronize(),
        "to device, non_blocking": lambda: torch.ones(4).to(device, non_blocking=True),
        "to device, pinned": lambda: pinned[2:].to(device, non_blocking=True),
        "fill": lambda: torch.full((2,), 3.0, device=device),
        "arithmetic": lambda: (x * 2 + torch.tensor(3.0)).softmax(0),
        "rows": lambda: x[rows],
        "rows by the host": lambda: x[torch.tensor([0, 1])],
    }
    costs = {}
    for name, work in works.items():
        with counting() as counts:
            work()
        costs[name] = [counts.waits.total(), counts.pageable.total()]
    return costs


def mixtures() -> dict[str, str]:
    """What tensors of several devices raise."""
    device, x = torch.device(NAME, 0), torch.ones(3)
    there, other = x.to(device), x.to(torch.device(NAME, 1))
    step = torch.tensor(0.0)
    works: dict[str, Callable[[], object]] = {
        "cpu": lambda: there + x,
        "in place": lambda: there.mul_(x),
        "cat": lambda: torch.cat([there, x]),
        "foreach": lambda: torch._foreach_add([there], [x]),
        "another": lambda: there + other,
        "fused": lambda: torch._fused_sgd_(
            *([there], [there], []),
            **{"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0},
            **{"nesterov": False, "maximize": False, "is_first_step": True, "found_inf": step},
        ),
    }
    messages = {}
    for name, work in works.items():
        try:
            work()
        except RuntimeError as error:
            messages[name] = str(error)
    return messages


def streams() -> dict[str, str]:
    """What becomes of a tensor that is copied on a stream and used on another."""
    gpu: Any = torch.get_device_module(NAME)
    device, side = torch.device(NAME, 0), gpu.Stream()
    outcomes = {}
    for waits, records in ((False, True), (True, False), (True, True)):
        with gpu.stream(side):
            tensor = torch.ones(4).to(device)
        if waits:
            gpu.current_stream(device).wait_stream(side)
        if records:
            tensor.record_stream(gpu.current_stream(device))
        try:
            outcomes[f"{waits} {records}"] = str((tensor + 1).tolist())
        except RuntimeError as error:
            outcomes[f"{waits} {records}"] = str(error)
    return outcomes
