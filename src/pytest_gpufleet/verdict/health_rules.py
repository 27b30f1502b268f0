"""What counts as healthy: facts against what they should be, counters against what they were.

Rules after DCGM's health checks (row remapping, clock events) and NVIDIA's XID catalogue. Those of links are in
link_rules.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_

from pytest_gpufleet.machine.xids import OF_PROCESSES, Sxid, Xid
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.gpu import CLOCK_EVENTS, COUNTED_SLOWDOWNS, COUNTERS, Gpu, Missing
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.verdict.link_rules import fact_unreadable, gpu_fault, replays_allowed, unreadable
from pytest_gpufleet.verdict.profile import for_gpu

REMAPPED_ROWS_LIMIT = 512
# Corrected errors that Azure's node health checks (check_gpu_ecc) still let pass, of which they count those since the
# driver was loaded. Here they are the most of a day, and of a run that is shorter.
CORRECTED_A_DAY = {"sram": 10_000, "dram": 20_000_000}
# DCGM warns of a GPU that retires more than one page a week, once it has many. A run lasts no week.
CORRECTED_ROWS = 1
# The clock events that must not happen under load. A software power cap (0x4) is normal there.
SLOWDOWNS = {0x8: "hardware_slowdown", 0x20: "thermal_slowdown", 0x40: "thermal_slowdown", 0x80: "power_brake"}
# Of those, what is no fault of a GPU, by model. DCGM judges no clock event of a T4, a card of 70 W without a fan. Here
# only the driver's own slowdown for heat is left out: what the hardware does counts, and so does its temperature limit.
NORMAL_SLOWDOWNS = {"Tesla T4": 0x20}

# How much of its highest clocks a GPU shows at least while its memory is busy, unless heat or power holds it back then.
# Those of data centres reach them: on all recorded H200 the SM clock was 1,980 of 1,980 MHz, memory 3,201 of 3,201.
# NVML's maximum of other models is the end of a curve of voltages, which they rarely reach.
CLOCKS_REACHED, CLOCKS_REACHED_ELSEWHERE = 0.97, 0.75
HELD_BACK = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
CLOCKS = {"sm": "SM clock", "memory": "memory clock"}

# The code of the fault if a counter has grown.
WORSE = {
    **dict.fromkeys(("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"), "ecc_uncorrected"),
    "sram_threshold_exceeded": "sram_threshold_exceeded",
    "remapped_rows": "rows_remapped",
    "retired_pages_pending": "page_retirement_pending",
    "memory_unrepairable": "memory_unrepairable",
    "pcie_replays": "pcie_replays",
}
XID_CODES = {
    "RESET_GPU": "xid_reset",
    "RESTART_BM": "xid_restart",
    "RESTART_VM": "xid_restart",
    "CHECK_MECHANICALS": "xid_mechanical",
    **dict.fromkeys(("WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR"), "xid_workflow"),
    **dict.fromkeys(("RESTART_APP", "XID_154_EVAL"), "xid_application"),
    "XID_154": "recovery_pending",
}


def recorded_errors(gpu: Gpu) -> list[Fault]:
    """What a GPU's counters say against it, whenever it happened; a counter that it has and does not tell, too."""
    _, uncorrected, pending, failed = gpu.get("remapped_rows") or (0, 0, 0, 0)
    volatile = gpu.get("ecc_uncorrected_volatile")
    many, sram = uncorrected if uncorrected >= REMAPPED_ROWS_LIMIT else 0, gpu.get("sram_threshold_exceeded")
    rules = (
        ("ecc_uncorrected", volatile, "uncorrectable ECC errors since the driver was loaded"),
        ("row_remapping_pending", pending, "row remapping pending: reset the GPU"),
        ("row_remapping_failed", failed, "row remapping failed: replace the GPU"),
        ("many_rows_remapped", many, "remapped rows: replace the GPU"),
        ("sram_threshold_exceeded", sram, "SRAM error threshold exceeded: replace the GPU"),
        ("page_retirement_pending", gpu.get("retired_pages_pending"), "page retirement pending: reset the GPU"),
        *(
            ("many_corrected_errors", count, f"corrected errors in {part.upper()}, more than {CORRECTED_A_DAY[part]:,}")
            for part, count in (gpu.get("ecc_corrected") or {}).items()
            if count > CORRECTED_A_DAY[part]
        ),
        ("memory_unrepairable", gpu.get("memory_unrepairable"), "the driver cannot repair memory: replace the GPU"),
        ("spare_rows_used_up", (gpu.get("spare_rows") or {}).get("none", 0), "banks of memory without a spare row"),
    )
    told = [gpu_fault(code, gpu, f"{text} ({int(value)})") for code, value, text in rules if value]
    return told + unreadable(gpu, (*COUNTERS, "spare_rows", "ecc_corrected"))


