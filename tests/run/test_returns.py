"""A machine comes back from repair: only what was replaced is another part, and what failed runs again."""

import shutil
from dataclasses import replace

import msgspec
import pytest

from pytest_gpufleet.model.codec import Moment
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import Check, HostFound, NodeFound, Returns
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Missing
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.report.page import page
from pytest_gpufleet.run import integrity, resume
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.across_runs.back_in_service import measured_otherwise, not_as_before, required, turn
from pytest_gpufleet.verdict.gaps import gaps
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.verdict import conclude
from tests import runs
from tests.conftest import ACCEPTANCE, RECORDED
from tests.machines import recorded, set_gpu, set_host, set_machine, set_port, then

DIMM = {"locator": "DIMM_A1", "serial": "1F3A9C1D", "part": "M321R8GA0BB0", "bytes": 64 << 30}
DRIVE = {"name": "nvme0", "address": "0000:01:00.0", "serial": "S-1", "model": "PM9A3", "firmware": "1", "bytes": 1}
DMI = {"vendor": "Dell", "product": "XE9680", "board_serial": "B-A", "bios_version": "2.1"}
PORT = {"adapter": "MT4129", "firmware": "28.39"}
PORTS = [{"port": f"mlx5_{n}/1", "guid": f"0c42:a103:0065:a1b{n}", **PORT} for n in range(2)]
HOST = set_host(network_ports=PORTS, nvme=[DRIVE], memory_modules=[DIMM, {"locator": "B1", "bytes": 0}], dmi=DMI)
AS_ROOT = Missing("only root may read them")
NEW = set_gpu(3, serial="4711", uuid="GPU-new", board_part_number="965-2G520-0041-000", vbios="96.00.B5")


def swapped(machine):
    first, second = machine.gpus[0]["pci_bus_id"], machine.gpus[1]["pci_bus_id"]
    machine.gpus[0]["pci_bus_id"], machine.gpus[1]["pci_bus_id"] = second, first


def lost(machine):
    machine.gpus[0]["nvlink_states"] = [0, *machine.gpus[0]["nvlink_states"][1:]]


def as_it_was(machine):
    """As recorded."""


def made(*changes):
    here = recorded(HOST, *changes)
    return Record(topology=here.topology, machines={0: HostFound("", here.machine.host)})


def held_against(before, now, *replaced):
    return replace(now, before=before, returns=Returns(run="before", replaced=replaced, required=(), kept=()))


