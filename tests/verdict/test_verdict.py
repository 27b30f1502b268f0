"""What a figure amounts to, and what all checks of a run amount to together."""

import json
import math
from dataclasses import asdict, replace

import pytest

from pytest_gpufleet.machine.gpu_facts import TELEMETRY
from pytest_gpufleet.model import levels
from pytest_gpufleet.model.events import Check, HostFound, Judged, NodeFound, NodeLeftOut, RunHeader, TopologyFound
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, Limit, Reference
from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.model.metric import Measurement, Sample
from pytest_gpufleet.model.place import WORLD, Gpu, GpuTopology, gpu, read as at
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import Suite, SuiteCheck, shipped, titled
from pytest_gpufleet.run.folder import Evidence
from pytest_gpufleet.verdict.gaps import Gap, newer, reasons, without_figures
from pytest_gpufleet.verdict.judgement import LimitMissed, comparisons, judge, measured_again, read
from pytest_gpufleet.verdict.profile import Profile, for_gpu
from pytest_gpufleet.verdict.verdict import EXIT_STATUS, conclude, remarks
from tests.runs import topology

CONDITIONS = {"collective": "all_reduce", "ranks": 8}
SOLO = "solo_train_throughput"
SOURCE = "somebody, 8x Card"
FLOOR = Limit("busbw", "min", 100.0, "GB/s", "published", SOURCE, CONDITIONS, "card.toml")
CEILING = Limit("collective_latency", "max", 100.0, "us", "published", SOURCE, CONDITIONS, "card.toml")
SOLO_FLOOR = Limit(SOLO, "min", 900.0, "images/s", "calibrated", SOURCE, {}, "card.toml")


def machine(*models):
    gpus = [
        Gpu(i, {"name": name, "uuid": f"GPU-{i}", "pci_bus_id": f"00000000:{i:02X}:00.0", "serial": f"S{i}"})
        for i, name in enumerate(models)
    ]
    return GpuTopology(gpus=tuple(gpus))


CARDS = machine(*["Card"] * 8)


def judged(values, limits=(FLOOR,), metric="busbw", topology=CARDS, **options):
    if not isinstance(values, dict):
        values = {"world": values}
    profile = None if limits is None else Profile("Card", ("Card",), {}, tuple(limits), "card.toml")
    measurement = Measurement(metric, values, CONDITIONS)
    return judge(measurement, profile, topology, "test_3.py::test_x", **{"rehearsal": False, **options})


def each(*values):
    return {gpu(i): value for i, value in enumerate(values)}


@pytest.mark.parametrize(("values", "limit", "state", "missed"), [
    (100.0, FLOOR, "met", ()),
    (math.nan, FLOOR, "missed", (WORLD,)),
    (100.001, CEILING, "missed", (WORLD,)),
    (math.nan, CEILING, "missed", (WORLD,)),
    (0.0, CEILING, "missed", (WORLD,)),  # no collective takes no time
    (0.0, replace(CEILING, metric="communication_share", unit="ratio"), "met", ()),
    ({"gpu0-gpu1": 120.0, "gpu0-gpu2": 80.0, "gpu1-gpu2": math.nan}, FLOOR, "missed",
     (at("gpu0-gpu2"), at("gpu1-gpu2"))),
])  # fmt: skip
def test_a_limit_is_met_or_missed_by_every_place(values, limit, state, missed):
    finding = judged(values, [limit], limit.metric)
    assert (finding.state, finding.missed, finding.limit) == (state, missed, limit)
    assert bool(finding.reason) == (state == "missed")


