"""The page: what it says and asks to be signed, that it says it safely, stands on its own, and what to type next."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from pytest_gpufleet.model.codec import Moment
from pytest_gpufleet.model.events import Check, CommandLine, HostFound, NodeFound, RunHeader
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.metric import Measurement, Metric, MiB
from pytest_gpufleet.model.place import Gpu, gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import machine_section
from pytest_gpufleet.report.banner import next_steps, why
from pytest_gpufleet.report.page import page as html_of
from pytest_gpufleet.report.rendering import STYLESHEET
from pytest_gpufleet.report.terminal.summary_lines import summary_lines
from pytest_gpufleet.run.run import AT_THE_END
from pytest_gpufleet.verdict.verdict import settled
from tests.report.conftest import INVENTORY, SAMPLE, page_of, record_of
from tests.report.page import Page

HOSTILE = "<script>alert('x')</script> & \x1b[31mred\x1b[0m \x00 \ud800 \"quoted\""
FAILED, FIGURES = "What failed, what it means", "What was checked and measured"


def test_every_page_stands_on_its_own_and_serves_a_screen_reader(every_page):
    links = [value for name in ("src", "href", "xlink:href", "data") for value in every_page.values(name)]
    assert all(value.startswith("#") for value in links)
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in every_page.seen}
    css = STYLESHEET.read_text(encoding="utf-8")
    assert not re.search(r"url\(|@import", css)
    assert "prefers-color-scheme: dark" in css and "@media print" in css  # noqa: PT018
    assert len(every_page.html) < 2_000_000
    tags = [tag for tag, _ in every_page.seen]
    assert tags.count("caption") == tags.count("table") == every_page.values("role").count("group")
    # No landmark has the name of another, all stands in the one of the page, and the keyboard scrolls what is wide.
    names = every_page.values("aria-labelledby")
    assert (tags.count("main"), len(names)) == (1, len(set(names)))
    assert all(attributes.get("tabindex") == "0" for tag, attributes in every_page.seen if tag in ("figure", "pre"))
    levels = [int(tag[1]) for tag in every_page.headings()]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for tag, attributes in every_page.seen:
        assert tag != "th" or attributes["scope"] in ("col", "row")
        assert tag != "svg" or (attributes["role"] == "img" and attributes["aria-label"])
    ids = [value for value in every_page.values("id") if value.startswith("fleet")]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for value in every_page.values("href") + every_page.values("xlink:href")}
    assert targets <= set(every_page.values("id"))  # no link leads nowhere
    # A dash stands for what is not known, and never in an attribute.
    assert not [value for name in ("class", "id", "href") for value in every_page.values(name) if "—" in value]


@pytest.mark.parametrize("check", ["", AT_THE_END, "acceptance/test_1_inventory.py::test_count"])
def test_a_fault_beside_all_checks_or_in_one_that_passed_is_no_failed_check_and_says_what_to_do(check):
    fault = Fault("ecc_uncorrected", (gpu(5),), "1 more", check=check, watched=bool(check))
    record = settled(record_of(faults=[fault], checks=INVENTORY), "")
    assert why(record) == "No check failed, but a fault was found. Named: GPU 5 (serial node17-S5)."
    text = " ".join(line for line, _ in summary_lines(record))
    for part in (fault.kind.message, "GPU-node17-5: 1 more", fault.kind.next_step, "and other faults: 1"):
        assert part.lower() in text.lower()
    page = Page(html_of(record))
    assert "A check failed, or a fault was found." in page.text
    assert page.table("One row a GPU").row("GPU 5")["Inventory" if "::" in check else "Health"] == "✗ failed"


def test_cause_stands_before_the_figures_that_missed(bad_gpu):
    text = page_of("BAD GPU").text
    failed = text[text.index(FAILED) : text.index(FIGURES)]
    cause = "every pair with it reaches 212 GB/s, all others 394"
    assert failed.index(cause) < failed.index("6 pairs with GPU 2")
    top = text[: text.index("What this is about")]
    assert f"GPU 2: {cause}." in top  # in the paragraph that says why; then which checks, and no count of what is well
    assert "Bus bandwidth of a collective over all GPUs : GPU 2 ... and 1 more" in top
    assert "within limits" not in top
    nobody = "no single GPU: all pairs are about equally slow"
    bad_gpu.faults = [fault.changed(name="cause_unclear", subjects=(), what=nobody) for fault in bad_gpu.faults]
    assert f" N{nobody[1:]}." in why(bad_gpu)


def test_programmers_words_are_folded_away_and_a_very_long_message_keeps_its_ends():
    message = "AssertionError: GPU 5 lost `its` link\nassert not ['x']\n\ndef test_x():\n>   assert not wrong"
    check = Check("a.py::b", "failed", 1.0, "Links are up", "Look at `nvidia-smi`.", message)
    page = Page(html_of(record_of(checks=[check], verdict="REJECTED")))
    assert page.of("pre") == ["GPU 5 lost `its` link", message, message]  # among all checks too
    assert "nvidia-smi" in page.of("code")
    check = Check("a.py::b", "failed", 1.0, message=f"the first line\n{'x' * 500_000}\nthe last line")
    html = html_of(record_of(checks=[check], verdict="REJECTED")).rpartition("fleet-every")[0]
    assert len(html) < 100_000
    assert all(words in html for words in ("the first line", "the last line", "characters left out"))


def test_rehearsal_never_looks_accepted(rehearsal):
    rehearsal.verdict = "ACCEPTED"
    rehearsal.checks["a.py::b"] = Check("a.py::b", "skipped", 0.0)
    page = Page(html_of(rehearsal))
    assert page.of("h2") == [summary_lines(rehearsal)[0][0]] == ["REHEARSAL"]
    count = "2 checks passed, none failed, 1 skipped, 1 not applicable."
    for words in (count, "never accepts a machine", "No GPU took part"):
        assert words in page.text
    assert not [value for value in page.values("class") if "fleet-accepted" in value]


def test_health_of_gpus():
    """Of the first NVLink 5 counts, and its second link does not tell of symbols."""
    healthy = Gpu(0, {
        "ecc_mode": [1, 1], "ecc_uncorrected_volatile": 0, "ecc_uncorrected_aggregate": 2, "pcie_replays": 0,
        "spare_rows": {"max": 3071, "high": 0, "partial": 0, "low": 1, "none": 0},
        "nvlink_errors": {"receive": [1, 2], "symbol": [4, None], "effective": [None, None]},
    })  # fmt: skip
    bad = Gpu(1, {
        "ecc_mode": [1, 0], "remapped_rows": [2, 1, 1, 0],
        "temperature_limits_c": {"gpu_max": 87, "slowdown": 0, "shutdown": 95, "memory_max": None},
        "pcie_replays": {"unavailable": "NVML: Not Supported", "applicable": False},
        "nvlink_errors": {"unavailable": "NVML: Unknown Error", "applicable": True},
    })  # fmt: skip
    table = machine_section.health([healthy, bad])
    assert [column.partition(":")[0] for column in table.columns] == [
        "ECC", "Uncorrectable memory errors", "Rows remapped", "PCIe replays", "Banks of memory by spare rows",
        "NVLink errors", "Temperature limits, °C",
    ]  # fmt: skip
    unknown = "not recorded"
    assert [[cell.text for cell in row.cells] for row in table.rows] == [
        ["on / on", "0 / 2", unknown, "0", "max 3,071, low 1", "receive 3, symbol 4", unknown],
        ["on / off", f"{unknown} / {unknown}", "2 / 1 / 1 / 0", "not supported", unknown, "not readable",
         "gpu max 87, shutdown 95"],  # some drivers give 0 for a temperature that they do not know
    ]  # fmt: skip


def test_cases_that_do_not_apply_are_told_together_and_gpus_beyond_the_first_three_counted(bad_gpu):
    checks = [Check(f"a.py::b[{case}]", "not applicable", 0.0, "All links", message="one GPU") for case in range(21)]
    row = Page(html_of(record_of(checks=checks))).table("Not applicable").row("· not applicable")
    assert row["What"] == "All links (a.py::b) in [0], [1], [2] and 18 more"
    for each in bad_gpu.topology.gpus:
        check = f"a.py::{each.index}"
        bad_gpu.checks[check] = Check(check, "failed", 1.0, message="lost links")
        bad_gpu.faults.append(Fault("nvlink_down", (each.place,), "lost a link", check=check))
    bad_gpu.checks["c.py::d"] = Check("c.py::d", "failed", 1.0, message="who knows why")
    assert ", 1 more GPU in some; 1 check names no single GPU." in Page(html_of(bad_gpu)).text


def test_customers_limits_are_marked(accepted):
    assert "customer's" not in html_of(accepted)
    accepted.findings = [
        replace(each, limit=each.limit and replace(each.limit, given=True, grade="contract"))
        for each in accepted.findings
        if each.measurement.metric == "gemm"
    ]
    text = Page(html_of(accepted)).text
    assert text.count("contract, customer's") == 2 * len(accepted.findings)  # beside it, and where it comes from
    assert "contract, customer's limit from h200.toml" in text


@pytest.mark.parametrize(
    ("lasted", "said"), [(152.0, ""), (152.9, ""), (155.2, "ran 2.1 % slow"), (149.0, "ran 2 % fast"), (0.0, "")]
)
def test_a_clock_that_runs_wrong_is_told_in_one_sentence(accepted, lasted, said):
    accepted.run = msgspec.structs.replace(accepted.run, utc=Moment("2026-11-20T09:14:03+00:00"))
    accepted.ended, accepted.lasted = Moment("2026-11-20T09:16:35+00:00"), lasted
    sentence = machine_section.clock_error(accepted)
    assert (said in sentence) if said else (sentence == "")
    assert sentence in machine_section.time_taken(accepted)


@pytest.mark.parametrize("verdict", ["ACCEPTED", "REJECTED", "INCOMPLETE", "SURPRISE"])
def test_hostile_text_is_shown_not_run(verdict):
    metric = Metric(HOSTILE, HOSTILE, "higher", HOSTILE)
    conditions = {HOSTILE: HOSTILE, "bytes": HOSTILE}
    measurement = Measurement(HOSTILE, {"world": 1.0}, conditions, {}, {HOSTILE: HOSTILE}, metric)
    several = Measurement(HOSTILE, {"gpu0": 1.0, "gpu1": 2.0}, {HOSTILE: HOSTILE}, {}, {}, metric)
    nothing = Finding("c", Measurement("busbw", {}, {}), "missed")
    record = Record(
        run=RunHeader(host=HOSTILE, command=HOSTILE, environment={HOSTILE: HOSTILE}),
        findings=[Finding("a", measurement, "missed", reason=HOSTILE), Finding("b", several, "not judged"), nothing],
        checks={HOSTILE: Check(HOSTILE, "failed", 0.1, HOSTILE, HOSTILE, HOSTILE)},
        deselected=[HOSTILE], verdict=verdict, reasons=[HOSTILE],
    )  # fmt: skip
    html = html_of(record, HOSTILE)
    assert "script" not in {tag for tag, _ in Page(html).seen}
    assert "<script>alert" in Page(html).text  # as text
    assert not set(html) & {"\x1b", "\x00"}
    html.encode("utf-8")


def test_check_of_somebody_else_has_a_group_of_its_own():
    fans = Metric("fan_speed", "rpm", "higher", "fan speed")
    measurement = Measurement("fan_speed", {"gpu0": 900.0, "gpu1": 950.0}, {"bytes": MiB}, definition=fans)
    finding = Finding("checks/test_my_fans.py::test_fans", measurement, "for information")
    check = Check("checks/test_my_fans.py::test_fans", "passed", 0.1, "All fans turn")
    page = Page(html_of(record_of(findings=[finding], checks=[check])))
    assert "My fans" in page.of("h4")
    assert page.table("One row a GPU").row("GPU 0")["My fans"] == "✓ ok"
    assert page.table("Fan speed, rpm").row("1 MiB")["GPU 1"] == "950"


def test_matplotlib_waits_for_a_report():
    modules = ("report.page", "report.terminal.summary_lines", "plugin.report_files")
    imports = ", ".join(f"pytest_gpufleet.{module}" for module in modules)
    code = f"import sys, {imports}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(("seconds", "drawn"), [(2, False), (16, False), (60, True)])
def test_what_the_gpus_did_is_drawn_where_there_is_something_to_see(seconds, drawn):
    samples = [replace(SAMPLE, time=float(second)) for second in range(seconds)]
    assert ('id="fleet-seen"' in html_of(record_of(telemetry=samples))) is drawn


GIVEN = {"technician": "J. Roe", "cost_centre": "88", "order": "4711", "remarks": "</style><b>bold</b>"}


@pytest.fixture
def noted(accepted):
    node = NodeFound(0, "node7", "ABC123")
    more = {"utc": Moment("2026-11-20T09:14:03+00:00"), "notes": GIVEN, "commit": "0123abcd-dirty", "nodes": (node,)}
    accepted.run = msgspec.structs.replace(accepted.run, **more)
    accepted.machines = {0: HostFound(host={"dmi": {"vendor": "Dell Inc.", "product": "PowerEdge XE9680"}})}
    accepted.ended, accepted.lasted = Moment("2026-11-20T09:45:15+00:00"), 1872.0
    return accepted


def test_notes_stand_in_the_head_and_beside_the_signatures(noted):
    page = Page(html_of(noted, "5e" * 32))
    signed = dict(row for row in page.table("What this is about").rows)
    given = {"Order number": "4711", "Technician": "J. Roe", "Remarks": "</style><b>bold</b>", "Cost centre": "88"}
    assert [*signed.items()][:4] == [*given.items()]
    assert signed["Machine"] == "Dell Inc. PowerEdge XE9680, serial ABC123"
    assert signed["Suite"].endswith(", commit 0123abcd-dirty")
    assert signed["Time"] == "2026-11-20 09:14:03 UTC to 2026-11-20 09:45:15 UTC, 31 min 12 s"
    assert "5e5e" in page.text[page.text.index("Sign-off") :]
    assert "b" not in {tag for tag, _ in page.seen}


def test_the_foot_names_host_run_and_evidence_and_many_notes_leave_room_for_signatures(noted):
    host = 'a"}</style><script>x\\'
    noted.run = msgspec.structs.replace(noted.run, host=host)
    rules = machine_section.page_foot(noted, "5e" * 32)
    content = re.search(r'@bottom-left \{ content: "([^"]*)"', rules)
    assert content
    assert "<" not in rules
    said = re.sub(r"\\([0-9a-f]+) ", lambda code: chr(int(code[1], 16)), content[1])
    assert said.split("\\A ") == [f"{host} · run of 2026-11-20 09:14:03 UTC", f"evidence SHA-256 {'5e' * 32}"]
    noted.run = msgspec.structs.replace(noted.run, notes={f"key{number}": "x" for number in range(40)})
    rows = machine_section.signed(noted)
    assert len(rows) < 20
    assert ("And", "28 more notes, which evidence.jsonl has") in rows


def commands(record):
    return [command for _, command in next_steps(record)]


ACCEPT = CommandLine("gpufleet accept", "--gpus 8 -k bandwidth")


@pytest.mark.parametrize(("header", "command"), [
    ({"command": "pytest acceptance/ --gpus 8 -k bandwidth"}, "pytest acceptance/ --gpus 8 --fleet-level standard"),
    ({"level": "burnin", "burn_in_seconds": 7200.0}, "pytest acceptance/ --gpus 8 --fleet-burn-in 7200s"),
    ({"level": "burnin", "burn_in_seconds": 30.0}, "pytest acceptance/ --gpus 8 --fleet-level burnin"),  # too short
    ({"command_line": ACCEPT}, "gpufleet accept --gpus 8 --fleet-level standard"),
])  # fmt: skip
def test_what_was_left_out_runs_without_what_left_it_out(incomplete, header, command):
    incomplete.findings[:] = [each for each in incomplete.findings if each.state != "not judged"]
    incomplete.run = msgspec.structs.replace(incomplete.run, **header)
    assert commands(incomplete) == [command]


def test_a_run_that_was_cut_short_goes_on_as_it_was_started_and_figures_without_limits_need_a_calibration(
    accepted, bad_gpu, rehearsal, incomplete
):
    assert commands(accepted) == commands(bad_gpu) == commands(rehearsal) == []
    died = replace(accepted, verdict=None)
    assert commands(died) == [f"{accepted.run.command} --fleet-resume FOLDER"]
    shown = [line for line, _ in summary_lines(died, "reports/node 7")]  # where the folder is known
    assert f"  {accepted.run.command} --fleet-resume 'reports/node 7'" in shown
    died.run = msgspec.structs.replace(died.run, command=ACCEPT.typed(), command_line=ACCEPT)
    assert commands(died) == ["gpufleet accept --gpus 8 -k bandwidth --fleet-resume FOLDER"]
    finding = next(each for each in incomplete.findings if each.limit)
    incomplete.findings.append(replace(finding, state="not judged", limit=None, required=True, reason="no profile"))
    assert commands(incomplete) == [
        "gpufleet calibrate DIR -o my.toml",
        "pytest acceptance/ --gpus 8 --fleet-level standard --fleet-profile my.toml",
    ]


def test_every_part_is_in_the_index_and_what_is_settled_is_folded():
    index = page_of("BAD GPU").html.partition("<nav")[2].partition("</nav>")[0]
    for anchor in ("fleet-gpus", "fleet-failed", "fleet-group-1", "fleet-open", "fleet-machine", "fleet-signoff"):
        assert f'href="#{anchor}"' in index
    opened, healthy = (
        {re.search(r"<h4[^>]*>([^<]*)<", part)[1]: "<details open>" in part
         for part in page_of(name).html.split('<section class="fleet-group"')[1:]}
        for name in ("BAD GPU", "ACCEPTED")
    )  # fmt: skip
    assert (opened["Inventory"], opened["What the GPUs did during the run"]) == (True, False)
    assert {*healthy.values()} == {False}


def test_what_is_not_judged_links_to_its_reason():
    page = page_of("INCOMPLETE")
    rows = {part.partition('"')[0]: part.partition("</tr>")[0] for part in page.html.split('<tr id="')[1:]}
    (row,) = (anchor for anchor, text in rows.items() if "has no limit for these conditions" in text)
    assert page.values("href").count(f"#{row}") >= 2  # of the GPUs at a glance, and of the figures
