"""Cables and transceivers of the network ports, as mlxlink (NVIDIA's MFT, or mstlink of mstflint) describes them."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.network_ports import NVIDIA, VIRTUAL_FUNCTIONS
from pytest_gpufleet.machine.tools import Absent, HostFact, Unreadable, unreadable_here
from pytest_gpufleet.model.fault import Fault, node_fault

# What a module measures of itself, with its own limits: "61 [-10..80]", by lane "3.583,3.253 [-9.914..6.999]".
READINGS = {
    "temperature_c": ("Temperature [C]", "temperature", "C"),
    "voltage_mv": ("Voltage [mV]", "voltage", "mV"),
    "bias_ma": ("Bias Current [mA]", "bias current", "mA"),
    "rx_power_dbm": ("Rx Power Current [dBm]", "received power", "dBm"),
    "tx_power_dbm": ("Tx Power Current [dBm]", "sent power", "dBm"),
}
# Those that mean that a module or its firmware does not work, or that a lane has no light.
FLAGS = ("Module FW Fault", "DataPath FW Fault", "Tx Fault [per lane]", "Rx LOS [per lane]", "Tx LOS [per lane]")
COUNTERS = {
    "minutes": "Time Since Last Clear [Min]", "symbol_ber": "Symbol BER", "effective_ber": "Effective Physical BER",
    "link_downs": "Link Down Counter",
}  # fmt: skip

# The limits of bit error rates are those from which NVIDIA calls a link faulty (InfiniBand Cluster Bring-up Procedure,
# "UFM Telemetry", link monitoring key indicators): after error correction 1e-11 where lost packets are sent again by
# the link (FEC with PLR, the default for short cables) and 1e-14 elsewhere, of symbols 1e-14. They hold once a link was
# up for 125 minutes, says the same page. What NVIDIA only warns of, from half of that on, is no fault here.
LEAST_MINUTES = 125
EFFECTIVE_BER, EFFECTIVE_BER_PLR, SYMBOL_BER = 1e-14, 1e-11, 1e-14
# The same page: a port that went down at least twice within a day needs a look.
LINK_DOWNS_A_DAY, MINUTES_A_DAY = 2, 1440


class Reading(msgspec.Struct, frozen=True):
    """By lane, with the least and the most that the module allows itself."""

    values: tuple[float, ...]
    least: float
    most: float


class Optics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of an active port. `readings`: by the names of READINGS, none of copper; counters since they were cleared
    (`minutes` ago); `able`: Gbit/s that board and cable can both do; `width`: lanes in use; `silent`: why unread."""

    port: str
    cable: str | None = None
    fec: str | None = None
    readings: Mapping[str, Reading] = {}
    minutes: float | None = None
    effective_ber: float | None = None
    symbol_ber: float | None = None
    link_downs: float | None = None
    flags: tuple[str, ...] = ()
    able: float | None = None
    width: int = 0
    silent: str = ""

    def __str__(self) -> str:
        return f"{self.port} ({self.cable})" if self.cable else self.port


