"""What a run says on the terminal of pytest: what it stands on, and in the end its verdict."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpufleet.model.language import some
from pytest_gpufleet.plugin.keys import RUN

MOST_NAMES = 16  # of nodes in one line
INSECURE = ", which lets in whoever reaches its ports, to run what they like (--fleet-insecure)"


def pytest_report_header(config: pytest.Config) -> list[str]:
    run = config.stash[RUN]
    if not run.options.makes_a_run or run.evidence is None:
        return []
    resumed = f"; {len(run.carried)} checks carried over from {run.options.resume}" if run.options.resume else ""
    lines = [f"gpufleet: {run.ground.headline(run.options.level, run.options.basis)}{resumed}"]
    from pytest_gpufleet.verdict.node_verdicts import one_host_told

    header = run.evidence.record.run
    if header.transport:
        names = [node.host for node in header.nodes]
        safe = INSECURE if header.secured == "insecure" else ""
        how = "processes of this machine" if header.transport == "local" else f"by {header.transport}"
        lines.append(f"nodes: {some(names, MOST_NAMES)}, {how}{safe}")
        lines += one_host_told(run.evidence.record)
    return lines


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    run = config.stash[RUN]
    if run.evidence is not None:
        from pytest_gpufleet.report.terminal import summary_lines
        from pytest_gpufleet.verdict.verdict import RESUMABLE

        record = run.evidence.record
        terminalreporter.section("gpufleet", sep="=")
        if run.never_began:
            terminalreporter.write_line("nothing was tested, because of the error that pytest tells below", red=True)
            return
        for text, markup in summary_lines.summary_lines(record, str(run.folder)):
            terminalreporter.write_line(text, **markup)
        for trouble in filter(None, [run.evidence.trouble, *run.unwritten]):
            if trouble not in record.reasons:
                terminalreporter.write_line(trouble, red=True)
        if record.of_cluster and record.broken in RESUMABLE:  # else it is among those lines
            terminalreporter.write_line(f"go on with: --fleet-resume {run.folder}")
        removed, problems = run.pruned
        if removed:
            terminalreporter.write_line(f"removed by --fleet-keep: {', '.join(removed)}")
        for problem in problems:
            terminalreporter.write_line(problem, red=True)
        if not run.no_report:
            terminalreporter.write_line(f"report: {config.getoption('htmlpath', None) or run.folder}")
        elif run.evidence.path.exists():
            terminalreporter.write_line(f"evidence: {run.evidence.path}")
    elif run.ranks.in_use is not None and run.ground.rehearsal_ranks:
        terminalreporter.write_line(f"gpufleet: {run.ground.headline(run.options.level, run.options.basis)}")
