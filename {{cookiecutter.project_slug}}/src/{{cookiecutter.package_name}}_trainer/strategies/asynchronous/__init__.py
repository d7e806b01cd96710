"""Strategies in which ranks do not wait for each other in every step.

It imports from ``strategies/``, ``replicated/`` and ``gradients/``, and from the floors below.
"""

from ..registration import Entry, Registration

_LACKS = {"find_unused_parameters": "it is not needed: ranks may use different parameters"}

REGISTRATION = Registration(
    {
        "local_sgd": Entry("local_sgd:LocalSGD", lacks=_LACKS),
        "diloco": Entry("local_sgd:DiLoCo", lacks=_LACKS),
        "parameter_server": Entry(
            "parameter_server:ParameterServer", lacks={"servers": "there is one, on rank 0"}
        ),
    },
)
