"""Rendezvous: the store through which the ranks of a run form a process group.

On one node, the store is a file that only this user can open, if a launch can be identified:
torch's TCP store accepts everyone who can reach its port, and on one node that is every user.
Between nodes there is only the TCP store, which listens on all interfaces.
"""

import atexit
import contextlib
import datetime
import ipaddress
import itertools
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

import torch.distributed as dist

from ..errors import TemporaryError, UserError
from . import files, held_folders
from .cluster import STORE, STORE_FILE, Layout

_INTERFACE = "GLOO_SOCKET_IFNAME"
_ROUTES = Path("/proc/net/route")
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.02, 0.5
# At most so many ranks connect to all others at once, and read all addresses from the store; more
# connect to those that they exchange something with.
_MOST_IN_FULL_MESH = 16
_OPEN_FILES = 65536
_groups_formed = itertools.count()
_stores: dict[Layout, dist.Store] = {}


def connect_store(layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    """Connect to the store shared by all ranks of a layout, when all have joined."""
    if layout.world_size == 1:
        return dist.HashStore()
    if layout.num_nodes == 1:
        stay_on_loopback()
    else:
        avoid_loopback(layout.main_address)
    if layout.world_size > _MOST_IN_FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if layout not in _stores:  # one for all groups of this process: ranks could not tell two apart
        path = _private_file(layout)
        # -1: keep the file.
        store = dist.FileStore(str(path), -1) if path else _tcp_store(layout, timeout)
        try:
            _stores[layout] = _join(store, layout, timeout)
        except dist.DistNetworkError as error:
            raise TemporaryError(f"the store of rank 0 was lost: {error}") from error
        if layout.is_main and (address := _address_file(layout)).exists():
            address.unlink()  # the next command of the same launch must not read it
    return dist.PrefixStore(f"group-{next(_groups_formed)}", _stores[layout])


def _private_file(layout: Layout) -> Path | None:
    """The store's file, not on a network file system; ``None`` if the ranks use TCP.

    Our launcher creates its folder, or else the first rank does, by a name that all of them know.
    """
    if layout.num_nodes > 1:
        return None
    if layout.source == "environment" and STORE in os.environ:
        return Path(os.environ[STORE])
    if not layout.launch_id:
        return None
    prefix = f"trainer-store-{os.geteuid()}-"
    folder = Path(tempfile.gettempdir()).absolute() / f"{prefix}{layout.launch_id}"
    if layout.is_main:
        held_folders.remove_left(f"{prefix}*")
    atexit.register(held_folders.release, folder, held_folders.hold(folder))
    return folder / STORE_FILE


def _join(store: dist.Store, layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    """Wait until all ranks have joined, and return the part of the store for these processes.

    After a restart by torchelastic, the store contains addresses of the previous ranks, and no rank
    knows which restart it belongs to. So each sends a new token, and rank 0 replies with another.
    Ranks are counted, so that rank 0 looks at each of them once.
    """
    token = uuid.uuid4().hex
    store.set(f"asked/{store.add('asked', 1)}", token)
    if layout.is_main:
        unanswered, known = set[int](), 0
        store.add(f"{token}/present", 1)

        def has_all() -> bool:
            nonlocal known
            unanswered.update(range(known + 1, (known := int(store.get("asked"))) + 1))
            for number in [number for number in unanswered if store.check([f"asked/{number}"])]:
                store.set(f"reply/{store.get(f'asked/{number}').decode()}", token)
                unanswered.remove(number)
            return int(store.get(f"{token}/present")) == layout.world_size

        if not poll(has_all, timeout.total_seconds(), _POLL_SECONDS):
            others = range(1, layout.world_size)
            late = [rank for rank in others if not store.check([f"{token}/present/{rank}"])]
            raise _missing(late, timeout)
        return dist.PrefixStore(token, store)
    if not poll(lambda: store.check([f"reply/{token}"]), timeout.total_seconds(), _POLL_SECONDS):
        raise _missing([0], timeout)
    token = store.get(f"reply/{token}").decode()
    store.set(f"{token}/present/{layout.rank}", "")
    store.add(f"{token}/present", 1)
    return dist.PrefixStore(token, store)


def _missing(ranks: list[int], timeout: datetime.timedelta) -> TemporaryError:
    return TemporaryError(
        f"rank {', '.join(map(str, ranks))} did not join within {timeout.total_seconds():g} s "
        "(timeout_seconds of the strategy): it ended, or hangs, before the trainer was reached; "
        "see docs/trouble.md#a-rank-did-not-join"
    )


def poll(is_done: Callable[[], bool], seconds: float, shortest: float) -> bool:
    """Whether something is done within so many seconds; ``shortest`` is between the first looks."""
    # They become rarer, as those of a thousand ranks would keep the store on rank 0 busy.
    began = time.monotonic()
    while not is_done():
        if (waited := time.monotonic() - began) > seconds:
            return False
        time.sleep(min(max(shortest, waited / 20), _LONGEST_POLL_SECONDS))
    return True


def _tcp_store(layout: Layout, timeout: datetime.timedelta) -> dist.Store:
    """Serve the store on rank 0, or connect to it; on one node it listens on 127.0.0.1 only."""
    address, port, descriptor = layout.main_address, layout.main_port, None
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    serves = layout.is_main and not (is_served and port)
    path = _address_file(layout)
    if not serves and port == 0:
        port = int(_await_address(path, timeout))
    soft, hard = getrlimit(RLIMIT_NOFILE)
    if serves and 0 <= soft < _OPEN_FILES:  # each rank keeps a connection; -1 is no limit
        setrlimit(RLIMIT_NOFILE, (hard if 0 <= hard < _OPEN_FILES else _OPEN_FILES, hard))
    is_local = layout.num_nodes == 1 and not is_served
    address = "127.0.0.1" if is_local else address
    try:
        if serves and is_local:
            descriptor = socket.create_server((address, port), backlog=1024).detach()
        store = dist.TCPStore(
            address,
            port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=descriptor,
        )
    except (dist.DistNetworkError, OSError) as error:  # such as: the port is in use
        problem = "cannot be served" if serves else "was not found"
        line = f"the store of rank 0 {problem} at {address}:{port}: {error}"
        raise TemporaryError(line) from error
    if serves and port == 0:
        atexit.register(path.unlink, missing_ok=True)
        files.write_atomically(path, str(store.port), mode=0o600)
    return store


def _address_file(layout: Layout) -> Path:
    """The file in which rank 0 tells the port of its store, in a folder that nodes share."""
    return Path(os.environ.get("SLURM_SUBMIT_DIR", ".")) / f".rendezvous-{layout.launch_id}"


def _await_address(path: Path, timeout: datetime.timedelta) -> str:
    if not poll(path.exists, timeout.total_seconds(), _POLL_SECONDS):
        problem = f"did not write its port to {path} within {timeout.total_seconds():g} s"
        advice = "set MASTER_PORT if the nodes do not share this directory"
        raise TemporaryError(f"rank 0 {problem}; {advice}")
    if (owner := path.stat().st_uid) != os.geteuid():
        raise UserError(f"{path} was written by another user (id {owner}); remove it")
    return path.read_text("utf-8")


def stay_on_loopback() -> None:
    """Select the loopback interface for gloo and NCCL, unless the user has set one."""
    for interface in [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
        os.environ.setdefault(_INTERFACE, interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def avoid_loopback(main_address: str) -> None:
    """Select the interface of the default route for gloo, unless the user has set one.

    By default gloo listens on the address of this host's name. Where that is 127.0.1.1, as in
    Debian's /etc/hosts, other nodes would connect to themselves.
    """
    is_set = _INTERFACE in os.environ or not sys.platform.startswith("linux")
    if is_set or _is_loopback(main_address):  # then all nodes are this host
        return
    name, listens_at = socket.gethostname(), "127.0.0.1"
    with contextlib.suppress(OSError):
        listens_at = socket.gethostbyname(name)
    if not _is_loopback(listens_at):
        return
    # Routes of the kernel: interface, destination (0: the default route), …
    routes = [line.split() for line in _ROUTES.read_text("utf-8").splitlines()]
    if (interface := next((route[0] for route in routes if route[1] == "00000000"), None)) is None:
        known = [other for _, other in socket.if_nameindex() if other != "lo"]
        raise UserError(
            f"{_INTERFACE} is needed: the name of this host, {name}, resolves to {listens_at}, "
            "which other nodes cannot reach; set it to the interface that the nodes share "
            f"(known: {', '.join(known) or 'none'})"
        )
    os.environ[_INTERFACE] = interface


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