@pytest.mark.parametrize(("options", "state", "words"), [
    ({"limits": None}, "not judged", ["no profile knows Card", "--fleet-profile"]),
    ({"limits": None, "topology": machine("A", "B")}, "not judged", ["no profile knows A and B"]),
    ({"limits": []}, "not judged", ["profile Card has no limit", "calibrate"]),
    ({"limits": [], "required": False}, "for information", []),
    ({"rehearsal": True}, "not judged", ["rehearsal"]),
    ({"rehearsal": True, "required": False}, "not judged", ["rehearsal"]),
    ({"required": False}, "missed", []),
    ({"values": {}}, "not judged", ["nothing was measured"]),
    ({"values": {}, "required": False}, "not judged", ["nothing was measured"]),
])  # fmt: skip
def test_what_has_no_limit_is_not_judged_and_says_why(options, state, words):
    finding = judged(**{"values": 1.0, **options})
    assert finding.state == state
    assert [word for word in words if word not in finding.reason] == []


MIXED = machine("Fast", "Fast", "Fast", "Slow", "Slow", "Slow")


@pytest.mark.parametrize(("values", "limits", "topology", "state", "slower"), [
    (each(1000, 1000, 999, 920, 1000, 1000, 1002, 999), [SOLO_FLOOR], CARDS, "missed", {gpu(3): 0.08}),
    (each(1000, 1001, 999, 971, 1000, 1002, 998, 1000), [SOLO_FLOOR], CARDS, "met", {}),  # as healthy ones differ
    (each(1000, 1000, 1000, 500, 500, 450), [], MIXED, "missed", {gpu(5): 0.1}),
    (each(1000, 1000, 1000, 900), [], CARDS, "missed", {gpu(3): 0.1}),
    (each(1000, 1000, 1000, 500), [FLOOR], CARDS, "met", {}),  # a metric of all together has no peers
])  # fmt: skip
def test_a_gpu_slower_than_its_like_is_found_whether_a_limit_is_met_or_not_known(
    values, limits, topology, state, slower
):
    finding = judged(values, limits, "busbw" if FLOOR in limits else SOLO, topology)
    assert (finding.state, finding.missed) == (state, ())
    assert (finding.slower_than_peers or {}) == pytest.approx(slower)


def test_limit_missed_names_identity_value_limit_and_source():
    limit = judged({"gpu1": 120.0, "gpu0-gpu5": 81.25})
    peers = judged(each(1000, 1000, 1000, 900), [SOLO_FLOOR], SOLO)
    error = LimitMissed([limit, peers], CARDS)
    assert isinstance(error, AssertionError)
    assert error.findings == (limit, peers)
    text = str(error)
    for words in (
        "bus bandwidth (collective=all_reduce, ranks=8): 1 place misses the limit",
        f"{CARDS.gpus[0].identity} and {CARDS.gpus[5].identity}: 81.25 GB/s, limit ≥ 100 GB/s",
        "limit from profile card.toml, published: somebody, 8x Card",
        f"{CARDS.gpus[3].identity}: 900 images/s, 10.0% worse than its peers "
        "(at most 7.9 % worse than the others with its part number)",
        "GPU 3 is 10.0 % below the others; healthy ones differ by 0.93 % (a default); this run makes",
        "such comparisons, so the line is at 7.9 %",
    ):
        assert words in text
    assert CARDS.gpus[1].identity not in text


# ---------------------------------------------------------------- findings follow from what is recorded
H200 = "NVIDIA H200"
H200X4 = topology("node7", H200)


def copied(*values, metric="memory_bandwidth", **how):
    measurement = Measurement(metric, each(*values), {"operation": "copy", "at_once": "all"})
    return judge(measurement, for_gpu(H200), H200X4, "a.py::b", **{"rehearsal": False, **how})


FINDINGS = {
    "met": copied(4300.0, 4300.0, 4300.0, 4300.0),
    "missed": copied(4300.0, 4300.0, 4300.0, 3000.0),
    "not judged, and why": copied(1.0, metric="loader_throughput"),
    "for information": copied(1.0, metric="loader_throughput", required=False),
    "no number": copied(4300.0, float("nan"), float("inf"), 4300.0),
    "nothing": copied(),
    "measured again": measured_again(copied(4300.0, 4300.0, 4300.0, 3000.0), "it missed"),
    "measured again without a limit": measured_again(copied(1.0, metric="loader_throughput"), "along"),
    "rehearsal": copied(4300.0, 10.0, rehearsal=True),
}