def read(root: Path = Path("/"), run: tools.RunTool = tools.output) -> list[Optics]:
    """Raises Absent where no NVIDIA adapter has an active port, Unreadable where none can be read."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/1"))
    of_nvidia = [port for port in ports if tools.text(port / "../../device/vendor") == NVIDIA]
    own = [port for port in of_nvidia if tools.text(port / "../../hca_type") not in VIRTUAL_FUNCTIONS]  # with a cable
    if not (names := [f"{port.parts[-3]}/1" for port in own if "ACTIVE" in (tools.text(port / "state") or "")]):
        raise Absent("no NVIDIA network adapter has an active port")
    try:
        return tools.asked(names, partial(_described, run), lambda name, why: Optics(name, silent=why))
    except Unreadable as why:
        raise why if why.remedy else unreadable_here(root, why.why) from None


def _described(run: tools.RunTool, port: str, again: bool = True) -> Optics:
    document = _document(run, port.partition("/")[0])
    module, link, counters, supported = (
        document.get(section) or {}
        for section in ("Module Info", "Operational Info", "Physical Counters and BER Info", "Supported Info")
    )
    readings = {name: _reading(module.get(key)) for name, (key, _, _) in READINGS.items()}
    width = int(_number(str(link.get("Width")).rstrip("x")) or 0)
    speeds = [max((_gigabits(speed, width) for speed in _lanes(each)), default=0.0) for each in supported.values()]
    counts: dict[str, Any] = {name: _number(counters.get(key)) for name, key in COUNTERS.items()}
    raised = {flag: [each not in ("0", "N/A") for each in _lanes(module.get(flag, "0"))] for flag in FLAGS}
    flags = tuple(flag for flag, lanes in raised.items() if sum(lanes) > _dark(lanes, width))
    if flags and again:  # a module keeps a flag until it is read
        return _described(run, port, again=False)
    known, able = {name: each for name, each in readings.items() if each}, min(speeds, default=0.0) or None
    return Optics(port, module.get("Cable Type"), link.get("FEC"), known, flags=flags, able=able, width=width, **counts)


def _dark(lanes: Sequence[object], width: int) -> int:
    """How many lanes of a module the link does not use, as where a cable splits one port into two of half the rate."""
    return max(0, len(lanes) - width) if width else 0


def _document(run: tools.RunTool, device: str) -> Mapping[str, Any]:
    """What mlxlink prints of a device, by sections. It also says in the document whether it could."""
    program, arguments = "mlxlink", ("-d", device, "-m", "-c", "--json")
    try:
        try:
            text = run(program, *arguments)
        except Unreadable as why:
            if "not installed" not in str(why):
                raise
            text = run(program := "mstlink", *arguments)
        document = json.loads(text)
        if (status := document.get("status") or {}).get("code"):
            raise Unreadable(f"{program} failed: {status.get('message')}")
        return document["result"]["output"]  # type: ignore[no-any-return]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreadable(f"{program} of this version writes no JSON") from None


def _lanes(value: Any) -> list[str]:
    """By lane, in both forms that there are: {"values": ["0", "0"]} and "0,0"."""
    values = value.get("values", ()) if isinstance(value, Mapping) else str(value).split(",")
    return [str(each).strip() for each in values]


def _gigabits(speed: str, width: int) -> float:
    """ "400G_4X" of Ethernet, "NDR" of InfiniBand (mlxlink_maps.cpp of Mellanox/mstflint), which says no lanes: of a
    link on two nobody knows whether its board has more, as those of HDR100 and NDR200 have not."""
    if found := re.fullmatch(r"(\d+)G(_\dX)?", speed):
        return float(found[1])
    return {"EDR": 100.0, "HDR": 200.0, "NDR": 400.0, "XDR": 800.0}.get(speed, 0.0) if width != 2 else 0.0


def _reading(text: Any) -> Reading | None:
    """None where the module does not measure it, as copper does not ("N/A"), or has no limits for it ([0..0])."""
    if (parts := re.fullmatch(r"(.*?) *\[(-?[\d.]+)\.\.(-?[\d.]+)\]", str(text))) is None:
        return None
    values = tuple(value for value in map(_number, _lanes(parts[1])) if value is not None)
    least, most = float(parts[2]), float(parts[3])
    return Reading(values, least, most) if values and least < most else None


def _number(text: Any) -> float | None:
    with suppress(TypeError, ValueError):
        return float(text)
    return None


OPTICS = HostFact("optics", list[Optics], read, subject="optics", on_request=True)


def module_faults(ports: Iterable[Optics]) -> Iterator[Fault]:
    for port in ports:
        yield from (node_fault("transceiver_fault", f"{port}: its module reports {flag}") for flag in port.flags)
        for name, reading in port.readings.items():
            _, what, unit = READINGS[name]
            limits = f"its own limits are {reading.least:g} to {reading.most:g}"
            bad = [(n, value) for n, value in enumerate(reading.values) if not reading.least <= value <= reading.most]
            for lane, value in bad if len(bad) > _dark(reading.values, port.width) else ():
                of = f" of lane {lane}" if len(reading.values) > 1 else ""
                yield node_fault("transceiver_fault", f"{port}: {what}{of} is {value:g} {unit}, {limits}")


def links_with_errors(ports: Iterable[Optics]) -> Iterator[Fault]:
    """Links on which more bits are wrong than a healthy cable lets through, or that go down again and again."""
    for port in ports:
        downs, minutes = port.link_downs, port.minutes or 0.0
        effective = EFFECTIVE_BER_PLR if "PLR" in (port.fec or "") else EFFECTIVE_BER
        for rate, what, most in (
            (port.effective_ber, "bit error rate after correction", effective),
            (port.symbol_ber, "symbol error rate", SYMBOL_BER),
        ):
            if rate is not None and rate >= most and minutes >= LEAST_MINUTES:
                text = f"{what} is {rate:g} over {minutes:,.0f} minutes, a healthy link stays below {most:g}"
                yield node_fault("network_link_errors", f"{port}: {text}")
        if port.minutes is not None and (downs or 0) >= LINK_DOWNS_A_DAY * max(1.0, minutes / MINUTES_A_DAY):
            text = f"its link went down {downs:.0f} times in {minutes:,.0f} minutes"
            yield node_fault("network_link_flaps", f"{port}: {text}")
