"""Where something belongs (a GPU, a pair of GPUs, a node, or all), what GPUs a machine has, and how they are linked."""

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from pytest_gpufleet.model.language import say

Key = TypeVar("Key", bound=Hashable)
Thing = TypeVar("Thing")

CALLED = {  # by people
    "gpu": "GPU", "cpu": "CPU rank", "numa": "NUMA node", "nic": "NIC", "rail": "rail", "group": "group",
    "domain": "NVLink domain",
}  # fmt: skip
DEVICE = re.compile(r"(?:node(\d+)/)?([a-z]+)(\d+)")


class Where:
    """A Place or a Pair: a value, sorted by the devices that it consists of. Equal ones are one object: places are keys
    of every figure. No dataclass, which msgspec would take apart: in JSON it is a text, also as a key (see `codec`)."""

    __slots__ = ("_key", "parts")

    _key: tuple[tuple[int, str, int], ...]
    parts: tuple["Place", ...]

    def __lt__(self, other: "Where") -> bool:
        return self._key < other._key


class Place(Where):
    """A device of a node (`kind` "gpu", "cpu" for a rank of a rehearsal, "numa" for a NUMA node, "nic" for a port of a
    network adapter, "rail" for the way of its GPU or rank to other nodes; `index` counts on its node), a node ("node"),
    some nodes ("group"), the NVLink domain that a node is in ("domain"), or everything (WORLD). Its text is that of
    evidence: "gpu3", "node", "world"; of a node after the first "node1", "node1/gpu3"."""

    __slots__ = ("index", "kind", "node")
    _known: ClassVar[dict[tuple[int, str, int], "Place"]] = {}

    node: int
    kind: str
    index: int

    def __new__(cls, node: int, kind: str, index: int = 0) -> "Place":
        key = (node, kind, index)
        if (known := cls._known.get(key)) is None:
            known = super().__new__(cls)
            known.node, known.kind, known.index, known._key, known.parts = node, kind, index, (key,), (known,)
            known = cls._known.setdefault(key, known)  # another thread may have been faster
        return known

    def __reduce__(self) -> tuple[type["Place"], tuple[int, str, int]]:
        return Place, self._key[0]

    @property
    def is_device(self) -> bool:
        return self.kind not in ("node", "world")

    @property
    def is_on_node(self) -> bool:
        return self.kind not in ("group", "domain", "world")

    def __repr__(self) -> str:
        node = f"node{self.node}" if self.node else ""
        return "/".join(filter(None, (node, f"{self.kind}{self.index}" if self.is_device else ""))) or self.kind


class Pair(Where):
    """Two devices and what lies between them, from the first to the second."""

    __slots__ = ("first", "second")
    _known: ClassVar[dict[tuple[Place, Place], "Pair"]] = {}

    first: Place
    second: Place

    def __new__(cls, first: Place, second: Place) -> "Pair":
        key = (first, second)
        if (known := cls._known.get(key)) is None:
            known = super().__new__(cls)
            known.first, known.second, known._key, known.parts = first, second, first._key + second._key, key
            known = cls._known.setdefault(key, known)
        return known

    def __reduce__(self) -> tuple[type["Pair"], tuple[Place, Place]]:
        return Pair, (self.first, self.second)

    def __repr__(self) -> str:
        return f"{self.first}-{self.second}"


WORLD = Place(0, "world")
THIS_NODE = Place(0, "node")


def gpu(index: int, node: int = 0) -> Place:
    return Place(node, "gpu", index)


def on_node(where: Where, node: int) -> Where:
    """The same place of another node. All ranks of a run on one machine are that node."""
    moved = [Place(node, "node" if part.kind == "world" else part.kind, part.index) for part in where.parts]
    return Pair(moved[0], moved[1]) if isinstance(where, Pair) else moved[0]


@lru_cache(maxsize=1 << 16)
def read(text: str) -> Where:
    """The place of a text. ValueError if it is none."""
    first, dash, second = text.partition("-")
    return Pair(_read(first), _read(second)) if dash else _read(first)


def where(given: Where | str) -> Where:
    return given if isinstance(given, Where) else read(given)


def _read(text: str) -> Place:
    if text in ("world", "node"):
        return Place(0, text)
    if not (device := DEVICE.fullmatch(text)):
        raise ValueError(f'{text!r} is no place: "world", "node", "gpu3", "gpu0-gpu5" or "node1/gpu3" are')
    on, kind, index = device.groups()
    return Place(int(index), "node") if kind == "node" and on is None else Place(int(on or 0), kind, int(index))


