"""What counts as healthy: facts against what they should be, counters against what they were.

Rules after DCGM's health checks (row remapping, PCIe replay rates, clock events) and NVIDIA's XID catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from pytest_gpufleet.hardware.kernel_log import Sxid, Xid
from pytest_gpufleet.model.facts import CLOCK_EVENTS, COUNTERS, Unavailable, check_name
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.verdict.blind import require_told
from pytest_gpufleet.world.outcomes import not_applicable

# PCIe replays a minute and lane that are still healthy, by generation (DCGM).
REPLAYS = {3: 0.48, 4: 0.96, 5: 1.92, 6: 1.92}
REMAPPED_ROWS_LIMIT = 512
# Errors of one NVLink that are still healthy, by kind; of any other kind one is too many. DCGM allows CRC errors of
# flits that rate too. But a flit with a wrong CRC has to be sent again, like all that replays and recoveries count, and
# where H200 count thousands of the others, they count none of these.
NVLINK_ERRORS_A_SECOND = {"crc_data": 100}
# The clock events that must not happen under load. A software power cap (0x4) is normal there.
SLOWDOWNS = (0x8, 0x20, 0x40, 0x80)
# Of those, what is no fault of a GPU, by model. DCGM judges no clock event of a T4, a card of 70 W without a fan. Here
# only the driver's own slowdown for heat is left out: what the hardware does counts, and so does its temperature limit.
NORMAL_SLOWDOWNS = {"Tesla T4": 0x20}


def expect(gpus: Sequence[Gpu], fact: str, wanted: Any, must_exist: bool = False) -> None:
    """Assert that a fact of every GPU is `wanted`: a value, or a function of the GPU that gives it.

    The AssertionError names every GPU for which it is not, and those that do not answer. Where no GPU of this machine
    has such a thing, the test does not apply, unless it `must_exist`; where the model has it, it is not judged.
    KeyError if nothing is called `fact`, also where there is no GPU.
    """
    __tracebackhide__ = True
    if not gpus:
        check_name(fact)
    wrong = []
    missing = [gpu[fact] for gpu in gpus if isinstance(gpu[fact], Unavailable) and not gpu[fact].applicable]
    if len(missing) == len(gpus) and not must_exist:
        require_told(gpus, fact)
        not_applicable(f"{fact}: {missing[0] if missing else 'there is no GPU'}")
    for gpu in gpus:
        if isinstance(gpu[fact], Unavailable):
            wrong.append(_unreadable(gpu, fact, gpu[fact]))
        elif gpu[fact] != (right := wanted(gpu) if callable(wanted) else wanted):
            wrong.append(f"{gpu.identity}: {fact} is {gpu[fact]}, should be {right}")
    assert not wrong, "\n".join(wrong)


def recorded_errors(gpu: Gpu) -> list[str]:
    """What a GPU's counters say against it, whenever it happened; a counter that it has and does not tell, too."""
    counts: dict[str, Any] = {fact: 0 if isinstance(gpu[fact], Unavailable) else gpu[fact] for fact in COUNTERS}
    _, uncorrected, pending, failed = counts["remapped_rows"] or (0, 0, 0, 0)
    rules = (
        (counts["ecc_uncorrected_volatile"], "uncorrectable ECC errors since the driver was loaded"),
        (pending, "row remapping pending: reset the GPU"),
        (failed, "row remapping failed: replace the GPU"),
        (uncorrected if uncorrected >= REMAPPED_ROWS_LIMIT else 0, "remapped rows: replace the GPU"),
        (counts["sram_threshold_exceeded"], "SRAM error threshold exceeded: replace the GPU"),
        (counts["retired_pages_pending"], "page retirement pending: reset the GPU"),
    )
    told = [f"{gpu.identity}: {text} ({int(value)})" for value, text in rules if value]
    return told + unreadable(gpu, COUNTERS)


def unreadable(gpu: Gpu, names: Iterable[str]) -> list[str]:
    """Facts that a GPU has and does not tell, each with the reason."""
    told = {name: gpu[name] for name in names}
    return [
        _unreadable(gpu, name, why) for name, why in told.items() if isinstance(why, Unavailable) and why.applicable
    ]


def _unreadable(gpu: Gpu, fact: str, why: Unavailable) -> str:
    return f"{gpu.identity}: {fact} cannot be read ({why})"


def worsened(before: Gpu, after: Gpu, minutes: float) -> list[str]:
    """What got worse on a GPU between two readings of its counters, each with the counter, before and after."""
    problems = []
    for counter, now in after.facts.items():
        then = before[counter]
        if isinstance(now, Unavailable):
            if not isinstance(then, Unavailable):
                problems.append(f"{counter} could be read before and cannot now: {now}")
            continue
        grown = _GROWN.get(counter, _ignored)
        if not isinstance(then, Unavailable) and grown(then, now, after, minutes):
            problems.append(f"{counter} was {then}, is {now}")
    return [f"{after.identity}: {problem}" for problem in problems]


