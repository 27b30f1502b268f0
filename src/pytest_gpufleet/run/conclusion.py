"""The end of a run: its verdict, on record, and the exit status that goes with it."""

import time
from dataclasses import replace
from pathlib import Path

from pytest_gpufleet import safe_files
from pytest_gpufleet.model.events import Verdict
from pytest_gpufleet.model.language import some
from pytest_gpufleet.run import folder, summary
from pytest_gpufleet.run.evidence import Evidence
from pytest_gpufleet.run.folder import SUMMARY
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.verdict.fleet.fleet_verdict import settled
from pytest_gpufleet.verdict.gaps import DEADLINE
from pytest_gpufleet.verdict.verdict import CUT_SHORT, ENDED_BY, EXIT_STATUS

INCOMPLETE = EXIT_STATUS["INCOMPLETE"]
UNSEEN_FAILURE = "pytest counts a failure of which there is no check"
MOST_FILES = 3
TESTS_FAILED, INTERRUPTED, NOTHING_COLLECTED = 1, 2, 5  # as pytest.ExitCode has them


def conclude(run: Run, status: int) -> int:
    """Record the verdict, if that was not done; its exit status. `status`: pytest's; if cut short, it stays."""
    evidence = run.written
    if evidence.record.verdict is None:
        status = _end(run, evidence, status)
    else:
        evidence.seal()
        status = evidence.record.exit_status or 0
    return status or (INCOMPLETE if run.unwritten else 0)


def summarize(run: Run) -> None:
    """Write the summary, the last file: it has the SHA-256 of the others. Then remove what --fleet-keep does not."""
    record, digest, page = run.written.record, run.written.sha256, run.folder.report
    made = []

    def write(path: Path) -> None:
        report_digest = safe_files.sha256(page) if page.is_file() else ""
        runs = run.runs_of_nodes() or run.folder.own_runs(record)
        made.append(summary.text(record, digest, report_digest, runs))
        safe_files.write_text(path, made[0])

    run.write(run.folder / SUMMARY, write)
    if run.options.webhook and made and not run.never_began:
        from pytest_gpufleet.run import webhook  # urllib.request takes long to import

        in_haste = run.interruption.heard or run.interruption.overdue
        why = webhook.post(run.options.webhook, made[0], digest, 1 if in_haste else webhook.TRIES)
        said = f"was not posted ({why}); the verdict stays" if why else "was posted"
        run.tell(f"--fleet-webhook: the summary {said}")
    if run.options.keep and not run.never_began:
        run.pruned = folder.prune(run.folder, record.run.host, run.options.keep)


def _end(run: Run, evidence: Evidence, status: int) -> int:
    if status == NOTHING_COLLECTED and (run.carried or run.of_nodes):
        status = 0
    run.note_lost_samples()
    failed = any(check.outcome == "failed" for check in evidence.record.checks.values())
    if status == TESTS_FAILED and not failed:
        evidence.spoil(UNSEEN_FAILURE)
    evidence.compare()
    broken = _cut_short(run, status)
    runs = run.runs_of_nodes() or run.folder.own_runs(evidence.record)
    ended = settled(evidence.record, broken, runs)
    if status not in CUT_SHORT or broken == DEADLINE:
        status = ended.exit_status or status  # never 0 where pytest's own is not
    lasted = round(time.monotonic() - run.began, 1)
    run.record(
        Verdict(verdict=ended.word, reasons=tuple(ended.reasons), broken=broken, exit_status=status, lasted=lasted)
    )
    if late := evidence.seal():
        # The file says what was the verdict before; all else tells this one.
        ended = settled(replace(evidence.record, spoiled=[*evidence.record.spoiled, late]), broken, runs)
        status = status or ended.exit_status or 0
        evidence.record = replace(ended, exit_status=status)
    return status


def _cut_short(run: Run, status: int) -> str:
    """Why the session did not end; pytest has one exit status for all signals and for a file that is not imported."""
    if run.not_imported and not run.interruption.heard:
        files = some(run.not_imported, MOST_FILES)
        return f"a test file could not be imported, so its checks are missing: {files}"
    if status == INTERRUPTED and run.interruption.overdue:
        return DEADLINE
    if status == INTERRUPTED and run.interruption.deadly:
        return ENDED_BY[run.interruption.deadly.name]
    return CUT_SHORT.get(status) or run.exited
