"""What pytest on a node is told of what pytest was told here."""

import pytest

from pytest_gpufleet.plugin.mirrored import kept


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["acceptance/", "--nodes", "16", "--gpus", "8"], []),
        (["--nodes=16", "--gpus=8", "--rehearse", "--rehearse=2", "--fleet-insecure"], []),
        (["--fleet-level", "quick", "--fleet-basis=published"], ["--fleet-level", "quick", "--fleet-basis=published"]),
        (["-x", "-v", "--maxfail", "3", "--mine", "yes"], ["-v", "--mine", "yes"]),
        (["-k", "links", "-kslow", "-m", "not slow", "--deselect", "a.py::b"], []),
        (["-p", "ours", "-W", "error", "-o", "a=b"], ["-p", "ours", "-W", "error", "-o", "a=b"]),
        (["-c", "site.ini", "--rootdir", "/x", "--html=a.html", "--lf", "--pdb"], []),
    ],
)
def test_what_is_about_all_nodes_or_about_what_to_run_is_left_out(given, left):
    assert [*kept(given, {"acceptance/"})] == left
