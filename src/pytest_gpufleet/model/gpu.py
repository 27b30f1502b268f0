"""What GPUs a machine has and how they are linked, as plain facts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from pytest_gpufleet.model import place
from pytest_gpufleet.model.place import Place, Where


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` is the one `nvidia-smi` shows. None: the driver does not tell."""

    index: int
    name: str
    uuid: str
    pci_bus_id: str
    memory_bytes: int
    serial: str | None = None
    board_part_number: str | None = None
    vbios: str | None = None
    compute_capability: tuple[int, int] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks_active: int | None = None
    power_limit_watts: float | None = None  # the enforced one
    minor: int | None = None  # of its device file: 3 for /dev/nvidia3
    # Who computed on it before this run's ranks started: "process 4711 (python3), 2.1 GiB".
    processes: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """The place of this GPU's values in measurements."""
        return place.gpu(self.index)

    @property
    def identity(self) -> str:
        """How an error names this GPU: what a technician needs to find it in the machine."""
        serial = f"serial {self.serial}" if self.serial else "no serial"
        return f"GPU {self.index} {self.name}, {serial}, {self.pci_bus_id}, {self.uuid}"


@dataclass(frozen=True)
class GpuTopology:
    """The GPUs a run uses, the links between them and the software above them.

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

    def first(self, count: int) -> GpuTopology:
        """The same machine with only its first `count` GPUs."""
        links = tuple(row[:count] for row in self.links[:count])
        return replace(self, gpus=self.gpus[:count], links=links)

    def identity(self, where: Where) -> str:
        """What stands behind a place: the identity of every GPU in it."""
        by_place = {gpu.place: gpu.identity for gpu in self.gpus}
        return " and ".join(by_place.get(part, str(part)) for part in where.parts)

    def kind(self, where: Where) -> tuple[str, ...]:
        """What a place has to be compared with: GPUs of its model; pairs of such GPUs with its kind of link.

        The number of NVLinks is not part of it: a pair that has lost links stands beside those that have not.
        """
        positions = {gpu.place: position for position, gpu in enumerate(self.gpus)}
        found = [positions[part] for part in where.parts if part in positions]
        models = sorted(self.gpus[position].name for position in found)
        link = self.links[found[0]][found[1]].rstrip("0123456789") if len(found) == 2 else ""
        return (*models, link)

    def __str__(self) -> str:
        """The link matrix as `nvidia-smi topo -m` prints it; without GPUs, why there are none."""
        if not self.gpus:
            return f"no GPU: {self.absent or 'nobody recorded why'}"
        names = [f"GPU{gpu.index}" for gpu in self.gpus]
        rows = [["", *names], *([name, *row] for name, row in zip(names, self.links, strict=True))]
        return "\n".join("\t".join(row) for row in rows)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GpuTopology:
        """The inverse of `dataclasses.asdict` after a way through JSON, which knows no tuples.

        Of a GPU, what another version has recorded and this one does not know is left out.
        """
        known = {field.name for field in fields(Gpu)}
        gpus = tuple(
            Gpu(
                **{
                    **{name: value for name, value in gpu.items() if name in known},
                    "compute_capability": _pair(gpu["compute_capability"]),
                    "processes": tuple(gpu.get("processes", ())),
                }
            )
            for gpu in data["gpus"]
        )
        links = tuple(tuple(row) for row in data["links"])
        if [len(row) for row in links] != [len(gpus)] * len(gpus):
            raise ValueError(f"the links of {len(gpus)} GPUs are no table of {len(gpus)} rows and columns")
        return cls(**{**data, "gpus": gpus, "links": links, "problems": tuple(data["problems"])})


def _pair(value: list[int] | None) -> tuple[int, int] | None:
    return (value[0], value[1]) if value else None
