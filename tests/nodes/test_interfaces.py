"""Address and interface of a node, and those that its ranks use."""

import socket
import urllib.parse

import pytest

from pytest_gpufleet.nodes import network
from pytest_gpufleet.nodes.network import Interface, for_ranks


def has(address):
    try:
        network.towards(address)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_on_one_machine_it_is_loopback(address):
    if not has(address):
        pytest.skip(f"this machine has no {address}")
    assert network.towards(address) == Interface(address, "lo")


def test_towards_another_node_it_is_the_interface_of_the_route():
    elsewhere = "192.0.2.1"  # for documentation (RFC 5737): nothing is sent there
    if not has(elsewhere):
        pytest.skip("this machine has no route to others")
    found = network.towards(elsewhere)
    assert found.name in dict(socket.if_nameindex()).values()
    assert found.name != "lo"
    assert network.towards(found.address) == found  # the controller's own node asks for itself


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_meet_at_a_port_that_can_be_had(address):
    if not has(address):
        pytest.skip(f"this machine has no {address}")
    met = urllib.parse.urlparse(network.free_rendezvous(address))
    assert (met.scheme, met.hostname) == ("tcp", address)
    with socket.create_server((address, met.port), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
        pass


@pytest.mark.parametrize(
    ("environment", "nccl", "gloo"),
    [
        ({}, "=eth0", ["eth0", "eth0", "eth0"]),
        ({"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "ib0"}, "ib", ["ib0", "ib0", "ib0"]),
        ({"GLOO_SOCKET_IFNAME": "rail0,rail1"}, "=eth0", ["rail0", "rail1", "rail0"]),
        ({"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": ""}, "=eth0", ["eth0", "eth0", "eth0"]),
    ],
)
def test_ranks_talk_on_the_interface_of_their_node_unless_somebody_chose_others(environment, nccl, gloo):
    found = [for_ranks("eth0", index, environment) for index in range(3)]
    assert found == [{"NCCL_SOCKET_IFNAME": nccl, "GLOO_SOCKET_IFNAME": name} for name in gloo]


def test_without_a_known_interface_nothing_is_chosen():
    assert for_ranks("", 0, {"GLOO_SOCKET_IFNAME": "eth1"}) == {}
