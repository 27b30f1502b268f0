"""XIDs and SXids as the kernel writes them, and what is said of them."""

import pytest

from pytest_gpufleet.hardware.kernel_log import KernelLog, parse
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.log_catalogue import ACTIONS, MEANINGS, UNUSED, Logged, Xid, table
from pytest_gpufleet.model.place import gpu as gpu_place
from pytest_gpufleet.verdict.health_rules import xids_of

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


def test_every_xid_of_the_catalogue_is_known():
    actions = {int(number): action for number, (action, _) in table()["actions"].items()}
    assert sorted(actions) == list(range(1, 173))
    assert {*actions.values(), *(rule[-1] for rule in table()["nvlink"])} - {"", *ACTIONS} - {
        "WORKFLOW_NVLINK5_ERR"
    } == set()
    needs_words = [number for number, action in actions.items() if action not in ("CONTACT_SUPPORT", "IGNORE")]
    assert [number for number in needs_words if number not in MEANINGS] == []
    assert UNUSED in str(Xid("0000:1b:00", 47, ""))
    assert "NVIDIA's XID catalogue" in str(Xid("0000:1b:00", 9999, ""))


def nvlink(number, name, first, second, severity="Nonfatal"):
    return f"NVRM: Xid (PCI:0000:1b:00): {number}, {name}  {severity}   XC0 i0 Link 09 ({first} {second} 0x00000000)"


RECOVERY = "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from "


@pytest.mark.parametrize(
    ("line", "code", "condemning"),
    [
        # As drivers before 575 write them, and those since: by other bits of the first number.
        (nvlink(149, "NETIR_LINK_EVT", "0x025525c6", "0x00000000", "Fatal"), "xid_reset", True),
        (nvlink(149, "NETIR_LINK_DOWN", "0x02500011", "0x00000000", "Fatal"), "xid_reset", True),
        (nvlink(149, "NETIR_BER_EVENT", "0x00000226", "0x00000001"), None, False),
        (nvlink(149, "NETIR_BER_EVENT", "0x00000013", "0x00000001"), None, False),
        (nvlink(144, "SAW_MVB", "0x00000001", "0x00000004"), None, False),
        (nvlink(144, "SAW_MVB", "0x123456789", "0x00000004"), "xid_workflow", True),  # not as anybody knows it
        (nvlink(144, "SAW_MVB", "0x00000001", "0x00000002", "Fatal"), "xid_reset", True),
        (nvlink(145, "RLW_SRC_TRACK", "0x00000007", "0x00000004"), "xid_application", False),
        # An error of this kind can be promoted to a fatal one.
        (nvlink(145, "RLW_RXPIPE", "0x00000006", "0x00000001"), None, False),
        (nvlink(145, "RLW_RXPIPE", "0x00000086", "0x00000001", "Fatal"), "xid_reset", True),
        (nvlink(146, "TLW_RX", "0x00000143", "0x00000001"), None, False),
        (nvlink(150, "MSE", "0x00000000", "0xFFFFFFFF", "Fatal"), "xid_reset", True),
        # What nobody can decode is not taken for healthy.
        (nvlink(144, "SAW_NEW", "0x00000001", "0x00000003"), "xid_workflow", True),
        ("NVRM: Xid (PCI:0000:1b:00): 144, SAW_MVB Nonfatal", "xid_workflow", True),
        (RECOVERY + "0x0 (None) to 0x1 (GPU Reset Required)", "recovery_pending", False),
        (RECOVERY + "0x1 (GPU Reset Required) to 0x0 (None)", None, False),
        ("NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python3, Ch 00000008, intr 00000000", "xid_of_process", False),
        ("NVRM: Xid (PCI:0000:1b:00): 43, pid=7, name=python3, Ch 00000008", "xid_of_process", False),
        ("NVRM: Xid (PCI:0000:1b:00): 63, Row Remapper: New row marked for remapping", None, False),
        ("NVRM: Xid (PCI:0000:1b:00): 94, pid=7062, Contained: CE User Channel (0x9).", "xid_application", False),
        ("NVRM: Xid (PCI:0000:1b:00): 46, GPU stopped processing", "xid_reset", True),
    ],
)
def test_what_an_xid_calls_for(line, code, condemning):
    (xid,) = parse(line)
    found = xids_of([Gpu(3, {"pci_bus_id": GPU})], [xid])
    assert [(fault.code, fault.subjects) for fault in found] == ([(code, (gpu_place(3),))] if code else [])
    assert xid.condemning == condemning


def test_about_half_of_the_sub_codes_of_nvlink_5_call_for_nothing():
    actions = [rule[-1] for rule in table()["nvlink"]]
    assert 0.4 < actions.count("IGNORE") / len(actions) < 0.6


SXID = "nvidia-nvswitch1: SXid (PCI:0000:86:00.0): "


@pytest.mark.parametrize(
    ("line", "number", "condemning", "text"),
    [
        ("20034, Fatal, Link 30 LTSSM Fault Up", 20034, True, "Link 30 LTSSM Fault Up"),
        ("20009, Non-fatal, Link 27 RX Short Error Rate", 20009, False, "Link 27 RX Short Error Rate"),
        ("11001, Fatal, ingress invalid command", 11001, True, "ingress invalid command"),
    ],
)
def test_an_sxid_is_found_and_belongs_to_its_switch(line, number, condemning, text):
    (sxid,) = parse(f"3,1234,99,-;{SXID}{line}\n")
    assert (sxid.number, sxid.condemning, sxid.text) == (number, condemning, text)
    assert not sxid.of(GPU)
    severity = "Fatal" if condemning else "Non-fatal"
    told = f"nvidia-nvswitch1 on PCI 0000:86:00.0: SXid {number} ({severity}: {text}); what to do: "
    assert str(sxid).startswith(told)


@pytest.mark.parametrize(
    "line",
    [
        "24007, Severity 1 Engine instance 0 Sub-engine instance 2",
        "24007, Data {0x00000000, 0x00000000}",
    ],
)
def test_what_follows_an_sxid_is_none(line):
    assert parse(SXID + line) == []


def test_lines_that_were_overwritten_before_they_were_read_are_told(tmp_path, monkeypatch):
    """As /dev/kmsg does: EPIPE once, then the oldest line that is left."""
    fell_off = b"6,9,9,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
    answers = [b"6,1,1,-;boot\n", BrokenPipeError(), fell_off, b"", b""]

    def read(descriptor, size):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    (tmp_path / "kmsg").touch()
    log = KernelLog(str(tmp_path / "kmsg"))
    monkeypatch.setattr("pytest_gpufleet.hardware.kernel_log.os.read", read)
    logged = log.new()
    assert [xid.number for xid in logged.xids] == [79]
    assert logged.unread == "the kernel wrote over lines of its log that had not been read yet"
    assert log.new() == Logged()