def called(where: Where, hosts: Mapping[int, str] = {}) -> str:
    """ "GPU 3", "GPU 0 to GPU 5", "all ranks together"; of several nodes "gf1 GPU 0 to GPU 5", "gf1 to gf2"."""
    if where == WORLD:
        return say("all ranks together")
    names, said = list[str](), set[int]()
    for part in where.parts:
        device, host = f"{CALLED[part.kind]} {part.index}" if part.kind in CALLED else str(part), ""
        if len(hosts) > 1 and part.is_on_node and part.node not in said:
            host = hosts.get(part.node, f"node {part.node}")
        names.append(device if not host else f"{host} {device}" if part.is_device else host)
        said.add(part.node)
    return names[0] if len(names) == 1 else say("{first} to {last}", first=names[0], last=names[1])


def grouped(pairs: Iterable[tuple[Key, Thing]]) -> dict[Key, list[Thing]]:
    """The things of each key; keys and things in the order in which they come."""
    found: dict[Key, list[Thing]] = {}
    for key, thing in pairs:
        found.setdefault(key, []).append(thing)
    return found


# The names of all facts. machine/gpu_facts.py adds them, which has their rows: how each is read is not known here.
FACTS: set[str] = set()

# nvml.h, nvmlClocksEventReasons: why the clocks are not higher than they are, the most alarming first.
CLOCK_EVENTS = {
    0x40: "hw thermal slowdown", 0x80: "hw power brake slowdown", 0x8: "hw slowdown", 0x20: "sw thermal slowdown",
    0x4: "sw power cap", 0x2: "applications clocks setting", 0x10: "sync boost", 0x100: "display clock setting",
    0x1: "gpu idle",
}  # fmt: skip
# The clock events of which NVML counts how long they lasted. Older drivers have one counter of heat alone.
COUNTED_SLOWDOWNS = {"sw_thermal": 0x20, "hw_thermal": 0x40, "power_brake": 0x80, "thermal": 0x20}

Capability = tuple[int, int]
# The first that have these.
TF32_SINCE = BF16_SINCE = (8, 0)
FP8_SINCE = (8, 9)
# NCCL moves float8 on any GPU, and adds it on these.
NVLS_SINCE = FP8_REDUCTIONS_SINCE = (9, 0)


@dataclass(frozen=True)
class Architecture:
    """Dense 16-bit matrix products with sums in 32 bits: operations in a clock of an SM (`tensor`); `geforce`: the same
    on GeForce boards; `named`: on boards that have less, by the names that NVML gives. `cores`: of an SM.

    `per_joule`: 10^12 operations a joule, measured on a healthy board. Of many boards the power limit alone decides how
    fast they are; a chip computes more with a joule at lower clocks, so that a board of fewer watts reaches at least
    that. Where nobody measured one it is that of the data sheet: then their clocks decide.

    `nvlink`: GB/s of one in one direction, 0 where there is none. By architecture, since drivers have told wrong
    versions, and speeds with the overhead of the line (26.562 GB/s on an H200). `data_centre`: no other GPUs have it.
    `fp64`: it has more than the few units of the others, which do 1/32 or 1/64 of the fp32 rate."""

    cores: int
    tensor: int
    per_joule: float
    source: str
    geforce: int | None = None
    named: tuple[tuple[str, int], ...] = ()
    nvlink: float = 0.0
    data_centre: bool = False
    fp64: bool = False