def written_down(folder, finding, rehearsal=False):
    evidence = Evidence(folder / "evidence.jsonl")
    for event in (RunHeader(rehearsal=rehearsal), TopologyFound(nodes=[H200X4]), Judged(finding=finding)):
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
    between = SuiteCheck("standard", "Of nodes", figures=("busbw",), nodes=2)
    suite = Suite("1", {"a.py::a": once, "a.py::b": twice, "a.py::c": later, "n.py::n": between})
    assert (comparisons(suite, "standard", gpus, 1), comparisons(suite, "standard", gpus, 2)) == (3 * count, 1)
    assert comparisons(shipped(), "quick", gpus, 1) < comparisons(shipped(), "standard", gpus, 1)


# ---------------------------------------------------------------- the verdict of a run
LEVEL = "standard"


def run(*outcomes, left_out=(), level=LEVEL, **run_facts):
    """A record in which every required check passed, except those left out and those given as (name, outcome)."""
    record = Record(run=RunHeader(level=level, **run_facts))
    record.telemetry.append(Sample(1.0, (dict.fromkeys(TELEMETRY, 1.0),) * 8))
    given, required = dict(outcomes), shipped().required(level)
    for name in (*required, *(given.keys() - set(required))):
        for case in shipped().cases(name) if name in required else [name]:
            if name not in left_out and case not in left_out:
                add(record, f"acceptance/{case}", given.get(name, "passed"))
    return record


def add(record, check_id, outcome):
    record.started.append(check_id)
    record.checks[check_id] = Check(check_id, outcome, 1.0, message=f"it was {outcome}")
    check = shipped().checks.get(check_name(check_id))
    for metric in check.metrics(several=True) if check else ():
        record.findings.append(Finding(check_id, Measurement(metric, {"world": 1.0}, {}), "met", FLOOR))


ANY = shipped().required(LEVEL)[4]
SEVERAL = "test_4_each_gpu.py::test_matrix_product_is_fast"  # with several cases, each of which leaves a figure
BURN_IN = "test_9_endurance.py::test_burn_in"


