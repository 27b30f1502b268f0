"""Checks of one's own, as the README and their page teach them. The examples are taken out of the text, so that what is
tested is what a reader copies."""

import re
from dataclasses import replace

import pytest

from pytest_gpufleet.report import wording
from pytest_gpufleet.verdict import judgement, profile
from tests import runs
from tests.conftest import REPORTS, ROOT
from tests.report.page import Page

README, PAGE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/checks-of-your-own.md"))
# A block of code and the file that the text before it names.
EXAMPLE = re.compile(r"`([\w/]+\.(?:py|toml))`(?:(?!```|`[\w/]+\.\w+`).)*?```\w+\n(.*?)```", re.DOTALL)
EXAMPLES = dict(EXAMPLE.findall(README) + EXAMPLE.findall(PAGE))
EXACT, SAME, FAST = "Every rank gets the same, right sum", "All GPUs compute the same bits", "All GPUs together reduce"
SORTING = "Every GPU sorts as fast as agreed"

# Rank 1 gets one element of every sum wrong. Planted before each test, since a failure is followed by fresh ranks.
FAULT = """
    import pytest

    def plant(rank):
        import torch.distributed as dist

        genuine = dist.all_reduce

        def all_reduce(tensor, *args, **kwargs):
            work = genuine(tensor, *args, **kwargs)
            if rank.index == 1:
                tensor.view(-1)[7:8] += 1
            return work

        dist.all_reduce = all_reduce

    @pytest.fixture(autouse=True)
    def fault(nccl_group):
        nccl_group.run(plant)
"""


@pytest.fixture(scope="module")
def rehearse(run_pytest):
    """rehearse(*arguments, files={}): the README's command, in a folder with nothing but the examples."""

    def run(*arguments, files=None):
        (command,) = re.findall(r"^    pytest (--rehearse checks/)$", PAGE, re.MULTILINE)
        return run_pytest(*command.split(), *arguments, f"--fleet-dir={REPORTS}", files={**EXAMPLES, **(files or {})})

    return run


@pytest.fixture(scope="module")
def rehearsed(rehearse):
    return rehearse("--fleet-profile=contract.toml")


def test_own_checks_and_their_figure_are_on_record_and_in_the_report(rehearsed):
    assert rehearsed.status == 0, rehearsed.text
    record = rehearsed.record
    assert (record.verdict, record.run.profile) == ("REHEARSAL", "Contract 4711")
    assert [limit.metric for limit in record.profile.limits] == ["sort_rate"]
    assert {check.outcome for check in record.checks.values()} == {"passed"}
    titles = [check.title for check in record.checks.values()]
    assert [*titles[:2], titles[2][: len(FAST)], *titles[3:]] == [EXACT, EXACT, FAST, SAME, SORTING]
    measurement = _sorting(rehearsed)
    assert (measurement.unit, measurement.definition.title) == ("Mkeys/s", "sorting")
    assert set(map(str, measurement.values)) == {"cpu0", "cpu1"}
    assert {len(samples) for samples in measurement.samples.values()} == {5}
    page = _text_of_report(rehearsed)
    assert [title for title in (EXACT, SAME, FAST, SORTING) if title not in page] == []
    _, heading, table = page.partition("Sorting, Mkeys/s")
    assert heading
    assert [value for value in measurement.values.values() if wording.number(value) not in table] == []


@pytest.mark.parametrize(
    ("slow", "state"), [({}, "met"), ({"gpu2": 1999.0}, "missed")], ids=["as agreed", "one GPU too slow"]
)
def test_contract_decides_about_the_own_figure(rehearsed, slow, state):
    contract = profile.load(rehearsed.root / "contract.toml")
    healthy = {f"gpu{index}": 2050.0 for index in range(4)}
    measurement = replace(_sorting(rehearsed), values={**healthy, **slow}, conditions={"keys": 1 << 26})
    finding = judgement.judge(measurement, contract, runs.topology("node7", runs.H200), "test", rehearsal=False)
    assert (finding.state, [*map(str, finding.missed)]) == (state, [*slow])
    assert finding.limit is not None
    assert (finding.limit.value, finding.limit.grade, finding.limit.given) == (2000, "contract", True)


def test_own_check_that_fails_says_which_rank_and_what_to_do(rehearse):
    run = rehearse("-k", "exact or same", files={"checks/conftest.py": FAULT})
    assert run.status == 1, run.text
    checks = run.record.checks.values()
    ended = [(check.title, check.outcome) for check in checks]
    assert ended == [(EXACT, "failed"), (EXACT, "failed"), (SAME, "passed")]
    failed = [check for check in checks if check.outcome == "failed"]
    assert all(check.message.startswith("rank 1 of 2, CPU: raised AssertionError") for check in failed)
    assert sum(EXACT in reason for reason in run.record.reasons) == 2
    page = _text_of_report(run)
    assert "The rank that is named received wrong data: look at the NVLinks of its GPU." in page
    assert "REHEARSAL" in page


def _sorting(run):
    measurements = (finding.measurement for finding in run.record.findings)
    return next(measurement for measurement in measurements if measurement.metric == "sort_rate")


def _text_of_report(run):
    (folder,) = run.folders
    return Page((folder / "report.html").read_text(encoding="utf-8")).text
