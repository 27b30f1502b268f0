"""Drives as the kernel shows them, what they say of themselves, and which of it is a fault."""

import json

import pytest

from pytest_gpufleet.machine import disks
from pytest_gpufleet.machine.disks import Drive, DriveHealth, failing_drives
from pytest_gpufleet.machine.tools import AS_ROOT, Absent, NoAnswer, Unreadable
from pytest_gpufleet.model import codec
from tests.acceptance.checks import outcomes
from tests.machine.trees import laid_out, replaced, written
from tests.machines import recorded


def asked(tmp_path, change=str):
    tree = laid_out("drives", tmp_path, change)
    return disks.read_health(tree.root, tree.run)


def test_every_drive_that_can_be_asked_is(tmp_path):
    """Not one that is reached over a network, or a removable one. Of one that this user may not ask it says why."""
    drives = {drive.device: drive for drive in asked(tmp_path)}
    assert set(drives) == {"nvme0", "nvme1", "nvme2", "sda", "sdb"}
    assert drives["nvme1"] == DriveHealth(
        device="nvme1", model="Samsung SSD 970 EVO 500GB", passed=True, rotating=False, celsius=35,
        critical_warning=0, used=3, media_errors=0, reallocated=None, pending=None, uncorrectable=None,
    )  # fmt: skip
    assert (drives["nvme2"].celsius, drives["nvme2"].used, drives["sdb"].rotating) == (50, 12, True)


def test_why_no_drive_could_be_asked(tmp_path):
    def denied(text):
        head, *programs = text.split("== $ ")
        return head + "".join(f"== $ {each}" for each in programs if each.startswith("smartctl --json=c -a /dev/sda"))

    with pytest.raises(Unreadable, match="no drive could be asked: smartctl is not installed"):
        asked(tmp_path, denied)
    with pytest.raises(Absent, match="no drive of its own"):
        disks.read_health(tmp_path / "none")


def test_a_drive_that_does_not_answer_is_not_judged(tmp_path):
    """Not even where the others are healthy, nor asked once more by another program."""
    tree = laid_out("drives", tmp_path)

    def run(*command, **how):
        if command[0] != "smartctl" or command[-1] != "/dev/nvme1":
            return tree.run(*command, **how)
        raise NoAnswer("smartctl did not answer within 20 s")

    drives = disks.read_health(tree.root, run)
    assert DriveHealth("nvme1", silent="nvme1: smartctl did not answer within 20 s") in drives
    assert failing_drives(drives) == []
    check = outcomes(recorded(), now={"disk_health": codec.plain(drives)})["test_drives_are_healthy"]
    assert check.what == "skipped"
    why = "nvme1: smartctl did not answer within 20 s; sda: smartctl could not ask"
    assert check.message.startswith(f"not judged: {why}")
    assert check.message.endswith(AS_ROOT)


SCANNED = [  # prometheus-community/smartctl_exporter issue 221, of a host with a RAID controller; its sda is a volume
    {"name": "/dev/sda", "info_name": "/dev/sda", "type": "scsi", "protocol": "SCSI"},
    {"name": "/dev/bus/0", "info_name": "/dev/bus/0 [megaraid_disk_01]", "type": "megaraid,1", "protocol": "SCSI"},
]
SAYS = {  # AnalogJ/scrutiny issues 155 and 30
    "sda": {"smartctl": {"messages": [{"string": "Smartctl open device: /dev/sda failed: DELL or MegaRaid controller, "
            "please try adding '-d megaraid,N'", "severity": "error"}], "exit_status": 2}},
    "bus/0 -d megaraid,1": {"smartctl": {"exit_status": 0}, "model_name": "WD4000FYYX", "rotation_rate": 7200,
                            "smart_status": {"passed": False}},
}  # fmt: skip


