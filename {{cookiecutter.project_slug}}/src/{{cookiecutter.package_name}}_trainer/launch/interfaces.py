"""Select the network interface that gloo uses to connect ranks on several nodes.

gloo listens on the address of this host's name. Where that is 127.0.1.1, as in Debian's
/etc/hosts, other nodes would connect to themselves.
"""

import fcntl
import ipaddress
import os
import socket
import struct
import sys

from ..errors import UserError

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
# A documentation address (RFC 5737), reached by the default route. Nothing is sent.
_ANYWHERE = "192.0.2.1"


def avoid_loopback(main_address: str) -> None:
    """Select an interface that other nodes can reach for gloo, unless the user has set one.

    Args:
        main_address: Address of rank 0's node.

    Raises:
        UserError: The host name resolves to loopback, and the interface to use is ambiguous.
    """
    if VARIABLE in os.environ or not sys.platform.startswith("linux"):
        return
    if _is_loopback(main_address):
        return  # all nodes are this host
    name = socket.gethostname()
    listens_at = _address_of(name)
    if not _is_loopback(listens_at):
        return
    others = _interfaces()
    # Rank 0's node reaches itself through loopback, so also try the default route.
    sources = [_source(target) for target in (main_address, _ANYWHERE)]
    found = next((others[each] for each in sources if each in others), None)
    if found is None and len(others) == 1:
        (found,) = others.values()
    if found is None:
        known = f" (known: {', '.join(sorted(others.values()))})" if others else ""
        raise UserError(
            f"{VARIABLE} is needed: the name of this host, {name}, resolves to {listens_at}, which "
            f"other nodes cannot reach; set it to the interface that the nodes share{known}"
        )
    os.environ[VARIABLE] = found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _address_of(name: str) -> str:
    """Address on which gloo listens: the first local address of a host name, or loopback."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as listener:
                listener.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


def _source(target: str) -> str | None:
    """This host's source address for packets to another host."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interfaces() -> dict[str, str]:
    """Map addresses to interface names, without loopback."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not _is_loopback(address):
                found[address] = name
    return found
