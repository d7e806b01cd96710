"""Runs on two nodes, which are network namespaces with a link between them, and cuts of it."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from . import machine
from .faults import SOON, Strike, fault
from .storage_faults import await_save
from .ways import Attempt, Launcher, Torchrun, Way

# Of each node; 198.51.100.0/24 is reserved for documentation, and nobody else is in these networks.
_ADDRESSES = ("198.51.100.1", "198.51.100.2")
_PORT = 29500
_SECONDS_TO_END = 60.0
# As slurm/elastic.sh, but with time for both to come on a busy machine: one that is late restarts
# the other.
_WAITS = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=10"
# After 25 s the kernel gives a connection up, not after 15 minutes: an agent of torchrun waits so
# long for the node with its rendezvous, whatever its own timeout is.
_GIVE_UP = "echo 6 > /proc/sys/net/ipv4/tcp_retries2"
# An Ethernet address that no node has: what is sent to it is lost.
_NOBODY = "02:00:00:00:00:99"


# By the folder of an attempt: a process in each namespace, which ends with this one.
_holders: dict[Path, list[subprocess.Popen[bytes]]] = {}


def _inside(attempt: Attempt, node: int) -> list[str]:
    """The command that runs another on a node."""
    return ["nsenter", "--net", "--target", str(_holders[attempt.folder][node].pid)]


def _run(attempt: Attempt, node: int, *command: str) -> None:
    done = [*_inside(attempt, node), *command]
    subprocess.run(done, check=True, capture_output=True, timeout=60)


def missing() -> str | None:
    if os.getuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "nsenter", "unshare") if not shutil.which(name)]
    return f"{absent[0]} is not installed: apt install iproute2 util-linux" if absent else None


class OnTwoNodes(Way):
    """The trainer's own launcher on each node, with a rank."""

    def missing(self) -> str | None:
        return missing() or super().missing()

    def begin(self, attempt: Attempt) -> None:
        _connect(attempt)
        nodes = ("NNODES=2", f"MASTER_ADDR={_ADDRESSES[0]}", f"MASTER_PORT={_PORT}")
        for node in range(2):
            by = partial(self.on_node, attempt, node, *nodes, f"NODE_RANK={node}")
            attempt.launchers.append(self.start(attempt, self.fit(attempt, 1), by))
        _end_together(attempt.launchers)

    def on_node(self, attempt: Attempt, node: int, *variables: str) -> list[str]:
        return [*_inside(attempt, node), "env", "GLOO_SOCKET_IFNAME=eth0", *variables]

    def stop(self, attempt: Attempt) -> None:
        super().stop(attempt)
        for holder in _holders.pop(attempt.folder, []):
            holder.communicate()  # closes its input


class TorchrunOnTwoNodes(OnTwoNodes, Torchrun):
    """An agent of torchrun on each node, with a rank; one without the other is an error."""

    nodes = ("--nnodes=2", "--max-restarts=0")
    goes_on = False
    """An agent that is alone."""

    def begin(self, attempt: Attempt) -> None:
        _connect(attempt)
        for node, address in enumerate(_ADDRESSES):
            meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint={_ADDRESSES[0]}:{_PORT}")
            host = f"--rdzv-conf={_WAITS},is_host={'false' if node else 'true'}"
            where = ("--rdzv-id=soak", f"--local-addr={address}", "--nproc-per-node=1")
            by = partial(self.on_node, attempt, node)
            agent = self.agent(attempt, *self.nodes, *meet, host, *where, by=by)
            attempt.launchers.append(agent)
        if not self.goes_on:
            _end_together(attempt.launchers)


def _end_together(launchers: Sequence[Launcher]) -> None:
    """Begin to do what srun does in slurm/train.sh: end the node that outlives a failed one by far.

    Nobody else ends a process that is stopped, or an agent that waits for a rank that is.
    """
    nodes = [*launchers]

    def wait() -> None:
        while not any(launcher.poll() for launcher in nodes):
            if None not in [launcher.poll() for launcher in nodes]:
                return
            time.sleep(1)
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _SECONDS_TO_END
            while None in [launcher.poll() for launcher in nodes] and time.monotonic() < deadline:
                time.sleep(1)
            for node in (launcher for launcher in nodes if launcher.poll() is None):
                os.kill(node.pid, number)

    threading.Thread(target=wait, daemon=True).start()


