"""The firmware, processors and memory of the host: what they are and how they are set up, as the kernel shows it, and
what of it is wrong."""

import pytest

from pytest_gpufleet.machine import bmc, host, memory, processors
from pytest_gpufleet.machine.processors import Processor, ProcessorSetup
from pytest_gpufleet.model import codec
from tests.machine.test_three_states import SERVER
from tests.machine.trees import laid_out, replaced, written

GiB = 1 << 30
RULES = (processors.slow_clock, processors.offline_processors, processors.nodes_with_less_memory)


def test_a_host_with_two_sockets_and_a_system_that_shows_nothing(tmp_path):
    assert processors.read(laid_out("two-sockets", tmp_path).root) == ProcessorSetup(
        sockets=2,
        smt="on",
        clock_source="tsc",
        numa_balancing=1,
        transparent_hugepages="madvise",
        numa_memory={"0": 1056216640 << 10, "1": 1056913408 << 10},  # node 2 has no processors
    )
    setup = processors.read(tmp_path / "nothing")
    assert [fault for rule in RULES for fault in rule(setup)] == []
    assert (setup.clock_source, setup.sockets) == (None, None)


TSC, ONLINE = "current_clocksource\ntsc", "cpu/online\n0-3"
SETUPS = {
    "as it was": ((), []),
    "a clock source that is read over the bus": (((TSC, "current_clocksource\nhpet"),), ["clock_source_slow"]),
    "the power management timer": (((TSC, "current_clocksource\nacpi_pm"),), ["clock_source_slow"]),
    "the clock of a hypervisor": (((TSC, "current_clocksource\nkvm-clock"),), []),
    "one processor switched off": (((ONLINE, "cpu/online\n0-1,3"),), ["cpu_offline"]),
    "second threads switched off": (((ONLINE, "cpu/online\n0,2"), ("control\non", "control\noff")), []),
    "a socket with one module of sixteen less": (((" 1056913408 kB", " 990000000 kB"),), ["numa_memory_imbalance"]),
    "a socket of which the kernel keeps a part": (((" 1056913408 kB", " 1030000000 kB"),), []),
}


@pytest.mark.parametrize(("changes", "codes"), SETUPS.values(), ids=SETUPS)
def test_setup(tmp_path, changes, codes):
    setup = processors.read(laid_out("two-sockets", tmp_path, replaced(*changes)).root)
    found = [fault for rule in RULES for fault in rule(setup)]
    assert [fault.name for fault in found] == codes
    assert {str(subject) for fault in found for subject in fault.subjects} == ({"node"} if codes else set())


def corrected(count):
    """So many corrected errors on one module, and with three others at its controller."""
    counter, module = f"mc1/ce_count\n{count + 3}", f"dimm3/dimm_ce_count\n{count}"
    return (("dimm3/dimm_ce_count\n1", module), ("mc1/ce_count\n4", counter))


UE_OF_L0, A_MONTH = "dimm3/dimm_ue_count\n0", ("seconds_since_reset\n600", "seconds_since_reset\n2592000")
OF_NO_MODULE = ("mc1/ce_count\n4", "mc1/ce_count\n105")
ERRORS = {
    "four corrected errors": ((), []),
    "ten on one module": (corrected(10), []),
    "eleven on one module": (corrected(11), [("host_memory_corrected", "N1 DIMM_L0")]),
    "eleven in a month": ((*corrected(11), A_MONTH), []),
    "fifty of no module": ((("mc1/ce_count\n4", "mc1/ce_count\n51"),), []),
    "many of no module": ((OF_NO_MODULE,), [("host_memory_corrected", "memory controller mc1")]),
    "an uncorrected error": (
        ((UE_OF_L0, "dimm3/dimm_ue_count\n1"), ("mc1/ue_count\n0", "mc1/ue_count\n1")),
        [("host_memory_uncorrected", "N1 DIMM_L0")],
    ),
}


@pytest.mark.parametrize(("changes", "expected"), ERRORS.values(), ids=ERRORS)
def test_errors_of_host_memory(tmp_path, changes, expected):
    found = memory.recorded_errors(memory.errors(laid_out("two-sockets", tmp_path, replaced(*changes)).root))
    assert [fault.name for fault in found] == [code for code, _ in expected]
    assert all(where in fault.what for fault, (_, where) in zip(found, expected, strict=True))


def test_errors_that_came_while_a_run_lasted(tmp_path):
    """What was there before is not found again; a controller whose driver was loaded in between counts from there."""
    before = memory.errors(laid_out("two-sockets", tmp_path / "before").root)
    few, many = replaced(*corrected(11)), replaced(*corrected(12))
    assert memory.errors_grown(before, memory.errors(laid_out("two-sockets", tmp_path / "few", few).root), 60) == []
    (fault,) = memory.errors_grown(before, memory.errors(laid_out("two-sockets", tmp_path / "many", many).root), 60)
    assert (fault.name, "11 corrected errors in" in fault.what) == ("host_memory_corrected", True)
    assert memory.errors_grown([], memory.errors(tmp_path / "many"), 60) == []
    more = memory.errors(laid_out("two-sockets", tmp_path / "more", replaced(*corrected(500))).root)
    anew = memory.errors(tmp_path / "many")  # somebody set its counters to 0
    assert [fault.name for fault in memory.errors_grown(more, anew, 60)] == ["host_memory_corrected"]


# The fields of an m6a.metal of AWS: 2 sockets of 48 cores, 192 threads (README of the public repository
# scann_microbench).
CPUINFO = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 7R13 48-Core Processor\nsiblings\t: 96\n\n"


ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"


