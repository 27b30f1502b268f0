"""XIDs as the kernel writes them, and what is said of them."""

import pytest

from pytest_gpufleet.hardware.xids import ACTION, CONDEMNING, MEANINGS, Xid, parse

GPU = "00000000:1B:00.0"  # as NVML writes it


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:1b:00): 94, pid=7062, Contained: CE User Channel (0x9).",
        "NVRM: Xid (PCI:0000:1b:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9).",
        "6,1234,99,-;NVRM: Xid (PCI:0000:1b:00): 94, Ch 00000001",
        "NVRM: Xid (0000:1b:00): 94, Channel 00000001",
    ],
    ids=["plain", "MIG", "as /dev/kmsg gives it", "older drivers"],
)
def test_an_xid_is_found_and_belongs_to_its_gpu(line):
    (xid,) = parse(line)
    assert xid.number == 94
    assert xid.of(GPU)
    assert not xid.of("00000000:2B:00.0")
    assert not xid.of("00000001:1B:00.0")
    assert not xid.of("NVML: GPU is lost")


def test_every_xid_with_an_action_has_a_meaning():
    assert [number for number in sorted(CONDEMNING | ACTION.keys()) if number not in MEANINGS] == []
    assert "NVIDIA's XID catalogue" in str(Xid("0000:1b:00", 9999, ""))
