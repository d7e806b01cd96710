"""By which interface gloo connects nodes whose names lead to themselves."""

import datetime
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer.errors import UserError
from my_project_trainer.launch import cluster, rendezvous

VARIABLE = "GLOO_SOCKET_IFNAME"
ROUTES = """\
Iface	Destination	Gateway 	Flags
ib0	0000000A	00000000	0001
eth0	00000000	0101A8C0	0003
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A host of two interfaces, of whose name the address is given."""
    monkeypatch.setenv(VARIABLE, "")  # as it was, afterward
    monkeypatch.delenv(VARIABLE)

    def named(address: str, routes: str = ROUTES) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: "gpu08")
        monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
        (tmp_path / "route").write_text(routes)
        monkeypatch.setattr(rendezvous, "_ROUTES", tmp_path / "route")

    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    return named


def test_a_name_that_leads_to_itself_is_not_used(host: Any) -> None:
    host("127.0.1.1")
    rendezvous.avoid_loopback("gpu07")
    assert os.environ[VARIABLE] == "eth0"


def test_a_name_without_an_address_is_not_used(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    host("127.0.1.1")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    rendezvous.avoid_loopback("gpu07")
    assert os.environ[VARIABLE] == "eth0"


@pytest.mark.parametrize("main", ["127.0.0.1", "localhost", "::1"])
def test_nodes_that_are_made_up_stay_on_loopback(host: Any, main: str) -> None:
    host("127.0.1.1")
    rendezvous.avoid_loopback(main)
    assert VARIABLE not in os.environ


def test_a_name_that_leads_to_the_network_is_left_to_gloo(host: Any) -> None:
    host("10.0.0.8")
    rendezvous.avoid_loopback("gpu07")
    assert VARIABLE not in os.environ


def test_what_the_user_says_stays(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host("127.0.1.1")
    monkeypatch.setenv(VARIABLE, "ib1")
    rendezvous.avoid_loopback("gpu07")
    rendezvous.stay_on_loopback()
    assert os.environ[VARIABLE] == "ib1"


NO_DEFAULT = ROUTES.rpartition("eth0")[0]


def test_without_a_default_route_it_is_asked_for_before_ranks_meet(host: Any) -> None:
    host("127.0.1.1", NO_DEFAULT)
    layout = cluster.Layout(world_size=2, num_nodes=2, main_address="gpu07", main_port=29500)
    with pytest.raises(UserError) as raised:
        rendezvous.connect_store(layout, datetime.timedelta(seconds=1))
    assert raised.value.problems == [
        "GLOO_SOCKET_IFNAME is needed: the name of this host, gpu08, resolves to 127.0.1.1, which "
        "other nodes cannot reach; set it to the interface that the nodes share (known: eth0, "
        "ib0)"
    ]


def test_this_machine_s_routes_can_be_read() -> None:
    assert rendezvous._ROUTES.read_text().split()[:2] == ["Iface", "Destination"]
