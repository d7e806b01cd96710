"""The gradient buckets of torch's DDP."""

import torch
from torch.nn.parallel import DistributedDataParallel

from ..gradients.same_use import trained
from ..gradients.user_hooks import without_hooks


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
