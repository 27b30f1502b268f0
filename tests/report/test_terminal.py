"""The last lines on the terminal, of one machine and of many nodes, and the lines below while these run."""

from dataclasses import replace

import msgspec
import pytest

from pytest_gpufleet.model.events import Check, HostFound
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import distinct
from pytest_gpufleet.model.place import Place, grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.banner import reasons, why
from pytest_gpufleet.report.failures import group_title
from pytest_gpufleet.report.figures import FULL_BAR, group_table, narrow, required_tables, texts
from pytest_gpufleet.report.terminal.summary_lines import SCREEN, summary_lines, text_report
from pytest_gpufleet.run.summary import summary
from pytest_gpufleet.verdict.basis import judged_by
from pytest_gpufleet.verdict.verdict import settled
from tests.fleets import fleet_of, rejected
from tests.node_records import Between, of_nodes


def text_of(record):
    return " ".join(" ".join(text.split()) for text, _ in summary_lines(record))


def test_verdict_stands_first_in_its_colour_and_lines_fit_eighty_columns(every_record):
    colours = {"ACCEPTED": "green", "REJECTED": "red", "INCOMPLETE": "yellow", "REHEARSAL": "cyan"}
    line, markup = summary_lines(every_record)[0]
    word, _, stands_on = line.partition("; ")
    assert word == every_record.verdict
    assert bool(stands_on) == (word == "ACCEPTED")
    assert markup == {colours[word]: True, "bold": True}
    paragraphs = map(wording.ascii_signs, (why(every_record), *reasons(every_record)))
    assert all(each in text_of(every_record) for each in paragraphs)
    lines = [text for text, _ in summary_lines(every_record)]
    assert max(map(len, lines)) <= 80
    assert "\n" not in "".join(lines)
    bad_gpu = every_record.topology.gpus[2].uuid if every_record.verdict == "REJECTED" else ""
    assert any(bad_gpu in line for line in lines)  # whole


@pytest.mark.parametrize("message", ["", "\n\n", "\x1b[2J\x1b[31mowned\x07", "word " * 100_000])
def test_terminal_is_safe_from_messages(message):
    record = Record(checks={"a": Check("a", "failed", 0.1, message=message)}, verdict="REJECTED")
    result = summary_lines(record)
    assert len(result) < 20
    assert summary_lines(Record())[0][0] == "INCOMPLETE"
    assert not any("\x1b" in text or "\x07" in text for text, _ in result)


def test_every_gpu_that_a_message_names_is_told():
    """As pytest words an assertion of several lines."""
    message = "AssertionError: GPU 0 X: process 7\n  GPU 2 Y: process 7\nassert not ['GPU 0 X: process 7', 'GPU 2 Y']"
    shown = [text for text, _ in summary_lines(Record(checks={"a": Check("a", "failed", 0.1, message=message)}))]
    assert {"    GPU 0 X: process 7", "    GPU 2 Y: process 7"} <= {*shown}
    assert not any("assert not" in text for text in shown)


def test_of_own_checks_alone_the_suite_is_not_left_open_and_without_figures_not_all_met(rehearsal, accepted):
    assert "Left open" in text_of(rehearsal)
    rehearsal.checks = {"checks/test_own.py::test_it": Check("checks/test_own.py::test_it", "passed", 0.1)}
    text = text_of(rehearsal)
    assert "Left open" not in text
    assert text.count("REHEARSAL") == 1
    accepted.findings.clear()
    told = " ".join(text_of(accepted).split())
    assert "none failed. No measurement was judged." in told
    assert " 0 " not in told


def test_each_group_has_a_line_with_its_smallest_margin(accepted):
    found, text = group_table(accepted).rows, text_of(accepted)
    judged = grouped((group_title(each.check), each) for each in distinct(accepted.findings) if judged_by(each))
    assert {row.name for row in found} == judged.keys()
    assert len(found) > 2
    for row in found:
        of_group = judged[row.name]
        nearest = texts(min(of_group, key=wording.margin))
        assert [row.cells[column].text for column in (2, 3, 1, 5)] == [*nearest]
        assert row.cells[0].text == f"{sum(each.state == 'met' for each in of_group)} of {len(of_group)}"
        assert all(wording.ascii_signs(part) in text for part in (row.name, row.cells[0].text, *nearest))
    accepted.findings[:] = [replace(each, limit=None, state="missed") for each in accepted.findings]  # their peers
    assert not any("()" in cell.text for row in narrow(group_table(accepted)).rows for cell in row.cells)
    off = [replace(each, slower_than_peers=dict.fromkeys(each.measurement.values, 0.3)) for each in accepted.findings]
    accepted.findings[:] = off
    for row in group_table(accepted).rows:
        assert [row.cells[column].text for column in (1, 3)] == ["-30 %", "peers"]
        assert row.cells[1].bar == -FULL_BAR


