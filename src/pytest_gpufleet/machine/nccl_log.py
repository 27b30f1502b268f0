"""What NCCL did, by its own log: ways between ranks, NVLS, channels, algorithms; and which of it is a fallback to
something slower. Lines are those of its source from 2.18 to 2.30 (src/transport/p2p.cc, shm.cc, net.cc and nvls.cc,
src/init.cc, src/enqueue.cc). Unknown lines are left alone; a way in another form blames nobody."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from pytest_gpufleet.model.conditions import c_number
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE, GpuTopology, Pair, Place

# NCCL's manual, "Environment Variables".
LOGGING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM,NVLS,TUNING"}

# Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
# Channel 02 : 4[9e000] -> 3[57000] via SHM/direct/direct
# Channel 04/0 : 8[0] -> 1[1] [receive] via NET/IB/0(1)/GDRDMA/Shared
WAY = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[[0-9a-f]+\] -> (\d+)\[[0-9a-f]+\](?: \[(?:send|receive)\])? via (.+)")
KIND = re.compile(r"(P2P/(?:CUMEM|IPC|MNNVL|direct pointer|indirect)|SHM|NET/[^/]+)(?:/|$)")
# NCCL version 2.28.9+cuda13.0
VERSION = re.compile(r"NCCL version (\d[\d.]*)")
# 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer
CHANNELS = re.compile(r"(\d+) coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels, (\d+) p2p channels")
# NVLS multicast support is not available on dev 0
MULTICAST = re.compile(r"NVLS multicast support is (not )?available")
# Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 '...'. Proceeding ...
NVLS_FAILED = re.compile(r"Failed to bind NVLink SHARP")
# By rank 0 alone: "1048576 Bytes -> Algo 4 proto 2 time 12.5" (2.20), the same behind "AllReduce: " (2.23), and
# "AllReduce: 1048576 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}" (from 2.24 on).
CHOICE = re.compile(r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)")
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")  # by number, as PROTOCOLS
PROTOCOLS = ("LL", "LL128", "SIMPLE")


class Way(msgspec.Struct, frozen=True, order=True):
    """`kind`: "P2P/CUMEM", "SHM", "NET/IB". `gpudirect`: by GPUDirect RDMA."""

    sender: int
    receiver: int
    kind: str
    gpudirect: bool = False


class Choice(msgspec.Struct, frozen=True):
    """How NCCL did a collective of so many bytes, as it counts them; `collective` is "" before 2.23."""

    collective: str
    nbytes: int
    algorithm: str
    protocol: str


class NcclLog(msgspec.Struct, frozen=True):
    """Of all ranks. `channels`: of collectives, NVLS, and pairs; `multicast`: whether the driver offers what NVLS
    needs; None where no log says. `unknown`: ways in another form."""

    version: str = ""
    ways: tuple[Way, ...] = ()
    channels: tuple[int, int, int] | None = None
    multicast: bool | None = None
    nvls_failed: bool = False
    choices: tuple[Choice, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def nvls(self) -> bool | None:
        """Whether NVSwitches did reductions; None if unknown. NCCL may have all that it takes, and choose otherwise."""
        if self.nvls_failed:
            return False
        if self.channels is None:
            return None
        chosen = [each.algorithm for each in self.choices if each.collective in ("", "AllReduce")]
        return self.channels[1] > 0 and (not chosen or any(each.startswith("NVLS") for each in chosen))

    def __str__(self) -> str:
        ways = Counter(way.kind + " with GPUDirect RDMA" * way.gpudirect for way in self.ways)
        words = {True: "in use", False: "not in use", None: "not in NCCL's log"}
        lines = [f"NCCL {self.version or 'of unknown version'}, NVLS is {words[self.nvls]}"]
        lines += [f"{kind}: {count} ways from one rank to another" for kind, count in ways.items()]
        if self.channels:
            lines.append("channels: {} of collectives, {} of NVLS, {} of pairs".format(*self.channels))
        lines += [f"{each.collective} {each.nbytes:,} bytes: {each.algorithm} {each.protocol}" for each in self.choices]
        return "\n".join(lines)


def parse(texts: Iterable[str]) -> NcclLog:
    lines = [line for text in texts for line in text.splitlines()]

    def every(pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return list(filter(None, map(pattern.search, lines)))

    def named(text: str, names: Sequence[str]) -> str:
        return names[int(text)] if text.isdigit() and int(text) < len(names) else text

    ways = [(found, KIND.match(found[3])) for found in every(WAY)]
    multicast = [not found[1] for found in every(MULTICAST)]
    known = {Way(int(way[1]), int(way[2]), kind[1], "/GDRDMA" in way[3]) for way, kind in ways if kind}
    chosen = (each.groups(default="") for each in every(CHOICE))
    choices = (Choice(what, int(n), named(how, ALGORITHMS), named(by, PROTOCOLS)) for what, n, how, by in chosen)
    return NcclLog(
        next((found[1] for found in every(VERSION)), ""),
        tuple(sorted(known)),
        min(((int(found[1]), int(found[2]), int(found[3])) for found in every(CHANNELS)), default=None),
        all(multicast) if multicast else None,
        bool(every(NVLS_FAILED)),
        tuple(dict.fromkeys(choices)),
        tuple(dict.fromkeys(way[0].strip() for way, kind in ways if not kind)),
    )


class Beside(msgspec.Struct, frozen=True):
    """NCCL's `variables`; by how many KiB the counters of the GPU's NVLinks grew, and by how many bytes those of the
    active InfiniBand and RoCE ports of its node; None where nobody counts."""

    variables: Mapping[str, str] = {}
    nvlink: int | None = None
    ports: Mapping[str, int | None] = {}


# By fault the variables by which somebody asks for the fallback. NCCL_ALGO does, like Ring, ^NVLS,NVLSTree or
# allreduce:^nvls; NVLS needs memory of cuMem.
ASKED: dict[str, dict[str, Callable[[str], bool]]] = {
    "nvls_not_used": {
        "NCCL_NVLS_ENABLE": lambda text: c_number(text) == 0,
        "NCCL_CUMEM_ENABLE": lambda text: c_number(text) == 0,
        "NCCL_ALGO": lambda text: ("nvls" in text.lower()) == ("^" in text),
    },
    "p2p_not_used": {"NCCL_P2P_DISABLE": lambda text: c_number(text) == 1, "NCCL_P2P_LEVEL": bool},
    "sockets_used": {
        "NCCL_IB_DISABLE": lambda text: c_number(text) != 0,
        "NCCL_NET": lambda text: text.lower() == "socket",
    },
}


def asked_for(fallback: str, variables: Mapping[str, str]) -> str:
    """The variable that asks for a fallback: "NCCL_NVLS_ENABLE=0"; "" if none does."""
    given = {name: value for name in ASKED[fallback] if (value := variables.get(name))}
    return next((f"{name}={value}" for name, value in given.items() if ASKED[fallback][name](value)), "")


# Farther apart, behind different host bridges or sockets, NCCL does not try it by itself (ncclTopoCheckP2p: PATH_PXB).
NEAR = ("PIX", "PXB")


def direct_link(topology: GpuTopology, pair: Pair) -> str:
    """The link over which NCCL by itself reaches a GPU from another; "" if not, also by `nvidia-smi topo -p2p r`."""
    if not (link := topology.link(pair)):
        return ""
    gpu, peer = topology.of(pair)
    status, number = gpu.get("p2p") or {}, topology.gpus.index(peer)
    lets = [statuses[number] == 0 for way, statuses in status.items() if way in ("read", "write")]
    return link if all(lets) and (link.startswith("NV") or (lets and link in NEAR)) else ""


def fallbacks(
    log: NcclLog, places: Sequence[Place], beside: Sequence[Beside], topology: GpuTopology
) -> tuple[list[Fault], list[Fault]]:
    """Slower ways where a faster one is there, and those that a variable asks for. Rank i is at places[i]."""
    slow: dict[tuple[str, str], list[Pair]] = {}
    for way in log.ways:
        pair, ports = Pair(places[way.sender], places[way.receiver]), beside[way.sender].ports
        if way.kind == "NET/Socket" and ports and beside[way.receiver].ports:
            what = f"NCCL sends by NET/Socket, and {', '.join(ports)} are active"
            slow.setdefault(("sockets_used", what), []).append(pair)
        elif not way.kind.startswith("P2P") and (link := direct_link(topology, pair)):
            what = f"NCCL sends by {way.kind}, and they are linked by {link}"
            slow.setdefault(("p2p_not_used", what), []).append(pair)
    found = [Fault(name, tuple(pairs), what) for (name, what), pairs in slow.items()]
    # Behind one NVSwitch. Across nodes, and between two GPUs before 2.27, NCCL may leave it out by itself.
    judged = topology.fabric == "nvswitch" and len(places) > 2 and len({place.node for place in places}) == 1
    if judged and (log.nvls_failed or (log.multicast and log.channels and not log.channels[1])):
        what = "NCCL could not set it up and goes on without" if log.nvls_failed else "NCCL has no channels for it"
        found.append(Fault("nvls_not_used", (THIS_NODE,), what))
    variables = {name: value for each in beside for name, value in each.variables.items()}
    asked = [each.changed(what=f"{each.what}: {by}") for each in found if (by := asked_for(each.name, variables))]
    return [each for each in found if not asked_for(each.name, variables)], asked


def contradictions(log: NcclLog, places: Sequence[Place], beside: Sequence[Beside], topology: GpuTopology) -> list[str]:
    """Where counters of bytes stood still on the way that the log names."""
    lines = []
    for way in log.ways:
        one, seen = places[way.sender], beside[way.sender]
        nvlink = way.kind.startswith("P2P") and direct_link(topology, Pair(one, places[way.receiver])).startswith("NV")
        if nvlink and seen.nvlink == 0:
            lines.append(f"NCCL's log says {way.kind}, and the NVLinks of {one} counted no bytes")
        if way.kind.startswith("NET/IB") and set(seen.ports.values()) == {0}:
            lines.append(f"NCCL's log of {one} says {way.kind}, and {', '.join(seen.ports)} counted no bytes")
    return list(dict.fromkeys(lines))
