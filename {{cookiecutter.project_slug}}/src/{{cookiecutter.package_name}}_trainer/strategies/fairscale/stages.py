"""FairScale's Pipe inside the user's module, whose names and calls stay the same.

Imported when it is used: FairScale need not be installed.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fairscale.nn import Pipe
from fairscale.nn.pipe.balance import balance_by_size, balance_by_time
from fairscale.nn.pipe.batchnorm import DeferredBatchNorm
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import UserError, one_line
from ..balance import divide, total

_SECONDS = 1.0  # that layers are measured for


class Stages:
    """Runs a sequential module as a pipeline, in place of its ``forward``.

    Args:
        sequential: The module; its layers are moved to the devices.
        devices: A device for each stage.
        balance: Number of layers of each stage; or ``"parameters"``, ``"time"`` or ``"memory"``.
        microbatches: Number of micro-batches.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.

    Raises:
        UserError: There are fewer layers than devices.
    """

    def __init__(
        self,
        sequential: nn.Sequential,
        devices: Sequence[torch.device],
        balance: list[int] | str,
        microbatches: int,
        checkpoint: str,
    ) -> None:
        if len(sequential) < len(devices):
            raise UserError(
                f"sequential_module has {len(sequential)} layers for {len(devices)} devices: use "
                "fewer devices"
            )
        self._sequential, self._devices = sequential, devices
        self._microbatches, self._checkpoint = microbatches, checkpoint
        self._norms = _Norms(sequential) if microbatches > 1 else None
        self._measure = balance if isinstance(balance, str) and balance != "parameters" else None
        self.optimizers: Sequence[Optimizer] = ()
        self.balance = balance if isinstance(balance, list) else _by_parameters(sequential, devices)
        self._pipe = self._make()
        # Not a submodule: names of parameters stay those of the user's module.
        vars(sequential)["forward"] = self._run

    def _make(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own Pipe was removed
            return Pipe(
                self._sequential,
                self.balance,
                devices=list(self._devices),
                chunks=self._microbatches,
                checkpoint=self._checkpoint,
            )

    def _run(self, given: Any) -> Any:
        first = _first_tensor(given)
        if self._measure is not None and torch.is_grad_enabled() and self._sequential.training:
            self._rebalance(self._measure, given)
        chunks = len(first.chunk(self._microbatches))
        if self._norms is not None:
            self._norms.expect(chunks)
        pipeline = self._pipe.pipeline
        pipeline.partitions = [_Stage(each, first.device.type) for each in self._pipe.partitions]
        if self._checkpoint == "except_last":
            pipeline.checkpoint_stop = chunks - 1
        outputs = self._pipe(given)
        if isinstance(outputs, tuple):
            return tuple(each.to(first.device) for each in outputs)
        return outputs.to(first.device)

    def _rebalance(self, measure: str, given: Any) -> None:
        """Divide the layers again, by what FairScale measures with a batch."""
        self._measure = None
        samples = given if isinstance(given, tuple) else (given,)
        samples = tuple(each.detach().requires_grad_(each.requires_grad) for each in samples)
        sample = samples if isinstance(given, tuple) else samples[0]
        count, device = len(self._devices), self._devices[0]
        with torch.random.fork_rng([each for each in self._devices if each.type == "cuda"]):
            try:
                if measure == "time":
                    self.balance = balance_by_time(
                        count, self._sequential, sample, timeout=_SECONDS, device=device
                    )
                else:
                    self.balance = balance_by_size(
                        count, self._sequential, sample, chunks=self._microbatches, device=device
                    )
            except RuntimeError as error:
                raise UserError(
                    f"strategy_options.balance={measure!r}: FairScale cannot measure the layers: "
                    f"{one_line(error)}; use 'parameters'"
                ) from None
        devices = {each: each.device for each in self._sequential.parameters()}
        self._pipe = self._make()
        for optimizer in self.optimizers:
            _follow(optimizer, devices)

    def close(self) -> None:
        """Restore the module; its layers stay on their devices."""
        del vars(self._sequential)["forward"]
        if self._norms is not None:
            self._norms.restore()
        self._pipe = None  # ends its threads


class _Stage:
    """A stage as Pipe's threads call it, with the autocast of the thread that runs the step."""

    def __init__(self, partition: nn.Module, device_type: str) -> None:
        self._partition, self._type = partition, device_type
        self._autocasts = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    @property
    def training(self) -> bool:
        """Whether it is in training mode."""
        return self._partition.training

    def __call__(self, given: Any) -> Any:
        with torch.autocast(self._type, self._dtype, enabled=self._autocasts):
            return self._partition(given)


class _Norms:
    """BatchNorm layers, which update their statistics once per batch, not per micro-batch.

    FairScale's layers normalize each micro-batch by itself. They share parameters and statistics
    with the layers that they replace until :meth:`restore`.
    """

    def __init__(self, root: nn.Sequential) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module, Any]] = []
        for parent in list(root.modules()):
            for name, child in list(parent._modules.items()):
                if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.track_running_stats:
                    self._replace(parent, name, child)

    def _replace(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        deferred = DeferredBatchNorm.convert_deferred_batch_norm(child)
        # Sums within a batch are not part of a checkpoint.
        deferred._non_persistent_buffers_set.update(("sum", "sum_squares"))
        deferred.to(child.weight.device if child.affine else child.running_mean.device)
        deferred.train(child.training)
        parent._modules[name] = deferred
        self._replaced.append((parent, name, child, deferred))

    def expect(self, chunks: int) -> None:
        """Set the number of micro-batches of the next batch."""
        for *_, deferred in self._replaced:
            deferred.chunks = chunks

    def restore(self) -> None:
        """Put the user's layers back, with the statistics."""
        for parent, name, child, deferred in self._replaced:
            child.train(deferred.training)
            for each in child._buffers:
                child._buffers[each] = deferred._buffers[each]
            parent._modules[name] = child


def _follow(optimizer: Optimizer, devices: Mapping[Any, torch.device]) -> None:
    """Move an optimizer's state to where its parameters now are.

    Args:
        optimizer: The optimizer, whose state may have been loaded.
        devices: Former devices of the parameters.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device == devices.get(parameter):
                state[name] = value.to(parameter.device)


def _by_parameters(sequential: nn.Sequential, devices: Sequence[torch.device]) -> list[int]:
    costs = [sum(each.numel() for each in layer.parameters()) for layer in sequential]
    # FairScale's own division gives a device no layers if those have no parameters.
    return divide(total(costs), len(costs), len(devices))


def _first_tensor(given: Any) -> Tensor:
    each = given[0] if isinstance(given, tuple) and given else given
    if not isinstance(each, Tensor):
        raise UserError(
            f"sequential_module was called with a {type(each).__name__}: Pipe splits a tensor, or "
            "a tuple of tensors"
        )
    return each
