"""Cables and transceivers of the network ports, as mlxlink (NVIDIA's MFT, or mstlink of mstflint) tells of them."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.tools import Absent, NoAnswer, Unreadable

NVIDIA = "0x15b3"  # Mellanox: the vendor of a PCI device
PROGRAMS = ("mlxlink", "mstlink")
# What a module measures of itself, with its own limits: "61 [-10..80]", by lane "3.583,3.253 [-9.914..6.999]".
READINGS = {
    "temperature_c": "Temperature [C]",
    "voltage_mv": "Voltage [mV]",
    "bias_ma": "Bias Current [mA]",
    "rx_power_dbm": "Rx Power Current [dBm]",
    "tx_power_dbm": "Tx Power Current [dBm]",
}
COUNTERS = {
    "minutes": "Time Since Last Clear [Min]",
    "raw_ber": "Raw Physical BER",
    "effective_ber": "Effective Physical BER",
    "symbol_ber": "Symbol BER",
    "link_downs": "Link Down Counter",
}
# Those that mean that a module or its firmware does not work, or that a lane has no light.
FLAGS = ("Module FW Fault", "DataPath FW Fault", "Tx Fault [per lane]", "Rx LOS [per lane]", "Tx LOS [per lane]")
RANGE = re.compile(r"(.*?) *\[(-?[\d.]+)\.\.(-?[\d.]+)\]")

Section = Mapping[str, Any]


def read(root: Path = Path("/"), run: tools.RunTool = tools.output) -> list[dict[str, Any]]:
    """Of each active port of an NVIDIA adapter: its `port` ("mlx5_0/1"), `cable` (its type), `fec`; `readings` by the
    names of READINGS, each with `values` by lane, `least` and `most` as the module has them (none of a copper cable);
    the COUNTERS since they were cleared (`minutes` ago), None for one that is not told; `flags` that are raised, of
    FLAGS. Of a port that mlxlink cannot read only `port`, and `why`, or `silent` where it did not end in time.

    Absent where there is no such port, Unreadable where none can be read.
    """
    ports = [port for port in sorted((root / "sys/class/infiniband").glob("*/ports/1")) if _active(port)]
    if not ports:
        raise Absent("no NVIDIA network adapter has an active port")
    found = [_port(port.parts[-3], run) for port in ports]
    if all("why" in port for port in found):
        raise Unreadable(found[0]["why"], "the state of cables and transceivers needs MFT or mstflint, and root")
    return found


def _active(port: Path) -> bool:
    return tools.text(port / "../../device/vendor") == NVIDIA and "ACTIVE" in (tools.text(port / "state") or "")


def _port(device: str, run: tools.RunTool) -> dict[str, Any]:
    try:
        told = _told(device, run)
        if told["flags"]:
            told = _told(device, run)  # a module keeps a flag until it is read: what is over is no fault
    except NoAnswer as why:
        return {"port": f"{device}/1", "silent": f"{device}/1: {why}"}
    except Unreadable as why:
        return {"port": f"{device}/1", "why": str(why)}
    return {"port": f"{device}/1", **told}


def _told(device: str, run: tools.RunTool) -> dict[str, Any]:
    document = _document(device, run)
    module, link, counters = (
        document.get(section) or {} for section in ("Module Info", "Operational Info", "Physical Counters and BER Info")
    )
    readings = {name: _reading(module.get(key)) for name, key in READINGS.items()}
    return {
        "cable": module.get("Cable Type"),
        "fec": link.get("FEC"),
        "readings": {name: reading for name, reading in readings.items() if reading},
        **{name: _number(counters.get(key)) for name, key in COUNTERS.items()},
        "flags": [flag for flag in FLAGS if any(value not in ("0", "N/A") for value in _lanes(module.get(flag, "0")))],
    }


def _document(device: str, run: tools.RunTool) -> Section:
    """What mlxlink tells of a device, by sections. It also says in the document whether it could."""
    why = Unreadable("nothing was asked")
    for program in PROGRAMS:
        try:
            document = json.loads(run(program, "-d", device, "-m", "-c", "--json"))
            if (status := document.get("status") or {}).get("code"):
                raise Unreadable(f"{program} failed: {status.get('message')}")
            return document["result"]["output"]  # type: ignore[no-any-return]
        except Unreadable as error:
            why = error
            if "not installed" not in str(error):
                break
        except (ValueError, KeyError, TypeError, AttributeError):
            why = Unreadable(f"{program} of this version writes no JSON")
            break
    raise why


def _lanes(value: Any) -> list[str]:
    """By lane, in both forms that there are: {"values": ["0", "0"]} and "0,0"."""
    values = value.get("values", ()) if isinstance(value, Mapping) else str(value).split(",")
    return [str(each).strip() for each in values]


def _reading(text: Any) -> dict[str, Any] | None:
    """None where the module does not measure it, as copper does not ("N/A"), or has no limits for it ([0..0])."""
    parts = RANGE.fullmatch(str(text))
    if parts is None:
        return None
    values, least, most = [_number(value) for value in _lanes(parts[1])], float(parts[2]), float(parts[3])
    told = [value for value in values if value is not None]
    return {"values": told, "least": least, "most": most} if told and least < most else None


def _number(text: Any) -> float | None:
    with suppress(TypeError, ValueError):
        return float(text)
    return None


OPTICS = HostFact("optics", list[dict[str, Any]], read, subject="optics", on_request=True)
