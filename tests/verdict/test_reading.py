"""Findings follow from what was recorded: when a run makes them, and when its evidence is read."""

import json
from dataclasses import asdict

import pytest

from pytest_gpufleet.model.events import Judged, RunHeader, TopologyFound
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.model.suite import Suite, SuiteCheck, shipped
from pytest_gpufleet.run.folder import Evidence
from pytest_gpufleet.verdict.judgement import comparisons, judge, measured_again, read
from pytest_gpufleet.verdict.profile import for_gpu
from tests.runs import topology

H200 = "NVIDIA H200"
GPUS = topology("node7", H200)
UNDER = {"operation": "copy", "at_once": "all"}


def judged(*values, metric="memory_bandwidth", **how):
    measurement = Measurement(metric, {gpu(index): value for index, value in enumerate(values)}, UNDER)
    return judge(measurement, for_gpu(H200), GPUS, "a.py::b", **{"rehearsal": False, **how})


FINDINGS = {
    "met": judged(4300.0, 4300.0, 4300.0, 4300.0),
    "missed": judged(4300.0, 4300.0, 4300.0, 3000.0),
    "not judged, and why": judged(1.0, metric="loader_throughput"),
    "for information": judged(1.0, metric="loader_throughput", required=False),
    "no number": judged(4300.0, float("nan"), float("inf"), 4300.0),
    "nothing": judged(),
    "measured again": measured_again(judged(4300.0, 4300.0, 4300.0, 3000.0), "it missed"),
    "measured again without a limit": measured_again(judged(1.0, metric="loader_throughput"), "along"),
    "rehearsal": judged(4300.0, 10.0, rehearsal=True),
}


def written_down(folder, finding, rehearsal=False):
    evidence = Evidence(folder / "evidence.jsonl")
    for event in (RunHeader(rehearsal=rehearsal), TopologyFound(nodes=[GPUS]), Judged(finding=finding)):
        evidence.add(event)
    evidence.close()
    return evidence


@pytest.mark.parametrize("what", FINDINGS)
def test_what_is_read_is_what_was_found_and_none_of_it_was_written(what, tmp_path):
    evidence = written_down(tmp_path, FINDINGS[what], rehearsal=what == "rehearsal")
    written = json.loads(evidence.path.read_text().splitlines()[-1])["finding"]
    assert written.keys().isdisjoint({"state", "missed", "slower_than_peers"})
    (found,) = read(evidence.path).findings
    now, then = ({**asdict(each), "measurement": each.measurement.conditions} for each in (found, FINDINGS[what]))
    assert now == then  # but for the values, of which NaN is like no other
    assert evidence.record.findings == [FINDINGS[what]]


def test_what_somebody_wrote_beside_a_measurement_is_not_looked_at(tmp_path):
    evidence = written_down(tmp_path, FINDINGS["missed"])
    *before, last = evidence.path.read_text().splitlines()
    event = json.loads(last)
    event["finding"] |= {"state": "met", "missed": [], "slower_than_peers": {}}
    evidence.path.write_text("\n".join([*before, json.dumps(event), ""]))
    assert read(evidence.path).findings == [FINDINGS["missed"]]


@pytest.mark.parametrize(("figures", "gpus", "count"), [
    (("memory_bandwidth",), 1, 1),  # with its limit
    (("memory_bandwidth",), 8, 9),  # and each with the others
    (("pair_bandwidth",), 4, 13),  # each way
    (("busbw",), 8, 1),  # of all together
    ((), 8, 0),
])  # fmt: skip
def test_how_many_comparisons_a_level_counts_with(figures, gpus, count):
    once = SuiteCheck("quick", "Of this", figures=figures)
    twice, later = SuiteCheck("quick", "Of that", ("x", "y"), figures), SuiteCheck("burnin", "Later", (), figures)
    suite = Suite("1", {"a.py::a": once, "a.py::b": twice, "a.py::c": later})
    assert comparisons(suite, "standard", gpus, 1) == 3 * count
    assert comparisons(shipped(), "quick", gpus, 1) < comparisons(shipped(), "standard", gpus, 1)
