"""A machine at one moment: every fact of its GPUs and its host, to be checked now; and what its network ports carry."""

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.log_catalogue import Logged


@dataclass(frozen=True)
class Machine:
    """Its GPUs, in the order of the run, and its host. `logged`: the errors that the kernel's log held. `present`: the
    PCI bus ids of all its GPUs, also of those hidden from the run; "" for one that does not answer. `node`: its number
    in the run."""

    gpus: tuple[Gpu, ...]
    host: Mapping[str, Any] = field(default_factory=dict)
    taken: str = ""
    logged: Logged = field(default_factory=Logged)
    present: tuple[str, ...] = ()
    node: int = 0
    _read_at: float = field(default_factory=time.monotonic, compare=False)

    @property
    def seconds_ago(self) -> float:
        """How long ago it was read, whatever was done to the clock since."""
        return time.monotonic() - self._read_at


class Order(msgspec.Struct, frozen=True):
    """The file that was given with --fleet-order: its name, its SHA-256, and what it says, as TOML has it."""

    file: str
    sha256: str
    content: Mapping[str, Any]


# InfiniBand, RoCE and EFA ports as machine/network_ports.py reads them.
Port = Mapping[str, Any]
# Of the bits on a PCIe link those that are payload, from generation 3 on; and of these what messages leave beside the
# headers of packets of 256 bytes.
PAYLOAD, MESSAGES = 128 / 130, 0.88


def active(ports: Iterable[Port]) -> list[Port]:
    return [port for port in ports if "ACTIVE" in (port["state"] or "")]


def gigabits(port: Port) -> float:
    """What it carries in a second: of "400 Gb/sec (4X NDR)"; 0 if it does not tell. Of bonded ports the kernel tells
    the rate of one, which is what one connection of NCCL uses (NVIDIA/nccl#1015)."""
    found = re.match(r"[0-9.]+", port.get("rate") or "")
    return float(found[0]) if found else 0.0


def slot_gigabits(port: Port) -> float:
    """What its PCIe link carries in a second, in one direction; 0 if nobody tells."""
    link = port.get("pcie") or {}
    return float(link.get("lanes", 0) * link.get("speed", 0) * PAYLOAD)


def fastest_ports(ports: Iterable[Port]) -> list[Port]:
    """The active InfiniBand and RoCE ports at the highest rate: slower ones are for storage and management."""
    rdma = [port for port in active(ports) if port.get("link_layer") in ("InfiniBand", "Ethernet") and gigabits(port)]
    most = max(map(gigabits, rdma), default=0)
    return [port for port in rdma if gigabits(port) == most]


def adapters_near(gpus: Sequence[Gpu]) -> set[str]:
    """The adapters next to these GPUs; none where that is not known of each of them, as in many virtual machines."""
    near = [gpu.get("network_adapters") or () for gpu in gpus]
    return set[str]().union(*near) if all(near) else set()


def gigabits_for_each_gpu(gpus: Sequence[Gpu], host: Mapping[str, Any]) -> float:
    """Gbit/s, one way, that each GPU of a machine has of its network if all of them send; 0 if no port tells.

    Several ports of a GPU are added up, and GPUs share what are fewer. Ports for storage and management are others than
    those of the GPUs: they are not next to a GPU, or of another adapter, link layer or rate, and then those count by
    which a GPU has most. Where the PCIe links of all ports, or those of older GPUs, carry less, that counts."""
    ports, devices = host.get("network_ports"), host.get("pci_devices")
    used = [port for port in active(ports if isinstance(ports, list | tuple) else ()) if gigabits(port)]
    near, present = adapters_near(gpus), len(gpus)
    if next_to := [port for port in used if port["port"].partition("/")[0] in near]:
        used = next_to
    elif isinstance(devices, Mapping):  # of several ports for each, some may be those of GPUs that take no part
        present = max(present, sum(each["kind"] == "gpu" for each in devices.values()))
    kinds = grouped(((port.get("adapter"), port.get("link_layer"), gigabits(port)), port) for port in used)
    each = max((_of_kind(ports, len(gpus), present) for ports in kinds.values()), default=0.0) if gpus else 0.0
    rate = float(f"{min([each, *filter(None, map(_of_gpu, gpus))]):.4g}")
    return int(rate) if rate.is_integer() else rate


def _of_kind(ports: Sequence[Port], gpus: int, present: int) -> float:
    """Of ports at one rate. Those of one adapter, which are functions of one PCI device, share its slot."""
    functions = len({port.get("function") for port in ports})
    slot = MESSAGES * max(map(slot_gigabits, ports)) / functions
    rate = min(gigabits(ports[0]), slot or math.inf)
    return rate * (len(ports) // present or min(1, len(ports) / gpus))


def _of_gpu(gpu: Gpu) -> float:
    """What the PCIe link of an older GPU carries at best; 0 if nobody tells. From PCIe 5 on GPUs may stand behind their
    adapters, and tell of another link."""
    generation, lanes = gpu.get("pcie_generation_max") or 0, gpu.get("pcie_width_max") or 0
    return MESSAGES * PAYLOAD * lanes * 2.0**generation if generation in (3, 4) and lanes >= 8 else 0.0
