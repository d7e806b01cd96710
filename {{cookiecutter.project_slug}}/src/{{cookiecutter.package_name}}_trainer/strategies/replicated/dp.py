"""``dp`` and ``ddp2``: a process scatters its batch over replicas on its devices.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html. torch's own class
works on GPUs only; this one works on any devices, even on the same one several times.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ...data import moving
from ...data.samples import Splitter, batch_length, counts_of, part_sizes
from ...errors import UserError, one_line
from ...module import TrainingModule
from ..base import STAGES, Devices, Stage, StepModule, Strategy, read_loss, refuse_others
from ..limits import Limits
from ..memory import Memory, Sizes, memory
from ..user_code import WeightGuard
from .ddp import DDP

_REFUSED = {
    "manual_optimization": "training_step runs once per replica; use strategy='ddp'",
    "sync_batchnorm": "a replica normalizes with its own part of the batch, and the parts run one "
    "after another; use strategy='ddp'",
    "compile": "replicas are created again for each step; use strategy='ddp'",
}


class ReplicatedStep(StepModule):
    """Runs a step on each device's part of a batch, and gathers the outputs on the first device.

    Replicas run one after another in this thread, so that randomness, logging and the user's own
    state have a fixed order. On GPUs, kernels run in parallel. ``dtype``: as in ``moving.move``.
    """

    def __init__(
        self, module: TrainingModule, device_list: Devices, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module)
        self._devices, self._dtype, self._splitter = device_list, dtype, Splitter()
        self._guard = WeightGuard("which would be lost: each step has new replicas")
        self.counts: list[float] = [1.0]  # what the parts of the batch count

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        run = self.module.trainer_state.run
        number = batch_length(batch, run.batch_samples if run is not None else None)
        sizes = part_sizes(number, min(len(self._devices), max(1, number)))
        parts = self._splitter.split(batch, sizes)
        self.counts = counts_of(self.module, parts, sizes)
        pairs = zip(parts, self._devices, strict=False)
        pieces = [moving.move(piece, device, self._dtype) for piece, device in pairs]
        replicas = [  # all before the first one's step, which may change buffers
            replicate(self.module, device, is_first=index == 0)
            for index, device in enumerate(self._devices[: len(pieces)])
        ]
        before = dict(vars(self.module))
        outputs = []
        for index, (replica, piece) in enumerate(zip(replicas, pieces, strict=True)):
            device, counted = self._devices[index], self.counts[index]
            state = dataclasses.replace(self.module.trainer_state, device=device, samples=counted)
            replica.trainer_state = state
            # The current one, for its kernels and new tensors.
            current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
            with current, self._guard.step(replica, stage):
                outputs.append(getattr(replica, f"{stage}_step")(piece, batch_idx))
        for name, value in vars(self.module).items():
            if before.get(name) is not value:  # by a lambda, which has the original
                problem = f"set {name} of the module itself, as a hook that is a function may"
                advice = "register a method of the module, or use strategy='ddp'"
                raise UserError(f"{stage}_step on a replica {problem}: {advice}")
        if self.module.may_skip_batches and any(output is None for output in outputs):
            return None
        if stage == "predict":
            return outputs[0] if len(outputs) == 1 else join_rows(outputs, sizes, self._devices[0])
        return gather(outputs, self._devices[0])

    def read_loss(self, outputs: Any) -> Tensor:
        """The mean of the replicas' losses, weighted by what their parts count."""
        refuse_others(outputs)
        losses = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(losses, Tensor) or losses.ndim != 1 or len(losses) != len(self.counts):
            return read_loss(outputs)
        # Not in half precision, which would round the sizes and their sum.
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        weights = moving.to_async(torch.tensor(self.counts, dtype=losses.dtype), losses.device)
        return (losses * weights).sum() / (sum(self.counts) or 1.0)  # nothing may count


class _Scatters(Strategy):
    """What ``dp`` and ``ddp2`` have in common: ``step`` scatters a batch over the devices."""

    def place(self, module: TrainingModule) -> None:
        super().place(module)
        self.scattered = ReplicatedStep(module, self.data.devices, self.precision.parameter_dtype)
        self.steps = dict.fromkeys(STAGES, self.scattered.forward)

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        try:
            return super().forward(stage, batch, batch_idx)
        except TypeError as error:
            if "cat()" not in str(error):
                raise
            given = "what the steps of all replicas returned, concatenated along dim 0 already"
            advice = f"leave torch.cat out ({one_line(error)})"
            raise UserError(f"{stage}_step_end gets {given}: {advice}") from error

    def read_loss(self, outputs: Any) -> Tensor:
        return self.scattered.read_loss(outputs)


