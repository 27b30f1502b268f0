"""Machines without an NVSwitch that are not here: what each measures at level standard, healthy or with one fault."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from unittest.mock import patch

from pytest_gpufleet.machine.gpu_facts import TELEMETRY
from pytest_gpufleet.model.events import RunHeader
from pytest_gpufleet.model.metric import METRICS, Sample
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.model.suite import Suite
from pytest_gpufleet.probes.links import copies
from pytest_gpufleet.verdict.accusations import accusations
from pytest_gpufleet.verdict.judgement import judge
from pytest_gpufleet.verdict.profile import choose
from pytest_gpufleet.verdict.verdict import concluded
from tests import dry_suite
from tests.boards import BOARDS, Board


def on_sockets(n, near, each=4, bridge=""):
    """`each` GPUs on a socket, `near` each other; neighbours by twos have a bridge."""

    def link(i, j):
        return bridge if bridge and i // 2 == j // 2 else near if i // each == j // each else "SYS"

    return tuple(tuple("X" if i == j else link(i, j) for j in range(n)) for i in range(n))


# As `nvidia-smi topo -m` shows a DGX-1 with V100.
CUBE_MESH = tuple(
    tuple(row.replace("1", "NV1").replace("2", "NV2").replace("-", "SYS").split())
    for row in (
        "X 1 1 2 2 - - -", "1 X 2 1 - 2 - -", "1 2 X 2 - - 1 -", "2 1 2 X - - - 1",
        "2 - - - X 1 1 2", "- 2 - - 1 X 2 1", "- - 1 - 1 2 X 2", "- - - 1 2 1 2 X",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """GB/s: `host` of one link at a time, `both` of each way with all at once; `pair` and `ring` by the kind of link,
    over NVLink of one; `busbw` of each collective, or of all others. `direct`: whether GPUs reach each other over PCIe;
    `mesh`: whether a ring goes over NVLinks alone."""

    board: Board
    gigabytes: int
    links: tuple[tuple[str, ...], ...]
    host: float
    both: float
    pair: Mapping[str, float]
    ring: Mapping[str, float]
    busbw: Mapping[str, float]
    direct: bool = True
    mesh: bool = False

    @property
    def topology(self):
        fabric = "nvlink" if any(link.startswith("NV") for row in self.links for link in row) else "pcie"
        machine = self.board.machine(len(self.links), fabric, memory_bytes=self.gigabytes * 10**9)
        return replace(machine, links=self.links)

    def reached(self, measurement, at, fault):
        under, topology = measurement.conditions, self.topology
        link = topology.kind(at)[-1]
        slow = fault.of(at, link)
        match measurement.metric:
            case "host_bandwidth" if under["at_once"] == "all":
                return slow * self.both * (1 if "both" in str(under["direction"]) else 1.2)
            case "host_bandwidth":
                return slow * self.host
            case "pair_bandwidth":
                return slow * self.pair[link] * (topology.nvlinks(at) or 1)
            case "ring_bandwidth":
                return slow * self.ring.get(link, self.pair[link] * topology.nvlinks(at))
            case "busbw":
                collective = str(under["collective"]) if under["collective"] in self.busbw else ""
                return self.busbw[collective] * (1 if self.mesh and fault.of_slot and not collective else fault.share)
        return None


@dataclass(frozen=True)
class Fault:
    """What is left of the speed (`share`) of the way between two GPUs; of one, of all that crosses its slot."""

    gpus: frozenset[int] = frozenset()
    share: float = 1.0

    @property
    def of_slot(self):
        return len(self.gpus) == 1

    def of(self, at, link):
        here = self.gpus and self.gpus <= {part.index for part in at.parts}
        return self.share if here and not (self.of_slot and link == "NV") else 1.0


V100, A100, A100_PCIE = (
    BOARDS[name] for name in ("Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe")
)
H100_NVL, L40S, T4 = (BOARDS[name] for name in ("NVIDIA H100 NVL", "NVIDIA L40S", "Tesla T4"))
RTX_5090, RTX_4090 = BOARDS["NVIDIA GeForce RTX 5090"], BOARDS["NVIDIA GeForce RTX 4090"]
RTX_PRO = replace(RTX_5090, name="NVIDIA RTX PRO 6000 Blackwell Server Edition", brand=13, cores=24064)
TWO = on_sockets(8, "NODE")
# What somebody published of such a machine stands behind it; the rest is what such PCIe and NVLinks carry.
MACHINES = {
    # Pairs: NVIDIA/nccl issue 814; host links one at a time, and down to 11 both ways: NVIDIA/nvbandwidth issue 15.
    "8x RTX 4090": Machine(RTX_4090, 24, TWO, 25, 12, {"NODE": 20.1, "SYS": 22.3}, {"NODE": 9, "SYS": 9},
                           {"": 14, "all_to_all": 7}, direct=False),
    # all_reduce: NVIDIA/nccl issue 1639; host links: tinygrad/open-gpu-kernel-modules issue 29.
    "8x RTX 5090": Machine(RTX_5090, 32, TWO, 56, 30, {"NODE": 37, "SYS": 37}, {"NODE": 20, "SYS": 20},
                           {"": 28, "all_to_all": 14}, direct=False),
    "4x L40S": Machine(L40S, 48, on_sockets(4, "PIX", 2), 25, 14, {"PIX": 26, "SYS": 18}, {"PIX": 25, "SYS": 16},
                       {"": 14, "all_to_all": 9}),
    # voipmonitor/rtx6kpro: pairs, all_reduce as NCCL runs by itself on two sockets, all to all.
    "8x RTX PRO 6000": Machine(RTX_PRO, 96, TWO, 55, 35, {"NODE": 55.6, "SYS": 51}, {"NODE": 54, "SYS": 50},
                               {"": 22.2, "all_to_all": 5.8}),
    # all_reduce: up to 21 in NVIDIA/nccl issue 841, 20 in NVIDIA/nccl-tests issue 178.
    "8x A100 PCIe": Machine(A100_PCIE, 80, TWO, 25, 16, {"NODE": 22, "SYS": 19}, {"NODE": 22, "SYS": 18},
                            {"": 20, "all_to_all": 10}),
    "8x A100 PCIe, bridges": Machine(A100_PCIE, 80, on_sockets(8, "NODE", 4, "NV12"), 25, 16,
                                     {"NV": 23, "NODE": 22, "SYS": 19}, {"NODE": 22, "SYS": 18},
                                     {"": 20, "all_to_all": 10}),
    "4x H100 NVL": Machine(H100_NVL, 94, on_sockets(4, "NODE", 4, "NV12"), 52, 35, {"NV": 22.1, "NODE": 50},
                           {"NODE": 45}, {"": 34, "all_to_all": 20}),
    # 72 GB/s of two GPUs with four NVLinks: NVIDIA/nccl-tests issue 331.
    "HGX A100 x4": Machine(A100, 40, on_sockets(4, "NV4"), 25, 16, {"NV": 23}, {}, {"": 210, "sendrecv": 72},
                           mesh=True),
    # all_reduce: Azure/azurehpc-health-checks.
    "DGX-1 V100": Machine(V100, 32, CUBE_MESH, 12, 8, {"NV": 24.2, "SYS": 9}, {"SYS": 8},
                          {"": 122, "sendrecv": 7, "all_to_all": 7}, mesh=True),
    "4x T4": Machine(T4, 16, on_sockets(4, "PHB"), 12.5, 6, {"PHB": 11}, {"PHB": 8}, {"": 5, "all_to_all": 3}),
}  # fmt: skip
HEALTHY, SLOW_HOP, NARROW_SLOT = Fault(), Fault(frozenset({0, 1}), 0.5), Fault(frozenset({2}), 0.25)


def named(name, fault, metrics=METRICS):
    """The faults of its run by place; collectives, which are slow with whatever is, left out."""
    found = accusations(standard_run(name, fault, frozenset(metrics)))
    return {(each.name, str(place)) for each in found for place in each.subjects if place != WORLD}


@cache
def checks_of_figures(name, metrics):
    """What each of those checks hands to `judge` on such a machine, whatever is wrong with it: what is shown, what is
    judged, and whether it is required."""
    machine, found = MACHINES[name], []

    def judging(check, *given, shown=(), required=True, **_):
        found.append((check, [*shown], dry_suite.taken(given), required))

    apart = (copies, {"_reach": lambda rank, offers: [machine.direct] * rank.size})
    with patch.object(dry_suite, "WORK", [*dry_suite.WORK, apart]):
        dry_suite.measured(
            machine.board, machine.topology, 1, False, "standard", metrics, lambda check: partial(judging, check)
        )
    return found


@cache
def standard_run(name, fault, metrics=frozenset(METRICS)):
    """A run at level standard in which all but figures of these metrics is in order. What the machine does not say of
    itself meets its limit."""
    machine = MACHINES[name]
    topology, limits, record = machine.topology, choose(None, {machine.board.name}), Record()
    for check, shown, judged, required in checks_of_figures(name, metrics):
        for each in [*shown, *judged]:
            anew = partial(
                judge, profile=limits, topology=topology, check=check, rehearsal=False,
                required=required and each not in shown, measured=[every.measurement for every in record.findings],
            )  # fmt: skip
            usual = 1.0
            for _ in range(2):  # a weak limit that is met gives way to another one
                limit = anew(replace(each, values=dict.fromkeys(each.values, usual))).limit
                if limit and not limit.met_by(usual):
                    usual = limit.value * (1.05 if limit.sense == "min" else 0.95)
            values = {at: machine.reached(each, at, fault) or usual for at in each.values}
            record.findings.append(anew(replace(each, values=values, samples={})))
    samples = [Sample(0.0, tuple(dict.fromkeys(TELEMETRY, 1.0) for _ in topology.gpus))]
    done = replace(
        record, run=RunHeader(level="standard"), manifest=Suite(), topology=topology, telemetry=samples,
    )  # fmt: skip
    return replace(done, verdict=concluded(done)[0])