def link_errors(before: Gpu, now: Mapping[str, list[int]] | Unavailable, seconds: float) -> list[str]:
    """NVLinks with errors that must not be, between two readings of nvlink_errors so many seconds apart.

    A replay, a recovery or a flit with a wrong CRC is one too many. Links correct CRC errors in data themselves, and
    healthy ones of an H200 do so about once in ten seconds even when idle: only their rate counts (DCGM: 100 a second).
    """
    problems = []
    then = before["nvlink_errors"]
    if isinstance(then, Unavailable) or isinstance(now, Unavailable):
        return [_unreadable(before, "nvlink_errors", now if isinstance(now, Unavailable) else then)]
    for kind, counts in now.items():
        if len(counts) != len(then[kind]):
            links = f"{len(counts)} NVLinks, at the beginning on {len(then[kind])}"
            problems.append(f"{before.identity}: {kind} errors are counted on {links}")
        allowed = NVLINK_ERRORS_A_SECOND.get(kind, 0) * seconds
        for link, (old, new) in enumerate(zip(then[kind], counts, strict=False)):
            if new - old > allowed:
                problems.append(f"{before.identity}: NVLink {link} had {new - old} {kind} errors in {seconds:.0f} s")
    return problems


def pcie_errors(before: Gpu, now: int | Unavailable, seconds: float) -> list[str]:
    """PCIe replays, if there were more than on a healthy link, between two readings so many seconds apart."""
    then = before["pcie_replays"]
    if isinstance(then, Unavailable) or isinstance(now, Unavailable):
        return [_unreadable(before, "pcie_replays", now if isinstance(now, Unavailable) else then)]
    allowed = _replays_allowed(before, seconds / 60)
    told = f"{now - then} PCIe replays in {seconds:.0f} s, a healthy link has at most {allowed:.0f}"
    return [f"{before.identity}: {told}"] if now - then > allowed else []


def too_hot(identity: str, gpu: Gpu, hottest: Mapping[str, float]) -> list[str]:
    """Temperatures above the device's own limit for operation, where it tells one."""
    limits = gpu["temperature_limits_c"]
    if not isinstance(limits, dict):
        return []
    rules = (
        ("temperature_c", limits.get("gpu_max") or limits.get("slowdown")),
        ("memory_temperature_c", limits.get("memory_max")),
    )
    return [
        f"{identity}: {name} reached {hottest[name]}, the device's own limit is {limit}"
        for name, limit in rules
        if limit and hottest[name] > limit
    ]


def slowdowns(gpu: Gpu, reasons: Iterable[int]) -> list[str]:
    """Which clock events that must not happen on a GPU are among samples of its clock_event_reasons."""
    seen = 0
    for sample in reasons:
        seen |= sample
    seen &= ~NORMAL_SLOWDOWNS.get(str(gpu["name"]), 0)
    return [f"{gpu.identity}: {CLOCK_EVENTS[bit]} (clock event 0x{bit:x})" for bit in SLOWDOWNS if seen & bit]


def xids_of(gpus: Iterable[Gpu], xids: Sequence[Xid]) -> list[str]:
    """XIDs of these GPUs, each with its meaning and the action it calls for."""
    return [f"{gpu.identity}: {xid}" for gpu in gpus for xid in xids if xid.of(str(gpu["pci_bus_id"]))]


def xids_of_none(pci_bus_ids: Collection[str], xids: Iterable[Xid]) -> list[str]:
    """XIDs of GPUs that are not at any of these PCI bus ids: the driver has lost them since."""
    strange = (xid for xid in xids if not isinstance(xid, Sxid) and not any(map(xid.of, pci_bus_ids)))
    return [f"a GPU that is no longer here, or hidden from this container: {xid}" for xid in strange]


def sxids(xids: Iterable[Xid]) -> list[str]:
    """SXids, each with the action it calls for. All GPUs share the NVSwitches, so they name no GPU."""
    return [str(xid) for xid in xids if isinstance(xid, Sxid)]


def _ignored(then: Any, now: Any, gpu: Gpu, minutes: float) -> bool:
    return False


def _more(then: Any, now: Any, gpu: Gpu, minutes: float) -> bool:
    return bool(now > then)


def _more_replays(then: int, now: int, gpu: Gpu, minutes: float) -> bool:
    return now - then > _replays_allowed(gpu, minutes)


def _replays_allowed(gpu: Gpu, minutes: float) -> float:
    generation, width = gpu["pcie_generation_max"], gpu["pcie_width"]
    rate = REPLAYS.get(generation, min(REPLAYS.values())) if isinstance(generation, int) else min(REPLAYS.values())
    lanes = width if isinstance(width, int) else 1
    return rate * lanes * max(minutes, 1.0)


def _more_rows(then: list[int], now: list[int], gpu: Gpu, minutes: float) -> bool:
    """[corrected, uncorrected, pending, failed]: correctable ones are shown, not judged."""
    return any(a > b for b, a in zip(then[1:], now[1:], strict=True))


_GROWN: dict[str, Callable[[Any, Any, Gpu, float], bool]] = {
    "ecc_uncorrected_volatile": _more,
    "ecc_uncorrected_aggregate": _more,
    "sram_threshold_exceeded": _more,
    "remapped_rows": _more_rows,
    "retired_pages_pending": _more,
    "pcie_replays": _more_replays,
}
