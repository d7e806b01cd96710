"""Styles for a ``parallelize_plan``, beside those of ``torch.distributed.tensor.parallel``."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ....data import randomness


class LossParallel(ColwiseParallel):
    """The last layer of a classifier or language model, sharded over its classes.

    Its output is a DTensor, and ``cross_entropy`` is computed on shards of the classes: no rank
    holds all logits. Steps and backward run inside ``loss_parallel``.

    Args:
        input_layouts: Layout of the layer's input; default: the same on all ranks.

    Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=Shard(-1), use_local_output=False
        )


class ShardedRandomness(ParallelStyle):
    """Inside the module, each rank of a tensor group draws other random numbers.

    For modules whose activations are sharded, such as attention whose heads are: their dropout
    masks must differ. Outside, all ranks of a tensor group draw the same, because they compute the
    same.

    The random state inside is made from one number of the state outside, so that activation
    checkpointing and a resume repeat both.

    Args:
        style: A style of torch that the module has too.
    """

    def __init__(self, style: ParallelStyle | None = None) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.style is not None:
            self.style.src_data_rank = self.src_data_rank
            module = self.style._apply(module, device_mesh)
        scope = _Scope(device_mesh.get_local_rank(), device_mesh.device_type)
        module.register_forward_pre_hook(scope.enter)
        module.register_forward_hook(scope.leave, always_call=True)
        return module


class _Scope:
    """Replaces torch's random states during a module's forward.

    Args:
        index: The rank in its tensor group.
        device_type: Type of the ranks' devices.
    """

    def __init__(self, index: int, device_type: str) -> None:
        self._index = index
        self._device = None if device_type == "cpu" else torch.get_device_module(device_type)
        self._outside: list[tuple[Tensor, Tensor | None]] = []

    def enter(self, module: nn.Module, _: Any) -> None:
        if not module.training:
            return
        # From the CPU's generator: the host need not wait for a GPU.
        seed = randomness.mix(int(torch.randint(2**62, ())), self._index)
        of_device = self._device.get_rng_state() if self._device is not None else None
        self._outside.append((torch.default_generator.get_state(), of_device))
        torch.default_generator.manual_seed(seed)
        if self._device is not None:
            self._device.manual_seed(seed)

    def leave(self, *_: Any) -> None:
        if not self._outside:
            return
        of_host, of_device = self._outside.pop()
        torch.default_generator.set_state(of_host)
        if self._device is not None and of_device is not None:
            self._device.set_rng_state(of_device)