# By name: the kind of parts, what is replaced, and the machine before and now; the code and the place of each fault,
# and how many cannot be read.
CASES = {
    "nothing": ("gpu", "", as_it_was, as_it_was, [], 0),
    "a GPU": ("gpu", "gpu3", as_it_was, NEW, [], 0),
    "a GPU that nobody named": ("gpu", "gpu2", as_it_was, NEW, ["part_not_replaced gpu2", "part_not_named gpu3"], 0),
    "no GPU, though one was named": ("gpu", "gpu3", as_it_was, as_it_was, ["part_not_replaced gpu3"], 0),
    "another model": ("gpu", "gpu3", as_it_was, then(NEW, set_gpu(3, name="NVIDIA H100")), ["part_changed gpu3"], 0),
    "a GPU is gone": ("gpu", "", as_it_was, set_machine(count=3), ["part_gone node"], 0),
    "a GPU is back": ("gpu", "", set_machine(count=3), as_it_was, ["part_not_named gpu3"], 0),
    "a GPU is back, and named": ("gpu", "gpu3", set_machine(count=3), as_it_was, [], 0),
    "two GPUs have changed places": ("gpu", "", as_it_was, swapped, ["part_changed gpu0", "part_changed gpu1"], 0),
    "firmware": ("gpu", "", as_it_was, set_gpu(1, vbios="1.2"), ["part_changed gpu1"], 0),
    "firmware, on purpose": ("gpu", "firmware", as_it_was, set_gpu(1, vbios="1.2"), [], 0),
    "firmware that cannot be read": ("gpu", "", as_it_was, set_gpu(1, vbios=AS_ROOT), [], 1),
    "no serial number": ("gpu", "gpu3", as_it_was, set_gpu(3, serial=AS_ROOT, uuid=AS_ROOT), [], 1),
    "a NIC": ("nic", "nic1", as_it_was, set_port(1, guid="1", firmware="28.43"), [], 0),
    "a NIC that nobody named": ("nic", "", as_it_was, set_port(1, guid="1"), ["part_not_named nic1"], 0),
    "other adapter, same board": ("nic", "nic1", as_it_was, set_port(1, guid="1", adapter="MT4125"),
                                  ["part_changed nic1"], 0),
    "a drive": ("disk", "disk0", as_it_was, set_host(nvme=[{**DRIVE, "serial": "S-2", "model": "CD8"}]), [], 0),
    "a drive in another bay": ("disk", "", as_it_was, set_host(nvme=[{**DRIVE, "address": "0000:02:00.0"}]),
                               ["part_changed node"], 0),
    "a module is gone": ("dimm", "", as_it_was, set_host(memory_modules=[]), ["part_gone node"], 0),
    "modules only root may read": ("dimm", "", as_it_was, set_host(memory_modules=AS_ROOT), [], 1),
    "the BIOS": ("board", "", as_it_was, set_host(dmi={**DMI, "bios_version": "2.2"}), ["part_changed node"], 0),
    "the mainboard": ("board", "board", as_it_was, set_host(dmi={**DMI, "board_serial": "B-B"}), [], 0),
    "a mainboard of which only root may read the serial number": (
        "board", "board", set_host(dmi={**DMI, "board_serial": None}), as_it_was, [], 1),
    "a link is lost": ("gpu", "gpu3", as_it_was, then(NEW, lost), ["part_changed gpu0"], 0),
    "a link is repaired": ("gpu", "gpu3", lost, NEW, [], 0),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "replaced", "was", "now", "faults", "unknown"), CASES.values(), ids=CASES)
def test_only_what_was_replaced_may_be_another_part(kind, replaced, was, now, faults, unknown):
    found = not_as_before(held_against(made(was), made(now), *filter(None, replaced.split(","))), kind)
    assert sorted(f"{each.name} {each.subjects[0]}" for each in found if isinstance(each, Fault)) == sorted(faults)
    assert sum(isinstance(each, str) for each in found) == unknown


def test_what_the_run_before_could_not_read_is_not_compared():
    assert not_as_before(held_against(made(set_host(memory_modules=AS_ROOT)), made()), "dimm") is None


@pytest.fixture
def before(tmp_path):
    """A run of level standard that was rejected: a check of collectives failed."""
    limits, failed = runs.written(tmp_path / "limits.toml"), {f"{runs.BANDWIDTH}[0]": "other"}
    return runs.record(tmp_path / "before", limits=limits, failed=failed)


def returned(folder, before, *replaced, slower=1.0):
    """A run on the machine of `before`, in which all checks ran, GPU 3 is another one, and GPU 1 is as much slower."""
    was, machine = RunFolder(before).record(), runs.topology()
    *same, other = machine.gpus
    gpus = (*same, replace(other, facts={**other.facts, "serial": "4711", "uuid": "new"}))
    values = {"solo_train_throughput gpu1": 6200.0 / slower}
    run = runs.record(
        folder, limits=before.parent / "limits.toml", machine=replace(machine, gpus=gpus),
        values=values, utc="2026-11-23T08:00:00+00:00", ends=False,
    )  # fmt: skip
    record = read(run / "evidence.jsonl")
    record.add(resume.returned(before, replaced, was, record))
    return record


