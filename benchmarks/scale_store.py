"""Processor time that the server of torch's TCPStore takes for an operation."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist


def server_microseconds(count: int) -> dict[str, float]:
    """Microseconds of the server's process per operation, by kind.

    It is processor time, which does not depend on what else the machine does: a server that has a
    core answers one operation after the other.
    """
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    server = context.Process(target=_serve, args=(other,), daemon=True)
    server.start()
    try:
        store = dist.TCPStore("127.0.0.1", own.recv(), is_master=False, wait_for_workers=False)
        store.set("known", "x" * 100)
        kinds: dict[str, Any] = {
            "check": lambda: store.check(["unknown"]),
            "get": lambda: store.get("known"),
            "set": lambda: store.set("other", "x" * 100),
            "compare_set": lambda: store.compare_set("unknown", "[]", "[]"),
        }
        found = {}
        for kind, operation in kinds.items():
            before = _used(own)
            for _ in range(count):
                operation()
            store.check(["unknown"])  # a set has no answer: when this one comes, all are done
            found[kind] = (_used(own) - before) / count * 1e6
        return found
    finally:
        own.close()
        server.join(60)


def _used(server: Connection) -> float:
    server.send(None)
    used: float = server.recv()
    return used


def _serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(time.process_time())
