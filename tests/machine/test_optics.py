"""Cables and transceivers as mlxlink describes them, and what of it is a fault."""

import pytest

from pytest_gpufleet.machine import optics
from pytest_gpufleet.machine.optics import Reading, module_faults
from pytest_gpufleet.machine.tools import Absent, NoAnswer, Unreadable
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.place import Missing
from tests.acceptance.checks import outcomes
from tests.machine.trees import laid_out, replaced
from tests.machines import recorded

MODULES, LINKS = "test_transceivers_are_well", "test_links_have_few_bit_errors"


def found(root, *changes, times=1, run=None):
    """The ports of the recorded machine after these changes, each at the first place where it stands."""
    tree = laid_out("optics", root, replaced(*changes, times=times))
    return optics.read(tree.root, run or tree.run)


def checked(ports):
    return outcomes(recorded(), now={"optics": codec.plain(ports)})


def test_a_module_and_a_copper_cable(tmp_path):
    """Ports that are down, and adapters of others, are not asked."""
    module, copper = found(tmp_path)
    assert (module.port, module.cable, module.flags) == ("mlx5_0/1", "Optical Module (separated)", ())
    assert module.readings["temperature_c"] == Reading((61,), -10, 80)
    assert module.readings["rx_power_dbm"].values == (3.583, 3.253, 3.233, 2.658)
    assert (module.minutes, module.effective_ber) == (2718.1, 15e-255)
    assert (module.link_downs, module.symbol_ber, module.able, copper.able) == (0, None, 400, None)
    assert (copper.port, copper.readings, copper.flags) == ("mlx5_1/1", {}, ())
    assert optics.OPTICS.of({"optics": codec.plain([module, copper])}) == [module, copper]


def lanes(width):
    return '"Width" : "4x"', f'"Width" : "{width}x"'


@pytest.mark.parametrize(
    ("board", "cable", "able"),
    [('"400G_4X", "400G_8X", "200G_2X", "1G"', '"200G_4X", "100G_2X"', 200), ('"NDR", "HDR", "SDR"', '"NDR"', 400)],
)
def test_board_and_cable_are_both_able_to(tmp_path, board, cable, able):
    was = '"400G_4X", "400G_8X", "200G_2X", "1G"', '"400G_4X", "200G_2X", "100G_1X"'
    for width in (4, 2, 1):
        module, _ = found(tmp_path / f"{width}", (was[0], board), (was[1], cable), lanes(width))
        # Of InfiniBand on two lanes nobody knows: boards of HDR100 and NDR200 have no more.
        assert module.able == (None if width == 2 and "NDR" in board else able)


def ber(rate, kind="Effective"):
    usual = {"Effective": "15E-255", "Raw": "5E-10"}[kind]
    return f'"{kind} Physical BER" : "{usual}"', f'"{kind} Physical BER" : "{rate}"'


def downs(count):
    return '"Link Down Counter" : "0"', f'"Link Down Counter" : "{count}"'


SENDS_AGAIN = ("Standard_RS-FEC - (544,514)", "Low_Latency_RS_FEC_PLR")  # as NVIDIA's bring-up procedure writes it
ERRORS, FLAPS, OF_MODULE = (LINKS, "network_link_errors"), (LINKS, "network_link_flaps"), (MODULES, "transceiver_fault")
# What is changed, the check that fails with its fault, and words of it; None: both pass.
CABLES = {
    "as it is": ((), None),
    "warm": ([('"61 [', '"79 [')], None),
    "hot": ([('"61 [', '"81 [')], OF_MODULE, "temperature is 81 C"),
    "little light": ([("3.233,", "-9.8,")], None),
    "no light": ([("3.233,", "-40,")], OF_MODULE, "received power of lane 2 is -40 dBm"),
    "a module that has no limits": ([("[-9.914..6.999]", "[0..0]")], None),
    "firmware": ([('"Module FW Fault" : "0"', '"Module FW Fault" : "1"')], OF_MODULE, "Module FW Fault"),
    "no light on a lane": ([('"Rx LOS [per lane]" : { "values" : [ "0"', '"Rx LOS [per lane]" : { "values" : [ "1"')],
                           OF_MODULE, "Rx LOS"),
    "marginal": ([ber("6E-15")], None),
    "bad": ([ber("2E-14")], ERRORS),
    "corrected": ([ber("5E-6", "Raw")], None),
    "bad, and sent again": ([ber("5E-13"), SENDS_AGAIN], None),
    "too bad to be sent again": ([ber("2E-11"), SENDS_AGAIN], ERRORS),
    "it has just come up": ([ber("1E-6"), ("2718.1", "60.0")], None),
    "a few times in two days": ([downs(3)], None),
    "flaps": ([downs(4)], FLAPS),
    "symbols": ([('"Raw Physical BER"', '"Symbol BER" : "2E-14", "Raw Physical BER"')], ERRORS),
}  # fmt: skip


