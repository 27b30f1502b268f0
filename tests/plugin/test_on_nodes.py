"""The arguments of pytest on each node of many."""

import pytest

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
