"""The shipped suite itself: a rehearsal of all of it, and what it finds on machines that are broken on purpose."""

import re
import runpy
from collections import defaultdict
from types import SimpleNamespace
from xml.etree import ElementTree

import pynvml
import pytest

from pytest_gpufleet.model.metric import METRICS
from pytest_gpufleet.model.suite import shipped
from pytest_gpufleet.plugin import selection
from pytest_gpufleet.plugin.compat import RUN
from tests.conftest import ACCEPTANCE, FILES, ROOT, lay_out

FOLDER = "--fleet-dir=runs"
EXACT = "test_3_exactness.py::test_collective_is_exact"

# Changes torch.distributed on the ranks, where it lasts: they are warm processes.
FAULT = """
def plant(rank, fault):
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist

    genuine = dist.all_reduce

    def damage(tensor):
        if tensor.numel() < 1000:  # the small ones that only line ranks up
            return
        tensor.view(-1)[7:8].view(torch.uint8)[0] ^= 1

    def all_reduce(tensor, *args, async_op=False, **kwargs):
        if rank.index == 1 and fault == "flip in the input":
            damage(tensor)
        work = genuine(tensor, *args, async_op=async_op, **kwargs)
        if rank.index != 1 or fault == "flip in the input":
            return work
        if async_op:
            return SimpleNamespace(wait=lambda *args: (work.wait(*args), damage(tensor)))
        damage(tensor)

    dist.all_reduce = all_reduce
"""


@pytest.fixture(scope="module")
def rehearsal(run_fresh):
    return run_fresh(ACCEPTANCE, "--rehearse", FOLDER)


def test_rehearsal_passes_and_is_stamped_everywhere(rehearsal):
    assert rehearsal.status == 0, rehearsal.text
    assert rehearsal.record.verdict == "REHEARSAL"
    assert rehearsal.record.run.rehearsal is True
    assert set(rehearsal.outcomes.values()) == {"passed", "not applicable"}
    assert {finding.state for finding in rehearsal.record.findings} == {"not judged"}
    assert len(rehearsal.record.worlds) == 3  # those of the short run that has NCCL's log, and the usual ones after it
    (folder,) = rehearsal.folders
    html = (folder / "report.html").read_text()
    assert re.search(r"<h1[^>]*>[^<]*GPU acceptance report", html)
    for text in (rehearsal.text, html):
        assert "REHEARSAL" in text
        assert not re.search(r"(?<!say )ACCEPTED", " ".join(text.split()))
    assert f"report: runs/{folder.name}/report.html" in rehearsal.text


LOADED = """
import sys

def pytest_unconfigure():
    print("loaded:", *({"torch", "torch._dynamo", "torchvision", "triton", "matplotlib"} & set(sys.modules)))
"""


def test_level_quick_waits_for_nothing_that_others_need(run_fresh):
    """The compiler, the networks and the plots take seconds to load, and this level runs before every job."""
    options = ("--rehearse", "--fleet-level=quick", FOLDER, "-k", "inventory or latency or product or loss_falls")
    run = run_fresh("-p", "loaded", ACCEPTANCE, *options, files={"loaded.py": LOADED})
    assert run.status == 0, run.text
    assert re.findall(r"^loaded: (.*)$", run.text, re.MULTILINE) == ["torch"]


OWN = "def test_own(world): pass"
BESIDE = {f"checks/{name}": ACCEPTANCE / name for name in ("test_1_inventory.py", "conftest.py")}
INVENTORY = ACCEPTANCE / "test_1_inventory.py"
OF_SUITE_ALONE = {
    "the suite": ([INVENTORY], {}, True),
    "beside a test of somebody's own": ([INVENTORY, "test_own.py"], {"test_own.py": OWN}, False),
    "under a name of the suite": (["test_1_inventory.py"], {"test_1_inventory.py": OWN}, False),
    "a folder of the suite's": (["checks"], BESIDE, True),
    "in a folder with a test of somebody's own": (["checks"], {**BESIDE, "checks/own_test.py": OWN}, False),
}


@pytest.mark.parametrize("what", OF_SUITE_ALONE)
def test_ranks_of_the_suite_alone_start_while_it_is_collected(tmp_path, what):
    """Those of other tests find what they need by what their files do when they are collected. That ranks do start,
    tests/acceptance/test_elsewhere.py shows."""
    arguments, files, alone = OF_SUITE_ALONE[what]
    begun = []
    ranks, here = SimpleNamespace(begin=lambda: begun.append(True)), SimpleNamespace(dir=lay_out(tmp_path, files))
    run = SimpleNamespace(evidence="some", options=SimpleNamespace(nodes=None), ranks=ranks)
    given = {"args": [*map(str, arguments)], "option": SimpleNamespace(pyargs=False), "invocation_params": here}
    selection.pytest_sessionstart(SimpleNamespace(config=SimpleNamespace(stash={RUN: run}, **given)))
    assert bool(begun) is alone


def test_trainings_record_their_losses(rehearsal):
    """Each GPU its own, or all together one; those of each training fall."""
    curves = defaultdict(list)
    for each in rehearsal.record.losses:
        curves[each.check.rsplit("::", 1)[-1]].append(each.curve)
    for check, places in {
        "test_phase_2_loss_falls": ["cpu0", "cpu1"],
        "test_each_gpu_alone": ["cpu0", "cpu1"],
        "test_throughput_and_scaling[amp]": ["world"],  # alone is that of the check before
        "test_speed": ["world"],
    }.items():
        assert sorted(str(curve.place) for curve in curves[check]) == places, check
        assert all(curve.losses[-1] < curve.losses[0] for curve in curves[check]), check


