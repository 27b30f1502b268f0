"""InfiniBand and RoCE ports as the system describes them: state, PCIe link, and the errors that they count."""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.host_fact import HostFact

ADAPTERS = Path("/sys/class/infiniband")
INTERFACES = Path("/sys/class/net")
# Of the standard's port counters those that a bad cable, transceiver or adapter makes grow.
ERRORS = (
    "link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)  # fmt: skip
# What also grows where nothing is broken, by traffic that meets: told, and not judged. The second are RoCE's (the
# kernel's mlx5 and bnxt_re drivers): what a lossless network never needs much of.
TRAFFIC = ("port_xmit_wait", "port_xmit_discards")
ROCE = (
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans",
    "np_cnp_sent", "rp_cnp_handled", "rx_icrc_encapsulated",
)  # fmt: skip
NOT_COUNTED = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP)


def read() -> list[dict[str, Any]]:
    """Of each port its `port` ("mlx5_0/1"), `state` ("unknown" where the adapter does not answer) and `rate`; of what
    kind it is: `link_layer`, `adapter`, and by which `function` of the PCI device the ports of one adapter differ;
    `pcie`: lanes and GT/s of its link, 0 for what the system does not tell; `errors`: counts by name, None for one that
    cannot be read; `traffic`: likewise, of what is no error by itself; `firmware` and `guid` of the adapter;
    `carrier_changes` of its network interface."""
    return [
        {
            "port": f"{port.parts[-3]}/{port.name}",
            "state": tools.text(port / "state") or "unknown",
            "rate": tools.text(port / "rate"),
            "link_layer": tools.text(port / "link_layer"),
            "adapter": tools.text(port.parents[1] / "hca_type"),
            "firmware": tools.text(port.parents[1] / "fw_ver"),
            "guid": tools.text(port.parents[1] / "node_guid"),
            "function": (device := (port.parents[1] / "device").resolve()).name.rpartition(".")[2],
            "pcie": _pcie(device),
            "errors": _counts(port / "counters", ERRORS),
            "traffic": {**_counts(port / "counters", TRAFFIC), **_counts(port / "hw_counters", ROCE)},
            "carrier_changes": _carrier_changes(device),
        }
        for port in sorted(ADAPTERS.glob("*/ports/*"))
    ]


def carried(port: str) -> tuple[int, int] | None:
    """Bytes that a port ("mlx5_0/1") has sent and received, by its own counters of words of 4 bytes, or a network
    interface ("lo"); None where nobody tells."""
    device, slash, number = port.partition("/")
    counters = ADAPTERS / device / "ports" / number / "counters" if slash else INTERFACES / port / "statistics"
    names, size = (("port_xmit_data", "port_rcv_data"), 4) if slash else (("tx_bytes", "rx_bytes"), 1)
    with suppress(OSError, ValueError):
        sent, received = (size * int((counters / name).read_text()) for name in names)
        return sent, received
    return None


def nearest(device: Path) -> list[str]:
    """The adapters that share most of their way over PCIe with this device: "mlx5_3". None if none shares any, or if
    that is true of all of several, as where a virtual machine shows no switches."""
    shared = {each.name: _shared(device, (each / "device").resolve()) for each in sorted(ADAPTERS.glob("*"))}
    most = max(shared.values(), default=0)
    near = [name for name, steps in shared.items() if steps == most]
    return near if most and (len(near) < len(shared) or len(near) == 1) else []


def _shared(one: Path, other: Path) -> int:
    """How many steps from the root of a PCIe hierarchy ("pci0000:15") on two devices have in common."""
    common = os.path.commonpath([one, other])
    return sum(part.startswith("pci") or tools.PCI_STEP.fullmatch(part) is not None for part in Path(common).parts)


def _pcie(device: Path) -> dict[str, float]:
    """As the link runs, and as the adapter and the port above it can. A virtual function does not tell."""
    return {
        "lanes": tools.lanes(device / "current_link_width") or 0.0,
        "lanes_able": tools.lanes(device / "max_link_width") or 0.0,
        "lanes_of_port": tools.lanes(device.parent / "max_link_width") or 0.0,
        "speed": tools.number(device / "current_link_speed") or 0.0,
        "speed_able": tools.number(device / "max_link_speed") or 0.0,
        "speed_of_port": tools.number(device.parent / "max_link_speed") or 0.0,
    }


def _carrier_changes(device: Path) -> int | None:
    """How often the link of an adapter's interfaces came or went since the system started."""
    changes = [tools.text(path) for path in device.glob("net/*/carrier_changes")]
    return sum(int(each) for each in changes if each and each.isdigit()) if changes else None


def _counts(counters: Path, names: tuple[str, ...]) -> dict[str, int | None]:
    """What the adapter does not count, or a virtual one may not tell, is left out."""
    counts: dict[str, int | None] = {}
    for name in names:
        try:
            counts[name] = int((counters / name).read_text())
        except (OSError, ValueError) as error:
            if not (isinstance(error, OSError) and error.errno in NOT_COUNTED):
                counts[name] = None
    return counts


NETWORK_PORTS = HostFact("network_ports", list[dict[str, Any]], read)
