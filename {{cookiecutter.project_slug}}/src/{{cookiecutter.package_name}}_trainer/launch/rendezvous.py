"""Rendezvous: the store through which the ranks of a run form a process group.

On one node, the store is a file that only this user can open, if a launch can be identified:
torch's TCP store accepts everyone who can reach its port, and on one node that is every user.
Between nodes there is only the TCP store, which listens on all interfaces.
"""

import atexit
import contextlib
import datetime
import fcntl
import itertools
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from ..errors import UserError
from . import files, interfaces
from .cluster import STORE, STORE_FILE, Layout

_POLL_SECONDS = 0.02
_STOPPED = (
    "a rank may be stopped (SIGSTOP, or a debugger) while it holds the lock of the store's file"
)
_groups_formed = itertools.count()
_stores: dict[Layout, dist.Store] = {}


def loopback_interface() -> str | None:
    """Name of the loopback interface, ``lo`` or ``lo0``; ``None`` if there is none."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


def stay_on_loopback() -> None:
    """Select the loopback interface for gloo and NCCL, unless the user has set one."""
    interface = loopback_interface()
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def loopback_store(port: int) -> dist.TCPStore:
    """Start a TCP store on a port of 127.0.0.1."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    """Connect to the store shared by all ranks of a layout.

    Raises:
        UserError: A rank did not join in time.
    """
    if layout.world_size == 1:
        return dist.HashStore()
    if layout.num_nodes == 1:
        stay_on_loopback()
    else:
        interfaces.avoid_loopback(layout.main_address)
    # One store for all process groups of this process: two stores could not be address_file apart.
    if layout not in _stores:
        path = _private_file(layout, timeout)
        if path is None:
            _stores[layout] = _join(_shared_store(layout, timeout), layout, timeout)
        else:
            _await_ranks(path, layout, timeout)
            _await_lock(path, timeout)
            _stores[layout] = dist.FileStore(str(path), -1)  # -1: do not delete the file
    return dist.PrefixStore(f"group-{next(_groups_formed)}", _stores[layout])


def _private_file(layout: Layout, timeout: datetime.timedelta) -> Path | None:
    """Path of the store's private file; ``None`` if the ranks use TCP.

    Our launcher creates its folder, or else rank 0 creates it and publishes the path. It is not in
    the working directory: network file systems may not support locks.
    """
    if layout.num_nodes > 1:
        return None
    if layout.source == "environment" and STORE in os.environ:
        return Path(os.environ[STORE])
    if not layout.launch_id:
        return None
    address_file = _address_file(layout)
    if layout.is_main:
        folder = Path(tempfile.mkdtemp(prefix="trainer-store-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _publish(address_file, str(folder))
    else:
        folder = Path(_await_address(address_file, timeout))
        check_private(folder)
    return folder / STORE_FILE


def check_private(folder: Path) -> None:
    """Raise UserError if others than this user can open a folder that rank 0 has created."""
    try:
        found = folder.lstat()
    except OSError:
        raise UserError(
            f"rank 0 created the rendezvous folder {folder}, which this rank cannot see: give the "
            "ranks of "
            "a node the same temporary folder (TMPDIR)"
        ) from None
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.geteuid():
        raise UserError(f"{folder} is not a folder that only this user can open; set TMPDIR")


@contextlib.contextmanager
def exit_if_stuck(seconds: float, end: Callable[[UserError], object]) -> Iterator[None]:
    """End this process if the store operations in this context take too long.

    If a rank is stopped (SIGSTOP) while it holds the lock of the store's file, the others wait in
    the kernel, where neither torch's timeouts nor exceptions work.

    Args:
        seconds: Maximum time, longer than the timeout of the operations.
        end: Called in another thread, with the error.
    """
    over = threading.Event()

    def watch() -> None:
        if not over.wait(seconds):
            end(
                UserError(
                    "initializing the process group did not finish within "
                    f"{seconds:g} s: {_STOPPED}"
                )
            )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _await_ranks(path: Path, layout: Layout, timeout: datetime.timedelta) -> None:
    """Wait until all ranks have joined.

    Uses one file per rank, not the store: if a rank is stopped while it holds the lock of the
    store's file, the others would wait for it in the kernel forever.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    present = [path.with_name(f"present-{rank}") for rank in range(layout.world_size)]
    present[layout.rank].touch()
    while missing := [str(rank) for rank, each in enumerate(present) if not each.exists()]:
        if time.monotonic() > deadline:
            raise UserError(_missing_ranks(missing, timeout))
        time.sleep(_POLL_SECONDS)


