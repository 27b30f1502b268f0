"""Evidence that somebody edited after its run, and the files that go with it."""

import json

from pytest_gpufleet.run import summary
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.safe_files import sha256
from pytest_gpufleet.verdict.fleet.fleet_verdict import ended
from pytest_gpufleet.verdict.judgement import read


def events(evidence):
    return [json.loads(line) for line in evidence.read_text().splitlines()]


def edit(evidence, change):
    written = events(evidence)
    change(written)
    evidence.write_text("".join(json.dumps(event) + "\n" for event in written))


def seal(folder):
    """Write the summary and the page that go with the evidence in a folder, the page as far as commands read it."""
    evidence = folder / "evidence.jsonl"
    record, digest = read(evidence), sha256(evidence)
    record, fleet = ended(record, RunFolder(folder).own_runs(record))
    page = f'<section class="fleet-banner fleet-{record.verdict.lower()}"><code id="fleet-sha256">{digest}</code>'
    (folder / "report.html").write_text(page)
    (folder / "summary.json").write_text(summary.text(record, digest, sha256(folder / "report.html"), fleet))
    return folder


def insert(line):
    """What makes this line the second of the evidence in a folder."""

    def change(folder):
        first, rest = (folder / "evidence.jsonl").read_text().split("\n", 1)
        (folder / "evidence.jsonl").write_text(f"{first}\n{line}\n{rest}")

    return change
