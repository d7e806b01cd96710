"""``ddp``: one process a device, gradients averaged in backward.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...errors import ConfigurationError
from ...module import TrainingModule
from ..gradients.averaging import GradientAverage
from ..gradients.same_use import OPTION, left_out, trained, unused
from ..gradients.sparse import sparse_parameters
from ..optimizers import Optimization
from ..step import StepModule
from .communication_hooks import CommunicationHook
from .replicated import Replicated


class DDP(Replicated):
    """One process per device, each with the whole model; gradients are averaged in backward.

    Args:
        find_unused_parameters: for models that leave parameters out in some steps.
        static_graph: for models that use the same parameters in every step, some several times.
        bucket_cap_mb: size of a gradient bucket in MiB.
        communication_hook: how gradients travel: ``"none"`` as they are, ``"fp16"``, ``"bf16"``,
            ``"powersgd"``.
        powersgd_rank: of the matrices that PowerSGD sends instead of a gradient.
        powersgd_start_step: gradients travel as they are before this step, at least the second.
        timeout_seconds: after which a collective that a rank does not join fails on the others.
    """

    wrapped: DistributedDataParallel | None = None

    def __init__(
        self,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float = 25.0,
        communication_hook: str = "none",
        powersgd_rank: int = 1,
        powersgd_start_step: int = 1000,
        timeout_seconds: float = 600.0,
    ) -> None:
        if find_unused_parameters and static_graph:
            raise ConfigurationError(
                "strategy_options: a static_graph has no unused parameters to find; give one of "
                "find_unused_parameters and static_graph"
            )
        super().__init__(timeout_seconds)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.bucket_cap_mb = bucket_cap_mb
        self.hook = CommunicationHook(communication_hook, powersgd_rank, powersgd_start_step)
        self._has_learnt = False
        self._ignored: list[Any] = []

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        if module.automatic_optimization:
            sparse = self._keep_sparse_apart(module)
            # They may be thawed later, and DDP takes no notice.
            frozen = [each for each in module.parameters() if not each.requires_grad]
            self.averaged = GradientAverage([*frozen, *sparse])
            # DDP refuses a module in which it has nothing to do.
            if not sparse or len(sparse) < len(trained(module)):
                self.wrapped = self.wrap(self.step)
        else:
            self.start_equal((*module.parameters(), *module.buffers()))
            self.averaged = GradientAverage(module.parameters())
        return configure()

    def _keep_sparse_apart(self, module: TrainingModule) -> Sequence[Tensor]:
        """Have DDP leave sparse gradients alone: NCCL and its hooks cannot reduce them."""
        found = {
            name: each for name, each in sparse_parameters(module).items() if each.requires_grad
        }
        self.start_equal(found.values())
        self._ignored = list(found.values())
        names = [f"module.{name}" for name in found]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.step, names)
        return self._ignored

    def wrap(self, module: StepModule) -> DistributedDataParallel:
        """Give the module to torch's DDP."""
        # Without device_ids: given these, DDP would walk through each batch, which has been moved
        # already, and fail on types that cannot be made from their items, such as defaultdict.
        wrapped = DistributedDataParallel(
            module,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        self.hook.register(wrapped)
        if not (self.static_graph or self.find_unused_parameters):
            _settle_buckets(wrapped, self.hook)
        return wrapped

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> None:
        # DDP learns a static graph in its first backward, which must synchronize for it. To average
        # what is averaged already changes nothing.
        learns = self.static_graph and not self._has_learnt
        self._has_learnt = True
        super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize or learns)

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        super().backward(loss, synchronize=synchronize)
        if synchronize and self.wrapped is not None:
            self._check_finished(self.wrapped, loss)

    def _check_finished(self, wrapped: DistributedDataParallel, loss: Tensor) -> None:
        """Complain now of gradients that DDP has waited for in vain: it does in the next step."""
        try:
            wrapped.reducer._check_reducer_finalized()
        except RuntimeError:
            names = unused(loss, trained(self.module))
            instead = " instead of static_graph" if self.static_graph else ""
            raise left_out(
                list(names), f"where a step may leave parameters out, set {OPTION}{instead}"
            ) from None

    def rank_local_state(self) -> dict[str, Tensor]:
        return self.hook.state()

    def load_rank_local_state(self, state: Mapping[str, Tensor]) -> None:
        self.hook.load_state(state, self.device)

    def teardown(self) -> None:
        self._has_learnt = False
        wrapped, self.wrapped = self.wrapped, None
        if wrapped is not None:
            # The reducer must not outlive the group: its destructor would join gloo's threads with
            # the interpreter locked, while one of them waits for the lock to free a tensor.
            del wrapped.reducer, wrapped.logger
        for each in self._ignored:
            del each._ddp_ignored  # torch's mark: another fit may have DDP average it
        self._ignored = []
        super().teardown()


def _settle_buckets(wrapped: DistributedDataParallel, hook: CommunicationHook) -> None:
    """Have DDP arrange its gradient buckets before the first step rather than after it.

    DDP rebuilds its buckets once, in the order in which the first gradients came. Where an element
    lies in a bucket decides in which order more than two ranks' values are summed, and so its last
    bit: a run that is resumed at step k would sum that step in the first arrangement and the
    uninterrupted run in the second. An empty backward makes the rebuilt arrangement the only one.
    """
    ignored = wrapped.parameters_to_ignore
    parameters: list[Tensor] = [
        each
        for name, each in wrapped.module.named_parameters()
        if each.requires_grad and name not in ignored
    ]
    wrapped.reducer.prepare_for_backward([])
    torch.stack([each.sum() * 0 for each in parameters]).sum().backward()
    # Gradients lie in the first buckets: kept, they would keep these beside those made now.
    for parameter in parameters:
        parameter.grad = None
    wrapped.reducer._rebuild_buckets()
    hook.restart()
