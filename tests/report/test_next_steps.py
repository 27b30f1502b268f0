"""What to type next where a run left something open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from pytest_gpufleet.model.events import CommandLine
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report.banner import next_steps
from pytest_gpufleet.report.page.report_page import summary
from pytest_gpufleet.report.terminal.summary_lines import summary_lines
from tests.report.page import Page


def commands(record: Record) -> list[str]:
    return [step.command for step in next_steps(record)]


@pytest.fixture
def left_out(incomplete: Record) -> Record:
    """A run from which checks were left out; whatever it measured was judged."""
    incomplete.findings[:] = [each for each in incomplete.findings if each.state != "not judged"]
    return incomplete


def test_what_was_left_out_runs_without_what_left_it_out(left_out: Record) -> None:
    left_out.run = msgspec.structs.replace(left_out.run, command="pytest acceptance/ --gpus 8 -k bandwidth")
    assert commands(left_out) == ["pytest acceptance/ --gpus 8 --fleet-level standard"]


def test_a_long_burn_in_is_as_long_again(left_out: Record) -> None:
    left_out.run = msgspec.structs.replace(left_out.run, level="burnin", burn_in_seconds=7200.0)
    assert commands(left_out) == ["pytest acceptance/ --gpus 8 --fleet-burn-in 7200s"]
    left_out.run = msgspec.structs.replace(left_out.run, burn_in_seconds=30.0)  # which was too short
    assert commands(left_out) == ["pytest acceptance/ --gpus 8 --fleet-level burnin"]


def test_it_is_started_as_it_was(left_out: Record) -> None:
    line = CommandLine("gpufleet accept", "--gpus 8 -k bandwidth")
    left_out.run = msgspec.structs.replace(left_out.run, command=line.typed, command_line=line)
    assert commands(left_out) == ["gpufleet accept --gpus 8 --fleet-level standard"]
    died = replace(left_out, verdict=None)
    assert commands(died) == ["gpufleet accept --gpus 8 -k bandwidth --fleet-resume FOLDER"]


def test_figures_without_limits_need_a_calibration_first(incomplete: Record) -> None:
    finding = next(each for each in incomplete.findings if each.limit)
    incomplete.findings.append(replace(finding, state="not judged", limit=None, required=True, reason="no profile"))
    assert commands(incomplete) == [
        "gpufleet calibrate DIR -o my.toml",
        "pytest acceptance/ --gpus 8 --fleet-level standard --fleet-profile my.toml",
    ]


def test_a_run_that_was_cut_short_goes_on(standard: Record) -> None:
    died = replace(standard, verdict=None)
    assert commands(died) == [f"{standard.run.command} --fleet-resume FOLDER"]


def test_where_the_folder_is_known_it_is_named(standard: Record) -> None:
    died = replace(standard, verdict=None)
    told = [line for line, _ in summary_lines(died, "reports/node 7")]
    assert f"  {standard.run.command} --fleet-resume 'reports/node 7'" in told


def test_nothing_is_to_be_typed_where_nothing_is_open(standard: Record, bad_gpu: Record, rehearsal: Record) -> None:
    assert commands(standard) == commands(bad_gpu) == commands(rehearsal) == []
    assert "What to type next" not in summary(standard)


def test_page_and_terminal_have_the_same_command(left_out: Record) -> None:
    (step,) = next_steps(left_out)
    assert step.command in Page(summary(left_out)).of("code")
    assert f"  {step.command}" in [line for line, _ in summary_lines(left_out)]


def test_every_part_is_in_the_index_and_what_is_settled_is_folded(page_of: Callable[[str], Page]) -> None:
    page = page_of("BAD GPU")
    index = page.html[page.html.index("<nav") : page.html.index("</nav>")]
    for anchor in ("fleet-gpus", "fleet-failed", "fleet-group-1", "fleet-open", "fleet-machine", "fleet-signoff"):
        assert f'href="#{anchor}"' in index
    opened = {
        " ".join(part.partition("<h4")[2].partition("</h4>")[0].partition(">")[2].split()): "<details open>" in part
        for part in page.html.split('<section class="fleet-group"')[1:]
    }
    assert opened["Inventory"]
    assert not opened["What the GPUs did during the run"]
    healthy = page_of("STANDARD").html.split('<section class="fleet-group"')[1:]
    assert healthy
    assert not [part for part in healthy if "<details open>" in part]


def test_what_is_not_judged_links_to_its_reason(incomplete: Record) -> None:
    finding = next(each for each in incomplete.findings if each.limit)
    incomplete.findings[:] = [replace(finding, state="not judged", limit=None, required=True, reason="no profile")]
    page = Page(summary(incomplete))
    rows = {part.partition('"')[0]: part.partition("</tr>")[0] for part in page.html.split('<tr id="')[1:]}
    (row,) = (anchor for anchor, told in rows.items() if "no profile" in told)
    assert page.values("href").count(f"#{row}") >= 2  # of the GPUs at a glance, and of the figures
