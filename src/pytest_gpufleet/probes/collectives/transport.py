"""What NCCL does between these ranks, by its own log, in a short run of ranks that are started for it: NCCL reads once
a process what it is to log, and connects ranks when they first need it. No measurement has a log beside it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory, gettempdir

import torch.distributed as dist

from pytest_gpufleet.machine import network_ports, nvml
from pytest_gpufleet.machine.nccl_log import ASKED, LOGGING, Beside, NcclLog, contradictions, fallbacks, parse
from pytest_gpufleet.machine.software import steering
from pytest_gpufleet.machine.tools import Unreadable
from pytest_gpufleet.model.endings import not_judged
from pytest_gpufleet.model.fault import Fault, Faults, expect_none
from pytest_gpufleet.model.place import THIS_NODE, GpuTopology, Pair, Where
from pytest_gpufleet.probes.collectives.table import COLLECTIVES
from pytest_gpufleet.probes.links.copies import IndexPair, rounds
from pytest_gpufleet.probes.timing import synchronize
from pytest_gpufleet.world.failure import RankFailure
from pytest_gpufleet.world.world import Rank, World, alone

NVLINK = "NVLink"  # among the names of ports
SECONDS = 120.0
PAIR_SECONDS = 30.0  # with the start of NCCL, which took 3 s on eight H200
Sizes = Mapping[str, Sequence[int]]  # S in bytes, by collective
# Without what a first collective is tried again, by how it failed: broken P2P mostly hangs; where multicast is broken
# most versions raise "Failed to bind NVLink SHARP" (pytorch/pytorch#177472).
WITHOUT = {"hang": ("p2p_hangs", "NCCL_P2P_DISABLE", "1"), "exception": ("nvls_not_used", "NCCL_NVLS_ENABLE", "0")}


Seen = tuple[NcclLog, Sequence[Beside]]  # what NCCL's log says, and what each rank saw beside it


def transport(world: World, group: World, sizes: Sizes) -> Seen:
    """Do each of these collectives once on all ranks of `group`, which is `world` with a process group. Where the
    smallest hang or raise too, and work without P2P or NVLS, raises Faults that say so; else RankFailure."""

    def works(variables: Mapping[str, str]) -> bool:
        with suppress(RankFailure):
            return bool(_logged(group, {each: nbytes[:1] for each, nbytes in sizes.items()}, variables))
        return False

    try:
        return _logged(group, sizes, {})
    except RankFailure as failure:
        if failure.kind not in WITHOUT or not group.gpus or len(group.nodes) > 1:
            raise
        code, name, value = WITHOUT[failure.kind]
        if works({}) or not works({name: value}):
            raise
        what = f"{failure.headline.splitlines()[0]}; with {name}={value} it works"
        places = _hanging(world) if failure.kind == "hang" else ()
        raise Faults([Fault(code, places or (THIS_NODE,), what, str(failure))]) from failure


def _logged(group: World, sizes: Sizes, variables: Mapping[str, str]) -> Seen:
    file = Path(gettempdir(), f"gpufleet-nccl-{token_hex(8)}")
    try:
        with group.restarted([{**LOGGING, "NCCL_DEBUG_FILE": f"{file}.%h.%p", **variables}] * group.size):
            answers: list[tuple[str, Beside]] = group.run(_exchanged, file, sizes, timeout=SECONDS)
    finally:
        for left in file.parent.glob(f"{file.name}.*"):
            left.unlink(missing_ok=True)
    return parse(text for text, _ in answers), [beside for _, beside in answers]


def _hanging(world: World) -> tuple[Where, ...]:
    """The pairs of ranks that do not meet by themselves; where none of a round does, no further ones are tried."""
    found: list[IndexPair] = []
    with world.restarted([{}] * world.size):
        for pairs in rounds(world.size):
            try:
                with TemporaryDirectory() as folder:
                    world.each(pairs, _meet, folder, pairs, timeout=PAIR_SECONDS)
            except RankFailure as failure:
                stuck = {report.rank for report in failure.reports if report.state != "returned"}
                found += (hanging := [pair for pair in pairs if stuck & {*pair}])
                if len(hanging) == len(pairs) > 1:
                    break
    return tuple(Pair(world.places[a], world.places[b]) for a, b in found)


def expect_fastest(seen: Seen, world: World, topology: GpuTopology) -> list[Fault]:
    """Fail the check for a fallback that nobody asks for; give the others. Not judged where NCCL's log and counters
    contradict each other, or the log does not say how ranks reach each other."""
    log, beside = seen
    faults, asked = fallbacks(log, world.places, beside, topology)
    expect_none(faults)
    unclear = contradictions(log, world.places, beside, topology)
    unclear += [f"not known of NCCL {log.version}: {way}" for way in log.unknown]
    if unclear or not log.ways:
        not_judged("\n".join(unclear) or "NCCL's log does not say how ranks reach each other")
    return asked


def _meet(rank: Rank, folder: str, pairs: Sequence[IndexPair]) -> None:
    """An all_reduce of this pair, whose ranks know no others."""
    number = next(number for number, pair in enumerate(pairs) if int(os.environ["RANK"]) in pair)
    alone(rank, f"file://{folder}/pair{number}")
    dist.destroy_process_group()


def _exchanged(rank: Rank, file: Path, sizes: Sizes) -> tuple[str, Beside]:
    before = _counters(rank)
    for name, nbytes in ((name, nbytes) for name, each in sizes.items() for nbytes in each):
        with rank.phase(f"{name} {nbytes:,} bytes"):
            input, output = COLLECTIVES[name].zeros(rank, nbytes)
            COLLECTIVES[name].run(rank.group, output, input)
            synchronize(rank)
    text = ""
    for own in file.parent.glob(f"{file.name}.*.{os.getpid()}"):
        text += own.read_text(errors="replace")
        own.unlink()
    asked = {name: value for each in ASKED.values() for name in each if (value := steering().get(name))}
    # None of a counter that has never counted.
    grown = {port: now - before[port] if now and port in before else None for port, now in _counters(rank).items()}
    return text, Beside(asked, grown.pop(NVLINK, None), grown)


def _counters(rank: Rank) -> dict[str, int]:
    """KiB over the NVLinks of this GPU, and bytes of each active InfiniBand and RoCE port that GPUs may use."""
    found = {}
    if rank.gpu is not None:
        with suppress(nvml.NoGpus), nvml.of_gpu(rank.gpu) as driver:
            if isinstance(nvlink := driver.ask(0, "nvlink_kib"), int):
                found[NVLINK] = nvlink
    with suppress(Unreadable):
        there = network_ports.of_gpus(network_ports.read(), ())
        found.update({port.port: sum(network_ports.carried(port.port) or ()) for port in there})
    return found