# By compute capability; whatever needs an architecture takes it from here. The sources are white papers and data sheets
# by NVIDIA; operations in a clock follow from their TFLOP/s, SMs and boost clock, GB/s of an NVLink from those of all
# of them: P100 160 in both directions on 4, V100 300 on 6, A100 600 on 12, H100 900 on 18, B200 1,800 on 18; Quadro RTX
# 8000 100 on 2; RTX A6000 112.5 on 4. Watts and TFLOP/s of a healthy board: stas00/ml-engineering (A100, B200),
# mag-/gpu_benchmark (V100, RTX A6000, L40S), forums.developer.nvidia.com/t/264462 (T4), the slowest of 13 in
# tests/recorded (H200, fp16).
ARCHITECTURES: dict[Capability, Architecture] = {
    # P100, without tensor cores: 21.2 TFLOP/s, 56 SMs, 1,480 MHz, 300 W.
    (6, 0): Architecture(64, 256, 21.2 / 300, "P100 white paper", nvlink=20.0, fp64=True),
    # P40, which does 16 bits at the rate of fp32: 11.8 TFLOP/s, 30 SMs, 1,531 MHz, 250 W.
    (6, 1): Architecture(128, 256, 11.8 / 250, "P40 data sheet"),
    # 125 TFLOP/s, 80 SMs, 1,530 MHz.
    (7, 0): Architecture(64, 1024, 94 / 300, "V100 white paper", nvlink=25.0, fp64=True),
    # T4 65 TFLOP/s, 40 SMs, 1,590 MHz; RTX 2080 Ti 56.9, 68 SMs, 1,635 MHz.
    (7, 5): Architecture(64, 1024, 24 / 70, "Turing white paper", geforce=512, nvlink=25.0),
    # 312 TFLOP/s, 108 SMs, 1,410 MHz.
    (8, 0): Architecture(64, 2048, 256 / 400, "A100 white paper", nvlink=25.0, data_centre=True, fp64=True),
    # A10 125 TFLOP/s, 72 SMs, 1,695 MHz; RTX 3090 71, 82 SMs, 1,695 MHz.
    (8, 6): Architecture(128, 1024, 131 / 300, "GA102 white paper", geforce=512, nvlink=14.0625),
    # Jetson AGX Orin 42.5 TFLOP/s, 16 SMs, 1,300 MHz, 60 W.
    (8, 7): Architecture(128, 2048, 42.5 / 60, "Jetson AGX Orin technical brief"),
    # L40S 362 TFLOP/s, 142 SMs, 2,520 MHz; RTX 4090 165, 128 SMs, 2,520 MHz; L40 181, 142 SMs, 2,490 MHz; L20 119.5,
    # 92 SMs, 2,520 MHz.
    (8, 9): Architecture(
        128, 1024, 252 / 350, "Ada white paper", geforce=512, named=(("NVIDIA L40", 512), ("NVIDIA L20", 512))
    ),
    # H100 SXM 989 TFLOP/s, 132 SMs, 1,830 MHz; H20 148, 78 SMs.
    (9, 0): Architecture(
        128, 4096, 649 / 700, "H100 white paper", named=(("NVIDIA H20", 1040), ("NVIDIA H20-3e", 1040)),
        nvlink=25.0, data_centre=True, fp64=True,
    ),
    # B200 2,250 TFLOP/s, 148 SMs, 1,850 MHz.
    (10, 0): Architecture(128, 8192, 1745 / 1000, "Blackwell data sheet", nvlink=50.0, data_centre=True, fp64=True),
    # GB300 2,500 TFLOP/s, 160 SMs, 1,910 MHz; 1.3 in fp64. A joule: as B200, of the same process.
    (10, 3): Architecture(128, 8192, 1745 / 1000, "Blackwell Ultra data sheet", nvlink=50.0, data_centre=True),
    # Jetson T5000 258 TFLOP/s, 20 SMs, 1,575 MHz, 130 W.
    (11, 0): Architecture(128, 8192, 258 / 130, "Jetson Thor data sheet"),
    # RTX 5090 209.5 TFLOP/s, 170 SMs, 2,407 MHz; RTX PRO 6000 twice that in an SM. A joule: as Ada (same process).
    (12, 0): Architecture(128, 1024, 252 / 350, "RTX Blackwell white paper", geforce=512),
    # GB10 125 TFLOP/s, 48 SMs, 2,500 MHz. A joule: as Ada.
    (12, 1): Architecture(128, 1024, 252 / 350, "GB10 data sheet"),
}  # fmt: skip


class Missing(msgspec.Struct, frozen=True):
    """A fact that is not there. `absent`: it is known that this machine, GPU or driver has no such thing; else it could
    not be read, and `remedy` is what makes it readable, "" if nobody knows."""

    why: str = msgspec.field(name="unavailable")
    absent: bool = False
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}" if self.remedy else self.why