@pytest.mark.parametrize("case", CABLES)
def test_a_module_or_a_link_that_is_not_well(tmp_path, case):
    changes, fault, *words = CABLES[case]
    ends = checked(found(tmp_path, *changes))
    assert [(check, each.name) for check in (MODULES, LINKS) for each in ends[check].faults] == [fault] * bool(fault)
    assert {check for check in (MODULES, LINKS) if ends[check].what != "passed"} == ({fault[0]} if fault else set())
    whats = [each.what for check in (MODULES, LINKS) for each in ends[check].faults]
    assert all(what.startswith("mlx5_0/1 ") and word in what for what in whats for word in ("", *words))


def test_a_flag_of_what_is_over_is_no_fault(tmp_path):
    """Modules keep a flag until somebody reads it."""
    tree = laid_out("optics", tmp_path)
    asked = []

    def run(*command):
        asked.append(command)
        text = tree.run(*command)
        return text.replace('"Module FW Fault" : "0"', '"Module FW Fault" : "1"') if len(asked) == 1 else text

    assert [*module_faults(optics.read(tree.root, run))] == []


@pytest.mark.parametrize(("was", "now", "state", "why"), [
    ("sys/class/infiniband/mlx5", "sys/class/infiniband/other/mlx5", Absent, "no NVIDIA network adapter"),
    ("$ mlxlink", "$ other", Unreadable, "not installed"),
    (' --json\n', ' --json ! mlxlink failed with status 1: -E- Failed to open device\n', Unreadable, "Failed"),
    ('"code" : 0,\n\t\t"message" : "success"', '"code" : 1, "message" : "Failed to open"', Unreadable, "Failed"),
    ("{\n", "-E- unknown flag --json\n", Unreadable, "writes no JSON"),
], ids=["no adapter", "no program", "not root", "not root, as JSON", "an old program"])  # fmt: skip
def test_nothing_can_be_read(tmp_path, was, now, state, why):
    tree = laid_out("optics", tmp_path, lambda text: text.replace(was, now))
    with pytest.raises(state, match=why) as error:
        optics.read(tree.root, tree.run)
    assert state is Absent or error.value.remedy
    ends = outcomes(recorded(), now={"optics": Missing(why, absent=state is Absent)})
    assert ends[MODULES].what == ends[LINKS].what == ("not applicable" if state is Absent else "skipped")


@pytest.mark.parametrize(("width", "faults"), [(4, 3), (2, 0)])
def test_lanes_that_a_link_does_not_use_may_be_dark(tmp_path, width, faults):
    """As of a port for 200 Gbit/s whose cable is one half of a split one for 400: two lanes of its module are lit."""
    light = ('"3.583,3.253,3.233,2.658', '"3.583,3.253,-40,-40')
    los = '"Rx LOS [per lane]" : { "values" : [ "0", "0", '
    lost = (los + '"0", "0"', los + '"1", "1"')
    assert len([*module_faults(found(tmp_path, light, lost, lanes(width)))]) == faults


def test_virtual_functions_show_no_cable(tmp_path):
    tree = laid_out("optics", tmp_path)
    for adapter in (tree.root / "sys/class/infiniband").iterdir():
        (adapter / "hca_type").write_text("MT4126")
    with pytest.raises(Absent):
        optics.read(tree.root, tree.run)


def test_a_port_that_cannot_be_read_is_not_judged_beside_the_others(tmp_path):
    tree = laid_out("optics", tmp_path)

    def run(*command, **how):
        if "mlx5_1" not in command:
            return tree.run(*command, **how)
        raise NoAnswer("mlxlink did not answer within 20 s")

    ends = checked(optics.read(tree.root, run))
    for check in (ends[MODULES], ends[LINKS]):
        assert (check.what, check.message) == ("skipped", "not judged: mlx5_1/1: mlxlink did not answer within 20 s")
    ends = checked([*found(tmp_path / "hot", ('"61 [', '"81 ['))[:1], optics.Optics("mlx5_1/1", silent="mlx5_1/1: no")])
    assert (ends[MODULES].what, ends[LINKS].what) == ("failed", "skipped")
