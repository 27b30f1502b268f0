"""What network ports counted between two readings: errors, links that came and went, and what is only told."""

import pytest

from pytest_gpufleet.verdict.port_rules import port_errors, port_traffic

ERRORS = {"link_downed": 1, "symbol_error": 17}
TRAFFIC = {"port_xmit_wait": 1_000, "out_of_sequence": 3}


def port(state="4: ACTIVE", carrier_changes=2, **changed):
    counts = {**ERRORS, **TRAFFIC, **changed}
    return {
        "port": "mlx5_0/1",
        "state": state,
        "rate": "400 Gb/sec (4X NDR)",
        "errors": {name: counts[name] for name in ERRORS},
        "traffic": {name: counts[name] for name in TRAFFIC},
        "carrier_changes": carrier_changes,
    }


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (port(), []),
        (port(port_xmit_wait=10**9, out_of_sequence=10**6), []),
        (port(symbol_error=27), []),
        (port(symbol_error=28), ["symbol_error"]),
        (port(link_downed=2), ["link_downed"]),
        (port(carrier_changes=4), ["carrier_changes"]),
        (port(carrier_changes=4, link_downed=2), ["link_downed", "carrier_changes"]),
    ],
    ids=["nothing", "congestion", "few errors", "many errors", "a link that was down", "carrier", "both"],
)
def test_errors_of_a_port_are_told_and_congestion_is_not(now, told):
    faults = port_errors([port()], [now], 600.0)
    assert [next(name for name in [*ERRORS, "carrier_changes"] if name in fault.what) for fault in faults] == told
    assert {fault.name for fault in faults} <= {"network_port_errors"}


def test_ports_without_a_cable_and_evidence_of_before_have_none():
    assert port_errors([port("1: DOWN")], [port("1: DOWN", carrier_changes=9)], 600.0) == []
    before = {name: value for name, value in port().items() if name not in ("traffic", "carrier_changes")}
    assert port_errors([before], [port(carrier_changes=9)], 600.0) == []
    assert port_traffic([before], [port()]) == {}


def test_what_is_told_is_what_grew_on_the_ports_in_use():
    before = [port(), {**port(), "port": "mlx5_1/1"}, {**port("1: DOWN"), "port": "mlx5_2/1"}]
    now = [
        port(port_xmit_wait=1_500),
        {**port(out_of_sequence=10), "port": "mlx5_1/1"},
        {**port(port_xmit_wait=9_999), "port": "mlx5_2/1"},
    ]
    assert port_traffic(before, now) == {"port_xmit_wait": 500, "out_of_sequence": 7}