def typed_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts as they came from a file or another process: msgspec leaves what may be anything as it is. Version 0.3.0
    wrote `applicable` instead of `absent`."""
    untyped = {name: value for name, value in facts.items() if isinstance(value, dict) and "unavailable" in value}
    typed = {name: {"absent": not value.get("applicable", True), **value} for name, value in untyped.items()}
    return {**facts, **msgspec.convert(typed, dict[str, Missing])} if typed else facts


def clock_events(mask: int) -> list[str]:
    """The bits of the reading `clock_event_reasons` in words, the most alarming first."""
    unknown = mask & ~sum(CLOCK_EVENTS)
    words = [word for bit, word in CLOCK_EVENTS.items() if mask & bit]
    return words + ([f"unknown reason {unknown:#x}"] if unknown else [])


def check_name(fact: str) -> None:
    """KeyError if no fact is called so: a check that asks for it would never look at anything."""
    if FACTS and fact not in FACTS:
        near = difflib.get_close_matches(fact, sorted(FACTS), n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(sorted(FACTS))}"
        raise KeyError(f"no GPU has a fact {fact!r}: {hint}")


class Domain(NamedTuple):
    """The NVLink domain of a GPU. A clique is a number within its cluster: racks share it, and 32766 stands in many
    (meta-pytorch/torchcomms pull request 3612; NVIDIA/nccl issue 1301)."""

    cluster: str
    clique: int

    def __str__(self) -> str:
        return f"cluster {self.cluster[:8]}, clique {self.clique}"


NO_CLUSTER = "0" * 32  # a machine of its own: all recorded H200, and H100 (torchcomms pull request 1385)
# Whose NVLinks leave the machine. H100 of several machines may show one UUID too (torchcomms pull request 1315).
RACK_SCALE = re.compile(r"\b(GB200|GB300|VR200)\b")
COMPLETED, SUCCESS = 3, 0  # nvml.h: NVML_GPU_FABRIC_STATE_COMPLETED, NVML_SUCCESS


@dataclass(frozen=True)
class Gpu:
    """One GPU: its facts by name (machine/gpu_facts.py), plain JSON values; those that cannot be had are Missing.
    `index` is the one `nvidia-smi` shows on its node, `node` the number of that among those of the run."""

    index: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    node: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", typed_facts(self.facts))

    def __getitem__(self, fact: str) -> Any:
        """KeyError for a name that this version and the recorded machine both do not know."""
        if fact not in self.facts:
            check_name(fact)
        return self.facts.get(fact, Missing("not recorded", absent=True))

    def get(self, fact: str) -> Any:
        value = self[fact]
        return None if isinstance(value, Missing) else value

    @property
    def name(self) -> str:
        return self.get("name") or "unknown GPU"

    @property
    def uuid(self) -> str:
        return self.get("uuid") or f"unknown UUID {self.index}"

    @property
    def lasting_id(self) -> str:
        """What stays its own wherever it is: its UUID, or its serial number; empty if it has none."""
        return self.get("uuid") or self.serial or ""

    @property
    def pci_bus_id(self) -> str:
        return self.get("pci_bus_id") or "unknown PCI bus id"

    @property
    def serial(self) -> str | None:
        return self.get("serial") or None

    @property
    def position(self) -> str:
        """Where it sits in its machine: "module 3", "slot 21"; "" if unknown."""
        known = (("module", self.get("module_id")), ("slot", self.get("physical_slot")))
        return ", ".join(f"{what} {value}" for what, value in known if value is not None)

    @property
    def memory_bytes(self) -> int:
        return self.get("memory_bytes") or 0

    @property
    def compute_capability(self) -> Capability | None:
        major, minor = self.get("compute_capability") or (0, 0)
        return (major, minor) if major else None

    @property
    def of_data_centre(self) -> bool:
        known = ARCHITECTURES.get(self.compute_capability or (0, 0))
        return known is not None and known.data_centre

    @property
    def power_limit_watts(self) -> float | None:
        return self.get("power_limit_watts")  # type: ignore[no-any-return]

    @property
    def nvlinks_active(self) -> int:
        return (self.get("nvlink_states") or []).count(1)

    @property
    def of_rack(self) -> bool:
        """Whether its model is made for an NVLink domain of several machines, and the fabric knows it."""
        return bool(RACK_SCALE.search(self.name)) and bool((self.get("fabric") or {}).get("state"))

    @property
    def domain(self) -> Domain | None:
        """That of several machines which it is in, if it is in one."""
        fabric, health = self.get("fabric") or {}, self.get("fabric_health") or {}
        registered = (fabric.get("state"), fabric.get("status")) == (COMPLETED, SUCCESS)
        known = self.of_rack and registered and health.get("cluster", NO_CLUSTER) != NO_CLUSTER
        return Domain(health["cluster"], health["clique"]) if known else None

    @property
    def processes(self) -> tuple[str, ...]:
        return tuple(self.get("processes") or ())

    @cached_property
    def place(self) -> Place:
        return gpu(self.index, self.node)

    @property
    def identity(self) -> str:
        """How an error names this GPU: what a technician needs to find it in the machine."""
        serial = f"serial {self.serial}" if self.serial else "no serial"
        where = f" ({self.position})" if self.position else ""
        return f"GPU {self.index}{where} {self.name}, {serial}, {self.pci_bus_id}, {self.uuid}"


# The software of a topology, and what it is called.
SOFTWARE = {
    "driver": "driver", "cuda_driver": "CUDA of the driver", "cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL",
    "torch": "torch",
}  # fmt: skip


@dataclass(frozen=True)
class GpuTopology:
    """The GPUs a run uses on one node, the links between them and the software above them. `links[i][j]` is the
    connection of `gpus[i]` and `gpus[j]` in the words of `nvidia-smi topo -m`: "NV18" for 18 NVLinks, else the common
    PCIe ancestor ("PIX", "PXB", "PHB", "NODE", "SYS"), "X" on the diagonal. `fabric` is "nvswitch", "nvlink", "pcie" or
    "none" (no GPU, or only one without links)."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    fabric: str = "none"
    driver: str | None = None
    cuda_driver: Annotated[str | None, Meta(description="The CUDA version that the driver supports.")] = None
    cuda: Annotated[str | None, Meta(description="The one that torch was built for.")] = None
    cudnn: str | None = None
    nccl: str | None = None
    torch: str | None = None
    # Why there are fewer facts than a healthy machine gives: one sentence a problem.
    problems: tuple[str, ...] = ()
    absent: str = ""  # why there are no GPUs, also in a rehearsal

    def on_node(self, number: int) -> "GpuTopology":
        return replace(self, gpus=tuple(replace(gpu, node=number) for gpu in self.gpus))

    @cached_property
    def _position(self) -> dict[Place, int]:
        return {gpu.place: position for position, gpu in enumerate(self.gpus)}

    def of(self, where: Where) -> list[Gpu]:
        """The GPUs of a place, in its order."""
        return [self.gpus[self._position[part]] for part in where.parts if part in self._position]

    def identity(self, where: Where) -> str:
        """What stands behind a place: the identity of every GPU in it, and the network adapter of a rail."""
        by_place = {gpu.place: gpu.identity for gpu in self.gpus}
        return " and ".join(by_place.get(part) or self._called(part) for part in where.parts)

    def _called(self, part: Place) -> str:
        if part.kind not in CALLED:
            return str(part)
        name = f"{CALLED[part.kind]} {part.index}"
        gpu = self.gpus[part.index] if part.kind == "rail" and part.index < len(self.gpus) else None
        near = gpu.get("network_adapters") if gpu else None
        return f"{name} ({', '.join(near)} next to GPU {gpu.index})" if gpu and near else name

    def kind(self, where: Where) -> tuple[str, ...]:
        """What a place has to be compared with: GPUs of its model; pairs of such GPUs with its kind of link, whatever
        the number of NVLinks: a pair that has lost links stands beside those that have not."""
        return (*sorted(gpu.name for gpu in self.of(where)), self.link(where).rstrip("0123456789"))

    def link(self, where: Where) -> str:
        """What connects the two GPUs of a place; "" where these are no two of its GPUs."""
        ends = [self._position[part] for part in where.parts if part in self._position]
        return self.links[ends[0]][ends[1]] if len(ends) == 2 else ""

    def nvlinks(self, where: Where) -> int:
        link = self.link(where)
        return int(link[2:]) if link.startswith("NV") else 0

    def boards(self, where: Where) -> tuple[str, ...]:
        """The part number of the board of each GPU in a place, sorted; "" of one that tells none."""
        return tuple(sorted(str(gpu.get("board_part_number") or "") for gpu in self.of(where)))

    def board(self, where: Where) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """`kind` and `boards`, which are asked for in each figure: found once."""
        if where not in self.known:
            self.known[where] = self.kind(where), self.boards(where)
        return self.known[where]  # type: ignore[no-any-return]

    @cached_property
    def known(self) -> dict[Hashable, Any]:
        """What is asked for in each figure, and follows from this alone."""
        return {}

    @property
    def domain(self) -> Domain | None:
        """The NVLink domain that all its GPUs are in."""
        found = {gpu.domain for gpu in self.gpus}
        return found.pop() if len(found) == 1 else None

    @property
    def part(self) -> str:
        """The part number that the boards of all GPUs have; "" if they differ or nobody knows."""
        numbers = {str(gpu.get("board_part_number") or "") for gpu in self.gpus}
        return numbers.pop() if len(numbers) == 1 else ""

    def processors_near(self, where: Where) -> tuple[Any, ...]:
        """The processors at the NUMA node of each GPU in a place, as NVML's masks of them. (NVML's own number of a NUMA
        node is that of the GPU's memory, which machines with Grace have one of for each GPU.)"""
        return tuple(tuple(gpu.get("cpu_affinity") or ()) for gpu in self.of(where))

    def switch_neighbours(self, where: Where) -> tuple[int, ...]:
        """For each GPU in a place, how many others are behind the same PCIe switch and share its way to the host, as
        far as the links tell: NVLinks hide it."""
        links = [*self.links] or [()] * len(self.gpus)
        rows = [links[self._position[part]] for part in where.parts if part in self._position]
        return tuple(sum(link in ("PIX", "PXB") for link in row) for row in rows)


