"""What counts as healthy of network adapters that send to themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import THIS_NODE

SLOW = 0.9  # of the fastest beside it: the tolerance of the metric


def adapters_that_fail(ports: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """Ports through which nothing could be sent: each with its `port` ("mlx5_0/1"), and `why` if it could not."""
    return [
        Fault("network_adapter_fails", (THIS_NODE,), f"{port['port']}: {port['why']}")
        for port in ports
        if "why" in port
    ]


def slow_adapters(measurement: Measurement) -> list[Fault]:
    """Those that are slower than the fastest beside them, by their names, which stand in the measurement's details; all
    of them where they are equally slow, or there is only one."""
    values = measurement.values
    best = max(values.values(), default=0.0)
    slow = {place: value for place, value in values.items() if value < SLOW * best} or values
    return [
        Fault(
            "network_adapter_slow",
            (place,),
            f"{measurement.details[str(place)]} sends {value:.3g} GB/s to itself, the fastest {best:.3g}",
        )
        for place, value in slow.items()
    ]