def worsened(before: Gpu, after: Gpu, minutes: float) -> list[Fault]:
    """What got worse on a GPU between two readings of its counters, each with the counter, before and after."""
    problems = []
    for counter, now in after.facts.items():
        then = before[counter]
        if isinstance(now, Missing):
            if not isinstance(then, Missing):
                what = f"{counter} could be read before and cannot now: {now}"
                problems.append(gpu_fault("counter_unreadable", after, what))
        elif counter in WORSE and not isinstance(then, Missing):
            # Of remapped rows [corrected, uncorrected, pending, failed]: correctable ones are shown, not judged.
            pairs = zip(then[1:], now[1:], strict=True) if counter == "remapped_rows" else [(then, now)]
            allowed = replays_allowed(after, minutes) if counter == "pcie_replays" else 0
            if any(new - old > allowed for old, new in pairs):
                problems.append(gpu_fault(WORSE[counter], after, f"{counter} was {then}, is {now}"))
    return problems


def too_hot(gpu: Gpu, hottest: Mapping[str, float]) -> list[Fault]:
    """Temperatures above the device's own limit for operation, where it tells one."""
    limits = gpu["temperature_limits_c"]
    if not isinstance(limits, dict):
        return []
    rules = (
        ("temperature_c", limits.get("gpu_max") or limits.get("slowdown")),
        ("memory_temperature_c", limits.get("memory_max")),
    )
    return [
        gpu_fault("too_hot", gpu, f"{name} reached {hottest[name]}, the device's own limit is {limit}")
        for name, limit in rules
        if limit and hottest[name] > limit
    ]


def slowdowns(before: Gpu, gpu: Gpu, reasons: Iterable[int]) -> list[Fault]:
    """What slowed a GPU down and must not, between two readings: by the driver's counters, which miss nothing, and by
    samples of its clock_event_reasons, since not every driver counts, and none counts every reason."""
    then, now = before.get("slowdown_ns") or {}, gpu.get("slowdown_ns") or {}
    counted: dict[int, int] = {}
    for name, bit in COUNTED_SLOWDOWNS.items():
        counted[bit] = max(counted.get(bit, 0), now[name] - then[name] if name in now and name in then else 0)
    seen, normal, faults = reduce(or_, reasons, 0), NORMAL_SLOWDOWNS.get(str(gpu["name"]), 0), []
    for bit, code in SLOWDOWNS.items():
        nanoseconds = counted.get(bit, 0)
        if not normal & bit and (nanoseconds > 0 or seen & bit):
            lasting = f" for {nanoseconds / 1e9:.3g} s" if nanoseconds > 0 else ""
            faults.append(gpu_fault(code, gpu, f"{CLOCK_EVENTS[bit]}{lasting} (clock event 0x{bit:x})"))
    return faults


def held_clocks(gpu: Gpu, seen: Mapping[str, int]) -> list[Fault]:
    """Clocks that somebody holds below what this GPU can do, by the highest that were `seen` under load: `sm` and
    `memory` in MHz, and the clock event `reasons` of that moment."""
    reached = CLOCKS_REACHED if gpu.of_data_centre else CLOCKS_REACHED_ELSEWHERE
    faults = unreadable(gpu, [f"{clock}_clock_max_mhz" for clock in CLOCKS])
    for clock, words in CLOCKS.items():
        best = gpu.get(f"{clock}_clock_max_mhz")
        excused = clock == "sm" and seen["reasons"] & HELD_BACK
        if best and seen[clock] < reached * best and not excused:
            faults.append(
                gpu_fault("clocks_pinned", gpu, f"{words} of at most {seen[clock]} MHz under load, of {best}")
            )
    return faults


def corrected_errors(before: Gpu, now: Mapping[str, int] | Missing, seconds: float) -> list[Fault]:
    """Memory errors that were corrected, where there are more than rarely: between two readings of ecc_corrected so
    many seconds apart. A few are normal; the limits are shown beside them."""
    then = before["ecc_corrected"]
    if isinstance(then, Missing) or isinstance(now, Missing):
        return [fact_unreadable(before, "ecc_corrected", now if isinstance(now, Missing) else then)]
    days = max(1.0, seconds / 86_400)
    return [
        gpu_fault(
            "many_corrected_errors",
            before,
            f"{now[part] - then[part]:,} corrected errors in {part.upper()} in {seconds:.0f} s, {limit:,} a day",
        )
        for part, limit in CORRECTED_A_DAY.items()
        if part in now and part in then and now[part] - then[part] > limit * days
    ]


def corrected_rows(before: Gpu, now: Sequence[int] | Missing, seconds: float) -> list[Fault]:
    """Rows of memory that were remapped for errors that were still corrected: one in a run is normal."""
    then = before["remapped_rows"]
    if isinstance(then, Missing) or isinstance(now, Missing):
        return [fact_unreadable(before, "remapped_rows", now if isinstance(now, Missing) else then)]
    more = now[0] - then[0]
    told = f"{more} rows were remapped for corrected errors in {seconds:.0f} s, at most {CORRECTED_ROWS} are normal"
    return [gpu_fault("many_corrected_errors", before, told)] if more > CORRECTED_ROWS else []