def test_a_machine_that_is_right_again_is_accepted_for_what_was_required(tmp_path, before):
    record = returned(tmp_path / "now", before, "gpu3")
    verdict, (whole, *rest) = conclude(record)
    assert verdict == "ACCEPTED"
    assert whole.startswith(f"all {len(record.required)} checks of level standard that its repair requires ran")
    assert "before of 2026-11-21 01:40 UTC (checks that failed there: 1; replaced: gpu3)" in " ".join(rest)
    assert measured_otherwise(record)[0] == []
    shown = page(replace(record, verdict=verdict, reasons=[whole, *rest]))
    texts = ("What was wrong in before", "node7-S3", "4711", "Parts that are not the same as before")
    assert all(text in shown for text in texts)


def test_a_gpu_that_got_slower_is_named_and_a_new_one_has_no_past(tmp_path, before):
    faults, _ = measured_otherwise(returned(tmp_path / "now", before, slower=1.1))
    assert [(each.name, str(each.subjects[0])) for each in faults] == [("slower_than_before", "gpu1")]


@pytest.mark.parametrize("outcome", ["passed", "skipped", "not applicable", None])
@pytest.mark.parametrize("check", [f"{runs.BANDWIDTH}[0]", "own.py::test_x"])
def test_what_failed_and_did_not_run_again_leaves_the_verdict_open(tmp_path, before, check, outcome):
    record = returned(tmp_path / "now", before, "gpu3")
    for each in ("acceptance/test_2_disks.py::test_drives_are_healthy", check):  # the first is not touched by a GPU
        record.checks.pop(each, None)
        record.started = [name for name in record.started if name != each]
    record.before.checks[check] = Check(check, "failed", 1.0)
    if outcome:
        record.checks[check] = Check(check, outcome, 1.0, message="no such thing")
    assert conclude(record)[0] == ("ACCEPTED" if outcome == "passed" else "INCOMPLETE")
    open_checks = {gap.subject for gap in gaps(record) if gap.counts}
    assert open_checks == (set() if outcome == "passed" else {check if outcome else shipped().known_as(check)})


def test_what_is_required_is_what_failed_level_quick_and_what_the_parts_touch(tmp_path, before):
    was, suite = RunFolder(before).record(), shipped()
    failed = {"test_6_collectives.py::test_bus_bandwidth"}
    quick = {name for name in suite.required("standard") if suite.checks[name].level == "quick"}
    found = {parts: set(required(was, parts, suite)) - quick for parts in ((), ("disk0",), ("gpu3",), ("firmware",))}
    assert found[()] == failed
    assert found["disk0",] == failed | {"test_2_disks.py::test_drives_are_healthy"}
    assert {"test_5_links.py::test_pair_bandwidth", "test_4_each_gpu.py::test_soak"} <= found["gpu3",]
    assert found["gpu3",].isdisjoint({"test_2_disks.py::test_drives_are_healthy", "test_9_endurance.py::test_burn_in"})
    assert found["firmware",] | quick == set(suite.required("standard"))
    cut_short = runs.record(
        tmp_path / "cut short", limits=before.parent / "limits.toml", without="test_6_collectives.py", ends=False
    )
    never_ran = {name for name in suite.required("standard") if name.startswith("test_6_collectives.py")}
    assert set(required(RunFolder(cut_short).record(), (), suite)) - quick == never_ran
    soak = "test_4_each_gpu.py::test_soak"
    older = replace(was, manifest=replace(was.suite, checks={**was.suite.checks}))
    del older.manifest.checks[soak]
    assert set(required(older, (), suite)) - quick == failed | {soak}
    turns = {name: turn(name, was, suite) for name in suite.checks}
    assert turns["test_5_links.py::test_pair_bandwidth"] == 0  # limits of collectives may follow from it
    assert (turns["test_1_inventory.py::test_gpu_count"], turns["test_4_each_gpu.py::test_soak"]) == (1, 2)


