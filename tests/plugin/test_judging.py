"""The fixture judge: it records and returns, and what missed fails the check when its body has ended."""

from xml.etree import ElementTree

import pytest

from tests.conftest import INNER, RECORDED

# Outcome, what failed it, and how many figures are on record.
EXPECTED = {
    "fine": ("passed", "", 1),
    "two": ("failed", "limits", 3),
    "loop_in_a_with": ("failed", "limits", 2),
    "assertion_after_a_miss": ("failed", "other", 1),
    "skip_after_a_miss": ("failed", "other", 1),  # by other limits it would be a skip and no pass
    "expected": ("skipped", "", 1),
    "teardown_fails_too": ("failed", "other", 1),
    "missed_in_a_fixture": ("failed", "limits", 1),
    "missed_after_the_body": ("failed", "other", 1),
    "raised_by_hand": ("failed", "other", 0),  # no figure of it is on record that could be judged again
}


@pytest.fixture(scope="module")
def run(run_pytest):
    return run_pytest("--gpus=4", "--fleet-dir=runs", *RECORDED, files={"test_inner.py": INNER / "judging.py"})


@pytest.mark.parametrize("name", EXPECTED)
def test_a_miss_fails_its_check_whatever_comes_after(run, name):
    check = run.check(f"test_{name}")
    figures = sum(finding.check == check.id for finding in run.record.findings)
    assert (check.outcome, check.failed_by, figures) == EXPECTED[name], check.message


def test_every_cause_comes_before_the_figures_and_what_a_body_raised_beside_them(run):
    lines = run.check("test_two").message.splitlines()
    assert lines[:2] == ["the first cable", "the second cable"]
    assert [line.split()[1] for line in lines if "which no measurement can give" in line] == ["-1", "-2"]
    above, _, below = run.text.partition("= gpufleet =")
    shown = below.partition("test_inner.py::test_assertion_after_a_miss\n    ")[2]
    assert 0 < shown.find("-1 GB/s") < shown.find("test_skip_after_a_miss")
    assert "assert 'wrong' == 'right'" in above


def test_junit_has_the_codes_of_faults_as_properties_where_jenkins_allows_them(run):
    (folder,) = run.folders
    (suite,) = ElementTree.parse(folder / "junit.xml").iter("testsuite")
    named = suite.iterfind("properties/property[@name='test_inner.py::test_two fault']")
    faults = [each.get("value") for each in named]
    assert faults == ["407 cause_unclear the first cable", "407 cause_unclear the second cable"]
    # What junit-10.xsd of the plugin xUnit of Jenkins allows in a test case, of what pytest writes.
    in_cases = {each.tag for case in suite.iterfind("testcase") for each in case}
    assert in_cases <= {"skipped", "error", "failure", "system-out", "system-err"}
