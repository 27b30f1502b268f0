"""What comes from outside (a branch name, an id, a message, a serial) cannot change what a reader sees of a verdict."""

import json
import re
from dataclasses import replace
from html import unescape

import pytest

from pytest_gpufleet.model.events import typed
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import hosts as hosts_page, rendering, several_runs
from pytest_gpufleet.report.page import page
from pytest_gpufleet.verdict.across_runs.run_comparison import compare, drift
from pytest_gpufleet.verdict.fleet.fleet_verdict import judge_fleet
from pytest_gpufleet.verdict.fleet.host_runs import Common, HostRun, Unusable, kept
from tests.conftest import EVIDENCE
from tests.report.page import seen

# Without quotes, spaces and colons: it fits into a branch name, an attribute, JSON and Python.
SCRIPT = "document.title=/taken/.source;document.getElementById(/fleet-verdict/.source).textContent=/ACCEPTED/.source"
COVER = "<b style=position:fixed;inset:0;background:green>ACCEPTED</b>"
BRANCH = f"<svg/onload={SCRIPT}>"
PAYLOAD = (
    f"{BRANCH}{COVER}\"><img src=x onerror={SCRIPT}>'><img/src/onerror={SCRIPT}></title></style></pre></svg>"
    f"</script><script>{SCRIPT}</script>&lt;svg/onload={SCRIPT}&gt;"
)
LINK = f" java\tscript:{SCRIPT}"
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>\n?')

ATTACK = f"""
    import pytest

    PAYLOAD = {PAYLOAD!r}

    @pytest.mark.parametrize("branch", [1, 2], ids=[{BRANCH!r}, PAYLOAD])
    def test_id(branch): pass

    def test_message(rank=None): print(PAYLOAD); raise AssertionError(PAYLOAD)
    test_message.__doc__ = PAYLOAD + "\\n\\n" + PAYLOAD

    def test_skip(): pytest.skip(PAYLOAD)

    def test_setup(request): request.node.add_report_section("call", PAYLOAD, PAYLOAD)
"""


@pytest.fixture(scope="module")
def live(fleet):
    """The page of a run that was attacked from everywhere."""
    run = fleet(ATTACK, "--metadata", PAYLOAD, PAYLOAD, CI_COMMIT_REF_NAME=BRANCH, GIT_BRANCH=PAYLOAD, BUILD_URL=LINK)
    assert sum(BRANCH in check for check in run.record.checks) == 2
    return (run.folders[0] / "report.html").read_text(encoding="utf-8")


def without_policy(page):
    assert POLICY.search(page)
    return POLICY.sub("", page)


def test_a_branch_name_and_ids_cannot_change_the_verdict_of_the_page_of_a_run(live, tmp_path):
    for each in seen({"live": live, "escaping-alone": without_policy(live)}, tmp_path).values():
        assert each.title.startswith("GPU acceptance report")
        assert (each.verdict, each.uncovered) == ("◇ REHEARSAL", True)
    assert unescape(live).count(PAYLOAD) > 5  # also what was printed, and the log of pytest


def test_no_string_of_evidence_can_change_the_verdict_of_a_page(tmp_path, monkeypatch):
    record = poisoned("h200x4-neighbour")
    record.judged_again = PAYLOAD  # as the page of `gpufleet judge -o` has it
    pages = {"report": page(record, PAYLOAD)}
    twins = {f"a{PAYLOAD}": record, f"b{PAYLOAD}": record}
    pages["compared"] = several_runs.page(compare(twins))
    pages["over time"] = several_runs.page(drift(twins))
    payload = HostRun(f"a{PAYLOAD}", PAYLOAD, kept(record, Common()))
    hosts = [payload, HostRun("b", "", kept(poisoned("h200x4-a"), Common()))]
    fleet = judge_fleet(hosts, [Unusable(PAYLOAD, PAYLOAD, PAYLOAD)], [PAYLOAD])
    pages["fleet"] = hosts_page.page(fleet, {hosts[0].folder: "a/report.html"})
    pages |= {f"{name}-without-policy": without_policy(page) for name, page in pages.items()}
    templates = rendering.templates.__wrapped__()  # one that has compiled nothing yet
    templates.autoescape = False
    monkeypatch.setattr(rendering, "templates", lambda: templates)
    pages["policy-alone"] = page(replace(record, telemetry=[], findings=[]), "")
    pages["neither"] = without_policy(pages["policy-alone"])
    shown = seen(pages, tmp_path)
    assert (shown["neither"].title, shown["neither"].verdict) == ("taken", "ACCEPTED")
    assert shown.pop("neither").uncovered is False
    assert not [name for name, each in shown.items() if each.title == "taken" or "ACCEPTED" in each.verdict]
    del shown["policy-alone"]  # styles may do what they like there
    assert all(each.uncovered for each in shown.values())
    assert shown["report"].verdict == shown["report-without-policy"].verdict == "✗ REJECTED"


def poisoned(name):
    """A recorded run with a payload behind every text that is not one of our own words."""
    record = Record()
    for event in map(json.loads, (EVIDENCE / name / "evidence.jsonl").read_text(encoding="utf-8").splitlines()):
        record.add(typed(_poisoned(event, {*OUR_WORDS, "name"} if event["event"] == "fault" else OUR_WORDS)))
    return record


OUR_WORDS = {
    "event", "outcome", "state", "sense", "level", "better", "failed_by", "metric", "missed", "t", "kind", "utc",
    "verdict", "grade", "reference", "within", "subjects",
}  # fmt: skip


def _poisoned(value, but):
    match value:
        case str():
            return value + PAYLOAD
        case list():
            return [_poisoned(each, but) for each in value]
        case dict():
            return {key: each if key in but else _poisoned(each, but) for key, each in value.items()}
    return value
