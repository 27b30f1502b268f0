"""Evidence of versions before 0.3 (schema 1), which knows one node, and tells of faults in texts alone.

The only place where texts are read for what is wrong with which GPU: these versions wrote them so, and nobody will
change what they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.check import Check
from pytest_gpufleet.model.events import SCHEMA
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding, by_check
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.levels import check_name
from pytest_gpufleet.model.metric import METRICS, Metric
from pytest_gpufleet.model.place import Pair, Where, gpu
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.model.tolerance import Tolerance

# "GPU 5 NVIDIA H200, serial ..., GPU-...: what is wrong with it" at the beginning of a line. What stands further inside
# a message (arguments in a traceback, stories of the other ranks) accuses nobody; nor does a line that ends in a colon,
# which says who saw what the lines below it tell.
_ACCUSED = re.compile(
    r"^\s*(?:E\s+)?(?:[\w.]+: )?(?:the link between )?(?:rank \d+ of \d+, )?(GPU \d+\b[^\n]*?)(?:: |(?<!:)$)([^\n]*)",
    re.MULTILINE,
)
_GPU = re.compile(r"\bGPU (\d+)\b")
# The first line of each rank's story in a RankFailure.
_RANK = re.compile(r"^rank \d+ of \d+, (?:GPU (\d+)|CPU).*?: (raised|died|running|returned)\b([^\n]*)", re.MULTILINE)
# "nccl-tests 2.19.6, 2026-11-20: 285.3": the lowest of the figures that a limit was made from.
_FIGURE = re.compile(r": (\d[\d,]*(?:\.\d+)?)(?: to [\d.,]+)?$")
_GRADES = {
    "published gate": "published",
    "0.90 x published measurement": "published",
    "data sheet": "published",
    "project gate": "project",
}
_OF_STATE = {"raised": "rank_raised", "died": "rank_died", "running": "rank_hung", "returned": "rank_raised"}
_OF_CHECK = {"test_1_inventory.py::test_no_foreign_process": "foreign_process"}


def upgraded(event: Any) -> Any:
    """An event as schema 2 has it: with a list of nodes where it tells of its machine, what the metric of a figure is,
    and the grades of limits. Refused if a later version wrote it in another way, which would be taken for this one."""
    match event:
        case {"event": "run", "schema": int(schema), **rest} if schema > SCHEMA:
            raise Refused(
                f"pytest-gpufleet {rest.get('plugin', '')} wrote its evidence, in schema {schema}, and this version "
                f"knows those up to {SCHEMA}: use that version, or a later one"
            )
        case {"event": "run", "host": host} if "nodes" not in event:
            return {**event, "nodes": [{"index": 0, "host": host}]}
        case {"event": "machine", "machine": machine}:
            return {**event, "nodes": [machine]}
        case {"event": "topology", "topology": {"gpus": list(gpus), **rest}}:
            return {**event, "nodes": [{**rest, "gpus": list(map(_gpu, gpus))}]}
        case {"event": "profile", "profile": {"limits": list(limits)} as profile}:
            return {**event, "profile": {**profile, "limits": list(map(_limit, limits))}}
        case {"event": "finding", "finding": {"measurement": {"metric": str(name)} as measurement} as finding}:
            known = METRICS.get(name) or Metric(name, "unknown unit", "higher", name)
            definition = measurement.get("definition") or codec.plain(known)
            held = {"tolerances": _tolerances(definition), **finding, "limit": _limit(finding.get("limit"))}
            return {**event, "finding": {**held, "measurement": {**measurement, "definition": definition}}}
    return event


def _tolerances(definition: Any) -> list[Any]:
    """By what these versions compared places that are peers: the median, with the tolerance of the metric."""
    match definition:
        case {"name": str(name), "peer_tolerance": int() | float() as worse}:
            return [codec.plain(Tolerance(name, worse, "median"))]
    return []


def _limit(limit: Any) -> Any:
    match limit:
        case {"kind": str(kind), "source": str(source), **rest}:
            figure = _FIGURE.search(source) if kind == "0.90 x published measurement" else None
            return {
                **rest,
                "grade": _GRADES.get(kind, kind),
                "source": source[: figure.start()] if figure else source,
                "measured": float(figure[1].replace(",", "")) if figure else None,
                "given": rest.get("contract", False),
            }
    return limit


def _gpu(gpu: Any) -> Any:
    match gpu:
        case {"index": index, **facts}:
            return {"index": index, "facts": {name: value for name, value in facts.items() if value is not None}}
    return gpu


def with_facts(topology: GpuTopology, gpus: Iterable[Gpu]) -> GpuTopology:
    """With the facts of GPUs that an event of the machine told again, and more of them."""
    more = {gpu.index: gpu.facts for gpu in gpus}
    known = (replace(gpu, facts={**gpu.facts, **more.get(gpu.index, {})}) for gpu in topology.gpus)
    return replace(topology, gpus=tuple(known))


def worsened(check: str, problem: str) -> Fault:
    """What an event `health` told of one GPU."""
    (fault, *_) = _accused(problem, "health_worsened") or [Fault("health_worsened", (), problem)]
    return Fault(fault.code, fault.subjects, fault.what, check=check, watched=True)


def faults(checks: Iterable[Check], findings: Iterable[Finding]) -> Iterator[Fault]:
    """What the messages of failed checks say besides the figures that missed their limits, which are findings."""
    found = by_check(findings)
    for check in checks:
        if check.outcome == "failed":
            cause, figures = _halves(check.message, found.get(check.id, ()))
            for fault in _told(check, cause) if not figures else _accused(cause, "slower_than_peers"):
                yield Fault(fault.code, fault.subjects, fault.what, check=check.id)
            if figures and cause and not _accused(cause, ""):
                yield Fault("cause_unclear", (), cause, check=check.id)


def _halves(message: str, findings: Iterable[Finding]) -> tuple[str, str]:
    """What stands before the first of the figures that missed their limits (the cause, if there are figures), and the
    rest."""
    titles = tuple(f"{finding.measurement.definition.title} (" for finding in findings if finding.state == "missed")
    lines = message.splitlines()
    first = next((number for number, line in enumerate(lines) if titles and line.startswith(titles)), len(lines))
    return "\n".join(lines[:first]).strip(), "\n".join(lines[first:])


def _told(check: Check, message: str) -> Sequence[Fault]:
    code = _OF_CHECK.get(check_name(check.id), "check_failed")
    first_line = message.partition("\n")[0]
    return _ranks(message) or _accused(message, code) or [Fault("check_failed", (), first_line)]


def _ranks(message: str) -> list[Fault]:
    """Of a RankFailure. The first rank to fail stands first. Others that raised by themselves are wrong too; that
    others died, hang or have returned is what came of it."""
    stories = _RANK.findall(message)
    if not stories:
        return []
    (_, state, what), *_ = stories
    to_blame = [index for index, its, _ in stories if its == state == "raised"] or [stories[0][0]]
    subjects = tuple(gpu(int(index)) for index in dict.fromkeys(to_blame) if index)
    return [Fault(_OF_STATE[state], subjects, f"{state}{what}")]


def _accused(message: str, code: str) -> list[Fault]:
    """One for each line that accuses a GPU, or two and what lies between them; pytest told some lines twice."""
    found = []
    for named, what in _ACCUSED.findall(message):
        gpus = [gpu(int(index)) for index in dict.fromkeys(_GPU.findall(named))]
        subject: list[Where] = [Pair(gpus[0], gpus[1])] if len(gpus) == 2 else [*gpus]
        if len(subject) == 1:
            found.append(Fault(code, tuple(subject), what or named))
    return list(dict.fromkeys(found))