@pytest.mark.parametrize(("cpuinfo", "cores", "name"), [
    (CPUINFO, 96, "AMD EPYC 7R13 48-Core Processor"),
    (ARM, 2, None),  # numbers of its maker and part alone (arch/arm64/kernel/cpuinfo.c)
])  # fmt: skip
def test_threads_are_no_cores(tmp_path, cpuinfo, cores, name):
    written(tmp_path, {"proc/cpuinfo": cpuinfo})
    for number in range(2 * cores):  # as Linux numbers them: the second threads come last
        siblings = f"{1 << number % cores | 1 << number % cores + cores:x}\n"
        written(tmp_path, {f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings": siblings})
    assert processors.read_model(tmp_path) == Processor(name, cores)
    assert processors.read_model(tmp_path / "nothing") == Processor()


def test_the_machine_its_bios_and_the_firmware_of_its_bmc(tmp_path):
    """The path and the form of ipmi_msghandler.c: "%u.%x"."""
    root = written(tmp_path, {"sys/devices/platform/ipmi_bmc.0/firmware_revision": "24.9\n"})
    assert bmc.read_firmware(root) == "24.9"
    dmi = host.read_dmi(laid_out("two-drives", tmp_path).root)
    assert (dmi.vendor, dmi.product, dmi.board) == ("QEMU", "Standard PC (Q35 + ICH9, 2009)", None)
    assert dmi.bios_version == "rel-1.16.1-0-g3208b098f51a-prebuilt.qemu.org"


def test_a_memory_module_beside_an_empty_slot(tmp_path):
    module, empty = memory.modules(laid_out("two-drives", tmp_path).root)
    assert module == memory.Module(
        locator="CPU1_DIMM_Q1", bank="P1 CHANNEL Q", serial="F3A21FA0", part="36ASF4G72PZ-3G2E7", bytes=32 * GiB,
        type="DDR4", configured_speed=2933,
    )  # fmt: skip
    assert (empty.locator, empty.bytes, empty.configured_speed, empty.type) == ("CPU1_DIMM_Q2", 0, None, None)


@pytest.mark.parametrize(
    ("size", "bytes_"), [("00 40", 16 * GiB), ("ff ff", None), ("00 00", 0)],
    ids=["MiB", "the firmware does not know", "empty"],
)  # fmt: skip
def test_sizes_of_old_firmware(tmp_path, size, bytes_):
    """16 GiB in MiB as DSP0134 7.18 counts it; with the highest bit set in KiB."""
    tree = laid_out("two-drives", tmp_path, lambda text: text.replace("48 00 40 00 ff 7f", f"48 00 40 00 {size}"))
    assert memory.modules(tree.root)[0].bytes == bytes_


def test_an_entry_that_ends_early_has_what_it_has(tmp_path):
    """SMBIOS 2.1 had no speed and no texts of the maker."""
    (module,) = memory.modules(written(tmp_path, SERVER))
    assert module == memory.Module(locator="DIMM_A1", bytes=8 * GiB, type="DDR4")


# ---------------- modules that are unlike the others, and what all carry together
def modules(*changes, count=24):
    """As of an m6a.metal of AWS: 24 modules of 32 GB, DDR4-3200 at 2933 MT/s (tests/machine/trees/two-drives.txt);
    `changes`: slot and values."""
    usual = {"bytes": 32 * GiB, "type": "DDR4", "configured_speed": 2933}
    return tuple(memory.Module(f"DIMM_{slot}", **usual | dict(changes).get(slot, {})) for slot in range(count))


EMPTY = {"bytes": 0, "type": None, "configured_speed": None}
MADE_UP = {"type": None, "configured_speed": None}  # as QEMU tells
MODULES = {
    "below their rating, all of them": (modules(), []),
    "one smaller": (modules((7, {"bytes": 16 * GiB})), ["dimm_mismatch"]),
    "one slower": (modules((7, {"configured_speed": 2666})), ["dimm_slow"]),
    "one missing": (modules((7, EMPTY)), ["numa_memory_imbalance"]),
    "two missing, as it may have been bought": (modules((7, EMPTY), (19, EMPTY)), []),
    "a third of them larger": (modules(*((slot, {"bytes": 64 * GiB}) for slot in range(0, 24, 3))), []),
    "those of a virtual machine": (modules(*((slot, MADE_UP) for slot in range(3)), count=3), []),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    there, codes = MODULES[name]
    found = memory.unfit_modules(there, 2)
    assert [fault.name for fault in found] == codes
    assert all("DIMM_7" in fault.what for fault in found)
    assert bool(memory.filled_slots(there)) == ("virtual" not in name)


def with_modules(**setup):
    return {
        "memory_modules": codec.plain(modules()),
        "processor_setup": {"virtual": False, "numa_memory": {"0": 384 * GiB, "1": 384 * GiB}} | setup,
    }


@pytest.mark.parametrize(("figures", "facts", "codes"), [
    ([150.0, 151.0], with_modules(), []),
    ([57.0, 57.0], with_modules(), []),  # two fifths of 12 channels with 2933 MT/s are 112.6 GB/s
    ([56.0, 56.0], with_modules(), ["host_memory_slow"]),
    ([50.0], with_modules(), []),  # a container that may use one of two nodes
    ([1.0, 1.0], with_modules(virtual=True), []),
    ([1.0, 1.0], {"memory_modules": None, "processor_setup": with_modules()["processor_setup"]}, []),
    ([1.0], {}, []),
])  # fmt: skip
def test_what_modules_carry(figures, facts, codes):
    assert [fault.name for fault in memory.slower_than_modules(figures, facts)] == codes
