"""Every fault costs one test, is told by the rank that caused it, and leaves a world that works."""

import json
import shutil
from pathlib import Path

import pytest
import torch._C._distributed_c10d as c10d

from pytest_gpufleet.verdict.evidence import read

from .faults import CULPRIT, FAULTS, RANKS

ON_CPU = [name for name, fault in FAULTS.items() if not fault.needs_gpu]
INNER = """
import pytest
from faults import FAULTS, HANG_SECONDS, RANKS, all_reduce, cause

STEPS = [(name, step) for name, fault in FAULTS.items() if not fault.needs_gpu for step in ("fault", "next")]

@pytest.mark.parametrize(("name", "step"), STEPS)
def test_it(nccl_group, name, step):
    if step == "fault":
        nccl_group.run(all_reduce)  # the group is there before anything goes wrong
        nccl_group.run(cause, name, timeout=HANG_SECONDS if FAULTS[name].kind in ("hang", "") else None)
    else:
        assert nccl_group.run(all_reduce) == [RANKS * (RANKS + 1) // 2] * RANKS
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """One run over the whole table: the record and the failures in their order."""
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("faults")
    shutil.copy(Path(__file__).with_name("faults.py"), folder)
    (folder / "test_inner.py").write_text(INNER)
    (folder / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", f"--rehearse={RANKS}", "--fleet-dir=out", "--fleet-timeout=60", "-q"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    (evidence,) = folder.glob("out/*/evidence.jsonl")
    failures = {}
    name = ""
    for event in map(json.loads, evidence.read_text().splitlines()):
        if event["event"] == "check_started":
            name = event["check"].partition("[")[2].rpartition("-")[0]
        elif event["event"] == "failure":
            failures[name] = event
    return read(evidence), failures, result.stdout


@pytest.mark.parametrize("name", ON_CPU)
def test_costs_one_test_and_names_the_rank(suite, name):
    record, failures, output = suite
    check = record.checks[f"test_inner.py::test_it[{name}-fault]"]
    assert check.outcome == "failed", output
    fault, failure = FAULTS[name], failures[name]
    assert not fault.kind or failure["kind"] == fault.kind, check.message
    for words in fault.says:
        assert words in check.message, check.message
    if fault.kind and fault.others != "same":
        assert check.message.startswith(f"rank {CULPRIT} of {RANKS}")


@pytest.mark.skipif(not hasattr(c10d, "_dump_fr_trace_json"), reason="this torch records no flight of Gloo")
def test_the_flight_recorder_tells_who_did_not_arrive(suite):
    record, _, _ = suite
    message = record.checks["test_inner.py::test_it[a collective that one rank never joins-fault]"].message
    (line,) = (line for line in message.splitlines() if line.startswith("flight recorder: "))
    assert "ranks 0, 1, 3 arrived" in line
    assert "gloo:all_reduce" in line
    assert "rank 2 did not" in line


@pytest.mark.parametrize("name", ON_CPU)
def test_leaves_a_world_that_works(suite, name):
    record, _, output = suite
    assert record.checks[f"test_inner.py::test_it[{name}-next]"].outcome == "passed", output
