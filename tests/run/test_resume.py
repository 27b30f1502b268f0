"""A run that died is continued, and only on the same machine."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from pytest_gpufleet.model import codec, events
from pytest_gpufleet.model.codec import Moment
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import GpuTopology, Missing
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import titled
from pytest_gpufleet.plugin import options
from pytest_gpufleet.report.banner import why
from pytest_gpufleet.run import resume
from pytest_gpufleet.run.folder import Evidence, RunFolder
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.verdict import DEADLINE, RESUMABLE, conclude
from tests import runs
from tests.conftest import RECORDED

MODULE = """
import os, signal
import pytest

@pytest.mark.parametrize("i", range(3))
def test_before(i):
    with open("ran", "a") as file:
        file.write(f"{i}")

def test_fails():
    assert os.path.exists("repaired")

def test_dies():
    if not os.path.exists("repaired"):
        os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""


@pytest.fixture(scope="module")
def died(fleet):
    run = fleet(MODULE)
    assert run.status == -9
    return run


@pytest.fixture
def resumed(run_pytest):
    """resumed(folder, *arguments, **environment): a run that goes on with another one, after a repair."""

    def run(folder, *arguments, **environment):
        files = {"test_inner.py": MODULE, "repaired": "", "ran": ""}
        options = ("--rehearse=2", "--fleet-dir=runs", f"--fleet-resume={folder}")
        return run_pytest(*options, *arguments, files=files, **environment)

    return run


def test_only_what_did_not_pass_runs_again(resumed, died):
    for text in (died.folders[0] / "evidence.jsonl").read_text().splitlines():
        json.loads(text)  # whole lines
    assert list(died.record.checks)[-1].endswith("test_fails")
    assert died.record.started[-1].endswith("test_dies")
    run = resumed(died.folders[0])
    assert (run.root / "ran").read_text() == ""
    assert run.status == 0, run.text
    assert set(run.outcomes.values()) == {"passed"}
    assert len(run.outcomes) == 6
    assert run.check("test_before[1]").run == died.folders[0].name
    assert run.check("test_fails").run == ""
    page = (run.folders[0] / "report.html").read_text()
    assert f'<th scope="row">{died.folders[0].name}</th><td>test_inner.py::test_before[1]</td>' in page
    assert f"Carried over from {died.folders[0].name}: 3 checks" in run.text
    again = resumed(run.folders[0])
    assert again.status == 0, again.text
    assert again.check("test_before[1]").run == died.folders[0].name
    assert again.check("test_fails").run == run.folders[0].name


@pytest.fixture
def limits(tmp_path):
    return runs.written(tmp_path / "limits.toml")


@pytest.mark.parametrize(("failed", "changed", "words"), [
    ({}, "31.4159", "came to its end .ACCEPTED.: there is nothing to resume; start a new run"),
    ({runs.ALONE: "other"}, "31.4159", "came to its end .REJECTED.: there is nothing to resume; start a new run"),
    ({}, "3.14159", "was not made of this evidence.jsonl"),
], ids=["accepted", "rejected", "changed by hand"])  # fmt: skip
def test_a_run_that_came_to_its_end_or_was_changed_is_refused(tmp_path, limits, failed, changed, words):
    evidence = (folder := runs.record(tmp_path / "run", limits=limits, failed=failed)) / "evidence.jsonl"
    evidence.write_text(evidence.read_text().replace("31.4159", changed))
    with pytest.raises(Refused, match=words):
        resume.load(RunFolder(folder))


def test_a_rejected_run_that_its_deadline_ended_is_gone_on_with(tmp_path):
    folder = runs.record(tmp_path / "run", failed={runs.ALONE: "other"}, ends=False)
    evidence = Evidence(folder / "evidence.jsonl", of_dead_process=True)
    evidence.add(events.Verdict(verdict="REJECTED", reasons=[], broken=DEADLINE, exit_status=1))
    evidence.close()
    assert resume.load(RunFolder(folder)).broken in RESUMABLE


