"""Styles for a ``parallelize_plan``, beside those of ``torch.distributed.tensor.parallel``."""

from typing import Any

import torch
from torch import nn
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
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=Shard(-1), use_local_output=False
        )


class ShardedRandomness(ParallelStyle):
    """Inside the module, each rank of a tensor group draws other random numbers.

    For modules whose activations are sharded, such as attention whose heads are: their dropout
    masks must differ. Outside, all ranks of a tensor group draw the same, because they compute the
    same. The random state inside is made from one number of the state outside, so that activation
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
        device, index = device_mesh.device_type, device_mesh.get_local_rank()
        devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
        outside: list[Any] = []

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def enter(module: nn.Module, _: Any) -> None:
            if module.training:
                # From the CPU's generator: the host need not wait for a GPU.
                seed = randomness.mix(int(torch.randint(2**62, ())), index)
                outside.append(torch.random.fork_rng(devices, device_type=device))
                outside[-1].__enter__()
                torch.manual_seed(seed)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def leave(*_: Any) -> None:
            if outside:
                outside.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module