@pytest.mark.parametrize("scanned", [SCANNED, SCANNED[:1]], ids=["with the drives", "a volume alone"])
def test_drives_behind_a_raid_controller_are_asked_instead_of_its_volume(tmp_path, scanned):
    """Nor is a disk asked that the BMC makes up (AMI Virtual HDisk0), of which smartctl knows no USB bridge."""
    made_up = tmp_path / "sys/devices/pci0000:00/0000:00:14.0/usb1/1-3/1-3:1.0/host10/block/sdb"
    written(tmp_path, {"sys/block/sda/removable": "0", "sys/block/sdb": made_up})
    written(made_up, {"removable": "0"})

    def run(_, *command, **how):
        name = " ".join(command[2:]).removeprefix("/dev/")
        return json.dumps({"devices": scanned} if command[0] == "--scan" else SAYS[name])

    if len(scanned) == 1:
        with pytest.raises(Unreadable, match="MegaRaid controller"):
            disks.read_health(tmp_path, run)
    else:
        drives = disks.read_health(tmp_path, run)
        (fault,) = failing_drives(drives)
        assert ([drive.device for drive in drives], fault.name) == (["bus/0 -d megaraid,1"], "drive_failing")
        assert fault.what.startswith("bus/0 -d megaraid,1 (WD4000FYYX): ")


def warning(bits, celsius=35):
    return '"critical_warning":0,"temperature":35', f'"critical_warning":{bits},"temperature":{celsius}'


def sectors(number, count):
    table = {5: ("Reallocated_Sector_Ct", 1, 5), 197: ("Current_Pending_Sector", 100, 0)}
    name, value, threshold = table[number]
    about = f'"id":{number},"name":"{name}","value":{value},"worst":{value},"thresh":{threshold},"raw":{{"value":'
    return f"{about}0", f"{about}{count}"


SMART_FAILED = ('"passed":true,"nvme":{"value":0}', '"passed":false,"nvme":{"value":4}')  # which drives say beside it
USED_UP = (('"percentage_used":3', '"percentage_used":100'), SMART_FAILED)
# By name: what is changed, and the code of the fault.
DRIVES = {
    "healthy, with some wear and unsafe shutdowns": ([], []),
    "warm": ([warning(0, 69)], []),
    "spare blocks used up": ([warning(1), SMART_FAILED], ["drive_failing"]),
    "hotter than its limit": ([warning(2, 87)], ["drive_too_hot"]),
    "to be read only": ([warning(8)], ["drive_failing"]),
    "reliability degraded": ([warning(4)], ["drive_failing"]),
    "worn, which its maker takes for degraded": ([warning(4), *USED_UP], ["drive_worn"]),
    "media errors": ([('"unsafe_shutdowns":10,"media_errors":0', '"media_errors":7')], ["drive_errors"]),
    "pending sectors": ([sectors(197, 8)], ["drive_errors"]),
    "reallocated sectors of a rotating disk": ([sectors(5, 1975)], ["drive_errors"]),
    "blocks that an SSD has replaced": ([sectors(5, 5), ('"rotation_rate":7200', '"rotation_rate":0')], []),
    "SMART failed": ([('{"passed":true},"ata', '{"passed":false},"ata')], ["drive_failing"]),
}


@pytest.mark.parametrize(("changes", "codes"), DRIVES.values(), ids=DRIVES)
def test_failing_drives(tmp_path, changes, codes):
    found = failing_drives(asked(tmp_path, replaced(*changes)))
    assert [fault.name for fault in found] == codes
    assert all(fault.what.startswith(("nvme1 (Samsung", "sdb (Hitachi", "nvme2: ")) for fault in found)


def test_drives_with_their_sizes(tmp_path):
    """One of them is seen over several ways, so that its namespace has another name."""
    one, two = disks.read_nvme(laid_out("two-drives", tmp_path / "two").root)
    assert one == Drive(
        name="nvme1", model="SAMSUNG MZ1L21T9HCLS-00A07", serial="S666NE0T000001", firmware="GDC7602Q",
        transport="pcie", address="0000:22:00.0", bytes=1_920_383_410_176,
    )  # fmt: skip
    assert (two.name, two.bytes) == ("nvme8", 7_681_501_126_656)
    # Without a namespace it has no size.
    tree = laid_out("two-drives", tmp_path / "one", lambda text: text.replace("/nvme1n1/size", "/hwmon/size"))
    assert [drive.bytes for drive in disks.read_nvme(tree.root)] == [None, 7_681_501_126_656]
    assert disks.read_nvme(tmp_path / "none") == ()