def test_checks_measure_what_the_manifest_says(rehearsal):
    make_checks = runpy.run_path(str(ROOT / "docs" / "make_checks.py"))
    measured, required = defaultdict(set), defaultdict(set)
    for finding in rehearsal.record.findings:
        name = finding.check.rpartition("/")[2].partition("[")[0]
        if finding.measurement.metric in METRICS:
            measured[name].add(finding.measurement.metric)
            required[name] |= {finding.measurement.metric} if finding.required else set()
    assert len(measured) > 15
    assert measured == {name: set(shipped().checks[name].metrics(several=True)) for name in measured}
    collected = make_checks["collected"]()
    assert required == {name: set(make_checks["judged"](collected[name]).required) for name in measured}


def test_report_is_one_file_with_figures_and_a_place_to_sign_and_junit_has_every_figure(rehearsal):
    (folder,) = rehearsal.folders
    html = (folder / "report.html").read_text()
    assert {path.name for path in folder.iterdir()} == FILES
    assert not re.search(r"""<link|\bsrc=["'](?!data:|["'])""", html)
    for words in ("<svg", "bus bandwidth", "training throughput", "Vendor", "Customer", "not judged"):
        assert words.lower() in html.lower()
    (suite,) = ElementTree.parse(folder / "junit.xml").iter("testsuite")
    assert {case.get("name") for case in suite.iter("testcase")} == rehearsal.outcomes.keys()
    found = {(each.get("name"), each.get("value")) for each in suite.iterfind("properties/property")}
    for finding in rehearsal.record.findings:
        assert {(f"{finding.check} {name}", value) for name, value in finding.properties()} <= found


@pytest.mark.parametrize(("fault", "ranks", "check", "blame", "words"), [
    ("flip", 2, f"{EXACT}[all_reduce-sum]", "CPU rank 1: has wrong data", "1 of 16,384 elements are wrong: [7]"),
    ("flip in the input", 3, f"{EXACT}[all_reduce-max]", "CPU rank 1: corrupts data", "all ranks alike"),
])  # fmt: skip
def test_a_planted_fault_is_found_and_the_rank_named(planted, fault, ranks, check, blame, words):
    run = planted(FAULT, fault, ACCEPTANCE / check, f"--rehearse={ranks}")
    assert run.status == 1, run.text
    message = run.check(check.rpartition("::")[2]).message
    assert message.removeprefix("Failed: ").startswith(blame), message
    assert words in message
    assert f"rank 0 of {ranks}, CPU: raised" not in message


def described(run_pytest, machine, *arguments):
    plugin = (
        f"import sys\nfrom tests.machine.fake_nvml import *\nsys.modules['pynvml'] = {machine}\n"
        "from pathlib import Path\nfrom pytest_gpufleet.machine import local_node\nlocal_node.DEVICES = Path()\n"
    )
    options, files = (INVENTORY, FOLDER, "-p", "described"), {"described.py": plugin}
    return run_pytest(*options, *arguments, files=files, PYTHONPATH=f".:{ROOT}")


# Whoever opened a file by itself is somebody else for its lock, in the same process too.
HELD = "switched(8); import fcntl; held = open('nvidia5', 'w'); fcntl.flock(held, fcntl.LOCK_EX)"


def test_a_run_is_refused_in_one_sentence_while_another_has_a_gpu(run_pytest):
    run = described(run_pytest, HELD, "--gpus=8")
    assert (run.status, run.folders) == (pytest.ExitCode.USAGE_ERROR, [])
    (line,) = filter(None, run.text.splitlines())
    assert re.match(r"ERROR: GPU 2 .* is in use by another run: process \d+ of ", line)


def test_a_suite_that_pytest_finds_by_itself_wants_to_know_what_to_run_on(run_pytest):
    """Nobody has named its folder, so nobody has asked for a run: none without report and verdict."""
    conftest = (ACCEPTANCE / "conftest.py").read_text()
    run = run_pytest(files={"suite/conftest.py": conftest, "suite/test_own.py": "def test_own(): pass"})
    assert (run.status, run.folders) == (pytest.ExitCode.INTERRUPTED, [])
    assert "say what the acceptance suite is to run on: --gpus N, --gpus all or --rehearse" in run.text


@pytest.mark.parametrize(("options", "verdict", "status"), [
    (["--gpus=8"], "REJECTED", 1),
    (["--rehearse", "-q"], "REHEARSAL", 0),
    (["--gpus=all"], None, 4),
], ids=lambda value: str(value))  # fmt: skip
def test_a_machine_whose_driver_is_not_loaded(run_pytest, options, verdict, status):
    """--gpus=auto does the same: tests/machine/test_nvml.py."""
    machine = f"FakeNvml(broken={pynvml.NVML_ERROR_DRIVER_NOT_LOADED})"
    run = described(run_pytest, machine, *options, "-k", "gpu_count")
    assert run.status == status
    reason = "--rehearse was given" if verdict == "REHEARSAL" else "the NVIDIA driver is installed but not loaded"
    assert reason in run.text
    assert (run.record.verdict if run.folders else None) == verdict
    if verdict:
        (folder,) = run.folders
        left = {name: (folder / name).read_text() for name in ("report.html", "evidence.jsonl", "summary.json")}
        assert {name for name, text in left.items() if reason not in text} == set()
        assert run.record.run.rehearsal_because == (reason if verdict == "REHEARSAL" else "")
        assert run.record.topology.absent.startswith(reason)
