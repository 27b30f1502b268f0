"""XIDs and SXids as the kernel writes them, and what is said of them."""

import pytest

from pytest_gpufleet.hardware.kernel_log import KernelLog, parse
from pytest_gpufleet.model.xid_catalogue import ACTION, CONDEMNING, MEANINGS, Logged, Xid

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