NETWORK, DOMAIN = "network", "domain"  # what links places of two nodes, in the words of GpuTopology.links
MIXED = "mixed"


@dataclass(frozen=True)
class ClusterTopology(GpuTopology):
    """What is true of all nodes together, made by `joined`. `nodes`: their topologies, by their numbers, with these in
    their GPUs' places; `hosts`: their names. The links of GPUs stand in the topology of their node and nowhere else."""

    nodes: Mapping[int, GpuTopology] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)

    def identity(self, where: Where) -> str:
        return " and ".join(map(self._named, where.parts))

    @cached_property
    def _domains(self) -> dict[int, Domain]:
        return {node: found for node, topology in self.nodes.items() if (found := topology.domain)}

    def kind(self, where: Where) -> tuple[str, ...]:
        """Of GPUs, and of pairs of one node, what their node says of them. Nodes and rails are compared with those of
        the same GPUs, and pairs of two nodes with such pairs, inside an NVLink domain or not."""
        on = self._on(where)
        if len(on) == 1 and where.parts[0].is_device and where.parts[0].kind != "rail":
            return on[0].kind(where)
        models = (", ".join(sorted(gpu.name for gpu in node.gpus)) for node in on)
        between = NETWORK if len({self._domains.get(part.node, part) for part in where.parts}) > 1 else DOMAIN
        return (*sorted(models), between if len(on) > 1 else where.parts[0].kind)

    def switch_neighbours(self, where: Where) -> tuple[int, ...]:
        return tuple(each for node in self._on(where) for each in node.switch_neighbours(where))

    def _on(self, where: Where) -> list[GpuTopology]:
        numbers = dict.fromkeys(part.node for part in where.parts if part.is_on_node)
        return [self.nodes.get(number, GpuTopology()) for number in numbers]

    def _named(self, part: Place) -> str:
        if part.kind == "domain":
            nodes = [*self._domains.values()].count(self._domains[part.node]) if part.node in self._domains else 1
            return f"the NVLink domain of {self.hosts[part.node]} ({nodes} nodes)"
        if not part.is_on_node:
            return str(part)
        host = self.hosts.get(part.node, f"node {part.node}")
        return f"{host} {self.nodes.get(part.node, GpuTopology()).identity(part)}" if part.is_device else host


def joined(nodes: Mapping[int, GpuTopology], hosts: Mapping[int, str]) -> GpuTopology:
    """The topology of all these nodes, each as it describes itself (as if it were the only one, node 0)."""
    if list(nodes) == [0]:
        return nodes[0]
    numbered = {number: topology.on_node(number) for number, topology in nodes.items()}
    there = [topology for topology in nodes.values() if topology.gpus]
    software: dict[str, Any] = {name: _of_all(getattr(each, name) for each in nodes.values()) for name in SOFTWARE}
    fabrics = {topology.fabric for topology in there}
    cluster = ClusterTopology(
        gpus=tuple(gpu for topology in numbered.values() for gpu in topology.gpus),
        fabric=(fabrics.pop() if len(fabrics) == 1 else MIXED) if there else "none",
        problems=tuple(f"{hosts[number]}: {each}" for number, node in nodes.items() for each in node.problems),
        absent="" if there else _of_all(topology.absent for topology in nodes.values()) or "",
        nodes=numbered,
        hosts=dict(hosts),
    )
    return replace(cluster, **software)


def _of_all(values: Iterable[str | None]) -> str | None:
    """What all have; each that any has where they differ."""
    return " and ".join(sorted(set(filter(None, values)))) or None