def xids_of(gpus: Iterable[Gpu], xids: Sequence[Xid]) -> list[Fault]:
    """XIDs of these GPUs, each with its meaning and the action it calls for, without those that call for none."""
    return [
        Fault("xid_of_process" if xid.number in OF_PROCESSES else XID_CODES.get(xid.action, "xid_other"),
              (gpu.place,), str(xid), story=xid.text)
        for gpu in gpus
        for xid in xids
        if xid.of(str(gpu["pci_bus_id"])) and not xid.harmless
    ]  # fmt: skip


def xids_of_none(pci_bus_ids: Collection[str], xids: Iterable[Xid]) -> list[Fault]:
    """XIDs of GPUs that are not at any of these PCI bus ids: the driver has lost them since."""
    strange = (xid for xid in xids if not isinstance(xid, Sxid) and not any(map(xid.of, pci_bus_ids)))
    return [
        Fault("gpu_lost", (), f"a GPU that is no longer here, or hidden from this container: {xid}") for xid in strange
    ]


def sxids(xids: Iterable[Xid]) -> list[Fault]:
    """SXids, each with the action it calls for. All GPUs share the NVSwitches, so they name no GPU."""
    return [Fault("sxid_fatal" if xid.condemning else "sxid", (), str(xid)) for xid in xids if isinstance(xid, Sxid)]


# What a GPU must tell of itself. Where it does not, what rests on it is not judged: who cannot see a fault has not
# found that there is none.

# Of the shipped profiles' models, those of which NVIDIA leaves open what NVML tells.
CONSUMER = ("GeForce", "TITAN")
# nvml.h, nvmlBrandType_t: QUADRO, GEFORCE, TITAN, NVIDIA_RTX, QUADRO_RTX, GEFORCE_RTX, TITAN_RTX.
DESKTOP = (1, 5, 6, 12, 13, 15, 16)
# Telemetry without which no slowdown and no heat would be seen.
TELEMETRY = ("clock_event_reasons", "temperature_c", "power_watts")


def for_servers(gpu: Gpu) -> bool:
    """Whether its driver is to stay loaded."""
    return gpu.get("brand") not in DESKTOP and not any(word in gpu.name for word in CONSUMER)


def _known(gpu: Gpu) -> bool:
    """Either is enough: a GPU that tells next to nothing still tells its name."""
    consumer = any(word in gpu.name for word in CONSUMER)
    return not consumer and (gpu.of_data_centre or for_gpu(gpu.name) is not None)


def _corrects_errors(gpu: Gpu) -> bool:
    mode = gpu["ecc_mode"]
    return _known(gpu) and not (isinstance(mode, list) and mode[0] == 0)


def _remaps_rows(gpu: Gpu) -> bool:
    """From Ampere on; before, whole pages were retired."""
    return _corrects_errors(gpu) and not gpu.name.startswith("Tesla")


# Fact: which GPUs have it, whatever their driver or nvidia-ml-py says. What is not here, a healthy GPU may lack: the
# SRAM threshold under an older driver, PCIe links and NUMA nodes in a virtual machine.
MUST_TELL: dict[str, Callable[[Gpu], bool]] = {
    "ecc_mode": _known,
    **dict.fromkeys(
        ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate", "ecc_corrected_volatile"), _corrects_errors
    ),
    "remapped_rows": _remaps_rows,
    "retired_pages_pending": lambda gpu: _corrects_errors(gpu) and not _remaps_rows(gpu),
    "pcie_replays": _known,
    "nvlink_errors": lambda gpu: _known(gpu) and gpu.nvlinks_active > 0 and gpu.of_data_centre,
    "power_limit_watts": _known,
    **dict.fromkeys(TELEMETRY, _known),
}


def untold(gpus: Iterable[Gpu], facts: Collection[str]) -> list[str]:
    """Facts that GPUs have by their model and do not tell, one line each that names the GPU and gives the reason."""
    return [
        f"{gpu.identity}: {fact} cannot be read ({gpu[fact]}), and this model has it"
        for gpu in gpus
        for fact in facts
        if fact in MUST_TELL and isinstance(gpu[fact], Missing) and MUST_TELL[fact](gpu)
    ]


def without_telemetry(record: Record) -> list[tuple[str, str]]:
    """The GPUs of which a reading of TELEMETRY was never had while the run lasted, with what is missing. Every
    GPU is in a sample, whatever it tells; that of many nodes is in their own runs."""
    if record.run.rehearsal or record.of_cluster:
        return []
    found = []
    for position, gpu in enumerate(record.topology.gpus):
        readings = [taken for sample in record.telemetry for taken in sample.gpus[position : position + 1]]
        never = [name for name in TELEMETRY if all(taken.get(name) is None for taken in readings)]
        if never and (_known(gpu) or not readings):
            listed = " and ".join(filter(None, (", ".join(never[:-1]), never[-1])))
            found.append((gpu.identity, f"telemetry never had {listed}: no slowdown would have been seen"))
    return found
