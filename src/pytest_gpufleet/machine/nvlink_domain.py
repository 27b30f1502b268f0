"""NVLink domains: the GPUs of several machines behind the same NVSwitches, as the 72 of an NVL72; and IMEX, the service
by which these share memory (NVIDIA's IMEX guide: docs.nvidia.com/multi-node-nvlink-systems/imex-guide, gettingstarted,
cmdservice; states of a daemon: NVIDIA/DCGM, dcgmlib/src/DcgmImexManager.cpp). The state of the domain (-N -j) is not
asked: one daemon that is down makes it DEGRADED on all of its machines."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.tools import Absent, Ended, HostFact, Unreadable
from pytest_gpufleet.model.fault import Fault, node_fault
from pytest_gpufleet.model.place import Domain, Place, grouped

NODES_CONFIG, CHANNELS = "etc/nvidia-imex/nodes_config.cfg", "dev/nvidia-caps-imex-channels"
READY, WAITING = "READY", "WAITING_FOR_"  # of the daemon: by the guide it may wait for its peers, or for one that left
ON_HOST = "run on the host and not in a container"
SECONDS = 10.0
SHOWN = 4


class Imex(msgspec.Struct, frozen=True):
    """`nodes`: that share memory by the list of this one. `channels`: for programs. `daemon`: "READY", or why not."""

    nodes: tuple[str, ...] = ()
    channels: int = 0
    daemon: str = ""

    @property
    def waits(self) -> bool:
        """For daemons of other machines."""
        return self.daemon.upper().startswith(WAITING)


def read(root: Path = Path("/"), ended: Ended = tools.ended) -> Imex:
    lines = map(str.strip, (tools.text(root / NODES_CONFIG) or "").splitlines())
    nodes = tuple(line for line in lines if line and not line.startswith("#"))
    channels = len(list((root / CHANNELS).glob("channel*")))
    if not nodes and not channels:
        raise Absent(f"this system has neither /{NODES_CONFIG} nor a channel in /{CHANNELS}")
    if not nodes:  # as in a pod of a ComputeDomain, whose daemon runs in another one
        raise Unreadable(f"there are channels and no /{NODES_CONFIG}: the daemon of IMEX is somewhere else", ON_HOST)
    try:
        status, answer, error = ended("nvidia-imex-ctl", "-q", seconds=SECONDS)
    except Unreadable as why:
        raise Unreadable(why.why, f"install nvidia-imex of the driver's version, or {ON_HOST}") from None
    said = (error if status and error else answer).strip().splitlines() or [f"nothing, with status {status}"]
    return Imex(nodes, channels, said[-1].strip())


IMEX = HostFact("imex", Imex, read)


def imex_faults(imex: Imex) -> list[Fault]:
    """What is wrong with IMEX on this machine itself. One that waits for others is no fault of it."""
    faults = [] if imex.channels else [node_fault("imex_channel_missing", f"there is none in /{CHANNELS}")]
    if imex.daemon.upper() != READY and not imex.waits:
        faults.append(node_fault("imex_down", f"its daemon answers: {imex.daemon}"))
    return faults


class Tray(msgspec.Struct, frozen=True):
    """A node of a run whose GPUs can be in a domain: the one that they are in, and the nodes of its IMEX, if known."""

    domain: Domain | None
    imex_nodes: tuple[str, ...] = ()


def domain_faults(trays: Mapping[int, Tray], ordered: int = 0) -> list[Fault]:
    """Nodes outside the domain of their like, or with another list than most of it; else domains of another size."""
    domains = grouped((tray.domain, node) for node, tray in sorted(trays.items()) if tray.domain)
    outside = dict(_outside(trays, {domain: len(nodes) for domain, nodes in domains.items()}, ordered))
    faults = [Fault("nvlink_domain_split", (Place(node, "node"),), what) for node, what in outside.items()]
    for nodes in domains.values():
        lists = Counter(trays[node].imex_nodes for node in nodes if trays[node].imex_nodes)
        usual, count = lists.most_common(1)[0] if lists else ((), 0)
        for node in nodes if 2 * count > lists.total() > count else ():
            if (own := trays[node].imex_nodes) and own != usual:
                what = f"its list has {len(own)} addresses, that of most others {len(usual)}; not in both: "
                differ = sorted({*own} ^ {*usual})
                what += ", ".join(differ[:SHOWN]) if differ else "none, their order differs"
                faults.append(Fault("imex_nodes_differ", (Place(node, "node"),), what))
    sizes = {nodes[0]: len({*nodes} - {*outside}) for nodes in domains.values()}
    wrong = {first: size for first, size in sizes.items() if size and ordered and size != ordered}
    for first, size in wrong.items() if sum(abs(ordered - size) for size in wrong.values()) > len(outside) else ():
        what = f"{size} nodes, {ordered} were ordered"
        faults.append(Fault("nvlink_domain_incomplete", (Place(first, "domain"),), what))
    return faults


def _outside(trays: Mapping[int, Tray], sizes: Mapping[Domain, int], ordered: int) -> Iterator[tuple[int, str]]:
    """Nodes in another domain than most that they share memory with by their lists, or in none. Without a list, by the
    order: those of small domains, where larger ones lack as many. One of half the size is a domain of its own."""
    for nodes in grouped((tray.imex_nodes, node) for node, tray in trays.items() if len(tray.imex_nodes) > 1).values():
        usual, count = Counter(trays[node].domain for node in nodes).most_common(1)[0]
        if usual is None or 2 * count <= len(nodes):
            continue
        for node in nodes:
            own = trays[node].domain
            if own is None or (own != usual and 2 * sizes[own] < sizes[usual]):
                yield node, f"it is in {own or 'none'}, {count} others of its IMEX are in {usual}"
    lacking = sum(ordered - size for size in sizes.values() if ordered / 2 <= size < ordered)
    for node, tray in trays.items():
        size = sizes.get(tray.domain, 0) if tray.domain else 0
        if lacking and 2 * size < ordered and len(tray.imex_nodes) < 2:
            yield node, f"it is in {tray.domain or 'none'} with {size} nodes, {ordered} were ordered"
