"""How the ranks of a run find one another: the store that a process group is formed over.

On one node everything listens on loopback only: the store is unauthenticated, and torch's own
would listen on every interface whatever address it is given.
"""

import atexit
import datetime
import itertools
import os
import socket
import time
from pathlib import Path

import torch.distributed as dist

from .cluster import Layout
from .errors import UserError

_groups_formed = itertools.count()
_stores: dict[Layout, dist.Store] = {}


def loopback_interface() -> str | None:
    """Name of the loopback interface, ``lo`` or ``lo0``; ``None`` if neither is there."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def stay_on_loopback() -> None:
    """Have gloo and NCCL talk over loopback, unless the user has named an interface."""
    interface = loopback_interface()
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def loopback_store(port: int = 0) -> dist.TCPStore:
    """A store on a port of 127.0.0.1, served by this process; 0 picks a free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    """The store that all ranks of a layout share.

    Raises:
        UserError: a rank did not come in time.
    """
    if layout.world_size == 1:
        return dist.HashStore()
    if layout.num_nodes == 1:
        stay_on_loopback()
    # Neither a restarted run nor a second group may read what the one before left in the store.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"restart-{restart}/group-{next(_groups_formed)}"
    # One store for all groups of a process: a second one could not be told from the first.
    if layout not in _stores:
        _stores[layout] = _shared_store(layout, timeout)
    store = dist.PrefixStore(prefix, _stores[layout])
    _call_the_roll(store, layout, timeout)
    return store


def _call_the_roll(store: dist.Store, layout: Layout, timeout: datetime.timedelta) -> None:
    """Wait until every rank is there: torch would say that a key is missing, and not whose."""
    store.set(f"present/{layout.rank}", "")
    store.add("present", 1)
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add("present", 0) < layout.world_size:
        if time.monotonic() > deadline:
            missing = [
                str(rank)
                for rank in range(layout.world_size)
                if not store.check([f"present/{rank}"])
            ]
            raise UserError(
                f"rank {', '.join(missing)} did not come within {timeout.total_seconds():g} s "
                "(timeout_seconds of the strategy): it ended, or hangs, before the trainer was "
                "reached"
            )
        time.sleep(0.02)


def _shared_store(layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    served_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = layout.main_port
    if port == 0:
        path = _port_file(layout)
        if layout.is_main:
            on_one_node = layout.num_nodes == 1
            store = loopback_store() if on_one_node else _serve_everywhere(layout, 0, timeout)
            _tell_port(path, store.port)
            return store
        port = _hear_port(path, timeout)
    elif layout.is_main and not served_by_launcher:
        on_one_node = layout.num_nodes == 1
        return loopback_store(port) if on_one_node else _serve_everywhere(layout, port, timeout)
    # On one node the store listens on loopback, by whatever name the launch calls that node.
    is_loopback = layout.num_nodes == 1 and not served_by_launcher
    address = "127.0.0.1" if is_loopback else layout.main_address
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timeout)
    except dist.DistNetworkError as error:
        raise UserError(f"rank 0 was not found at {address}:{port}: {error}") from error


def _serve_everywhere(layout: Layout, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    return dist.TCPStore(
        layout.main_address, port, is_master=True, wait_for_workers=False, timeout=timeout
    )


def _port_file(layout: Layout) -> Path:
    """Where rank 0 tells its port: a file of this launch alone, on a disk that the nodes share."""
    folder = Path(os.environ.get("SLURM_SUBMIT_DIR", "."))
    return folder / f".rendezvous-{layout.launch_id}"


def _tell_port(path: Path, port: int) -> None:
    atexit.register(path.unlink, missing_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(str(port))
    beside.replace(path)


def _hear_port(path: Path, timeout: datetime.timedelta) -> int:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        try:
            return int(path.read_text())
        except FileNotFoundError:
            time.sleep(0.05)
    raise UserError(
        f"rank 0 did not write its port to {path} within {timeout.total_seconds():.0f} s; "
        "set MASTER_PORT if the nodes share no disk there"
    )
