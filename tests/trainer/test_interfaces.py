"""By which interface gloo connects nodes whose names lead to themselves."""

import datetime
import os
import socket
from typing import Any

import pytest
from my_project_trainer.errors import UserError
from my_project_trainer.launch import cluster, interfaces, rendezvous

VARIABLE = "GLOO_SOCKET_IFNAME"
WAYS = {"gpu07": "10.0.0.8", "192.0.2.1": "192.168.1.8"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host of two interfaces, of whose name the address is given."""
    monkeypatch.setenv(VARIABLE, "")  # as it was, afterward
    monkeypatch.delenv(VARIABLE)

    def named(address: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
        monkeypatch.setattr(socket, "gethostname", lambda: "gpu08")
        monkeypatch.setattr(socket, "getaddrinfo", lambda name, port, **how: found)

    monkeypatch.setattr(interfaces, "_source", WAYS.get)
    known = {"10.0.0.8": "ib0", "192.168.1.8": "eth0"}
    monkeypatch.setattr(interfaces, "_interfaces", lambda: known)
    return named


@pytest.mark.parametrize(("main", "interface"), [("gpu07", "ib0"), ("gpu08", "eth0")])
def test_a_name_that_leads_to_itself_is_not_used(host: Any, main: str, interface: str) -> None:
    host("127.0.1.1")
    interfaces.avoid_loopback(main)
    assert os.environ[VARIABLE] == interface


def test_a_name_without_an_address_is_not_used(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, port: int, **how: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    interfaces.avoid_loopback("gpu07")
    assert os.environ[VARIABLE] == "ib0"


@pytest.mark.parametrize("main", ["127.0.0.1", "localhost", "::1"])
def test_nodes_that_are_made_up_stay_on_loopback(host: Any, main: str) -> None:
    host("127.0.1.1")
    interfaces.avoid_loopback(main)
    assert VARIABLE not in os.environ


def test_a_name_that_leads_to_the_network_is_left_to_gloo(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("127.0.1.1")
    monkeypatch.setattr(interfaces, "_address_of", lambda name: "10.0.0.8")
    interfaces.avoid_loopback("gpu07")
    assert VARIABLE not in os.environ


def test_what_the_user_says_stays(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host("127.0.1.1")
    monkeypatch.setenv(VARIABLE, "ib1")
    interfaces.avoid_loopback("gpu07")
    assert os.environ[VARIABLE] == "ib1"


def test_where_no_interface_can_be_told_it_is_asked_for(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("127.0.1.1")
    monkeypatch.setattr(interfaces, "_source", lambda target: None)
    with pytest.raises(UserError) as raised:
        interfaces.avoid_loopback("gpu07")
    assert raised.value.problems == [
        "GLOO_SOCKET_IFNAME is needed: the name of this host, gpu08, resolves to 127.0.1.1, which "
        "other nodes cannot reach; set it to the interface that the nodes share (known: eth0, "
        "ib0)"
    ]
    monkeypatch.setattr(interfaces, "_interfaces", lambda: {"10.0.0.8": "ib0"})
    interfaces.avoid_loopback("gpu07")
    assert os.environ[VARIABLE] == "ib0"


def test_ranks_of_several_nodes_ask_for_it_before_they_meet(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host("127.0.1.1")
    monkeypatch.setattr(interfaces, "_source", lambda target: None)
    layout = cluster.Layout(world_size=2, num_nodes=2, main_address="gpu07", main_port=29500)
    with pytest.raises(UserError, match=r"^GLOO_SOCKET_IFNAME is needed: "):
        rendezvous.connect_store(layout, datetime.timedelta(seconds=1))


def test_this_machine_s_interfaces_are_read() -> None:
    found = interfaces._interfaces()
    assert not [address for address in found if address.startswith("127.")]
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()} - {"lo"}
    assert interfaces._source("127.0.0.1") == "127.0.0.1"
    assert interfaces._address_of("localhost") in ("127.0.0.1", "::1")
    assert interfaces._address_of("no-such-host.invalid") == "127.0.0.1"
