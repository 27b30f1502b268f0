"""The checks of network adapters, called with a recorded machine that has some."""

import pytest

from pytest_gpufleet.verdict.judgement import judge
from tests.acceptance.checks import outcomes
from tests.machines import recorded

MODULES, LINKS = "test_transceivers_are_well", "test_links_have_few_bit_errors"
# As hardware/host_parts/optics.py reads it of a healthy 400G module.
OPTICS = """
def module(i):
    readings = dict(temperature_c=dict(values=[61.0], least=-10.0, most=80.0))
    told = dict(cable='Optical Module (separated)', fec='Standard_RS-FEC - (544,514)', readings=readings, flags=[])
    counted = dict(minutes=2718.1, raw_ber=5e-10, effective_ber=15e-255, symbol_ber=None, link_downs=0.0)
    return told | counted | dict(port=f'mlx5_{i}/1')
ports = host['optics'] = [module(i) for i in range(4)]
"""


@pytest.mark.parametrize(
    ("change", "check", "code"),
    [
        ("ports[2]['readings']['temperature_c']['values'] = [81.0]", MODULES, "network_module_fault"),
        ("ports[2]['effective_ber'] = 3e-13", LINKS, "network_link_errors"),
        ("ports[2]['link_downs'] = 9.0", LINKS, "network_link_flaps"),
    ],
)
def test_a_cable_that_is_not_well(change, check, code):
    (fault,) = outcomes(recorded(OPTICS + change))[check].faults
    assert (fault.code, [str(where) for where in fault.subjects]) == (code, ["node"])
    assert fault.what.startswith("mlx5_2/1 ")


def test_cables_that_are_well():
    checks = outcomes(recorded(OPTICS))
    assert (checks[MODULES].what, checks[LINKS].what) == ("passed", "passed")


def test_a_virtual_machine_without_adapters():
    why = "no NVIDIA network adapter has an active port"
    checks = outcomes(recorded(f"host['optics'] = Unavailable({why!r}, False)"))
    assert {(checks[name].what, why in checks[name].message) for name in (MODULES, LINKS)} == {("not applicable", True)}


PORTS = """
def port(i):
    return dict(port=f'mlx5_{i}/1', state='4: ACTIVE', rate='400 Gb/sec (4X NDR)', link_layer='InfiniBand')
host['network_ports'] = [port(i) for i in range(4)]
wrote = host['rdma_writes'] = [dict(port=f'mlx5_{i}/1', bytes=8 << 20, gigabits=389.6) for i in range(4)]
"""


def written(change):
    """How the check of writes ends on this machine, and what it gave to judge."""
    judged = []

    def judge(measurement, on_miss):
        judged.append((measurement, on_miss))

    return outcomes(recorded(change), judge=judge)["test_adapters_write_to_themselves"], judged


def test_adapters_that_write_to_themselves():
    outcome, [(measurement, _)] = written(PORTS)
    assert outcome.what == "passed"
    assert set(measurement.values.values()) == {389.6 / 8}
    assert measurement.conditions == {"method": "ib_write_bw", "bytes": 8 << 20, "port_rate": 400}


def test_a_slow_adapter_is_found_by_its_peers_and_named():
    _, [(measurement, on_miss)] = written(PORTS + "wrote[2]['gigabits'] = 340.0")
    finding = judge(measurement, None, recorded().topology, "x.py::y", rehearsal=False)
    assert (finding.state, [str(where) for where in finding.slower_than_peers]) == ("missed", ["nic2"])
    assert [fault.what.partition(" ")[0] for fault in on_miss()] == ["mlx5_2/1"]


def test_adapters_that_are_all_slow_miss_what_their_ports_can():
    """Half of the rate, as on a machine where all traffic goes through the memory of the host."""
    _, [(measurement, _)] = written(PORTS + "for one in wrote: one['gigabits'] = 200.0")
    finding = judge(measurement, None, recorded().topology, "x.py::y", rehearsal=False)
    assert (finding.state, finding.limit.grade, len(finding.missed)) == ("missed", "physical", 4)


@pytest.mark.parametrize("gigabits", [360.0, 384.0])
def test_adapters_as_slow_as_published_gates_allow_are_healthy(gigabits):
    """Azure's for H200, and that of oci-hpc."""
    _, [(measurement, _)] = written(PORTS + f"for one in wrote: one['gigabits'] = {gigabits}")
    assert judge(measurement, None, recorded().topology, "x.py::y", rehearsal=False).state == "met"


def test_an_adapter_through_which_nothing_goes():
    outcome, [(measurement, _)] = written(PORTS + "wrote[2] = dict(port='mlx5_2/1', why='no reply')")
    assert [fault.code for fault in outcome.faults] == ["network_adapter_fails"]
    assert len(measurement.values) == 3
