"""report.txt and `gpufleet report --text`: a run as text. Its beginning and its checks are there while it goes on."""

from collections.abc import Iterable, Iterator

from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import machine_section, wording
from pytest_gpufleet.report.failures import message
from pytest_gpufleet.report.margins import named, texts
from pytest_gpufleet.report.terminal.summary_lines import summary_lines, table_lines

WIDEST = 400  # columns of a matrix of links


def software(record: Record) -> list[str]:
    """The versions of what the GPUs run with, and how they are linked: in a line where all pairs are alike."""
    topology = record.topology
    versions = {
        "driver": topology.driver, "CUDA": topology.cuda, "cuDNN": topology.cudnn, "NCCL": topology.nccl,
        "torch": topology.torch,
    }  # fmt: skip
    lines = [f"versions: {', '.join(f'{name} {version}' for name, version in versions.items() if version)}"]
    links = machine_section.links(topology)
    kinds = {cell.text for row, each in enumerate(links.rows) for at, cell in enumerate(each.cells) if row != at}
    if len(kinds) == 1:
        return [*lines, f"links: {kinds.pop()} between every two GPUs"]
    return [*lines, *(line for line, _ in table_lines(links, WIDEST))]


def beginning(record: Record) -> str:
    run = record.run
    gpus = wording.models(record.topology.gpus) or "no GPU"
    head = f"pytest-gpufleet {run.plugin} on {run.host}, {wording.moment(run.utc)}, level {run.level}: {gpus}"
    return _joined([head, f"command: {run.command}", *software(record), ""])


def of_check(record: Record, check_id: str, findings: Iterable[Finding]) -> str:
    """How a check ended, what it measured, and all that it said if it failed."""
    check = record.checks[check_id]
    lines = [f"{check.outcome:<14} {wording.duration(check.seconds):>12}  {check.id}"]
    for finding in findings:
        value, limit, margin, where = texts(finding, record.hosts)
        held = f" ({', '.join(filter(None, (limit, margin)))})" if limit else ""
        lines.append(f"    {finding.state}: {named(finding)}: {value}{held}, {where}")
    said = message(check).whole or message(check).head
    return _joined([*lines, *(f"    {line}" for line in said.splitlines())])


def ending(record: Record, folder: str) -> str:
    return _joined(["", *(line for line, _ in summary_lines(record, folder, detailed=True))])


def text_report(record: Record, folder: str) -> Iterator[str]:
    yield beginning(record)
    findings = grouped((finding.check, finding) for finding in record.findings)
    yield from (of_check(record, check_id, findings.get(check_id, ())) for check_id in record.checks)
    yield ending(record, folder)


def _joined(lines: list[str]) -> str:
    return "".join(f"{wording.ascii_signs(wording.clean(line))}\n" for line in lines)
