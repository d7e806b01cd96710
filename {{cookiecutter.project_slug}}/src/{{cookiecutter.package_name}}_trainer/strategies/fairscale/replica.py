"""FairScale's sharded data parallel, as ``ddp_sharded`` uses it.

Imported when it is used, and before there is a process group: FairScale need not be installed.
"""

from collections.abc import Callable, Sequence

from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import Tensor, nn

from ..gradients.averaging import FixedOrder, copy_gradient


class Replica(ShardedDataParallel):  # type: ignore[misc]
    """A module whose gradients are averaged on the process that steps the parameter."""

    _reference_trainable_mask: list[bool]
    _grad_to_be_reduced: list[bool]

    def __init__(self, module: nn.Module, optimizers: Sequence[OSS]) -> None:
        super().__init__(
            module,
            list(optimizers),
            sync_models_at_startup=False,
            # With a buffer, gradients are views of it. A gradient that is set to None, as ours are
            # after each step, loses its place in the buffer, which is then averaged without it.
            reduce_buffer_size=0,
        )
        self._places = {id(parameter): index for index, parameter in enumerate(module.parameters())}
        self._order = FixedOrder(len(self._places))

    def _get_reduce_fn(self, index: int, param: Tensor, dst_rank: int) -> Callable[..., None]:
        reduce = super()._get_reduce_fn(index, param, dst_rank)

        def reduce_copy() -> None:
            self._bucket_flush_callback_set = True  # FairScale would wait in the backward
            if not self._should_accumulate_grads:
                copy_gradient(param)
            reduce()

        return lambda *_: self._order.note(self._places[id(param)], reduce_copy)

    def finish(self) -> None:
        """Reduce the gradients that are left after a backward, and wait for all."""
        self._order.finish()
        super()._consume_work_handles()

    def _detect_train_change(self) -> bool:
        # Like FairScale's, without its warnings: freezing and unfreezing layers is allowed.
        mask = [param.requires_grad for param in self._all_params]
        changed, self._reference_trainable_mask = mask != self._reference_trainable_mask, mask
        if changed:
            self._grad_to_be_reduced = []
        return changed

    def not_averaged(self) -> list[Tensor]:
        """Parameters whose gradients the last backward did not average."""
        pairs = zip(self._grad_to_be_reduced, self._trainable_params, strict=True)
        return [parameter for waits, parameter in pairs if waits and parameter.grad is not None]

    def drop_group(self) -> None:
        """Drop the reference to the process group, whose threads would otherwise stay alive."""
        for hook in self._grad_hooks:
            hook.remove()
        for kept in (self._grad_hooks, self._grad_accs, self._manual_reduce):
            kept.clear()
        self._process_group = None