def _await_lock(path: Path, timeout: datetime.timedelta) -> None:
    """Wait until the lock of the store's file is free: torch would wait forever.

    torch opens the store without releasing the GIL, so no thread could end the process either.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{path} was locked for {timeout.total_seconds():g} s: {_STOPPED}"
                    ) from None
                time.sleep(_POLL_SECONDS)
            else:
                return


def _join(store: dist.Store, layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    """Wait until all ranks have joined, and return the part of the store for these processes.

    After a restart, torchelastic gives the ranks the store of the previous ones, whose addresses
    must not be used again. Ranks do not know which restart they belong to: each node counts its
    own. So each rank sends a new random token, and rank 0 replies with another.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    own_token = uuid.uuid4().hex
    token = own_token if layout.is_main else _request_token(store, own_token, deadline)
    if token is None:
        raise UserError(_missing_ranks(["0"], timeout))
    ours = dist.PrefixStore(token, store)
    ours.set(f"present/{layout.rank}", "")
    ours.add("present", 1)
    answered = 0
    while ours.add("present", 0) < layout.world_size:
        if layout.is_main:
            answered = _send_token(store, token, answered)
        if time.monotonic() > deadline:
            ranks = map(str, range(layout.world_size))
            missing = [rank for rank in ranks if not ours.check([f"present/{rank}"])]
            raise UserError(_missing_ranks(missing, timeout))
        time.sleep(_POLL_SECONDS)
    return ours


def _request_token(store: dist.Store, own_token: str, deadline: float) -> str | None:
    """Request rank 0's token; ``None`` if there is no reply in time."""
    store.set(f"asked/{store.add('asked', 1)}", own_token)
    while not store.check([f"answer/{own_token}"]):
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)
    return store.get(f"answer/{own_token}").decode()


def _send_token(store: dist.Store, token: str, answered: int) -> int:
    """Send rank 0's token to the ranks that requested it; return the number of replies so far."""
    asked = store.add("asked", 0)
    for number in range(answered + 1, asked + 1):
        store.set(f"answer/{store.get(f'asked/{number}').decode()}", token)
    return asked


def _missing_ranks(ranks: Sequence[str], timeout: datetime.timedelta) -> str:
    return (
        f"rank {', '.join(ranks)} did not join within {timeout.total_seconds():g} s "
        "(timeout_seconds of the strategy): it ended, or hangs, before the trainer was reached"
    )


def _shared_store(layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    served_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = layout.main_port
    if port == 0:
        path = _address_file(layout)
        if layout.is_main:
            store = _serve_everywhere(layout, 0, timeout)
            _publish(path, str(store.port))
            return store
        port = int(_await_address(path, timeout))
    elif layout.is_main and not served_by_launcher:
        on_one_node = layout.num_nodes == 1
        return loopback_store(port) if on_one_node else _serve_everywhere(layout, port, timeout)
    # On one node the store listens on loopback, whatever the name of the node.
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


def _address_file(layout: Layout) -> Path:
    """The file in which rank 0 publishes its address: unique per launch, on a shared disk."""
    folder = os.environ.get("SLURM_SUBMIT_DIR", ".")
    if layout.num_nodes == 1 and not os.access(folder, os.W_OK):  # in a container, for example
        folder = tempfile.gettempdir()
    return Path(folder) / f".rendezvous-{layout.launch_id}"


def _publish(path: Path, text: str) -> None:
    atexit.register(path.unlink, missing_ok=True)
    files.write_private(path, text)


def _await_address(path: Path, timeout: datetime.timedelta) -> str:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        try:
            with path.open() as file:
                owner = os.fstat(file.fileno()).st_uid
                if owner != os.geteuid():
                    raise UserError(f"{path} was written by another user (id {owner}); remove it")
                return file.read()
        except FileNotFoundError:
            time.sleep(0.05)
    raise UserError(
        f"rank 0 did not write its address to {path} within {timeout.total_seconds():.0f} s; "
        "set MASTER_PORT if the nodes do not share this directory"
    )
