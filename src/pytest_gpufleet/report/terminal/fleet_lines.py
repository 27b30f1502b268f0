"""A fleet on the terminal: the verdict, why, and the hosts to look at."""

from __future__ import annotations

from pytest_gpufleet.model.place import on_node
from pytest_gpufleet.report import wording
from pytest_gpufleet.report.banner import STAMPS
from pytest_gpufleet.report.fleet_hosts import HostRow, counts, host_rows
from pytest_gpufleet.report.reason_texts import why
from pytest_gpufleet.report.terminal.screen_lines import BAD, HEADING, Line, and_more, wrapped
from pytest_gpufleet.verdict import basis
from pytest_gpufleet.verdict.fleet.fleet_verdict import Fleet

MOST_HOSTS = 20
MOST_REASONS = 12


def fleet_lines(fleet: Fleet) -> list[Line]:
    """The lines of the summary, each with its markup."""
    stands_on = basis.in_words(fleet.grades) if fleet.verdict == "ACCEPTED" else ""
    told = "; ".join(filter(None, (fleet.verdict, ", ".join(counts(fleet)), stands_on)))
    lines = wrapped(told, "", STAMPS[fleet.verdict].markup)
    for reason in fleet.reasons[:MOST_REASONS]:
        lines += wrapped(reason, "  - ")
    lines += and_more(len(fleet.reasons) - MOST_REASONS, "  - ")
    if wrong := [row for row in host_rows(fleet) if row.wrong]:
        lines.append((f"Hosts to look at: {len(wrong)}", HEADING))
        lines += [line for row in wrong[:MOST_HOSTS] for line in _host(row)]
        lines += and_more(len(wrong) - MOST_HOSTS, "  ")
    return lines


def _host(row: HostRow) -> list[Line]:
    serial = f", serial {row.run.serial}" if row.run and row.run.serial else ""
    own = f"its own run is {row.verdict}" if row.run else "no run that counts"
    lines = wrapped(f"{row.host}{serial}: {own}", "  ", BAD)
    if row.run and row.verdict == "REJECTED":
        lines += wrapped(why(row.run.record), "    ")
    lines += [line for gpu in row.named for line in wrapped(gpu.identity, "    ", BAD)]
    lines += [line for gap in row.gaps for line in wrapped(gap.what, "    ")]
    for each in row.slow[:1]:
        where = "all of its places" if each.everywhere else wording.places([on_node(place, 0) for place in each.worse])
        more = f", and {wording.count(len(row.slow) - 1, 'figure')} more" if len(row.slow) > 1 else ""
        what = f"{each.figure.metric.title} of {where} {wording.percent(each.worst)} worse than the fleet's peers"
        lines += wrapped(f"{what}{more}", "    ")
    for difference in row.differences:
        value = next(value for value, hosts in difference.others.items() if row.host in hosts)
        lines += wrapped(f"{difference.fact}: {value}, most hosts: {difference.usual or 'nothing in common'}", "    ")
    return lines
