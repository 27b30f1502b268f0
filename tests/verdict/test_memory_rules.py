"""Memory modules of a host: those that are unlike the others, and what all of them carry together."""

import pytest

from pytest_gpufleet.machine.memory import Module, filled_slots, slower_than_modules, unfit_modules
from pytest_gpufleet.model import codec

GiB = 1 << 30


def modules(*changes, count=24):
    """As of an m6a.metal of AWS: 24 modules of 32 GB, DDR4-3200 at 2933 MT/s (tests/machine/trees/two-drives.txt);
    `changes`: slot and values."""
    usual = {"bytes": 32 * GiB, "type": "DDR4", "speed": 3200, "configured_speed": 2933}
    return tuple(Module(f"DIMM_{slot}", **usual | dict(changes).get(slot, {})) for slot in range(count))


EMPTY = {"bytes": 0, "type": None, "configured_speed": None}
MADE_UP = {"type": None, "speed": None, "configured_speed": None}  # as QEMU tells
MODULES = {
    "below their rating, all of them": (modules(), []),
    "one smaller": (modules((7, {"bytes": 16 * GiB})), ["dimm_mismatch"]),
    "one slower": (modules((7, {"configured_speed": 2666})), ["dimm_slow"]),
    "one missing": (modules((7, EMPTY)), ["numa_memory_imbalance"]),
    "two missing, as it may have been bought": (modules((7, EMPTY), (19, EMPTY)), []),
    "half of them larger": (modules(*((slot, {"bytes": 64 * GiB}) for slot in range(0, 24, 2))), []),
    "those of a virtual machine": (modules(*((slot, MADE_UP) for slot in range(3)), count=3), []),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    there, codes = MODULES[name]
    found = unfit_modules(there, 2)
    assert [fault.name for fault in found] == codes
    assert all("DIMM_7" in fault.what for fault in found)
    assert bool(filled_slots(there)) == ("virtual" not in name)


def host(**setup):
    return {
        "memory_modules": codec.plain(modules()),
        "processor_setup": {"virtual": False, "numa_memory": {"0": 384 * GiB, "1": 384 * GiB}} | setup,
    }


@pytest.mark.parametrize(("figures", "facts", "codes"), [
    ([150.0, 151.0], host(), []),
    ([57.0, 57.0], host(), []),  # two fifths of 12 channels with 2933 MT/s are 112.6 GB/s
    ([56.0, 56.0], host(), ["host_memory_slow"]),
    ([50.0], host(), []),  # a container that may use one of two nodes
    ([1.0, 1.0], host(virtual=True), []),
    ([1.0, 1.0], {"memory_modules": None, "processor_setup": host()["processor_setup"]}, []),
    ([1.0], {}, []),
])  # fmt: skip
def test_what_modules_carry(figures, facts, codes):
    assert [fault.name for fault in slower_than_modules(figures, facts)] == codes
