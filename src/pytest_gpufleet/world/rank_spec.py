"""What a rank is: told to its engine and to its process before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pytest_gpufleet.model import place
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.place import Place


def nothing() -> None:
    pass


@dataclass(frozen=True)
class RankSpec:
    """Rank `index` of `size`, which is rank `local_index` of the `local_size` on its node. `device` is a torch device
    of that node ("cuda:3", "cpu"), `gpu` the GPU behind it; None in a rehearsal. `prepare` is called on the
    rank when it starts. `host`: the name of its node, where there are several. `environment`: variables that it finds
    whatever else there is. `packages`: those that it finds past sys.path, as loaded_packages tells them, beside those
    of the process that starts it."""

    index: int
    size: int
    node: int
    local_index: int
    local_size: int
    device: str
    gpu: Gpu | None
    cpu_threads: int | None = None
    prepare: Callable[[], None] = nothing
    host: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, tuple[str, list[str]]] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        return place.gpu(self.gpu.index, self.node) if self.gpu else Place(self.node, "cpu", self.local_index)

    @property
    def name(self) -> str:
        where = self.gpu.identity if self.gpu else "CPU"
        return f"rank {self.index} of {self.size}, {self.host and f'{self.host} '}{where}"