FAULT = """
import os, signal

def test_before():
    open("ran", "a").write("before ")

def test_xid():
    if not os.path.exists("repaired"):
        with open("kernel-log", "a") as log:
            log.write("NVRM: Xid (PCI:0000:00:08): 79, GPU has fallen off the bus.\\n")

def test_dies():
    if not os.path.exists("repaired"):
        os.kill(os.getpid(), signal.SIGKILL)
"""
TOLD_NOW = """
def test_no_memory_error_is_recorded():
    open("ran", "a").write("health ")
"""


def test_a_machine_that_had_a_fault_stays_rejected_and_its_health_is_checked_again(run_pytest):
    options = ("--gpus=4", "--fleet-dir=runs", *RECORDED)
    files = {"test_2_health.py": TOLD_NOW, "test_inner.py": FAULT}
    first = run_pytest(*options, files=files)
    assert first.status == -9
    run = run_pytest(*options, f"--fleet-resume={first.folders[0]}", files={**files, "repaired": ""})
    assert (run.root / "ran").read_text() == "health "
    assert (run.status, run.record.verdict) == (1, "REJECTED"), run.text
    assert set(run.outcomes.values()) == {"passed"}
    (reason,) = (reason for reason in run.record.reasons if "XID 79" in reason)
    assert reason.startswith("while test_inner.py::test_xid ran: GPU 2 NVIDIA H200, serial 0000000000002")
    assert reason.endswith(f"(in run {first.folders[0].name})")


def interrupted(folder):
    """The same run as if it had died before its verdict."""
    evidence = folder / "evidence.jsonl"
    evidence.write_text("".join(evidence.read_text().splitlines(keepends=True)[:-1]))
    for name in ("report.html", "summary.json"):
        (folder / name).unlink()
    return folder


def test_what_was_carried_over_stands_beside_the_acceptance(tmp_path, limits):
    record = read(runs.record(tmp_path / "run", limits=limits) / "evidence.jsonl")
    assert conclude(record)[0] == "ACCEPTED"
    (check, *_), (other, *_) = record.checks, list(record.checks)[7:]
    record.checks[check] = replace(record.checks[check], run="node7-a")
    earlier = events.Earlier("node7-a", Moment("2026-11-20T23:10:00+00:00"), (other, "own.py::test_x"))
    record.run = msgspec.structs.replace(record.run, resumed=(earlier,))
    verdict, (_, _, carried, *failed) = conclude(record)
    assert verdict == "ACCEPTED"
    assert carried == f"1 of {len(record.checks)} checks carried over from node7-a of 2026-11-20 23:10 UTC"
    assert failed == [
        f"{titled(other)}: failed in node7-a, passed in this run",
        "own.py::test_x: failed in node7-a, not run in this run",
    ]
    assert f"{carried}." in why(record)


@pytest.fixture
def cut_short(tmp_path, limits):
    """cut_short(name, *events): a run on GPUs with limits that died after these events."""

    def record(name, *events):
        folder = runs.record(tmp_path / name, limits=limits, ends=False)
        with (folder / "evidence.jsonl").open("a") as file:
            file.writelines(json.dumps({"t": "2026-11-21T02:00:00.000+00:00", **event}) + "\n" for event in events)
        return folder

    return record


@pytest.fixture
def first(cut_short):
    return partial(cut_short, "first")


def taken(folder, kind=events.Event):
    folder = RunFolder(folder)
    return [event for event in resume.carried(folder, resume.load(folder)) if isinstance(event, kind)]


