"""NVIDIA's own diagnostic: what dcgmi printed (dcgm/README.md says where), by its JSON of DCGM 3 and of DCGM 4."""

import json
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pytest_gpufleet.machine import dcgm
from pytest_gpufleet.machine.dcgm import Printed, diagnosed
from pytest_gpufleet.machine.tools import NoAnswer, Unreadable, ended
from pytest_gpufleet.model import events, place
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.place import THIS_NODE
from pytest_gpufleet.plugin import fixtures
from tests.machines import recorded

PRINTED = Path(__file__).parent / "dcgm"
FOUR = recorded().machine.gpus
ONE = FOUR[:1]
EIGHT = [replace(gpu, index=i, facts={**gpu.facts, "serial": f"{i:013d}"}) for i, gpu in enumerate(FOUR * 2)]
BROKEN = {"error_category": 7, "error_id": 4, "error_severity": 2, "warning": "GPU 5: 3 uncorrectable memory errors"}


def document(name):
    return json.loads((PRINTED / f"{name}.json").read_text())


def diagnosis(document, gpus, status=0):
    return diagnosed(Printed(2, status, document), gpus)


def on_eight(change=lambda results: None, serials=tuple(gpu.serial for gpu in EIGHT)):
    """What DCGM 4 prints of eight GPUs, numbered the other way round than the run's."""
    printed = document("4_passed")
    (test,) = printed["DCGM Diagnostic"]["test_categories"][0]["tests"]
    change(test["results"])
    entities = [{"entity_id": 7 - number, "serial_num": serial} for number, serial in enumerate(serials)]
    return {**printed, "entity_groups": [{"entities": entities, "entity_group": "GPU", "entity_group_id": 1}]}


def result(number, **changed):
    return lambda results: results[number].update(changed)


@pytest.mark.parametrize(("name", "gpus"), [("3_passed", ONE), ("4_passed", EIGHT)])
def test_a_healthy_run_of_either_version_has_no_findings(name, gpus):
    found = diagnosis(document(name), gpus)
    assert (found.faults, found.shown, found.unseen, found.skipped) == ([], [], [], False)


def test_a_failed_setting_is_found_in_either_version_by_its_severity():
    (fault,) = diagnosis(document("4_failed"), ONE, status=226).faults
    assert (fault.name, fault.subjects) == ("dcgm_setting", (THIS_NODE,))  # a GB10 has no serial number
    assert fault.what.startswith("software failed (DCGM's GPU 0): Persistence Mode")
    found = diagnosis(document("3_failed"), ONE)
    assert [(fault.name, fault.what) for fault in found.faults] == [("dcgm_test_failed", "Persistence Mode failed")]
    assert found.unseen == ["Environment Variables has the status 'Warn', which is not known"]


def test_the_gpu_is_named_by_its_serial_number_and_not_by_the_number_that_dcgm_has_for_it():
    (fault,) = diagnosis(on_eight(result(5, status="Fail", warnings=[BROKEN])), EIGHT, status=205).faults
    assert (fault.name, fault.subjects) == ("dcgm_part_broken", (place.gpu(2),))
    for serials in ([], ["1"] * 8, [EIGHT[0].serial] * 8):  # none, and one for all
        (fault,) = diagnosis(on_eight(result(5, status="Fail", warnings=[BROKEN]), serials), EIGHT, 205).faults
        assert (fault.subjects, "DCGM's GPU 5" in fault.what) == ((THIS_NODE,), True)
    of_a_switch = result(5, status="Fail", warnings=[BROKEN], entity_group="Switch")
    assert diagnosis(on_eight(of_a_switch), EIGHT, 205).faults[0].subjects == (THIS_NODE,)


def test_version_3_is_read_by_its_own_names_and_its_tests_of_settings_accuse_no_single_gpu():
    printed = document("3_passed")
    printed["GPU Device Serials"] = {"0": ONE[0].serial}
    memory = printed["DCGM GPU Diagnostic"]["test_categories"][2]["tests"][0]["results"][0]
    memory |= {"gpu_id": memory.pop("gpu_ids"), "status": "Fail", "warnings": [BROKEN]}
    (fault,) = diagnosis(printed, ONE, status=205).faults
    assert (fault.name, fault.subjects) == ("dcgm_part_broken", (place.gpu(0),))
    printed = document("3_passed") | {"GPU Device Serials": {"0": ONE[0].serial}}
    setting = {"warnings": "Persistence mode is off", "error_id": 29, "error_category": 8, "error_severity": 5}
    test = printed["DCGM GPU Diagnostic"]["test_categories"][0]["tests"][4]
    test["results"] = [{"status": "Fail", "gpu_id": 0, "warnings": [setting, setting]}]
    (fault,) = diagnosis(printed, ONE, status=226).faults
    assert (fault.name, fault.subjects) == ("dcgm_setting", (THIS_NODE,))
    assert fault.what == "Persistence Mode failed: Persistence mode is off"


def test_the_worst_severity_counts_and_a_summary_that_failed_where_no_result_did():
    watch = {**BROKEN, "error_severity": 1}
    (fault,) = diagnosis(on_eight(result(0, status="Fail", warnings=[watch, BROKEN])), EIGHT, status=205).faults
    assert fault.name == "dcgm_part_broken"
    found = diagnosis(on_eight(result(0, status="Fail", warnings=[watch])), EIGHT, status=226)
    assert (found.faults, [shown.name for shown in found.shown]) == ([], ["dcgm_warning"])
    printed = on_eight()
    (test,) = printed["DCGM Diagnostic"]["test_categories"][0]["tests"]
    test["test_summary"] = {"status": "Fail", "warnings": [BROKEN]}
    (fault,) = diagnosis(printed, EIGHT, status=205).faults
    assert (fault.name, fault.subjects) == ("dcgm_part_broken", (THIS_NODE,))


