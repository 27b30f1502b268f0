"""A drive that does not give back what was written to it, by what fio 3.33 printed of a real one and of data that were
changed behind its back."""

import json
import os
from errno import EILSEQ, EINVAL, EIO, EROFS
from pathlib import Path
from unittest.mock import Mock

import pytest

from pytest_gpufleet.machine.tools import NoAnswer, Unreadable, output
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.place import THIS_NODE
from pytest_gpufleet.probes import disk_reads

MiB = 1 << 20
# What stands before the JSON where a job failed.
FAILED = "fio: pid=12186, err=84/file:io_u.c:2190, func=io_u_queued_complete, error=Invalid or incomplete multibyte or wide character\n"  # noqa: E501


# What it says of reading that a virtual machine's disk did, by job.
READ = {
    "read in order": {"bw_bytes": 633102490, "iops": 603.773585, "clat_ns": {"percentile": {"99.000000": 64225280}}},
    "read at random": {"bw_bytes": 84940365, "iops": 20737.393909, "clat_ns": {"percentile": {"99.000000": 12648448}}},
}


def printed(before="", **errors):
    """What fio prints; the keys of a job are those that it has, without those that nobody reads."""
    jobs = []
    for name in ("written", *READ, *(f"{name} again" for name in READ)):
        work = name.removesuffix(" again")
        read = READ.get(work, {"bw_bytes": 0, "iops": 0.0, "clat_ns": {}})
        jobs.append({"jobname": name, "error": errors.get(work.split()[-1], 0), "elapsed": 1, "read": read})
    return before + json.dumps({"fio version": "fio-3.33", "timestamp": 1795368126, "jobs": jobs}, indent=2)


@pytest.fixture
def fio(monkeypatch):
    monkeypatch.setattr(disk_reads.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(disk_reads, "IN_MEMORY", ())


def giving(text):
    return lambda *command, **how: text


@pytest.mark.parametrize(("text", "code", "words"), [
    (printed(FAILED, order=EILSEQ), "drive_data_error", "read in order"),
    (printed(FAILED, random=EILSEQ), "drive_data_error", "read at random"),
    (printed(written=EIO), "drive_unreadable", "Input/output error"),
], ids=["changed", "changed, read at random", "not written"])  # fmt: skip
def test_what_does_not_come_back(tmp_path, fio, text, code, words):
    (fault, *more), _ = disk_reads.read_drive(tmp_path, MiB, giving(text))
    assert {each.name for each in (fault, *more)} == {code}
    assert words in fault.what
    assert str(tmp_path) in fault.what


def test_rates_have_their_conditions_and_the_file_room_and_no_name(tmp_path, fio):
    seen = {}

    def run(*command, **how):
        file = next(each for each in command if each.startswith("--filename=")).partition("=")[2]
        seen.update(size=os.stat(file).st_size, names=os.listdir(tmp_path))
        return printed()

    faults, (in_order, at_random) = disk_reads.read_drive(tmp_path, MiB, run)
    assert (faults, seen) == ([], {"size": MiB, "names": []})
    assert (in_order.metric, dict(in_order.values)) == ("drive_bandwidth", {THIS_NODE: pytest.approx(0.633, rel=0.01)})
    assert in_order.conditions == {"bytes": MiB, "queue_depth": 32}
    assert (at_random.metric, dict(at_random.values)) == ("drive_iops", {THIS_NODE: pytest.approx(20737, rel=0.01)})
    assert at_random.conditions == {"bytes": 4096, "queue_depth": 32}
    assert at_random.details == {"folder": str(tmp_path), "99 % of reads took at most": "12.6 ms"}
    _, (unread,) = disk_reads.read_drive(tmp_path, MiB, giving(printed(random=EIO)))
    assert unread.metric == "drive_bandwidth"


failed = Mock(side_effect=Unreadable("fio failed with status 1"))


@pytest.mark.parametrize(("folder", "nbytes", "run", "end", "why"), [
    (None, MiB, failed, NotApplicable, "no folder for it was named: --fleet-disk-folder DIR"),
    (Path("/nonexistent"), MiB, failed, NotJudged, "/nonexistent cannot be written"),
    ("here", 1 << 60, failed, NotJudged, "the folder has less room"),
    ("here", MiB, failed, NotJudged, "fio failed with status 1"),
    ("here", MiB, giving("fio: unrecognized option"), NotJudged, "fio printed no JSON"),
])  # fmt: skip
def test_why_nothing_was_read(tmp_path, fio, folder, nbytes, run, end, why):
    """A drive that somebody asked for and that was not tested leaves the verdict open."""
    with pytest.raises(end, match=why):
        disk_reads.read_drive(tmp_path if folder == "here" else folder, nbytes, run)


def test_a_drive_that_takes_for_ever_is_a_fault(tmp_path, fio):
    no_answer = Mock(side_effect=NoAnswer("fio did not answer within 120 s"))
    (fault,), _ = disk_reads.read_drive(tmp_path, MiB, no_answer)
    assert (fault.name, "within 120 s" in fault.what) == ("drive_unreadable", True)


def test_a_drive_that_refuses_to_be_written_is_none_that_could_not_be_tested(tmp_path, monkeypatch, fio):
    def refused(number):
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(disk_reads.tempfile, "TemporaryFile", Mock(side_effect=error))
        return disk_reads.read_drive(tmp_path)

    (fault,), _ = refused(EIO)
    assert (fault.name, fault.what.rpartition(": ")[2]) == ("drive_unreadable", "Input/output error")
    with pytest.raises(NotJudged, match="Read-only file system"):
        refused(EROFS)
    with pytest.raises(NotApplicable, match="Invalid argument"):  # of one that has no such way
        refused(EINVAL)
    monkeypatch.setattr(disk_reads.shutil, "which", lambda name: None)
    with pytest.raises(NotJudged, match="fio is not installed"):
        disk_reads.read_drive(tmp_path)


def test_a_folder_in_memory_is_on_no_drive(monkeypatch):
    monkeypatch.setattr(disk_reads.shutil, "which", lambda name: f"/usr/bin/{name}")
    if disk_reads._file_system(os.stat("/dev/shm").st_dev) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.raises(NotApplicable, match="in memory"):
        disk_reads.read_drive(Path("/dev/shm"), MiB, failed)


@pytest.mark.skipif(disk_reads.shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("changed", [False, True])
def test_fio_itself(tmp_path, changed):
    """Data that are changed between writing and reading are found: by a second fio that writes others there."""

    def run(*command, **how):
        file = next(each for each in command if each.startswith("--filename="))
        begin = command.index("--name=read in order")
        jobs = command.index("--name=written")
        output(*command[:begin], **how)
        if changed:
            with open(file.partition("=")[2], "r+b") as written:
                written.seek(300_000)
                written.write(b"others")
        return output(*command[:jobs], *command[begin:], **how)

    faults, figures = disk_reads.read_drive(tmp_path, 4 * MiB, run)
    assert {fault.name for fault in faults} == ({"drive_data_error"} if changed else set())
    assert [figure.metric for figure in figures] == ["drive_bandwidth", "drive_iops"]
    assert os.listdir(tmp_path) == []