class ElasticOnTwoNodes(TorchrunOnTwoNodes):
    """As slurm/elastic.sh: an agent that is alone goes on."""

    nodes = ("--nnodes=1:2", "--max-restarts=100")
    goes_on = True
    saves = False  # as it restarts ranks that have saved


def _connect(attempt: Attempt) -> None:
    """Make two network namespaces, which are gone when the processes in them have ended."""
    command, pipe = ["unshare", "--net", "cat"], subprocess.PIPE
    nodes = [subprocess.Popen(command, cwd="/", stdin=pipe) for _ in range(2)]
    _holders[attempt.folder] = nodes
    namespace = Path("/proc/self/ns/net").readlink()
    while any(Path(f"/proc/{launcher.pid}/ns/net").readlink() == namespace for launcher in nodes):
        time.sleep(0.01)
    link = ("type", "veth", "peer", "eth0", "netns", str(nodes[1].pid))
    _run(attempt, 0, "ip", "link", "add", "eth0", *link)
    for node, address in enumerate(_ADDRESSES):
        _run(attempt, node, "ip", "address", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run(attempt, node, "ip", "link", "set", interface, "up")
        _run(attempt, node, "bash", "-c", _GIVE_UP)


# --- cuts ----------------------------------------------------------------------------------------

Cut = Callable[[Attempt], Callable[[], None]]
"""Cuts the link, and returns what mends it."""


def _pull(attempt: Attempt) -> Callable[[], None]:
    """The interface of a node is down: the kernels of both know."""
    node = attempt.dice.randrange(2)
    change = partial(_run, attempt, node, "ip", "link", "set", "eth0")
    change("down")
    return partial(change, "up")


def _drop(attempt: Attempt, nodes: Sequence[int] = (0, 1)) -> Callable[[], None]:
    """What nodes send is lost, and nobody is told."""

    def change(how: str, *more: str) -> None:
        for node in nodes:
            entry = ("neighbor", how, _ADDRESSES[1 - node], "dev", "eth0")
            _run(attempt, node, "ip", *entry, *more)

    change("replace", "lladdr", _NOBODY, "nud", "permanent")
    return partial(change, "delete")


def _drop_one_way(attempt: Attempt) -> Callable[[], None]:
    return _drop(attempt, (attempt.dice.randrange(2),))


def _mend(mend: Callable[[], None]) -> None:
    with suppress(
        subprocess.CalledProcessError, KeyError
    ):  # the attempt, and its nodes, have ended
        mend()


def _register(name: str, cut: Cut) -> None:
    on_two = partial(fault, fits=lambda way: isinstance(way, OnTwoNodes))

    @on_two(f"{name} for a moment", "continues")
    def interrupt(attempt: Attempt) -> Strike:
        yield
        threading.Timer(attempt.dice.uniform(1, 2), _mend, [cut(attempt)]).start()

    @on_two(name)
    def lose(attempt: Attempt) -> Strike:
        attempt.timeout = SOON
        yield
        cut(attempt)

    @on_two(f"{name} in a save", needs=machine.compiler)
    def lose_in_save(attempt: Attempt) -> Strike:
        attempt.timeout = SOON
        yield from await_save(attempt)
        cut(attempt)


_register("network link down", _pull)
_register("packets lost", _drop)
_register("packets lost one way", _drop_one_way)


WAYS: dict[str, Way] = {
    "ddp on two nodes": OnTwoNodes("ddp"),
    "fsdp on two nodes": OnTwoNodes("fsdp"),
    "ddp by torchrun on two nodes": TorchrunOnTwoNodes("ddp"),
    "fsdp by torchrun on two nodes": TorchrunOnTwoNodes("fsdp"),
    "ddp by elastic torchrun on two nodes": ElasticOnTwoNodes("ddp"),
}
