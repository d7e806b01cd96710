"""How the ranks of a run find one another: the store that a process group is formed over.

On one node everything listens on loopback only: the store is unauthenticated, and torch's own
would listen on every interface whatever address it is given.
"""

import atexit
import datetime
import itertools
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from . import files
from .cluster import Layout
from .errors import UserError

_POLL_SECONDS = 0.02
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
    # One store for all groups of a process: a second one could not be told from the first.
    if layout not in _stores:
        _stores[layout] = _meet(_shared_store(layout, timeout), layout, timeout)
    return dist.PrefixStore(f"group-{next(_groups_formed)}", _stores[layout])


def _meet(store: dist.Store, layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    """The part of the store that belongs to these very processes, once every rank is there.

    torchelastic hands the ranks of a restart the store of those before, whose addresses must not
    be read again. It tells no rank which restart it belongs to: each node counts its own. So each
    rank asks with a word that is new, and rank 0, which is new too, answers with another.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    own_word = uuid.uuid4().hex
    word = own_word if layout.is_main else _ask(store, own_word, deadline)
    if word is None:
        raise UserError(_did_not_come(["0"], timeout))
    ours = dist.PrefixStore(word, store)
    ours.set(f"present/{layout.rank}", "")
    ours.add("present", 1)
    answered = 0
    while ours.add("present", 0) < layout.world_size:
        if layout.is_main:
            answered = _answer(store, word, answered)
        if time.monotonic() > deadline:
            ranks = map(str, range(layout.world_size))
            missing = [rank for rank in ranks if not ours.check([f"present/{rank}"])]
            raise UserError(_did_not_come(missing, timeout))
        time.sleep(_POLL_SECONDS)
    return ours


def _ask(store: dist.Store, own_word: str, deadline: float) -> str | None:
    """Rank 0's word; ``None`` if there is no answer in time."""
    store.set(f"asked/{store.add('asked', 1)}", own_word)
    while not store.check([f"answer/{own_word}"]):
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)
    return store.get(f"answer/{own_word}").decode()


def _answer(store: dist.Store, word: str, answered: int) -> int:
    """Tell rank 0's word to those who have asked; how many have been answered by now."""
    asked = store.add("asked", 0)
    for number in range(answered + 1, asked + 1):
        store.set(f"answer/{store.get(f'asked/{number}').decode()}", word)
    return asked


def _did_not_come(ranks: Sequence[str], timeout: datetime.timedelta) -> str:
    return (
        f"rank {', '.join(ranks)} did not come within {timeout.total_seconds():g} s "
        "(timeout_seconds of the strategy): it ended, or hangs, before the trainer was reached"
    )


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
    folder = os.environ.get("SLURM_SUBMIT_DIR", ".")
    if layout.num_nodes == 1 and not os.access(folder, os.W_OK):  # in a container, say
        folder = tempfile.gettempdir()
    return Path(folder) / f".rendezvous-{layout.launch_id}"


def _tell_port(path: Path, port: int) -> None:
    atexit.register(path.unlink, missing_ok=True)
    files.write_atomically(path, str(port))


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