def test_warnings_of_a_passed_test_and_skipped_tests_are_shown():
    warned = diagnosis(on_eight(result(0, warnings=[BROKEN])), EIGHT, status=226)
    assert (warned.faults, len(warned.shown), warned.unseen) == ([], 1, [])
    printed = on_eight()
    skipped = {"entity_group": "GPU", "entity_id": 0, "status": "Skip"}
    printed["DCGM Diagnostic"]["test_categories"][0]["tests"].append({"name": "eud", "results": [skipped]})
    found = diagnosis(printed, EIGHT)
    assert ([shown.what for shown in found.shown], found.skipped) == (["eud was skipped"], False)
    # Where every test of the hardware was skipped, nothing was looked at.
    assert diagnosis(on_eight(lambda results: [each.update(status="Skip") for each in results]), EIGHT).skipped


WHOLE = on_eight()
NAMES = {
    "DCGM Diagnostic": "DCGM Report", "results": "outcomes", "status": "state", "Pass": "OK", "Hardware": "Deployment",
}  # fmt: skip
RENAMED = [json.loads(json.dumps(WHOLE).replace(f'"{old}"', f'"{new}"')) for old, new in NAMES.items()]
RUNTIME = {"DCGM Diagnostic": {"runtime_error": "Error: Unable to complete diagnostic.", "version": "4.4.1"}}


@pytest.mark.parametrize(
    ("printed", "status"),
    [({}, 0), ([], 0), (None, 0), ({"DCGM Diagnostic": {}}, 0), (RUNTIME, 226), (RUNTIME, 0), (WHOLE, 205), (WHOLE, 1),
     (WHOLE, 226), (on_eight(result(0, warnings=[BROKEN])), 205), *((each, 0) for each in RENAMED),
     (on_eight(lambda results: results.pop()), 0), (on_eight(lambda results: results.clear()), 0)],
)  # fmt: skip
def test_what_is_not_known_never_passes(printed, status):
    found = diagnosis(deepcopy(printed), EIGHT, status)
    assert (bool(found.unseen), found.skipped, found.faults) == (True, False, [])


def printing(out, status=0, errors=""):
    def run(*command, seconds):
        assert command == ("dcgmi", "diag", "-r", "3", "-j")
        assert seconds == dcgm.SECONDS[3]
        return status, out, errors

    return run


def test_half_a_document_is_none_and_without_dcgmi_or_its_host_engine_there_is_none():
    whole = (PRINTED / "4_failed.json").read_text()
    assert dcgm.read(3, printing(whole, 226)).document == document("4_failed")
    cut = dcgm.read(3, printing(whole[:200], 226))
    assert (cut.document, cut.status, bool(diagnosed(cut, ONE).unseen)) == (None, 226, True)
    with pytest.raises(Unreadable, match="host engine of DCGM does not answer"):
        dcgm.read(3, printing("Error: unable to establish a connection to the specified host: localhost", 235))
    with pytest.raises(Unreadable, match="no-such-dcgmi is not installed"):
        dcgm.read(3, lambda name, *rest, seconds: ended("no-such-dcgmi", *rest, seconds=seconds))


def test_a_program_that_takes_too_long_can_take_back_what_it_began(tmp_path):
    left, began = tmp_path / "left", time.monotonic()
    script = f"trap 'echo done > {left}; exit 3' TERM; echo; while :; do sleep 0.05; done"
    with pytest.raises(Unreadable, match=r"sh did not answer within 0\.5 s"):
        ended("sh", "-c", script, seconds=0.5)
    assert left.read_text() == "done\n"
    assert time.monotonic() - began < 25


# ---------------------------------------------------------------- in a run, which leaves it the GPUs
@pytest.fixture
def run():
    """What the diagnosis uses of a run, and what was done with it."""
    done, noticed = [], []
    return SimpleNamespace(
        done=done,
        noticed=noticed,
        target=SimpleNamespace(topology=SimpleNamespace(gpus=EIGHT), gpus_present=8),
        ranks=SimpleNamespace(in_use=SimpleNamespace(stop=lambda: done.append("ranks are gone"))),
        options=SimpleNamespace(dcgm=2, without=()),
        record=lambda event: (done.append(event.fact), events.recorded(event)),
        notice=noticed.extend,
    )


def test_the_ranks_are_gone_before_it_begins_and_what_it_printed_is_on_record(monkeypatch, run):
    def read(level):
        run.done.append(f"level {level}")
        return dcgm.Printed(level, 0, on_eight(result(0, warnings=["look at it"])))

    monkeypatch.setattr(dcgm, "read", read)
    found = fixtures.diagnose(run, "test_x")
    assert run.done == ["ranks are gone", "level 2", "dcgm"]
    assert [(fault.name, fault.check) for fault in run.noticed] == [("dcgm_warning", "test_x")]
    assert (found.faults, found.unseen) == ([], [])


def test_it_ends_in_one_sentence_without_a_result_and_leaves_gpus_alone_that_are_not_the_runs(monkeypatch, run):
    monkeypatch.setattr(dcgm, "read", Mock(side_effect=NoAnswer("dcgmi did not answer within 900 s")))
    with pytest.raises(NotJudged, match="dcgmi did not answer within 900 s"):
        fixtures.diagnose(run, "test_x")
    run.done.clear()
    run.target.topology.gpus = EIGHT[:4]
    with pytest.raises(NotApplicable, match="all 8 GPUs of the machine, and this run has 4"):
        fixtures.diagnose(run, "test_x")
    assert run.done == []
