"""Pipeline parallelism: the children of ``sequential_module`` divided over processes.

It imports from ``strategies/``, and from the floors below. ``mesh/`` imports it.
"""

from ..registration import Entry, Registration

_ELSEWHERE = ("rpc", "rpc_sequential", "ddp_sequential", "pipeline_parallel", "gpipe")

REGISTRATION = Registration(
    {"sequential": Entry("strategy:Sequential"), "pipeline": Entry("strategy:Sequential")},
    other_names=dict.fromkeys(_ELSEWHERE, "is pipeline parallelism; use strategy='sequential'"),
    plugins={"RPCSequentialPlugin": "plugins:RPCSequentialPlugin"},
    plugin_names=dict.fromkeys(("rpc_sequential", "ddp_sequential"), "RPCSequentialPlugin"),
)
"""``pipeline`` is another name of ``sequential``, which is Lightning's."""
