"""DDP communication hooks: reduce gradients as they are, in half precision, or by PowerSGD.

Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

Name = Literal["none", "fp16", "bf16", "powersgd"]
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
_SEED = 0


class CommunicationHook:
    """One of torch's communication hooks, with its state for checkpoints.

    ``rank``: of PowerSGD's matrices (Vogels et al. 2019, https://arxiv.org/abs/1905.13727);
    ``start_step``: the first one that it compresses, at least the second.
    """

    def __init__(self, name: Name, rank: int = 1, start_step: int = 1000) -> None:
        self.name = name
        self._rank = rank
        self._start = start_step
        self._powersgd: PowerSGDState | None = None

    def register(self, wrapped: DistributedDataParallel) -> None:
        """Register the hook with DDP."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.name == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.name == "bf16":
            wrapped.register_comm_hook(None, _bf16)
        elif self.name == "powersgd":
            self._powersgd = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=self._rank,
                start_powerSGD_iter=self._start,
                random_seed=_SEED,
            )
            wrapped.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)

    def state(self) -> dict[str, Tensor]:
        """This rank's error feedback of the compression; empty if the hook has none."""
        powersgd = self._powersgd
        if powersgd is None:
            return {}
        words = powersgd.rng.get_state(legacy=False)["state"]
        state = {
            "iteration": torch.tensor([powersgd.iter, words["pos"]]),
            "random": torch.from_numpy(words["key"].astype(np.int64)),
        }
        for name in _MEMORIES:
            for bucket, memory in getattr(powersgd, name).items():
                state[f"{name}/{bucket}"] = memory
        return state

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore a state of :meth:`state`, on the device of the gradients."""
        powersgd = self._powersgd
        if powersgd is None or "iteration" not in state:  # or saved by another strategy
            return
        powersgd.iter, position = state["iteration"].tolist()
        keys = state["random"].numpy().astype(np.uint32)
        powersgd.rng.set_state(("MT19937", keys, position, 0, 0.0))
        for key, memory in state.items():
            name, _, bucket = key.partition("/")
            if bucket:
                getattr(powersgd, name)[int(bucket)] = memory.to(device)


def _bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    # torch's own function is a wrapper whose signature register_comm_hook does not accept.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