@pytest.mark.parametrize("level", levels.LEVELS)
def test_accepted_when_every_required_check_passed(level):
    verdict, (reason, *basis) = conclude(run(level=level, burn_in_seconds=levels.BURN_IN_SECONDS))
    assert verdict == "ACCEPTED"
    assert level in reason
    assert ["published" in each for each in basis] == ([] if level == "quick" else [True])
    assert (EXIT_STATUS[verdict], EXIT_STATUS["REJECTED"]) == (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    assert EXIT_STATUS["INCOMPLETE"] not in list(pytest.ExitCode)


@pytest.mark.parametrize(("outcomes", "verdict", "words"), [
    ([(ANY, "not applicable")], "ACCEPTED", []),
    ([(ANY, "skipped")], "INCOMPLETE", [f"{titled(ANY)}: skipped: it was skipped"]),
    ([(SEVERAL, "skipped")], "INCOMPLETE", [f"{titled(SEVERAL)}: 6 cases skipped: it was skipped"]),
    ([(ANY, "failed")], "REJECTED", [ANY]),
    ([(ANY, "failed"), (shipped().required(LEVEL)[-1], "skipped")], "REJECTED", [ANY]),
    ([("test_own.py::test_mine", "failed")], "REJECTED", ["test_own.py::test_mine"]),
    ([("test_own.py::test_mine", "skipped")], "ACCEPTED", []),
])  # fmt: skip
def test_outcomes_of_checks_decide(outcomes, verdict, words):
    found, reasons = conclude(run(*outcomes))
    assert found == verdict
    assert [word for word in words if not any(word in reason for reason in reasons)] == []


FOREIGN = "acceptance/test_1_inventory.py::test_no_foreign_process"
SPEED = f"acceptance/{SEVERAL}[fp16]"


@pytest.mark.parametrize(("effects", "verdict"), [
    ([], "INCOMPLETE"),
    ([Fault("limit_missed", (gpu(5),), "slow")], "INCOMPLETE"),
    ([Fault("limit_missed", (WORLD,), "slow"), Fault("memory_occupied", (gpu(5),), "full")], "INCOMPLETE"),
    ([Fault("rank_raised", (gpu(5),), "torch.OutOfMemoryError: CUDA out of memory")], "INCOMPLETE"),
    ([Fault("limit_missed", (gpu(5),), "slow"), Fault("limit_missed", (gpu(4),), "slow")], "REJECTED"),
    ([Fault("matmul_wrong", (gpu(5),), "one bit")], "REJECTED"),
    ([Fault("rank_raised", (gpu(5),), "ValueError: no")], "REJECTED"),
    ([Fault("check_failed", (), "assert False")], "REJECTED"),
    (None, "REJECTED"),  # it failed, and nobody knows for what
])  # fmt: skip
def test_a_process_of_somebody_else_leaves_untested_what_it_may_have_caused_and_hides_no_fault(effects, verdict):
    record, miner = run(), "process 4711 (miner), 2.0 GiB"
    for check in [FOREIGN] if effects == [] else [FOREIGN, SPEED]:
        record.checks[check] = replace(record.checks[check], outcome="failed")
    record.faults += [fault.changed(check=SPEED) for fault in effects or ()]
    record.faults.append(Fault("foreign_process", (gpu(5),), miner, check=FOREIGN))
    found, reasons = conclude(record)
    assert found == verdict
    assert (miner in reasons[0]) == (verdict == "INCOMPLETE")


@pytest.mark.parametrize(("check", "when"), [("", "GPU"), (f"acceptance/{ANY}", f"while acceptance/{ANY} ran: GPU")])
def test_a_fault_that_no_check_says_rejects(check, when):
    record = run()
    record.faults.append(Fault("ecc_uncorrected", (gpu(5),), "1 more", check=check, watched=True))
    found, (reason, *_) = conclude(replace(record, topology=CARDS))
    assert (found, reason.startswith(when)) == ("REJECTED", True)


def test_every_required_check_is_required_and_none_of_a_level_above():
    required = shipped().required(LEVEL)
    expected = [("INCOMPLETE", [f"{titled(name)}: not run"]) for name in required]
    assert [conclude(run(left_out=[name])) for name in required] == expected
    above = [name for name, check in shipped().checks.items() if check.level != "quick"]
    assert conclude(run(left_out=above, level="quick"))[0] == "ACCEPTED"


@pytest.mark.parametrize(("left_out", "where"), [(ANY, ""), (f"{SEVERAL}[fp16]", " in [fp16]")])
def test_deselected_checks_leave_a_gap(left_out, where):
    record = replace(run(left_out=[left_out]), deselected=[f"acceptance/{left_out}", "test_own.py::test_mine"])
    assert conclude(record) == ("INCOMPLETE", [f"{titled(check_name(left_out))}: deselected{where}"])


def test_a_gpu_that_did_not_start_is_told_beside_the_verdict():
    """Or one that is hidden from a container: the kernel lists it as the driver's, and NVML does not show it."""

    def told(kinds, shown=8):
        devices = {f"0000:{number:02x}:00.0": {"kind": kind} for number, kind in enumerate(kinds)}
        run, facts = RunHeader(level="quick", gpus_present=shown), {"pci_devices": devices}
        return remarks(Record(run=run, topology=machine(*["Card"] * shown), machines={0: HostFound("", facts)}))

    (remark,) = told(["port", *["gpu"] * 8, "nvme"], shown=7)
    assert remark.startswith("8 GPUs are bound to the NVIDIA driver, which shows 7")
    assert told(["port", *["gpu"] * 8, "nvme"]) == told(["gpu"] * 4) == told([]) == []


def test_one_case_of_a_check_is_not_the_check():
    record = run(left_out=[f"{SEVERAL}[fp16]"])  # as if it had been left out on the command line
    told = f"{titled(SEVERAL)}: not run in [fp16]"
    assert conclude(record) == ("INCOMPLETE", [told])
    add(record, f"{SEVERAL}[fp64]", "passed")  # once more: the run was resumed under another --rootdir
    assert conclude(record) == ("INCOMPLETE", [told])
    add(record, f"elsewhere/{SEVERAL}[fp16]", "passed")
    assert conclude(record)[0] == "ACCEPTED"


@pytest.mark.parametrize(("state", "verdict"), [
    ("met", "ACCEPTED"),
    ("for information", "ACCEPTED"),
    ("not judged", "INCOMPLETE"),
    ("missed", "REJECTED"),  # by a test that caught LimitMissed
])  # fmt: skip
def test_figures_that_nobody_judged_leave_a_gap(state, verdict):
    record, measured = run(), Measurement("busbw", {"world": 1.0}, {})
    record.findings.append(Finding("test_a.py::test_it[x]", measured, state, reason="nobody knows"))
    found, reasons = conclude(record)
    assert found == verdict
    assert ("test_a.py::test_it: 1 measurement was not judged: nobody knows" in reasons) == (state == "not judged")


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_a_rehearsal_is_never_accepted(outcome):
    verdict, reasons = conclude(run((ANY, outcome), rehearsal=True))
    assert verdict == "REHEARSAL"
    assert any(ANY in reason for reason in reasons) == (outcome == "failed")


def test_an_empty_or_interrupted_run_is_incomplete_by_the_titles_of_its_checks():
    assert conclude(Record())[0] == "INCOMPLETE"
    assert conclude(replace(run(), broken="the run was interrupted")) == ("INCOMPLETE", ["the run was interrupted"])
    unfinished, long = run(), "acceptance/test_9.py::test_long"
    unfinished.started.append(long)
    why = "did not finish: it was running when the record ends"
    assert conclude(unfinished) == ("INCOMPLETE", [f"{long}: {why}"])
    record = run(left_out=[BURN_IN], level="burnin", burn_in_seconds=480.0)
    record.started.append(f"acceptance/{BURN_IN}")
    record.progress[f"acceptance/{BURN_IN}"] = 120.0, 480.0
    assert conclude(record)[1] == [
        f"{titled(f'acceptance/{BURN_IN}')}: did not finish: it came to 120 s of 480 s without a fault",
        "the burn-in was 480 s long, level burnin asks for 900 s",
    ]


@pytest.mark.parametrize("outcome", ["passed", "not applicable"])
def test_a_check_that_left_no_figures_shows_nothing(outcome):
    record = run((SEVERAL, outcome))
    lost = [f"acceptance/{SEVERAL}[{case}]" for case in ("fp16", "bf16")]
    record.findings = [finding for finding in record.findings if finding.check not in lost]
    passed = [f"{titled(SEVERAL)}: passed and left no measurement of gemm in [fp16], [bf16]"]
    assert conclude(record)[1][:1] == (passed if outcome == "passed" else conclude(run())[1][:1])


OF_PAIRS = ("pair_bandwidth", "test_5_links.py::test_pair_bandwidth")
OF_HOST = ("host_bandwidth", "test_5_links.py::test_host_bandwidth_of_each_gpu")
ON_RAILS = ("rail_bandwidth", "test_nodes_3_rails.py::test_rail_bandwidth")


@pytest.mark.parametrize(("of", "found", "left_out", "missing"), [
    (("gemm", SEVERAL), [({}, "gpu0 gpu1 gpu3")], None, "gpu2"),
    (("busbw", SEVERAL), [({}, "gpu0")], None, ""),  # which the check is not there for, such as a search for a cause
    (OF_PAIRS, [({}, "gpu0-gpu1 gpu0-gpu2 gpu1-gpu2")], None, "gpu0-gpu3, gpu1-gpu3, gpu2-gpu3"),
    (OF_PAIRS, [({}, "gpu0-gpu1 gpu0-gpu2 gpu3-gpu0 gpu1-gpu2 gpu1-gpu3 gpu2-gpu3")], None, ""),
    (("busbw", "test_6_collectives.py::test_bus_bandwidth"), [({}, "world")], None, ""),
    (("host_memory_bandwidth", "test_5_links.py::test_host_memory_bandwidth"), [({}, "numa0")], None, ""),
    (("gemm", "test_own.py::test_mine"), [({}, "gpu0")], None, ""),
    # Under each of the conditions; but ways differ from pair to pair.
    (OF_HOST, [({"direction": way}, "gpu0 gpu1 gpu2 gpu3") for way in "AB"], None, ""),
    (OF_HOST, [({"direction": "A"}, "gpu0 gpu1 gpu2 gpu3"), ({"direction": "B"}, "gpu0 gpu2 gpu3")], None, "gpu1"),
    (OF_PAIRS, [({"link": "PIX"}, "gpu0-gpu1 gpu2-gpu3"), ({"link": "SYS"}, "gpu0-gpu2 gpu0-gpu3 gpu1-gpu2 gpu1-gpu3")],
     None, ""),
    # Of a run on three nodes.
    (ON_RAILS, [({}, "rail0 node1/rail0")], (), "node2"),
    (ON_RAILS, [({}, "rail0-node1/rail0")], (), "node2"),
    (ON_RAILS, [({}, "rail0 node1/rail0")], (2,), ""),
    (ON_RAILS, [({}, "rail0-node1/rail0 rail0-node2/rail0")], (), ""),
    (ON_RAILS, [({"nodes": 2}, "rail0 node1/rail0")], (), ""),
    (ON_RAILS, [({}, "world")], (), ""),
])  # fmt: skip
def test_a_figure_that_is_missing_for_some_places_leaves_a_gap(of, found, left_out, missing):
    metric, check = of
    findings = [
        Finding(check, Measurement(metric, dict.fromkeys(places.split(), 50.0), conditions), "met", FLOOR)
        for conditions, places in found
    ]
    nodes = tuple(NodeFound(number, f"gf{number}") for number in range(3))
    run = RunHeader() if left_out is None else RunHeader(nodes=nodes, transport="local")
    passed = {check: Check(check, "passed", 1.0)}
    record = Record(run=run, topology=machine(*["Card"] * 4), findings=findings, checks=passed)
    record.left_out = {number: NodeLeftOut(node=number, why="another driver") for number in left_out or ()}
    gap = Gap("without figures", check, f"no measurement of {metric} at {missing}")
    assert [each for each in without_figures(record) if each.why.startswith("no")] == [gap] * bool(missing)
    record.findings = [replace(each, state="for information") for each in findings]  # may be of some places alone
    assert [each for each in without_figures(record) if each.why.startswith("no")] == []


def test_one_gpu_leaves_no_figures_of_several():
    record, scaling = run(), "test_8_resnet50.py::test_throughput_and_scaling"
    lost = (f"acceptance/{scaling}", "scaling_efficiency")
    record.findings = [each for each in record.findings if (each.check.split("[")[0], each.measurement.metric) != lost]
    assert conclude(replace(record, topology=machine("Card")))[0] == "ACCEPTED"
    why = "passed and left no measurement of scaling_efficiency"
    assert conclude(replace(record, topology=CARDS))[1] == [f"{titled(scaling)}: {why}"]


# ---------------------------------------------------------------- the suite of another version
OLD = Suite("0.0.1", {ANY: SuiteCheck("quick", "As it was")})


def test_evidence_is_judged_by_the_manifest_of_the_suite_that_made_it():
    record = Record(run=RunHeader(level=LEVEL, plugin="0.0.1"), manifest=OLD)
    assert conclude(record) == ("INCOMPLETE", [f"{titled(ANY)}: not run", conclude(record)[1][-1]])
    add(record, ANY, "passed")
    verdict, (_, since) = conclude(record)
    assert verdict == "ACCEPTED"
    subjects = {gap.subject for gap in newer(record)}
    assert since == f"{len(subjects)} checks did not exist in 0.0.1 and do not count"
    assert "test_1_inventory.py::test_gpu_count" in subjects
    assert ANY not in subjects


def test_a_board_with_another_part_number_is_told_and_no_fault():
    boards = ["692-1", "692-1", "965-2", None]
    gpus = tuple(Gpu(i, {**CARDS.gpus[i].facts, "board_part_number": board}) for i, board in enumerate(boards))
    told = "not all boards have one part number: 692-1, but GPU 2 has 965-2"
    assert told in remarks(Record(topology=replace(CARDS, gpus=gpus)))
    assert remarks(Record(topology=replace(CARDS, gpus=gpus[:2]))) == []


@pytest.mark.parametrize(("environment", "fabric", "capability", "told"), [
    ({"NCCL_NVLS_ENABLE": "0"}, "nvswitch", (9, 0), True),
    ({"NCCL_NVLS_ENABLE": "0"}, "nvswitch", (8, 0), False),  # whose NVSwitch cannot reduce
    ({"NCCL_NVLS_ENABLE": "0"}, "nvlink", (9, 0), False),
    ({"NCCL_NVLS_ENABLE": "off"}, "nvswitch", (9, 0), True),  # as NCCL reads it
    ({}, "nvswitch", (9, 0), False),
])  # fmt: skip
def test_what_a_variable_kept_from_being_tested_is_told(environment, fabric, capability, told):
    gpus = tuple(Gpu(gpu.index, {**gpu.facts, "compute_capability": capability}) for gpu in CARDS.gpus)
    record = Record(run=RunHeader(environment=environment), topology=replace(CARDS, gpus=gpus, fabric=fabric))
    assert any("NCCL_NVLS_ENABLE=0" in reason and "not tested" in reason for reason in conclude(record)[1]) == told


def test_an_accepted_machine_says_what_was_not_asked_of_it():
    assert remarks(Record(run=RunHeader(without=("bmc", "disks"), used=True, network="none"))) == [
        "not judged by request (--fleet-without): bmc, disks", "judged as used hardware, as --fleet-used says",
        "nothing was asked of the network, as --fleet-network none says",
    ]  # fmt: skip
    (said,) = remarks(Record(run=RunHeader(network="200", transport="local")))
    assert said == "the network between nodes is judged by 200 Gbit/s for each GPU (--fleet-network)"


def test_what_several_checks_could_not_read_is_one_reason():
    hidden = "not judged: this container hides the host: run on the host"
    whys = {"t.py::test_fans": hidden, "t.py::test_drives": hidden, "t.py::test_memory": "not judged: no EDAC driver"}
    assert reasons([Gap("skipped", name, why) for name, why in whys.items()], Record()) == [
        "2 checks were not judged: this container hides the host: run on the host",
        "t.py::test_memory: skipped: not judged: no EDAC driver",
    ]


def test_thousands_are_no_powers_of_ten():
    floor = replace(SOLO_FLOOR, reference=Reference(12_960.4), value=12_960.4)
    assert str(floor) == "≥ 12,960 images/s"
    assert "12,960 images/s, limit ≥ 13,000" in str(
        LimitMissed([judged(each(12_960.4), [replace(SOLO_FLOOR, value=13_000.0)], SOLO)], CARDS)
    )


def test_what_a_line_follows_from_is_said_of_a_machine():
    copies, h200 = Measurement("memory_bandwidth", each(4000, 4001), {"operation": "copy"}), "NVIDIA H200"
    found = judge(copies, for_gpu(h200), machine(h200, h200), "x", rehearsal=False, comparisons=228)
    assert {str(place): text for place, text in found.why().items()} == dict.fromkeys(
        ("gpu0", "gpu1"),
        "the mean of this machine is 6.4 % below what 7 machines reach; healthy ones differ by 0.36 % (14 GPUs, "
        "4 machines); this run makes 228 such comparisons, so the line is at 2.4 %",
    )
