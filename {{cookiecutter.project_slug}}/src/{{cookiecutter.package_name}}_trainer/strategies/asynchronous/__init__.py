"""Strategies in which ranks do not wait for each other: the parameter server."""

from ..registry import Entry, Registration

_INSTEAD = "; use 'ddp' with accumulate_grad_batches, which averages gradients less often"
_LACKS = {"servers": "there is one, on rank 0"}
REGISTRATION = Registration(
    {"parameter_server": Entry("parameter_server:ParameterServer", lacks=_LACKS)},
    refused=dict.fromkeys(("local_sgd", "diloco"), _INSTEAD),
)
