"""What GPUs a machine has and how they are linked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpufleet.model import place
from pytest_gpufleet.model.facts import Unavailable, check_name, told
from pytest_gpufleet.model.place import CALLED, Place, Where


@dataclass(frozen=True)
class Gpu:
    """One GPU: its facts by name (model/facts.py), plain JSON values; those that cannot be had are Unavailable.

    `index` is the one `nvidia-smi` shows on its node, `node` the number of that among those of the run.
    """

    index: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    node: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", told(self.facts))

    def __getitem__(self, fact: str) -> Any:
        """KeyError for a name that this version and the recorded machine both do not know."""
        if fact in self.facts:
            return self.facts[fact]
        check_name(fact)
        return Unavailable("not recorded", applicable=False)

    def get(self, fact: str) -> Any:
        """A fact, or None where it cannot be had."""
        value = self[fact]
        return None if isinstance(value, Unavailable) else value

    @property
    def name(self) -> str:
        return self.get("name") or "unknown GPU"

    @property
    def uuid(self) -> str:
        return self.get("uuid") or f"unknown UUID {self.index}"

    @property
    def pci_bus_id(self) -> str:
        return self.get("pci_bus_id") or "unknown PCI bus id"

    @property
    def serial(self) -> str | None:
        return self.get("serial") or None

    @property
    def position(self) -> str:
        """Where it sits in its machine: "module 3", "slot 21"; "" if nobody tells."""
        known = (("module", self.get("module_id")), ("slot", self.get("physical_slot")))
        return ", ".join(f"{what} {value}" for what, value in known if value is not None)

    @property
    def memory_bytes(self) -> int:
        return self.get("memory_bytes") or 0

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        major, minor = self.get("compute_capability") or (0, 0)
        return (major, minor) if major else None

    @property
    def power_limit_watts(self) -> float | None:
        watts: float | None = self.get("power_limit_watts")
        return watts

    @property
    def nvlinks_active(self) -> int:
        return (self.get("nvlink_states") or []).count(1)

    @property
    def processes(self) -> tuple[str, ...]:
        return tuple(self.get("processes") or ())

    @property
    def place(self) -> Place:
        """The place of this GPU's values in measurements."""
        return place.gpu(self.index, self.node)

    @property
    def identity(self) -> str:
        """How an error names this GPU: what a technician needs to find it in the machine."""
        serial = f"serial {self.serial}" if self.serial else "no serial"
        where = f" ({self.position})" if self.position else ""
        return f"GPU {self.index}{where} {self.name}, {serial}, {self.pci_bus_id}, {self.uuid}"


# The software of a topology, and what it is called.
SOFTWARE = {
    "driver": "driver",
    "cuda_driver": "CUDA of the driver",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "torch": "torch",
}


@dataclass(frozen=True)
class GpuTopology:
    """The GPUs a run uses on one node, the links between them and the software above them.

    `links[i][j]` is the connection of `gpus[i]` and `gpus[j]` in the words of `nvidia-smi topo -m`: "NV18" for 18
    NVLinks, else the common PCIe ancestor ("PIX", "PXB", "PHB", "NODE", "SYS"), "X" on the diagonal.
    `fabric` is "nvswitch", "nvlink", "pcie" or "none" (no GPU, or only one without links).
    """

    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    fabric: str = "none"
    driver: str | None = None
    cuda_driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    torch: str | None = None
    # Why there are fewer facts than a healthy machine gives: one sentence a problem.
    problems: tuple[str, ...] = ()
    absent: str = ""  # why there are no GPUs, also in a rehearsal

    def on_node(self, number: int) -> GpuTopology:
        """The same machine as that node of a run."""
        return replace(self, gpus=tuple(replace(gpu, node=number) for gpu in self.gpus))

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
        """What a place has to be compared with: GPUs of its model; pairs of such GPUs with its kind of link.

        The number of NVLinks is not part of it: a pair that has lost links stands beside those that have not.
        """
        positions = {gpu.place: position for position, gpu in enumerate(self.gpus)}
        found = [positions[part] for part in where.parts if part in positions]
        models = sorted(self.gpus[position].name for position in found)
        link = self.links[found[0]][found[1]].rstrip("0123456789") if len(found) == 2 else ""
        return (*models, link)

    def processors_near(self, where: Where) -> tuple[Any, ...]:
        """The processors at the NUMA node of each GPU in a place, as NVML's masks of them. (NVML's own number of a
        NUMA node is that of the GPU's memory, which machines with Grace have one of for each GPU.)"""
        by_place = {gpu.place: gpu for gpu in self.gpus}
        return tuple(tuple(by_place[part].get("cpu_affinity") or ()) for part in where.parts if part in by_place)

    def switch_neighbours(self, where: Where) -> tuple[int, ...]:
        """For each GPU in a place, how many others are behind the same PCIe switch and share its way to the host, as
        far as the links tell: NVLinks hide it."""
        rows = {gpu.place: row for gpu, row in zip(self.gpus, self.links, strict=False)}
        return tuple(sum(link in ("PIX", "PXB") for link in rows[part]) for part in where.parts if part in rows)

    def __str__(self) -> str:
        """The link matrix as `nvidia-smi topo -m` prints it; without GPUs, why there are none."""
        if not self.gpus:
            return f"no GPU: {self.absent or 'nobody recorded why'}"
        names = [f"GPU{gpu.index}" for gpu in self.gpus]
        rows = [["", *names], *([name, *row] for name, row in zip(names, self.links, strict=True))]
        return "\n".join("\t".join(row) for row in rows)
