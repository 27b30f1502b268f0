"""Whom a failed check names: the GPUs that somebody has to look at."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from pytest_gpufleet.model import levels
from pytest_gpufleet.model.check import Check
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.place import Place, gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.report import wording
from pytest_gpufleet.verdict.judgement import halves

# "GPU 5 NVIDIA H200, serial ..., GPU-...: what is wrong with it" at the beginning of a line. What stands further inside
# a message (arguments in a traceback, stories of the other ranks) accuses nobody; nor does a line that ends in a colon,
# which says who saw what the lines below it tell.
_ACCUSED = re.compile(
    r"^\s*(?:E\s+)?(?:[\w.]+: )?(?:the link between )?(?:rank \d+ of \d+, )?(GPU \d+\b[^\n]*?)(?:: |(?<!:)$)",
    re.MULTILINE,
)
_GPU = re.compile(r"\bGPU (\d+)\b")
# The first line of each rank's story in a RankFailure.
_RANK = re.compile(r"^rank \d+ of (\d+), GPU (\d+) .*?: (raised|died|running|returned)\b", re.MULTILINE)


@dataclass(frozen=True)
class Blame:
    """What a failed check says of GPUs, by their places.

    `named` are to blame. `beside` are only in pairs with one of those, and it says with which. `everybody`: all GPUs
    failed together, and nothing tells which of them is the cause. `shared`: somebody else's process on these GPUs
    explains it.
    """

    named: tuple[Place, ...] = ()
    beside: dict[Place, Place] = field(default_factory=dict)
    everybody: bool = False
    shared: tuple[Place, ...] = ()


def blames(record: Record) -> dict[str, Blame]:
    """Whom each check names that failed, or of which a figure missed its limit."""
    missed: dict[str, list[Finding]] = {}
    for finding in record.findings:
        if finding.state == "missed":
            missed.setdefault(finding.check, []).append(finding)
    failed = [check_id for check_id, check in record.checks.items() if check.outcome == "failed"]
    places = [one.place for one in record.topology.gpus]
    neighbours = occupied(record)
    return {
        check_id: _explained(blame, check_id, record.checks.get(check_id), neighbours)
        for check_id in dict.fromkeys((*failed, *missed))
        for blame in [_blame(record.checks.get(check_id), missed.get(check_id, []), places)]
    }


def occupied(record: Record) -> dict[Place, tuple[str, ...]]:
    """The GPUs on which somebody else computed before the run's ranks started, by place, each with the processes."""
    return {one.place: one.processes for one in record.topology.gpus if one.processes}


def sees_neighbours(check_id: str) -> bool:
    return levels.check_name(check_id) == "test_1_inventory.py::test_no_foreign_process"


def _explained(blame: Blame, check_id: str, check: Check | None, neighbours: Collection[Place]) -> Blame:
    """The same without the GPUs that a neighbour explains.

    A second program on a GPU makes its figures miss limits and peers. It explains nothing else: no counter, no XID and
    no wrong bit comes from it.
    """
    only_figures = check is None or check.outcome != "failed" or check.failed_by.startswith("limits")
    if not neighbours or not (only_figures or sees_neighbours(check_id)):
        return blame
    if blame.everybody:
        return replace(blame, everybody=False, shared=tuple(neighbours))
    shared = tuple(place for place in blame.named if place in neighbours)
    return replace(blame, named=tuple(place for place in blame.named if place not in neighbours), shared=shared)


def cause(check: Check, findings: Iterable[Finding]) -> str:
    """What a check found out about the cause of missed limits: what its message says before the figures."""
    before, figures = halves(wording.clean(check.message), findings)
    return before if figures else ""


def times_named(blames: Iterable[Blame]) -> Counter[Place]:
    """How many checks name each GPU, by its place."""
    return Counter(place for blame in blames for place in blame.named)


def _blame(check: Check | None, findings: list[Finding], places: list[Place]) -> Blame:
    missed = [place for finding in findings for place in (*finding.missed, *(finding.slower_than_peers or ()))]
    parts = [[part for part in place.parts if part in places] for place in missed]
    named = [pair[0] for pair in parts if len(pair) == 1]
    pairs = [(pair[0], pair[1]) for pair in parts if len(pair) == 2]
    everybody = any(not pair for pair in parts)
    if check is not None:
        subjects, all_ranks = _accused(halves(wording.clean(check.message), findings)[0])
        known = [[place for place in subject if place in places] for subject in subjects]
        named += [subject[0] for subject in known if len(subject) == 1]
        pairs += [(subject[0], subject[1]) for subject in known if len(subject) == 2]
        everybody = everybody or all_ranks
    culprits = _cover([pair for pair in pairs if not set(pair) & set(named)], places)
    everybody = everybody or culprits is None
    named = list(dict.fromkeys((*named, *(culprits or ()))))
    beside: dict[Place, Place] = {}
    for pair in pairs:
        for place, other in (pair, pair[::-1]):
            if other in named and place not in named:
                beside[place] = other
    return Blame(tuple(named), beside, everybody and not named)


def _cover(pairs: list[tuple[Place, Place]], places: list[Place]) -> list[Place] | None:
    """The fewest GPUs that explain these bad pairs, the one with the most first; None if it could be any of all."""
    cover: list[Place] = []
    left = pairs
    while left:
        counts = Counter(place for pair in left for place in pair)
        most = max(counts.values())
        worst = [place for place, count in counts.items() if count == most]
        if len(worst) == len(places) > 2:
            return None
        cover += worst
        left = [pair for pair in left if not set(pair) & set(worst)]
    return cover


def _accused(message: str) -> tuple[list[list[Place]], bool]:
    """The places of the GPUs that each line of a message accuses, and whether it accuses all ranks at once."""
    stories = _RANK.findall(message)
    if stories:
        size, first, state = stories[0]
        # The first one to fail stands first. Others that raised by themselves are wrong too; that others died, hang or
        # have returned is what came of it.
        ranks = dict.fromkeys(index for _, index, its in stories if its == state == "raised") or {first: None}
        if len(ranks) == int(size) > 1:
            return [], True
        return [[gpu(int(index))] for index in ranks], False
    subjects = (dict.fromkeys(_GPU.findall(subject)) for subject in _ACCUSED.findall(message))
    return [[gpu(int(index)) for index in subject] for subject in subjects], False
