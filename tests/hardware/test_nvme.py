"""NVMe drives as the kernel shows them."""

from pytest_gpufleet.hardware import disks
from tests.hardware.trees import laid_out


def test_drives_with_their_sizes(tmp_path):
    """One of them is seen over several ways, so that its namespace has another name."""
    one, two = disks.read_nvme(laid_out("two-drives", tmp_path).root)

    assert one == {
        "name": "nvme1", "model": "SAMSUNG MZ1L21T9HCLS-00A07", "serial": "S666NE0T000001", "firmware": "GDC7602Q",
        "state": "live", "transport": "pcie", "address": "0000:22:00.0", "bytes": 1_920_383_410_176,
        "namespaces": {"nvme1n1": 1_920_383_410_176}, "lanes": 4, "speed": 16,
    }  # fmt: skip
    assert (two["name"], two["bytes"], two["namespaces"]) == ("nvme8", 7_681_501_126_656, {"nvme8c8n1": 7681501126656})


def test_a_drive_without_a_namespace_has_no_size(tmp_path):
    tree = laid_out("two-drives", tmp_path, lambda text: text.replace("/nvme1n1/size", "/hwmon/size"))

    assert [drive["bytes"] for drive in disks.read_nvme(tree.root)] == [None, 7_681_501_126_656]


def test_a_machine_without_drives(tmp_path):
    assert disks.read_nvme(tmp_path) == []
