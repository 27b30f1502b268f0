"""The arguments of pytest on each node of many, and how far these are."""

from collections import Counter
from types import SimpleNamespace

import pytest

from pytest_gpufleet.model.record import Record
from pytest_gpufleet.plugin import on_nodes


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["acceptance/", "--nodes", "16", "--gpus", "8"], ["acceptance/"]),
        (["--nodes=16", "--gpus=8", "--rehearse", "--rehearse=2", "--fleet-insecure"], []),
        (["--fleet-level", "quick", "--fleet-network=none"], ["--fleet-level", "quick", "--fleet-network=none"]),
        (["-x", "-v", "--maxfail", "3", "--mine", "yes"], ["-x", "-v", "--maxfail", "3", "--mine", "yes"]),
        (
            ["-k", "links", "-m", "not slow", "--deselect", "a::b"],
            ["-k", "links", "-m", "not slow", "--deselect", "a::b"],
        ),
        (["-p", "ours", "-W", "error", "-o", "a=b"], ["-p", "ours", "-W", "error", "-o", "a=b"]),
        (["-c", "site.ini", "--html=a.html", "--junitxml", "b.xml", "--lf", "--pdb"], ["-c", "site.ini"]),
        (["--fleet-resume", "reports/a", "--fleet-deadline=1h", "--fleet-dir", "b", "--fleet-keep=2"], []),
    ],
)
def test_what_is_about_all_nodes_or_about_files_of_this_machine_is_left_out(given, left):
    assert [*on_nodes.kept(given)] == left


@pytest.mark.parametrize(
    ("at_work", "started", "shown"),
    [
        ({1, 2}, [], "each node by itself, 3 of 5 checks, waiting for gf1, gf2"),
        ({0, 1, 2}, [], "each node by itself, 3 of 5 checks"),
        (None, ["a", "b"], "b"),
        (None, ["a"], "no check is on"),
    ],
)
def test_a_line_says_how_far_nodes_are_and_who_is_waited_for(at_work, started, shown):
    runs = {
        node: SimpleNamespace(host=f"gf{node}", at_work=node in (at_work or ()), outcomes=Counter(passed=2 + node))
        for node in range(3)
    }
    evidence = SimpleNamespace(record=Record(started=started, checks={"a": None}))
    run = SimpleNamespace(
        evidence=evidence, node_runs=SimpleNamespace(all=runs), alone=at_work is not None, of_nodes="12345"
    )
    assert on_nodes.now(run) == shown