@pytest.fixture
def gone_on_with(cut_short):
    """What a run amounts to that goes on with the one in `folder` and in which every check passes: its folder, and
    verdict and reasons."""

    def goes_on(folder, name):
        again = cut_short(name, *(json.loads(events.recorded(event)[1]) for event in taken(folder)))
        first, *rest = (again / "evidence.jsonl").read_text().splitlines(keepends=True)
        history = resume.history(RunFolder(folder), resume.load(RunFolder(folder)))
        begins = {**json.loads(first), "resumed": codec.plain(history)}
        (again / "evidence.jsonl").write_text("".join([json.dumps(begins) + "\n", *rest]))
        return again, *conclude(read(again / "evidence.jsonl"))

    return goes_on


XID = codec.plain(Fault("xid_restart", (), "XID 79", check="a.py::b", watched=True))
WRONG_DATA = codec.plain(Fault("matmul_wrong", (), "1 wrong bit", check=f"{runs.BANDWIDTH}[0]"))
SPOILED_BY = {
    "an edited suite": ({"event": "suite", "altered": ["test_4.py"]}, "test_4.py (in run first): not as it was"),
    "lost telemetry": ({"event": "spoiled", "why": "lost samples: x"}, "lost samples: x (in run first)"),
    "a fault": ({"event": "fault", "fault": XID}, "XID 79 (in run first)"),
    "wrong data, which the next did not see": ({"event": "fault", "fault": WRONG_DATA}, "1 wrong bit (in run first)"),
}  # fmt: skip


@pytest.mark.parametrize(("event", "told"), SPOILED_BY.values(), ids=SPOILED_BY)
def test_what_spoiled_a_run_spoils_those_that_go_on_with_it(first, gone_on_with, event, told):
    folder = first(event)
    for name in ("second", "third"):
        folder, verdict, reasons = gone_on_with(folder, name)
        assert verdict != "ACCEPTED"
        assert any(told in reason for reason in reasons)


def test_what_goes_along_is_that_of_checks_that_do_not_run_again(first):
    """Those that only look at the machine do."""
    done, again = f"{runs.BANDWIDTH}[0]", "acceptance/test_2_host.py::test_bmc_logged_no_grave_error"
    not_done = "acceptance/test_8_resnet50.py::test_training_sweep"
    shown = [Fault("dcgm_warning", (), "x", check=check, watched=watched) for check, watched in
             ((done, False), (again, False), (again, True), ("", False))]  # fmt: skip
    curve = {"training": {"model": "resnet50"}, "steps": [1], "losses": [7.1], "place": "gpu0"}
    folder = first(
        *({"event": "noticed", "fault": codec.plain(fault)} for fault in shown),
        *({"event": "losses", "check": check, "curve": curve} for check in (done, again, not_done)),
    )
    noticed = [event.fault for event in taken(folder, events.Noticed)]
    assert [(fault.check, fault.watched) for fault in noticed] == [(done, False), (again, True)]
    assert [(event.check, event.in_run) for event in taken(folder, events.Losses)] == [(done, "first")]
    carried = {event.check.id.partition("/")[2] for event in taken(folder, events.CheckFinished)}
    files = {check.partition("::")[0] for check in carried}
    assert "test_3_exactness.py" in files
    assert files.isdisjoint({"test_1_inventory.py", "test_1_order.py", "test_2_host.py", "test_2_pcie.py"})
    assert "test_6_network.py::test_transceivers_are_well" not in carried


LOOKS_BACK = """
def test_looks_back(machine):
    assert machine.before("bmc") == {"log": {"events": []}}
    machine.now("bmc")
    assert machine.before("bmc") == {"log": {"events": []}}
    assert machine.before("optics") is None
"""


def test_the_host_is_compared_with_what_it_was_in_the_first_session(died, run_pytest, tmp_path):
    folder = shutil.copytree(died.folders[0], tmp_path / "first")
    first, later = {"log": {"events": []}}, {"log": {"events": ["a fan stalled"]}}
    facts = ({"event": "host_fact", "fact": "bmc", "value": bmc} for bmc in (first, later))
    with (folder / "evidence.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(fact)}\n" for fact in facts)
    options = ("--rehearse=2", "--fleet-dir=runs", f"--fleet-resume={folder}")
    run = run_pytest(*options, files={"test_inner.py": MODULE + LOOKS_BACK, "repaired": ""})
    assert run.outcomes["test_looks_back"] == "passed", run.text


