"""DDP communication hooks: reduce gradients as they are, in half precision, or by PowerSGD.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..gradients.same_use import trained
from ..gradients.user_hooks import without_hooks

Name = Literal["none", "fp16", "bf16", "powersgd"]
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")


def register(wrapped: DistributedDataParallel, name: Name, rank: int, start_step: int) -> Any:
    """Register a hook with DDP; return the state of PowerSGD, ``None`` of other hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    powersgd = None
    if name == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "bf16":
        compress: Any = default_hooks.bf16_compress_hook  # refused by its name, without NCCL
        wrapped.register_comm_hook(None, lambda _, bucket: compress(None, bucket))
    elif name == "powersgd":
        powersgd = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step, random_seed=0
        )
        wrapped.register_comm_hook(powersgd, powerSGD_hook.powerSGD_hook)
    return powersgd


def state(powersgd: Any) -> dict[str, Tensor]:
    """This rank's error feedback of the compression."""
    words = powersgd.rng.get_state(legacy=False)["state"]
    tensors = {
        "iteration": torch.tensor([powersgd.iter, words["pos"]]),
        "random": torch.from_numpy(words["key"].astype(np.int64)),
    }
    for name in _MEMORIES:
        for bucket, memory in getattr(powersgd, name).items():
            tensors[f"{name}/{bucket}"] = memory
    return tensors


def load_state(powersgd: Any, device: torch.device, state: Mapping[str, Tensor]) -> None:
    """Restore a state of :func:`state`, on the device of the gradients."""
    if "iteration" not in state:  # of another strategy
        return
    powersgd.iter, position = state["iteration"].tolist()
    keys = state["random"].numpy().astype(np.uint32)
    powersgd.rng.set_state(("MT19937", keys, position, 0, 0.0))
    for key, memory in state.items():
        name, _, bucket = key.partition("/")
        if bucket:
            getattr(powersgd, name)[int(bucket)] = memory.to(device)


def rebuild_buckets(wrapped: DistributedDataParallel) -> None:
    """Rebuild DDP's gradient buckets before the first step instead of after it.

    DDP rebuilds its buckets once, in the order of the first gradients. The position of an element
    in a bucket determines the order in which the values of more than two ranks are summed, and so
    its last bit: a resumed run would sum its first step in the initial order, and the
    uninterrupted run in the rebuilt order. An empty backward leaves only the rebuilt order.
    """
    named, ignored = trained(wrapped.module), wrapped.parameters_to_ignore
    parameters = [parameter for name, parameter in named if name not in ignored]
    wrapped.reducer.prepare_for_backward([])
    with without_hooks(parameters):
        torch.stack([parameter.sum() * 0 for parameter in parameters]).sum().backward()
    for parameter in parameters:  # its gradient, a view, would keep the first bucket in memory
        parameter.grad = None
    wrapped.reducer._rebuild_buckets()