class DP(_Scatters):
    """One process; each device computes a part of the batch on a replica of the model."""

    limits: Limits = Limits(
        one_process_per_node=True,
        max_nodes=1,
        refused={
            "16-mixed": "gradient scaling with replicas in one process is not supported; use "
            "'bf16-mixed', or strategy='ddp'",
            **_REFUSED,
        },
    )

    def memory(self, sizes: Sizes) -> Memory:
        return memory(of_first_device(sizes), mark="unverified")


class DDP2(_Scatters, DDP):
    """``dp`` inside a node, ``ddp`` across nodes.

    ``training_step_end`` can compute a loss over the node's whole batch.
    """

    limits: Limits = Limits(one_process_per_node=True, refused=_REFUSED)

    def step_module(self, module: TrainingModule) -> StepModule:
        return self.scattered

    def memory(self, sizes: Sizes) -> Memory:
        return dataclasses.replace(super().memory(of_first_device(sizes)), mark="unverified")


def of_first_device(sizes: Sizes) -> Sizes:
    """The sizes of the first of a process' devices, which computes a part of its batch."""
    # CPUs are one device, whose memory the parts share.
    return sizes if sizes.is_on_host else sizes.computing(1 / sizes.devices)


def replicate(
    module: Any, device: torch.device, *, is_first: bool, copies: dict[int, Any] | None = None
) -> Any:
    """Replicate a module for one step; gradients flow to the parameters of the original.

    The first replica shares the buffers, so that its updates (running statistics of BatchNorm)
    persist; others have copies. ``copies``: its parameters and modules by ids of the original's.
    """
    copies = {} if copies is None else copies
    if hasattr(module, "metric_state") and hasattr(module, "_update_count"):  # of torchmetrics
        return module  # its state must outlive the step
    replica = module._replicate_for_data_parallel()
    copies[id(module)] = replica
    if isinstance(vars(module).get("forward"), MethodType):
        replica.forward = _rebound(module.forward, copies)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = vars(module)[name].items()
        vars(replica)[name] = OrderedDict((key, _rebound(hook, copies)) for key, hook in hooks)
    for name, child in module._modules.items():
        if child is not None:
            replica._modules[name] = replicate(child, device, is_first=is_first, copies=copies)
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in copies:
            # A view or copy, not a leaf: backward accumulates into the original's gradient.
            copies[id(parameter)] = _copied(parameter, device)
        copy = None if parameter is None else copies[id(parameter)]
        setattr(replica, name, copy)  # nn.RNN lists its parameters when they are set
        # As in the original: for parameters(), and for functional_call, which exchanges them there.
        replica._parameters[name] = vars(replica).pop(name, copy)
    for name, buffer in module._buffers.items():
        if buffer is not None and not is_first:
            replica._buffers[name] = buffer.detach().to(device, copy=True)
    if isinstance(replica, TrainingModule):
        replica.trainer_state = dataclasses.replace(replica.trainer_state, device=device)
    return replica


def _rebound(call: Any, copies: Mapping[int, Any]) -> Any:
    """A bound method of a module as one of its replica; it would use the original."""
    if not isinstance(call, MethodType):
        return call
    return MethodType(call.__func__, copies.get(id(call.__self__), call.__self__))


class _View(torch.autograd.Function):
    """A view that supports sparse gradients, which torch's own views do not."""

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


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """Gather the replicas' outputs: concatenate tensors along dim 0, and numbers to a vector."""
    first = outputs[0]
    if isinstance(first, Tensor):
        moved = [output.to(device) for output in outputs]
        return torch.cat(moved) if first.ndim else torch.stack(moved)
    if isinstance(first, int | float) and not isinstance(first, bool):
        return moving.to_async(torch.tensor(outputs), device)
    if isinstance(first, Mapping):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    if isinstance(first, list | tuple):
        columns = enumerate(zip(*outputs, strict=True))
        return moving.like(first, {key: gather(column, device) for key, column in columns})
    return None if first is None else list(outputs)


def join_rows(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Join the predictions of a batch's parts: in one process, they would be those of the batch."""
    columns = list(zip(*map(moving.leaves, outputs), strict=False))
    if len({len(moving.leaves(output)) for output in outputs}) > 1 or not all(
        all(value is None for value in column) or _are_rows(column, sizes) for column in columns
    ):
        problem = "predict_step returned what the devices of a batch cannot join"
        advice = "return tensors with a row of one shape for each sample"
        raise UserError(f"{problem}: {advice}, or use strategy='ddp', or one device")
    joined = (
        column[0] if column[0] is None else torch.cat([value.to(device) for value in column])
        for column in columns
    )
    return moving.mapped(outputs[0], lambda _: next(joined))


def _are_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return all(isinstance(value, Tensor) and value.ndim for value in values) and (
        [len(value) for value in values] == list(sizes)
        and len({value.shape[1:] for value in values}) == 1
    )
