"""How the ranks of a run find one another: the store that a process group is formed over.

On one node it is a file that only this user can open, where one launch can be told from another:
torch's TCP store lets in whoever reaches its port, and on one node that is every user. Between
nodes there is only that store, which listens on every interface whatever address it is given.
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
from .cluster import STORE, Layout

_POLL_SECONDS = 0.02
_STOPPED = (
    "a rank may be stopped (SIGSTOP, or a debugger) while it holds the lock of the store's file"
)
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


def loopback_store(port: int) -> dist.TCPStore:
    """A store on a port of 127.0.0.1, served by this process."""
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
    """The store that all ranks of a layout share.

    Raises:
        UserError: a rank did not come in time.
    """
    if layout.world_size == 1:
        return dist.HashStore()
    if layout.num_nodes == 1:
        stay_on_loopback()
    else:
        interfaces.leave_loopback(layout.main_address)
    # One store for all groups of a process: a second one could not be told from the first.
    if layout not in _stores:
        path = _private_file(layout, timeout)
        if path is None:
            _stores[layout] = _meet(_shared_store(layout, timeout), layout, timeout)
        else:
            _meet_beside(path, layout, timeout)
            _await_lock(path, timeout)
            _stores[layout] = dist.FileStore(str(path), -1)  # -1: it does not remove the file
    return dist.PrefixStore(f"group-{next(_groups_formed)}", _stores[layout])


def _private_file(layout: Layout, timeout: datetime.timedelta) -> Path | None:
    """The file of a store that this user alone can open; ``None``: the ranks meet by TCP.

    Our launcher has made its folder, or rank 0 makes it and tells where it is. Not in the folder
    that the run is started from: file systems of a network may know no locks.
    """
    if layout.num_nodes > 1:
        return None
    if layout.source == "environment" and STORE in os.environ:
        return Path(os.environ[STORE])
    if not layout.launch_id:
        return None
    told = _told_file(layout)
    if layout.is_main:
        folder = Path(tempfile.mkdtemp(prefix="trainer-store-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _tell(told, str(folder))
    else:
        folder = Path(_hear(told, timeout))
        _check_private(folder)
    return folder / "store"


def _check_private(folder: Path) -> None:
    try:
        found = folder.lstat()
    except OSError:
        raise UserError(
            f"rank 0 meets the others in {folder}, which this rank does not see: give the ranks of "
            "a node the same temporary folder (TMPDIR)"
        ) from None
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.geteuid():
        raise UserError(f"{folder} is not a folder that only this user can open; set TMPDIR")


@contextlib.contextmanager
def ending_if_stuck(seconds: float, end: Callable[[UserError], object]) -> Iterator[None]:
    """End this process if what is done meanwhile with the store takes longer.

    A rank that is stopped (SIGSTOP) while it holds the lock of the store's file has the others wait
    in the kernel, where no timeout of torch's and no exception reaches them.

    Args:
        seconds: longer than the timeout of what is done.
        end: called in another thread, with what to tell.
    """
    over = threading.Event()

    def watch() -> None:
        if not over.wait(seconds):
            end(
                UserError(f"forming the process group did not end within {seconds:g} s: {_STOPPED}")
            )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _meet_beside(path: Path, layout: Layout, timeout: datetime.timedelta) -> None:
    """Wait until every rank is there.

    By a file a rank, and not in the store: a rank that is stopped while it holds the lock of the
    store's file would have the others wait for it in the kernel, without an end.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    present = [path.with_name(f"present-{rank}") for rank in range(layout.world_size)]
    present[layout.rank].touch()
    while missing := [str(rank) for rank, each in enumerate(present) if not each.exists()]:
        if time.monotonic() > deadline:
            raise UserError(_did_not_come(missing, timeout))
        time.sleep(_POLL_SECONDS)


def _await_lock(path: Path, timeout: datetime.timedelta) -> None:
    """Wait until the lock of the store's file is free: torch would wait without an end.

    It makes the store without releasing the interpreter, so that no thread could end it either.
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
        path = _told_file(layout)
        if layout.is_main:
            store = _serve_everywhere(layout, 0, timeout)
            _tell(path, str(store.port))
            return store
        port = int(_hear(path, timeout))
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


def _told_file(layout: Layout) -> Path:
    """Where rank 0 tells where it is: a file of this launch alone, on a disk that nodes share."""
    folder = os.environ.get("SLURM_SUBMIT_DIR", ".")
    if layout.num_nodes == 1 and not os.access(folder, os.W_OK):  # in a container, say
        folder = tempfile.gettempdir()
    return Path(folder) / f".rendezvous-{layout.launch_id}"


def _tell(path: Path, text: str) -> None:
    atexit.register(path.unlink, missing_ok=True)
    files.write_private(path, text)


def _hear(path: Path, timeout: datetime.timedelta) -> str:
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
        f"rank 0 did not write where it is to {path} within {timeout.total_seconds():.0f} s; "
        "set MASTER_PORT if the nodes share no disk there"
    )