def test_a_run_that_only_died_spoils_nothing(first, gone_on_with):
    folder = first({"event": "check_started", "check": "own.py::test_dies"})
    _, verdict, (_, _, carried, *_) = gone_on_with(folder, "second")
    assert verdict == "ACCEPTED"
    assert "checks carried over from first of 2026-11-21 01:40 UTC" in carried


def test_telemetry_that_saw_nothing_spoils_the_checks_that_do_not_run_again(tmp_path):
    gpus = [replace(gpu, facts={**gpu.facts, "compute_capability": [9, 0]}) for gpu in runs.topology("node7").gpus]
    machine = replace(runs.topology("node7"), gpus=tuple(gpus))
    told = ("temperature_c", "power_watts")
    spoiled = taken(runs.record(tmp_path / "first", machine=machine, ends=False, readings=told), events.Spoiled)
    assert [each.in_run for each in spoiled] == ["first"] * 4
    assert spoiled[0].why.endswith("telemetry never had clock_event_reasons: no slowdown would have been seen")


def test_a_limit_that_was_missed_is_told_though_its_check_did_not_end(tmp_path, limits, first, gone_on_with):
    missed = read(runs.record(tmp_path / "other", values={"busbw world": 0.5}, limits=limits) / "evidence.jsonl")
    finding = next(each for each in missed.findings if each.state == "missed")
    begun = {"event": "finding", "finding": {**codec.plain(finding), "check": "own.py::test_dies"}}
    folder = first({"event": "check_started", "check": "own.py::test_dies"}, begun)
    for name in ("second", "third"):
        folder, _, reasons = gone_on_with(folder, name)
        assert "own.py::test_dies: failed in first, not run in this run" in reasons


def test_what_else_ran_in_a_run_stands_in_the_reports_of_those_that_go_on_with_it(first, gone_on_with):
    conftest = {"file": "/site/conftest.py", "sha256": "1234567890abcdef"}
    folder = first({"event": "session", "conftests": [conftest]})
    for name in ("second", "third"):
        folder, _, _ = gone_on_with(folder, name)
        told = runs.facts_on_the_page(read(folder / "evidence.jsonl"))
        assert told["conftest.py, sitecustomize.py (in run first)"] == "/site/conftest.py (SHA-256 1234567890ab…)"


OTHER_MACHINE = """
machine.count = 3
host["kernel"] = "7.0"
gpus[2]["serial"] = "4711"
"""
PORT = {"port": "mlx5_0/1", "guid": "0c42:a103:0065:a1b2", "adapter": "MT4129"}
DIMM = {"locator": "DIMM_A1", "serial": "1F3A9C1D", "part": "M321R8GA0BB0", "bytes": 64 << 30}
DMI = {"serial": "SN-A", "board_serial": "B-A", "chassis_serial": "C-A", "bios_version": "2.1"}
CHASSIS = {
    "name": "node7", "kernel": "6.8.0-45", "system": "Ubuntu 24.04", "processors": 224, "memory_bytes": 2 << 40,
    "dmi": DMI, "processor": {"model": "Xeon 8480C", "cores": 112}, "network_ports": [PORT], "memory_modules": [DIMM],
    "nvme": [{"name": "nvme0", "address": "0000:01:00.0", "serial": "S-1", "model": "PM9A3"}],
    "pci_devices": {"0000:18:00.0": {"kind": "gpu", "lanes": 16, "errors": None}}, "boot_id": "1",
}  # fmt: skip


def run(**header):
    return Record(run=events.RunHeader(**header))


def machine(**facts):
    return Record(machines={0: events.HostFound("", {**CHASSIS, **facts})})


