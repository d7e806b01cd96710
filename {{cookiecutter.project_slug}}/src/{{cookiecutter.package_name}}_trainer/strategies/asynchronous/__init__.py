"""Strategies in which ranks do not wait for each other: the parameter server.

It imports from ``strategies/``, and from the floors below.
"""

from ..registry import Entry, Registration

_INSTEAD = "; use 'ddp' with accumulate_grad_batches, which averages gradients less often"

REGISTRATION = Registration(
    {
        "parameter_server": Entry(
            "parameter_server:ParameterServer", lacks={"servers": "there is one, on rank 0"}
        ),
    },
    refused=dict.fromkeys(("local_sgd", "diloco"), _INSTEAD),
)
