"""What counts as healthy of cables and transceivers: within the module's own limits, few errors, and a link that stays.

The limits of bit error rates are those from which NVIDIA calls a link faulty (InfiniBand Cluster Bring-up Procedure,
"UFM Telemetry", link monitoring key indicators): after error correction 1e-11 where lost packets are sent again by the
link (FEC with PLR, the default for short cables) and 1e-14 elsewhere, of symbols 1e-14. They hold once a link was up
for 125 minutes, says the same page. What NVIDIA only warns of, from half of that on, is no fault here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import THIS_NODE

LEAST_MINUTES = 125
EFFECTIVE_BER, EFFECTIVE_BER_PLR, SYMBOL_BER = 1e-14, 1e-11, 1e-14
# The same page: a port that went down at least twice within a day needs a look.
LINK_DOWNS_A_DAY = 2
MINUTES_A_DAY = 1440
UNITS = {
    "temperature_c": ("temperature", "C"),
    "voltage_mv": ("voltage", "mV"),
    "bias_ma": ("bias current", "mA"),
    "rx_power_dbm": ("received power", "dBm"),
    "tx_power_dbm": ("sent power", "dBm"),
}

Port = Mapping[str, Any]


def module_faults(ports: Iterable[Port]) -> list[Fault]:
    """Modules that report a fault, or measure what is outside their own limits. Ports are as the host's fact `optics`
    has them."""
    return [_fault("network_module_fault", port, what) for port in _read(ports) for what in _of_module(port)]


def links_with_errors(ports: Iterable[Port]) -> list[Fault]:
    """Links on which more bits are wrong than a healthy cable lets through, or that go down again and again."""
    faults = [_fault("network_link_errors", port, what) for port in _read(ports) for what in _errors(port)]
    return faults + [_fault("network_link_flaps", port, what) for port in _read(ports) for what in _flaps(port)]


def _read(ports: Iterable[Port]) -> list[Port]:
    return [port for port in ports if not {"why", "silent"} & port.keys()]


def _of_module(port: Port) -> Iterator[str]:
    yield from (f"its module reports {flag}" for flag in port["flags"])
    for name, reading in port["readings"].items():
        what, unit = UNITS[name]
        for lane, value in enumerate(reading["values"]):
            if not reading["least"] <= value <= reading["most"]:
                of = f" of lane {lane}" if len(reading["values"]) > 1 else ""
                limits = f"its own limits are {reading['least']:g} to {reading['most']:g}"
                yield f"{what}{of} is {value:g} {unit}, {limits}"


def _errors(port: Port) -> Iterator[str]:
    if (port["minutes"] or 0) < LEAST_MINUTES:
        return
    resent = "PLR" in (port["fec"] or "")
    effective = EFFECTIVE_BER_PLR if resent else EFFECTIVE_BER
    for name, what, most in (
        ("effective_ber", "bit error rate after correction", effective),
        ("symbol_ber", "symbol error rate", SYMBOL_BER),
    ):
        if (rate := port[name]) is not None and rate >= most:
            yield f"{what} is {rate:g} over {port['minutes']:,.0f} minutes, a healthy link stays below {most:g}"


def _flaps(port: Port) -> Iterator[str]:
    downs, minutes = port["link_downs"], port["minutes"]
    if downs is None or minutes is None:
        return
    days = max(1.0, minutes / MINUTES_A_DAY)
    if downs >= LINK_DOWNS_A_DAY * days:
        yield f"its link went down {downs:.0f} times in {minutes:,.0f} minutes"


def _fault(code: str, port: Port, what: str) -> Fault:
    cable = f" ({port['cable']})" if port["cable"] else ""
    return Fault(code, (THIS_NODE,), f"{port['port']}{cable}: {what}")