REFUSED = {
    "another machine": ({"host": "node8"}, (), "of another machine .node7, serial unknown.: this one is node8"),
    "another chassis": ({"serial": "B"}, (), "of another machine .node7, serial A.: this one is node7, serial B"),
    "less is asked": ({"without": ("bmc",)}, (), "what --fleet-without leaves out was .*, is .*bmc"),
    "the clock": ({"utc": Moment("2020-01-01T00:00:00+00:00")}, (), "began at 2026-11-21.* set the clock"),
    "no such part": ({}, ("gpu9",), "--fleet-replaced gpu9: this machine has no such part; it has gpu0 .GPU 0."),
}


@pytest.mark.parametrize(("header", "replaced", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_held_against_it_is_refused_in_a_sentence(before, header, replaced, words):
    was = RunFolder(before).record()
    serial = header.pop("serial", None)
    now = replace(was, run=msgspec.structs.replace(was.run, **header))
    if serial:
        was.run = msgspec.structs.replace(was.run, nodes=(NodeFound(0, "node7", "A"),))
        now.run = msgspec.structs.replace(now.run, nodes=(NodeFound(0, "node7", serial),))
    with pytest.raises(Refused, match=words):
        resume.returned(before, replaced, was, now)


@pytest.mark.parametrize(("options", "words"), [
    (("--fleet-returns=nowhere",), "nowhere is not the folder of a run"),
    (("--fleet-resume=nowhere",), "--fleet-resume: nowhere is not the folder of a run"),
])  # fmt: skip
def test_what_is_no_run_is_refused_before_anything_runs(run_pytest, options, words):
    run = run_pytest("--rehearse=2", "--fleet-dir=runs", *options, files={"test_own.py": OWN})
    assert (run.status, run.folders) == (4, [])
    assert (words in run.text, "Errno" in run.text) == (True, False)


OWN = """
import os

def test_fine():
    pass

def test_link():
    assert os.path.exists("repaired")
"""


@pytest.fixture
def comes_back(run_pytest):
    """comes_back(options, repaired, change): a run in which a check fails, and the one of the machine that returns."""

    def come_back(*options, repaired=True, change=""):
        files = {"test_own.py": OWN, "test_1_returns.py": ACCEPTANCE / "test_1_returns.py"}
        first = run_pytest(*options, "--fleet-dir=runs", files=files)
        assert first.status == 1, first.text
        given = (*options, "--fleet-dir=runs", f"--fleet-returns={first.folders[0]}")
        run = run_pytest(*given, files={**files, **({"repaired": ""} if repaired else {})}, CHANGE=change)
        shutil.rmtree(first.folders[0])
        integrity.check(RunFolder(run.folders[0]))  # without the run before
        return run

    return come_back


def test_a_healthy_machine_comes_back_in_a_rehearsal_with_what_failed_first(comes_back):
    run = comes_back("--rehearse=2")
    assert run.status == 0, run.text
    outcomes = run.outcomes
    assert next(iter(outcomes)) == "test_link"
    assert "failed" not in outcomes.values()
    assert outcomes["test_only_what_was_replaced_is_new[gpu]"] == "passed"


@pytest.mark.parametrize(("repaired", "change", "failed"), [
    (True, "gpus[2]['serial'] = '4711'; gpus[2]['uuid'] = 'new'", "test_only_what_was_replaced_is_new[gpu]"),
    (False, "", "test_link"),
], ids=["a GPU was swapped and nobody said so", "the fault is still there"])  # fmt: skip
def test_a_machine_that_is_not_right_again_is_rejected(comes_back, repaired, change, failed):
    run = comes_back("--gpus=4", *RECORDED, repaired=repaired, change=change)
    assert (run.status, run.record.verdict) == (1, "REJECTED"), run.text
    assert [name for name, outcome in run.outcomes.items() if outcome == "failed"] == [failed]
    named = [str(fault.subjects[0]) for fault in run.record.faults if fault.name == "part_not_named"]
    assert named == (["gpu2"] if change else [])