@pytest.mark.parametrize(("then", "now", "told"), [
    (run(), run(level="quick"), ["level was standard, is quick"]),
    (run(), run(network="none"), ["what --fleet-network says was nothing, is none"]),
    (run(burn_in_seconds=1), run(burn_in_seconds=259200), ["the length of the burn-in in seconds was 1, is 259200"]),
    (run(), run(environment={"NCCL_ALGO": "Ring"}), ["variable NCCL_ALGO is another"]),
    (machine(), machine(boot_id="2", memory_bytes=(2 << 40) - 4096), []),  # a reboot
    (machine(), machine(pci_devices={"0000:18:00.0": {"kind": "gpu", "lanes": 8, "errors": {"corrected": {}}}}), []),
    (machine(), machine(name="node8"), ["machine: host name was node7, is node8"]),
    (machine(), machine(kernel="6.8.0-50"), ["machine: kernel was 6.8.0-45, is 6.8.0-50"]),
    (machine(), machine(memory_bytes=1 << 40), ["machine: memory in GiB was 2048, is 1024"]),
    (machine(), machine(processor={"model": "Xeon 8592"}), [
        "machine: model of the processors was Xeon 8480C, is Xeon 8592"]),
    (machine(), machine(dmi={**DMI, "serial": "SN-B"}), ["machine: serial number of the machine was SN-A, is SN-B"]),
    (machine(), machine(dmi=Missing("as no root", absent=True)), [
        "machine: serial number of the machine was SN-A, is unknown"]),
    (machine(), machine(network_ports=[{**PORT, "guid": "1"}]), [
        "network port mlx5_0/1: guid was 0c42:a103:0065:a1b2, is 1"]),
    (machine(), machine(network_ports=[]), ["network port mlx5_0/1 is not there any more"]),
    (machine(), machine(memory_modules=[{**DIMM, "serial": "2"}]), [
        "memory module DIMM_A1: serial was 1F3A9C1D, is 2"]),
    (machine(), machine(nvme=[]), ["drive 0000:01:00.0 is not there any more"]),
    (machine(), machine(pci_devices={"0000:2a:00.0": {"kind": "gpu"}}), [
        "PCI device 0000:18:00.0 is not there any more", "PCI device 0000:2a:00.0 was not there"]),
])  # fmt: skip
def test_another_machine_or_setup_is_refused_and_a_reboot_is_not(then, now, told):
    with pytest.raises(Refused) if told else nullcontext() as refused:
        resume.check_same(RunFolder(Path("there")), then, now)
    assert not told or str(refused.value).splitlines()[1:] == [f"  {line}" for line in told]


def test_another_machine_is_told_in_a_sentence_for_each_thing(run_pytest):
    options, files = ("--fleet-dir=runs", *RECORDED), {"test_inner.py": "def test_it(): pass"}
    first = run_pytest("--gpus=4", *options, files=files)
    again = ("--gpus=3", *options, f"--fleet-resume={interrupted(first.folders[0])}")
    run = run_pytest(*again, files=files, CHANGE=OTHER_MACHINE)
    assert run.status == 4
    (error, *lines) = run.text.strip().splitlines()
    assert error.endswith("this is not the same machine and setup:")
    assert [line.strip() for line in lines] == [
        "what --gpus asks for was 4, is 3", "the number of GPUs in the machine was 4, is 3",
        "the number of ranks was 4, is 3", "GPU 2: serial was 0000000000002, is 4711",
        "GPU 3 is not there any more", "machine: kernel was 6.18.44-fc-v657-gpu, is 7.0",
    ]  # fmt: skip


def test_another_driver_is_refused_in_words_that_steer_no_terminal():
    then = replace(Record(), topology=GpuTopology(driver="\x1b[2J570"))
    with pytest.raises(pytest.UsageError, match=r"driver was .*570, is unknown") as refused, options.refusals():
        resume.check_same(RunFolder(Path("there")), then, Record())
    assert "\x1b" not in str(refused.value)
