"""``dp``: one process, the batch scattered over the replicas of its devices.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html; torch's own works
on GPUs only, this one on any devices, the same one several times too.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...data import moving, transfer
from ...data.feed import Feed, MicroBatch, batch_length
from ...module import TrainingModule
from ..base import Strategy
from ..limits import Limits
from ..optimizers import Optimization
from ..step import Stage, StepModule, read_loss

NO_MANUAL = "training_step runs once a replica; use strategy='ddp'"
NO_SYNCED_NORM = (
    "a replica normalizes by its own piece of the batch, and the pieces run one after another; "
    "use strategy='ddp'"
)
NOT_COMPILED = "a replica is made anew for each step; use strategy='ddp'"


class ReplicatedStep(StepModule):
    """A step on each device's piece of a batch, and the outputs gathered on the first device.

    Replicas run one after another in this thread, so that randomness, logging and the user's own
    state see one order. On GPUs their kernels are queued and run side by side all the same.

    Args:
        module: the user's, on the first device.
        device_list: of the replicas.
        dtype: of floating-point tensors in a batch; ``None``: as they are.
    """

    def __init__(
        self,
        module: TrainingModule,
        device_list: Sequence[torch.device],
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(module)
        self._devices = device_list
        self._dtype = dtype
        self.sizes: list[int] = [1]

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        pieces = scatter(batch, self._devices, self._dtype)
        self.sizes = [batch_length(piece) for piece in pieces]
        outputs = []
        for index, (piece, device) in enumerate(zip(pieces, self._devices, strict=False)):
            replica = replicate(self.module, device, is_first=index == 0)
            run = self.module.trainer_state.run
            # A batch that only keeps this process in step with the others counts nothing.
            counted = self.sizes[index] if run is None or run.batch_samples else 0
            state = dataclasses.replace(self.module.trainer_state, device=device, samples=counted)
            replica.trainer_state = state
            with _on(device):
                outputs.append(getattr(replica, f"{stage}_step")(piece, batch_idx))
        return gather(outputs, self._devices[0])

    def read_loss(self, outputs: Any) -> Tensor:
        """The mean of the replicas' losses, each sample counted once."""
        losses = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(losses, Tensor) or losses.ndim != 1 or len(losses) != len(self.sizes):
            return read_loss(outputs)
        # In half precision sizes would be rounded, and so would their sum.
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        weights = transfer.sent(torch.tensor(self.sizes, dtype=losses.dtype), losses.device)
        return (losses * weights).sum() / weights.sum()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """A replica's own GPU is the current one in it, for its kernels and for what it makes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class DP(Strategy):
    """One process; each device computes a piece of the batch on a replica of the model."""

    limits: Limits = Limits(
        max_nodes=1,
        refused={
            "16-mixed": "gradient scaling with replicas in one process is not supported; use "
            "'bf16-mixed', or strategy='ddp'",
            "manual_optimization": NO_MANUAL,
            "sync_batchnorm": NO_SYNCED_NORM,
            "compile": NOT_COMPILED,
        },
    )

    step: ReplicatedStep

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        return configure()

    def place(self, module: TrainingModule) -> None:
        super().place(module)
        self.step = ReplicatedStep(module, self.devices, self.precision.parameter_dtype)

    def batches(self, feed: Feed, epoch: int, start: int) -> Iterator[MicroBatch]:
        return transfer.read_pinned(feed, epoch, start, self.device)

    def move(self, batch: Any) -> Any:
        return batch  # each piece goes to its own device

    def call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        return self.step(stage, batch, batch_idx)

    def read_loss(self, outputs: Any) -> Tensor:
        return self.step.read_loss(outputs)


def replicate(module: Any, device: torch.device, *, is_first: bool) -> Any:
    """A copy of a module for one step whose gradients flow into the module's own parameters.

    Args:
        module: any ``nn.Module``.
        device: of the copy.
        is_first: share the buffers, so that what the first replica writes (the running statistics
            of BatchNorm) stays; the others' buffers are copies.
    """
    if _is_torchmetric(module):
        return module  # its sums must outlive the step
    replica = module._replicate_for_data_parallel()
    replica._former_parameters = {}
    own = vars(module).get("forward")
    if isinstance(own, MethodType):  # it would go on to compute with the original
        replica.forward = MethodType(own.__func__, replica)
    for name, child in module._modules.items():
        if child is not None:
            replica._modules[name] = replicate(child, device, is_first=is_first)
    for name, parameter in module._parameters.items():
        # A view or a copy, and no leaf: backward adds its gradient to the original's.
        copy = None if parameter is None else _copied(parameter, device)
        setattr(replica, name, copy)
        replica._former_parameters[name] = copy
    for name, buffer in module._buffers.items():
        if buffer is not None and not is_first:
            replica._buffers[name] = buffer.detach().to(device, copy=True)
    if isinstance(replica, TrainingModule):
        replica.trainer_state = dataclasses.replace(replica.trainer_state, device=device)
    return replica


class _View(torch.autograd.Function):
    """A view whose gradient may be sparse, which torch's own views refuse."""

    @staticmethod
    def forward(context: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0]


def _copied(parameter: Tensor, device: torch.device) -> Tensor:
    if parameter.device != device:
        return parameter.to(device)
    view: Tensor = _View.apply(parameter)  # type: ignore[no-untyped-call]
    return view


def _is_torchmetric(module: nn.Module) -> bool:
    return hasattr(module, "metric_state") and hasattr(module, "_update_count")


def scatter(
    batch: Any, device_list: Sequence[torch.device], dtype: torch.dtype | None = None
) -> list[Any]:
    """Pieces of a batch, one a device, each where it belongs; fewer if there are fewer samples.

    Tensors are cut along their first dimension, into pieces that differ by one at most, and those
    of floating-point numbers cast to ``dtype``; what is no tensor is given to every replica.
    """
    count = min(len(device_list), max(1, batch_length(batch)))
    used = list(device_list[:count])
    return [
        moving.move(piece, device, dtype)
        for piece, device in zip(_cut(batch, count), used, strict=True)
    ]


def _cut(value: Any, count: int) -> list[Any]:
    if isinstance(value, Tensor) and value.ndim > 0:
        return list(value.tensor_split(count))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [type(value)(*parts) for parts in _cut_each(value, count)]
    if isinstance(value, list | tuple):
        return [type(value)(parts) for parts in _cut_each(value, count)]
    if isinstance(value, Mapping):
        cuts = _cut_each(list(value.values()), count)
        return [type(value)(zip(value, parts, strict=True)) for parts in cuts]  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        cuts = _cut_each([getattr(value, name) for name in names], count)
        return [moving.with_fields(value, dict(zip(names, parts, strict=True))) for parts in cuts]
    return [value] * count


def _cut_each(values: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    return list(zip(*(_cut(value, count) for value in values), strict=True)) or [()] * count


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """Replicas' outputs as one: tensors joined along the first dimension, numbers made a vector."""
    first = outputs[0]
    if isinstance(first, Tensor):
        moved = [output.to(device) for output in outputs]
        return torch.cat(moved) if first.ndim else torch.stack(moved)
    if isinstance(first, int | float) and not isinstance(first, bool):
        return transfer.sent(torch.tensor(outputs), device)
    if isinstance(first, Mapping):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(gather(each, device) for each in zip(*outputs, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(gather(each, device) for each in zip(*outputs, strict=True))
    return None if first is None else list(outputs)
