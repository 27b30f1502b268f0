"""What counts as healthy of network ports: their PCIe links, the errors that they count, cables and transceivers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.machine import Port, active, adapters_near, gigabits, slot_gigabits
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import THIS_NODE

# How many errors of a port a day are still healthy: the thresholds of ibcheckerrs (infiniband-diags), which are for all
# since the counters were cleared. A link that goes down while a run lasts is one too many.
ERRORS_A_DAY = {
    "link_downed": 0, "link_error_recovery": 10, "symbol_error": 10, "port_rcv_errors": 10,
    "local_link_integrity_errors": 10, "excessive_buffer_overrun_errors": 10,
}  # fmt: skip


def unlike_others(ports: Iterable[Port]) -> list[Fault]:
    """Ports that are down, or slower than usual, where others of their kind are up: the same adapter model, link layer
    and place on the adapter."""
    wrong = []
    for kind in _kinds(ports):
        rates = [port["rate"] for port in active(kind)]
        usual = max(rates, key=rates.count, default=None)
        wrong += [port for port in kind if rates and (port["rate"] != usual or not active([port]))]
    return [_not_up(port) for port in wrong]


def kinds_down(ports: Sequence[Port], gpus: Sequence[Gpu]) -> list[Fault]:
    """Ports of a kind of which none is up and which GPUs need: no other is up, or none next to the GPUs; where nobody
    knows which these are, there is one for each GPU, and fewer others are up. Whatever else is down, nobody may have
    plugged in."""
    up, near = active(ports), adapters_near(gpus) if len(gpus) > 1 else set()
    cut_off = not any(_adapter(port) in near for port in up)
    needed = [
        kind
        for kind in _kinds(ports)
        if not active(kind)
        and (
            not up
            or (cut_off and any(_adapter(port) in near for port in kind) if near else len(kind) >= len(gpus) > len(up))
        )
    ]
    return [_not_up(port) for kind in needed for port in kind]


def _kinds(ports: Iterable[Port]) -> Iterable[list[Port]]:
    of_kind = ("adapter", "link_layer", "function")
    return grouped((tuple(map(port.get, of_kind)), port) for port in ports).values()


def _adapter(port: Port) -> str:
    return str(port["port"]).partition("/")[0]


def _not_up(port: Port) -> Fault:
    return Fault("network_port_unlike_others", (THIS_NODE,), f"{port['port']} is {port['state']} at {port['rate']}")


def ports_behind_slow_pcie(ports: Iterable[Port]) -> list[Fault]:
    """Active ports whose PCIe link runs with less than adapter and slot can, or with less than the port itself in a
    slot that is the wrong one: with fewer lanes than the adapter has, or slower than that of another port. Where all
    slots are of a generation that is too slow for these ports, the machine was built so."""
    used = active(ports)
    fastest = max((slot_gigabits(port) for port in used), default=0.0)
    return [_fault("nic_pcie_slow", port, what) for port in used for what in _slow(port, fastest)]


def _slow(port: Port, fastest: float) -> list[str]:
    link = port.get("pcie") or {}
    lanes, speed = link.get("lanes", 0), link.get("speed", 0)
    if not lanes or not speed:
        return []
    can = min(filter(None, (link["lanes_able"], link["lanes_of_port"])), default=lanes)
    fast = min(filter(None, (link["speed_able"], link["speed_of_port"])), default=speed)
    told = f"its PCIe link runs at {speed:g} GT/s on {lanes:g} lanes"
    if lanes < can or speed < fast:
        return [f"{told}, adapter and slot can {fast:g} GT/s on {can:g}"]
    rate, wrong_slot = gigabits(port), lanes < link["lanes_able"] or slot_gigabits(port) < fastest
    return [f"{told}, too little for its {rate:g} Gbit/s"] if slot_gigabits(port) < rate and wrong_slot else []


def port_errors(before: Iterable[Port], now: Iterable[Port], seconds: float) -> list[Fault]:
    """Ports that were active and have counted more errors than healthy ones, between two readings so many seconds
    apart; also those that are gone, and counters that cannot be read."""
    later = {port["port"]: port for port in now}
    days = max(1.0, seconds / 86_400)
    faults = []
    for port in active(before):
        if port["port"] not in later:
            faults.append(_fault("network_port_errors", port, "it is gone"))
            continue
        counts, earlier = _counted(later[port["port"]]), _counted(port)
        for name, then in earlier.items():
            count, allowed = counts.get(name), ERRORS_A_DAY.get(name, 0) * days
            if count is None:
                faults.append(_fault("network_port_errors", port, f"{name} cannot be read"))
            elif then is not None and count - then > allowed:
                told = f"{name} grew by {count - then} in {seconds:.0f} s, a healthy port has at most {allowed:.0f}"
                faults.append(_fault("network_port_errors", port, told))
    return faults


def _counted(port: Port) -> Mapping[str, int | None]:
    """Its errors. That its link came or went is one, also where the adapter counts none."""
    changes = port.get("carrier_changes")
    return {**(port.get("errors") or {}), **({} if changes is None else {"carrier_changes": changes})}


def port_traffic(before: Iterable[Port], now: Iterable[Port]) -> dict[str, int]:
    """What grew on active ports between two readings and is no error by itself, by name, over all of them."""
    later = {port["port"]: port.get("traffic") or {} for port in now}
    grown: dict[str, int] = {}
    for port in active(before):
        for name, then in (port.get("traffic") or {}).items():
            count = later.get(port["port"], {}).get(name)
            if count is not None and then is not None:
                grown[name] = grown.get(name, 0) + count - then
    return grown


def _fault(code: str, port: Port, what: str) -> Fault:
    cable = f" ({port['cable']})" if port.get("cable") else ""
    return Fault(code, (THIS_NODE,), f"{port['port']}{cable}: {what}")


SLOW = 0.9  # of the fastest beside it: the tolerance of the metric


def adapters_that_fail(ports: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """Ports through which nothing could be sent: each with its `port` ("mlx5_0/1"), and `why` if it could not."""
    return [_fault("network_adapter_fails", port, port["why"]) for port in ports if "why" in port]


def slow_adapters(measurement: Measurement) -> list[Fault]:
    """Those that are slower than the fastest beside them, by their names, which stand in the measurement's details; all
    of them where they are equally slow, or there is only one."""
    values = measurement.values
    best = max(values.values(), default=0.0)
    faults = []
    for place, value in ({place: value for place, value in values.items() if value < SLOW * best} or values).items():
        told = f"{measurement.details[str(place)]} sends {value:.3g} GB/s to itself, the fastest {best:.3g}"
        faults.append(Fault("network_adapter_slow", (place,), told))
    return faults


# Cables and transceivers: the limits of bit error rates are those from which NVIDIA calls a link faulty (InfiniBand
# Cluster Bring-up Procedure, "UFM Telemetry", link monitoring key indicators): after error correction 1e-11 where lost
# packets are sent again by the link (FEC with PLR, the default for short cables) and 1e-14 elsewhere, of symbols 1e-14.
# They hold once a link was up for 125 minutes, says the same page. What NVIDIA only warns of, from half of that on, is
# no fault here.

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


def module_faults(ports: Iterable[Port]) -> list[Fault]:
    """Modules that report a fault, or measure what is outside their own limits. Ports are as the host's fact `optics`
    has them."""
    return [_fault("transceiver_fault", port, what) for port in _read(ports) for what in _of_module(port)]


def links_with_errors(ports: Iterable[Port]) -> list[Fault]:
    """Links on which more bits are wrong than a healthy cable lets through, or that go down again and again."""
    faults = [_fault("network_link_errors", port, what) for port in _read(ports) for what in _wrong_bits(port)]
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


def _wrong_bits(port: Port) -> Iterator[str]:
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
