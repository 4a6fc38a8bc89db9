"""Interfaces and addresses that lead to another host, and how ranks without Ray learn of them."""

import logging

import pytest

from lockstep.launcher.channels import Seating
from lockstep.launcher.errors import LaunchError
from lockstep.launcher.network import interface_of, local_address, use_route
from lockstep.launcher.roll import Presence, seating_of


def test_the_way_to_this_host_is_loopback_and_to_its_own_address_the_interface_of_it():
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.123") is None


def test_gloo_and_nccl_get_the_interface_that_leads_there_unless_the_user_chose(caplog):
    env = {"NCCL_SOCKET_IFNAME": "ib0"}
    caplog.set_level(logging.INFO, "lockstep")
    use_route("127.0.0.1", env)
    assert env == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}
    assert "GLOO_SOCKET_IFNAME=lo, NCCL_SOCKET_IFNAME=ib0" in caplog.text


def test_an_interface_is_that_of_the_route_and_not_of_the_host_name(monkeypatch):
    """The name of a host often means loopback there, which leads to no other host."""
    addresses = {"lo": "127.0.0.1", "eth9": "10.9.8.7"}
    names = [(1, "lo"), (2, "eth9")]
    monkeypatch.setattr("lockstep.launcher.network.local_address", lambda towards: "10.9.8.7")
    monkeypatch.setattr("lockstep.launcher.network.socket.if_nameindex", lambda: names)
    monkeypatch.setattr("lockstep.launcher.network._ipv4_of", addresses.get)
    env = {}
    use_route("10.9.8.1", env)
    assert env == {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "eth9"}


def test_a_name_that_means_nothing_is_an_error_that_names_it():
    with pytest.raises(LaunchError, match=r"no way leads from this host to no\.such\.invalid"):
        local_address("no.such.invalid")


def presence(node_rank, master):
    return Presence(pid=1, boot_id=f"kernel-{node_rank}", node_rank=node_rank, master=master)


def test_the_scheduler_is_bound_where_other_hosts_see_its_host():
    roll = [presence(0, "127.0.1.1")] * 2 + [presence(1, "10.0.0.5")] * 2
    assert seating_of(roll) == Seating("10.0.0.5", (2, 3))
    assert seating_of(roll[:2]) == Seating("127.0.0.1", ())