def test_the_text_of_a_run_has_every_check_and_required_measurement_and_ends_as_the_terminal(every_record):
    text = text_report(every_record, "FOLDER")
    assert all(f"  {check}\n" in text for check in every_record.checks)
    rows = [row for table in required_tables(every_record) for row in table.rows]
    assert sum(line.startswith("Conditions  ") for line in text.splitlines()) == len(required_tables(every_record))
    assert all(row.cells[0].text in text for row in rows)
    assert text.endswith(wording.ascii_signs("".join(f"{line}\n" for line, _ in summary_lines(every_record))))


def test_the_terminal_names_nodes_by_host_and_serial(faulty):
    text = text_of(faulty)
    assert text.startswith("REJECTED")
    told = (
        "8 nodes of 8 asked for, 1 lost, 1 left out", "Nodes to look at: 4", "node-003, serial SN-node-003: named",
        "node-007, serial SN-node-007: lost", "node-005 rail 1: with 3 others",
        "node-004, serial SN-node-004: rejected",
    )  # fmt: skip
    assert [each for each in told if each not in text] == []
    assert "node2" not in text


@pytest.mark.parametrize(("kernels", "rehearsal", "together"), [
    (("a", "b", "a"), False, {0: (2,), 1: (), 2: (0,)}),
    (("a", "a", "a"), False, {0: (1, 2), 1: (0, 2), 2: (0, 1)}),
    (("a", "b", "c"), False, {0: (), 1: (), 2: ()}),
    ((None, None, ""), False, {0: (), 1: (), 2: ()}),
    (("a", "a"), True, {0: (), 1: ()}),
], ids=["two of three", "all", "none", "nobody tells", "rehearsal"])  # fmt: skip
def test_nodes_that_one_kernel_runs_are_told_as_one_host(kernels, rehearsal, together):
    """Each node tells that this kernel runs it, or does not tell."""
    record, _ = of_nodes(fleet_of(len(kernels)))
    machines = {node: HostFound(host={"boot_id": kernel}) for node, kernel in enumerate(kernels)}
    run = msgspec.structs.replace(record.run, rehearsal=rehearsal)
    record = settled(replace(record, machines=machines, run=run, verdict=None), "")
    assert {node.index: node.same_host for node in summary(record, "0" * 64).nodes} == together
    named = [record.hosts[node] for node, others in together.items() if others]
    said = f"{len(named)} nodes are one host ({', '.join(named)}): " if named else "one host"
    assert (said in text_of(record)) == bool(named)


def test_the_terminal_takes_one_screen_however_many_nodes_are_bad():
    bad = of_nodes([rejected(f"n{number:03}") for number in range(60)], Between(nodes=tuple(range(30))))[0]
    lines = summary_lines(bad)
    assert len(lines) <= SCREEN
    assert any("more nodes, which the report lists" in text for text, _ in lines)
    assert max(len(text) for text, _ in lines) <= 80 or "serial" in max((text for text, _ in lines), key=len)


@pytest.mark.parametrize(("between", "code", "why", "named"), [
    (Between(lost={1: "its cable was pulled"}), "node_lost", "its cable was pulled", "lost"),
    (Between(left_out={1: "no space left on device"}), "node_unfit", "no space left on device", "left out"),
])  # fmt: skip
def test_a_node_that_is_gone_is_named_once_with_why_and_by_no_check(between, code, why, named):
    record, _ = of_nodes(fleet_of(3), between)
    record.faults.append(Fault(code, (Place(1, "node"),), why))
    told = text_of(record).partition("Nodes to look at")[2]
    assert (f": {named}" in told, told.count(why) <= 1, "named by checks" in told) == (True, True, False)
