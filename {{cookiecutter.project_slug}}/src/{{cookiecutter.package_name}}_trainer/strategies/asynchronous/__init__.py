"""Strategies in which ranks do not wait for each other in every step.

It imports from ``strategies/``, ``replicated/`` and ``gradients/``, and from the floors below.
"""

from ..registration import Entry, Registration

REGISTRATION = Registration(
    {
        "local_sgd": Entry("local_sgd:LocalSGD"),
        "diloco": Entry("local_sgd:DiLoCo"),
        "parameter_server": Entry("parameter_server:ParameterServer"),
    }
)
