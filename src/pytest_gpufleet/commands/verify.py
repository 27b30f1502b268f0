"""`gpufleet verify`: whether evidence, report and summary of a run belong together."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from pytest_gpufleet import __version__
from pytest_gpufleet.commands import signatures
from pytest_gpufleet.commands.command import Command, printing, tell
from pytest_gpufleet.commands.openssh import AllowedSigners
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.run import summary, summary_parts
from pytest_gpufleet.run.folder import EVIDENCE, NODES, REPORT, SUMMARY, RunFolder
from pytest_gpufleet.verdict.contradictions import contradictions
from pytest_gpufleet.verdict.node_contradictions import with_node
from pytest_gpufleet.verdict.verdict import DIED, ended

SINCE_SCHEMA_2 = ("faults", "nodes", "basis", "limits_not_applied")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=RunFolder.of, metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "--allowed-signers", type=Path, metavar="FILE",
        help="check signatures: who may sign, with which keys, as ssh-keygen(1) has it; one signature must be there",
    )  # fmt: skip
    parser.add_argument(
        "--revoked-keys", type=Path, metavar="FILE", help="keys that no longer count: public keys, or a KRL of OpenSSH"
    )


def _run(given: argparse.Namespace) -> int:
    folder = given.folder
    if given.revoked_keys and not given.allowed_signers:
        raise Refused("--revoked-keys is about signatures, which only --allowed-signers checks")
    allowed = AllowedSigners.read(given.allowed_signers, given.revoked_keys) if given.allowed_signers else None
    with folder.of_anybody():
        record, digest = folder.as_written(), folder.digest()
        died = record.verdict is None
        record = ended(record)
        problems, told = examined(folder, record, digest, allowed)
    with printing():
        for problem in problems:
            tell(f"{folder}: {problem}")
        if not problems:
            verdict = f"{record.verdict}; {DIED}" if died else record.verdict
            whose = f" of the run and of {len(record.finished)} nodes" if record.of_cluster else ""
            tell(f"{folder}: evidence, report and summary{whose} belong together, SHA-256 {digest}: {verdict}")
            if (made_by := record.run.plugin) != __version__:
                tell(f"{folder}: made by pytest-gpufleet {made_by}, of which it is not known here what limits it had")
        for line in told:
            tell(f"{folder}: {line}")
    return 1 if problems else 0


def examined(
    folder: RunFolder, record: Record, digest: str, allowed: AllowedSigners | None = None
) -> tuple[list[str], list[str]]:
    """What does not belong together in the folder of a run, and what its signatures that are good say."""
    signed = signatures.check(folder, record, digest, allowed)
    problems = [*_problems(folder, record, digest), *(problem for each in signed for problem in each.problems)]
    if allowed and not signed:
        problems.append("nobody signed it")
    return problems, [each.text for each in signed if each.text]


def _problems(folder: RunFolder, record: Record, digest: str) -> Iterator[str]:
    yield from (f"the evidence contradicts itself: {told}" for told in contradictions(record))
    for name, stated in folder.stated_sums().items():
        if stated is None:
            yield f"{name} is missing"
        elif name == REPORT and folder.is_judgement():
            yield f"{name} is not the run's own, but a later judgement of its figures: `gpufleet report` writes its own"
        elif not stated:
            yield f"{name} does not say of which evidence it was made"
        elif stated != digest:
            yield f"{name} was made of other evidence: it says SHA-256 {stated}, {EVIDENCE} has {digest}"
        elif name == SUMMARY:
            yield from _contradictions(json.loads(folder.text_of(name) or ""), record, digest)
    for number, end in record.finished.items():
        own = folder.of_node(record.node(number))
        if end.sha256:
            yield from (f"{NODES}/{own.name}: {problem}" for problem in _of_node(own, record, number, end.sha256))


def _of_node(folder: RunFolder, record: Record, number: int, stated: str) -> Iterator[str]:
    """What does not belong together in the folder of a node's own run, and what a run on many nodes says of it that is
    not so. `stated`: the SHA-256 of its evidence, by the run."""
    try:
        own, digest = folder.as_written(), folder.digest()
    except (OSError, Refused) as error:
        yield str(error).removeprefix(f"{folder}: ")
        return
    if digest != stated:
        yield f"{EVIDENCE} has SHA-256 {digest}, and the run says {stated}"
    with folder.of_anybody():
        yield from with_node(record, number, own)
        yield from _problems(folder, ended(own), digest)


def _contradictions(given: dict[str, object], record: Record, digest: str) -> Iterator[str]:
    """What a summary that was made of this very evidence says differently: somebody changed it by hand."""
    if (schema := codec.typed(given, summary_parts.Stated).schema) != summary_parts.SCHEMA:
        yield f"{SUMMARY} has schema {schema}, but this version of the program knows {summary_parts.SCHEMA}"
        return
    expected = json.loads(summary.text(record, digest))
    if record.run.schema == 1:  # by a version before 0.3, which told of none of these
        expected = {name: told for name, told in expected.items() if name in given or name not in SINCE_SCHEMA_2}
    if wrong := [name for name in {**expected, **given} if given.get(name) != expected.get(name)]:
        yield f"{SUMMARY} does not say what the evidence says: {', '.join(wrong)}"


VERIFY = Command(
    "compare the SHA-256 of a run's evidence with the one in its report and in its summary",
    _arguments,
    _run,
    "This shows whether one of them was changed or mixed up later. It cannot show who wrote them: for that, check "
    "who signed them with --allowed-signers, or compare the sum with the one on the signed paper.",
    "1 also if anything differs or is missing, or if a signature is not good.",
)
