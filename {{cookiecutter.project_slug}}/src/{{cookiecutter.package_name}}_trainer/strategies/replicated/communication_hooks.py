"""DDP communication hooks: reduce gradients as they are, in half precision, or by PowerSGD.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

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
