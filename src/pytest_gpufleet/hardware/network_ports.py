"""InfiniBand and RoCE ports as the system describes them: state, PCIe link, and the errors that they count."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

ADAPTERS = Path("/sys/class/infiniband")
# Of the standard's port counters those that a bad cable, transceiver or adapter makes grow. What congestion makes grow
# (discards) is not among them.
ERRORS = (
    "link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)  # fmt: skip
NOT_COUNTED = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP)
LANES = (1, 2, 4, 8, 12, 16, 32)


def read() -> list[dict[str, Any]]:
    """Of each port its `port` ("mlx5_0/1"), `state` and `rate`; of what kind it is: `link_layer`, `adapter`, and by
    which `function` of the PCI device the ports of one adapter differ; `pcie`: lanes and GT/s of its link, 0 for what
    the system does not tell; `errors`: counts by name, None for one that cannot be read."""
    return [
        {
            "port": f"{port.parts[-3]}/{port.name}",
            "state": _text(port / "state"),
            "rate": _text(port / "rate"),
            "link_layer": _text(port / "link_layer"),
            "adapter": _text(port.parents[1] / "hca_type"),
            "function": (device := (port.parents[1] / "device").resolve()).name.rpartition(".")[2],
            "pcie": _pcie(device),
            "errors": _errors(port / "counters"),
        }
        for port in sorted(ADAPTERS.glob("*/ports/*"))
    ]


def _pcie(device: Path) -> dict[str, float]:
    """As the link runs, and as the adapter and the port above it can. A virtual function does not tell."""
    return {
        "lanes": _number(device / "current_link_width", LANES),
        "lanes_able": _number(device / "max_link_width", LANES),
        "lanes_of_port": _number(device.parent / "max_link_width", LANES),
        "speed": _number(device / "current_link_speed"),
        "speed_able": _number(device / "max_link_speed"),
        "speed_of_port": _number(device.parent / "max_link_speed"),
    }


def _number(path: Path, among: tuple[int, ...] = ()) -> float:
    """Of "16" or "32.0 GT/s PCIe"; 0 if there is none."""
    found = re.match(r"\d+(\.\d+)?", _text(path) or "")
    number = float(found[0]) if found else 0.0
    return number if not among or number in among else 0.0


def _errors(counters: Path) -> dict[str, int | None]:
    """What the adapter does not count, or a virtual one may not tell, is left out."""
    counts: dict[str, int | None] = {}
    for name in ERRORS:
        try:
            counts[name] = int((counters / name).read_text())
        except OSError as error:
            if error.errno not in NOT_COUNTED:
                counts[name] = None
        except ValueError:
            counts[name] = None
    return counts


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text().strip()
    return None
