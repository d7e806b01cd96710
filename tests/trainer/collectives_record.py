"""Records what a rank exchanges with its peers, in the order in which it starts the operations.

On the CPU, gloo carries all of them, and forgives another order on another rank; NCCL does not. A
CPU tensor does not say whether it would be on a GPU, so the whole main thread is recorded, which
demands more than NCCL does: also the order of what signals, logging and checkpoints exchange. Only
groups that are created with ``backend="gloo"`` stay on the host on every machine; they are noted.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from tests.project import PACKAGE
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PEERS = {"send": "dst", "recv_": "src"}
# Ranks give these tensors of different sizes, or none.
_OWN_SIZES = ("gather_", "scatter_", "alltoall_", "alltoall_base_", "all_to_all_single", "barrier")
_HERE = Path(__file__).parent


class Records:
    """Of one rank: dictionaries with the fields of ``collectives_order.Operation``."""

    def __init__(self) -> None:
        self.operations: list[dict[str, Any]] = []
        self.batch: int | None = None
        """Number of the batch of sends and receives that is being started."""
        self._hosts: set[str] = set()
        self._batches = 0

    def note(self, kind: str, group: Any, sizes: Any, peer: int | None = None) -> None:
        """Add an operation; ``sizes`` must be equal on all its ranks, ``peer`` is a rank in it."""
        resolved: Any = distributed_c10d._resolve_process_group(group) if _is_name(group) else group
        ranks = dist.get_process_group_ranks(resolved)
        self.operations.append(
            {
                "kind": kind,
                "group": ranks,
                "name": resolved.group_name,
                "sizes": sizes,
                "peer": None if peer is None else ranks[peer],
                "batch": self.batch,
                "is_host": resolved.group_name in self._hosts,
                "thread": _thread(),
                "where": _where(),
            }
        )

    def note_new(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Create a group: all ranks do, in the same order, and NCCL may connect it at once."""
        ranks = args[0] if args else kwargs.get("ranks")
        self.note("new_group", dist.group.WORLD, [ranks and list(ranks), kwargs.get("backend")])
        group = function(*args, **kwargs)
        if kwargs.get("backend") == "gloo" or "gloo" in args[2:3]:
            self._hosts.add(group.group_name)
        return group

    def note_batch(self, function: Any, operations: Any) -> Any:
        """Start sends and receives at once, as NCCL does in a group call."""
        self._batches += 1
        self.batch = self._batches
        try:
            return function(operations)
        finally:
            self.batch = None


class _Mode(TorchDispatchMode):
    def __init__(self, records: Records) -> None:
        super().__init__()
        self.records = records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor | AsyncCollectiveTensor) for cls in types):
            return NotImplemented  # they call operators on their own tensors, which come here
        namespace, _, kind = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            names = [argument.name for argument in func._schema.arguments]
            self._note(kind, dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, inputs: dict[str, Any]) -> None:
        group = inputs.get("process_group", inputs.get("group_name"))
        if group is None:
            return  # it waits for an operation, or wraps its result
        if not _is_name(group):
            group = dist.ProcessGroup.unbox(group)
        tensors = [leaf for leaf in tree_leaves(list(inputs.values())) if isinstance(leaf, Tensor)]
        sizes: list[Any] = [[tensor.numel(), str(tensor.dtype)[6:]] for tensor in tensors]
        peer = inputs.get(_PEERS.get(kind, ""))
        if kind in _OWN_SIZES:
            sizes = []
        elif peer is None:
            values = (inputs.get(name) for name in ("root_rank", "reduce_op"))
            sizes += [value for value in values if isinstance(value, int | str)]
        self.records.note(kind, group, sizes, peer)


def _is_name(group: Any) -> bool:
    return isinstance(group, str)


def _thread() -> str:
    current = threading.current_thread()
    return "" if current is threading.main_thread() else current.name


def _where() -> str:
    """The innermost line of the trainer or the tests."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_own = f"{PACKAGE}_trainer" in path.parts or path.parent == _HERE
        if is_own and path.name != "collectives_record.py":
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@contextlib.contextmanager
def recorded(file: Path) -> Iterator[Records]:
    """Record all threads of this rank, and write what they did."""
    records, run = Records(), threading.Thread.run

    def run_recorded(thread: threading.Thread) -> None:
        with _Mode(records):
            run(thread)

    def noted(function: Any, by: Any) -> Any:
        return lambda *args, **kwargs: by(function, *args, **kwargs)

    new, batch = distributed_c10d._new_group_with_tag, dist.batch_isend_irecv
    with (
        mock.patch.object(threading.Thread, "run", run_recorded),
        mock.patch.object(distributed_c10d, "_new_group_with_tag", noted(new, records.note_new)),
        mock.patch.object(dist, "batch_isend_irecv", noted(batch, records.note_batch)),
        _Mode(records),
    ):
        yield records
    file.write_text("".join(json.dumps(operation) + "\n" for operation in records.operations))
