"""Pipeline parallelism: the children of ``sequential_module`` divided over processes.

It imports from ``strategies/``, and from the floors below. ``mesh/`` imports it.
"""

from ..registration import Entry, Registration

REGISTRATION = Registration(
    {"sequential": Entry("strategy:Sequential"), "pipeline": Entry("strategy:Sequential")},
)
"""``pipeline`` is another name of ``sequential``, which is Lightning's."""
