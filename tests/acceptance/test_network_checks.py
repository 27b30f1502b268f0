"""The checks of network adapters, called with a recorded machine that has some."""

import pytest

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
