"""What the firmware says of a machine, and of its memory modules."""

import pytest

from pytest_gpufleet.machine import host, memory
from tests.machine.test_three_states import SERVER
from tests.machine.trees import laid_out, written

GiB = 1 << 30


def test_the_machine_and_its_bios(tmp_path):
    dmi = host.read_dmi(laid_out("two-drives", tmp_path).root)
    assert (dmi.vendor, dmi.product, dmi.board) == ("QEMU", "Standard PC (Q35 + ICH9, 2009)", None)
    assert dmi.bios_version == "rel-1.16.1-0-g3208b098f51a-prebuilt.qemu.org"


def test_a_memory_module_beside_an_empty_slot(tmp_path):
    module, empty = memory.modules(laid_out("two-drives", tmp_path).root)

    assert module == memory.Module(
        locator="CPU1_DIMM_Q1", bank="P1 CHANNEL Q", manufacturer="Micron Technology", serial="F3A21FA0",
        part="36ASF4G72PZ-3G2E7", bytes=32 * GiB, type="DDR4", speed=3200, configured_speed=2933,
    )  # fmt: skip
    assert (empty.locator, empty.bytes, empty.speed, empty.type) == ("CPU1_DIMM_Q2", 0, None, None)


@pytest.mark.parametrize(
    ("size", "bytes_"), [("00 40", 16 * GiB), ("00 88", 2 << 20), ("ff ff", None), ("00 00", 0)],
    ids=["MiB", "KiB", "the firmware does not know", "empty"],
)  # fmt: skip
def test_sizes_of_old_firmware(tmp_path, size, bytes_):
    """16 GiB in MiB as DSP0134 7.18 counts it; with the highest bit set in KiB."""
    tree = laid_out("two-drives", tmp_path, lambda text: text.replace("48 00 40 00 ff 7f", f"48 00 40 00 {size}"))

    assert memory.modules(tree.root)[0].bytes == bytes_


def test_an_entry_that_ends_early_has_what_it_has(tmp_path):
    """SMBIOS 2.1 had no speed and no texts of the maker."""
    (module,) = memory.modules(written(tmp_path, SERVER))
    assert module == memory.Module(locator="DIMM_A1", bytes=8 * GiB, type="DDR4")
