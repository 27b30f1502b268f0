"""The health of GPUs: memory, clocks, power and heat, then links, then what watches them around every test. Rules after
DCGM's health checks (row remapping, clock events, PCIe replay rates, NVLink errors, the fabric's health)."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from pytest_gpufleet.machine import kernel_log
from pytest_gpufleet.machine.gpu_facts import COUNTERS
from pytest_gpufleet.machine.kernel_log import OF_CRASHES, OF_PROCESSES
from pytest_gpufleet.machine.local_node import LocalNode
from pytest_gpufleet.machine.pcie import REPLAYS
from pytest_gpufleet.machine.tools import grown, since
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.model.place import CLOCK_EVENTS, COMPLETED, COUNTED_SLOWDOWNS, Gpu, GpuTopology, Missing, Pair

# Corrected errors that Azure's node health checks (check_gpu_ecc) still let pass, of which they count those since the
# driver was loaded. Here they are the most of a day, and of a run that is shorter.
CORRECTED_A_DAY = {"sram": 10_000, "dram": 20_000_000}
# DCGM warns of a GPU that retires more than one page a week, once it has many. A run lasts no week.
CORRECTED_ROWS = 1
REMAPPED_ROWS_LIMIT = 512
# The clock events that must not happen under load. A software power cap (0x4) is normal there.
SLOWDOWNS = {0x8: "hardware_slowdown", 0x20: "thermal_slowdown", 0x40: "thermal_slowdown", 0x80: "power_brake"}
# Of those, what is no fault of a GPU, by model. DCGM judges no clock event of a T4, a card of 70 W without a fan. Here
# only the driver's own slowdown for heat is left out: what the hardware does counts, and so does its temperature limit.
NORMAL_SLOWDOWNS = {"Tesla T4": 0x20}

# How much of its highest clocks a GPU shows at least while its memory is busy, unless heat or power holds it back then.
# Those of data centres reach them: on all recorded H200 the SM clock was 1,980 of 1,980 MHz, memory 3,201 of 3,201.
# NVML's maximum of other models is the end of a curve of voltages, which they rarely reach.
CLOCKS_REACHED, CLOCKS_REACHED_ELSEWHERE = 0.97, 0.75
HELD_BACK, POWER_CAP = 0x8 | 0x20 | 0x40 | 0x80, 0x4
# A GPU that its power limit holds back draws this share of it at least. Below, something else holds the clock: it is
# locked (nvidia-smi -lgc), or there is a limit that nobody sees. The modules of Grace share one with their processor.
AT_THE_LIMIT = 0.95
SHARED_POWER = ("GH200", "GB200", "GB300")
# In degrees Celsius, of GPUs of data centres from Hopper on: they idle at 30 to 45, and above 60 airflow, fan curve or
# a neighbour is wrong (SemiAnalysisAI/ClusterMAX, cluster-audit-slurm.sh). Those that cool down from work get time.
IDLE_CEILING, IDLE_SINCE, COOLING_SECONDS, LOOK_AGAIN_SECONDS = 60, (9, 0), 120, 5
# By how much NVML may round the watts of a data sheet.
ROUNDED_WATTS = 0.99

# The code of the fault if a counter has grown.
WORSE = {
    **dict.fromkeys(("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"), "ecc_uncorrected"),
    "sram_threshold_exceeded": "sram_threshold_exceeded",
    "remapped_rows": "rows_remapped",
    "retired_pages_pending": "page_retirement_pending",
    "memory_unrepairable": "memory_unrepairable",
    "pcie_replays": "pcie_replays",
}


class ClocksUnderLoad(NamedTuple):
    """The highest clocks seen, in MHz, the clock event reasons of that moment, and the highest power, 0 if unknown."""

    sm: int
    memory: int
    reasons: int
    watts: float


def gpu_fault(code: str, gpu: Gpu, what: str) -> Fault:
    return Fault(code, (gpu.place,), what)


def unreadable(gpu: Gpu, names: Iterable[str], also_absent: bool = False) -> list[Fault]:
    return [
        gpu_fault("fact_unreadable", gpu, f"{name} cannot be read ({why})")
        for name in names
        if isinstance(why := gpu[name], Missing) and (also_absent or not why.absent)
    ]


def recorded_errors(gpu: Gpu, used: bool = False) -> list[Fault]:
    """What a GPU's counters say against it, or that they cannot be read. `used`: it is not new, so may have some."""
    corrected, uncorrected, pending, failed = gpu.get("remapped_rows") or (0, 0, 0, 0)
    many = uncorrected if uncorrected >= REMAPPED_ROWS_LIMIT else 0
    sram, volatile = gpu.get("sram_threshold_exceeded"), gpu.get("ecc_uncorrected_volatile")
    channel, tpc = gpu.get("repair_pending") or (0, 0)
    rules = [
        ("ecc_uncorrected", volatile, "uncorrectable ECC errors since the driver was loaded"),
        ("row_remapping_pending", pending, "row remapping pending: reset the GPU"),
        ("row_remapping_failed", failed, "row remapping failed: replace the GPU"),
        ("recovery_pending", channel, "repair of a memory channel pending: reset the GPU"),
        ("recovery_pending", tpc, "repair of a TPC pending: reset the GPU"),
        ("many_rows_remapped", many, "remapped rows: replace the GPU"),
        ("sram_threshold_exceeded", sram, "SRAM error threshold exceeded: replace the GPU"),
        ("page_retirement_pending", gpu.get("retired_pages_pending"), "page retirement pending: reset the GPU"),
        ("memory_unrepairable", gpu.get("memory_unrepairable"), "the driver cannot repair memory: replace the GPU"),
        ("spare_rows_used_up", (gpu.get("spare_rows") or {}).get("none", 0), "banks of memory without a spare row"),
    ]
    for part, count in (gpu.get("ecc_corrected") or {}).items():
        if count > (most := CORRECTED_A_DAY[part]):
            rules.append(("many_corrected_errors", count, f"corrected errors in {part.upper()}, more than {most:,}"))
    if not used:
        remapped = 0 if many or pending or failed else corrected + uncorrected
        lifetime = 0 if volatile else gpu.get("ecc_uncorrected_aggregate")
        rules += [
            ("new_gpu_remapped_rows", remapped, "remapped rows, and a new GPU has none"),
            ("new_gpu_ecc_errors", lifetime, "uncorrectable ECC errors in its life, and a new GPU has had none"),
        ]
    faults = [gpu_fault(code, gpu, f"{text} ({int(value)})") for code, value, text in rules if value]
    return faults + unreadable(gpu, (*COUNTERS, "spare_rows", "ecc_corrected"))


def worsened(before: Gpu, after: Gpu, minutes: float) -> list[Fault]:
    """What got worse on a GPU between two readings of its counters, each with the counter, before and after."""
    problems = []
    both = ((counter, before[counter], now) for counter, now in after.facts.items())
    for counter, then, now in (each for each in both if not isinstance(each[1], Missing)):
        if isinstance(now, Missing):
            what = f"{counter} could be read before and cannot now: {now}"
            problems.append(gpu_fault("counter_unreadable", after, what))
        elif counter in WORSE:
            # Of remapped rows [corrected, uncorrected, pending, failed]: correctable ones are shown, not judged.
            pairs = zip(then[1:], now[1:], strict=True) if counter == "remapped_rows" else [(then, now)]
            allowed = replays_allowed(after, minutes) if counter == "pcie_replays" else 0
            if any(since(old, new) > allowed for old, new in pairs):
                problems.append(gpu_fault(WORSE[counter], after, f"{counter} was {then}, is {now}"))
    return problems


def too_hot(gpu: Gpu, hottest: Mapping[str, float]) -> list[Fault]:
    limits = gpu.get("temperature_limits_c") or {}
    of_gpu = limits.get("gpu_max") or limits.get("slowdown")
    return [
        gpu_fault("too_hot", gpu, f"{name} reached {hottest[name]}, the device's own limit is {limit}")
        for name, limit in (("temperature_c", of_gpu), ("memory_temperature_c", limits.get("memory_max")))
        if limit and hottest[name] > limit
    ]


def has_idle_ceiling(gpu: Gpu) -> bool:
    return gpu.of_data_centre and (gpu.compute_capability or (0, 0)) >= IDLE_SINCE


def hot_at_idle(gpus: Sequence[Gpu], temperatures: Callable[[], Sequence[Any]]) -> list[Fault]:
    """GPUs that stay above their ceiling, and that no other process uses. `temperatures`: of all, as they are now."""
    watched = [has_idle_ceiling(gpu) and not gpu.get("processes") for gpu in gpus]
    for _ in range(COOLING_SECONDS // LOOK_AGAIN_SECONDS):
        now = [(gpu, each) for gpu, each, is_idle in zip(gpus, temperatures(), watched, strict=True) if is_idle]
        hot = [(gpu, each) for gpu, each in now if isinstance(each, int) and each > IDLE_CEILING]
        if not hot:
            break
        time.sleep(LOOK_AGAIN_SECONDS)
    text = "{} °C without work, healthy ones have at most {}"
    faults = [gpu_fault("hot_at_idle", gpu, text.format(each, IDLE_CEILING)) for gpu, each in hot]
    silent = (replace(gpu, facts={**gpu.facts, "temperature_c": each}) for gpu, each in now)
    return [fault for gpu in silent for fault in unreadable(gpu, ["temperature_c"])] + faults


def slowdowns(before: Gpu, gpu: Gpu, seen: int) -> list[Fault]:
    """By the driver's counters, which miss nothing, and by clock events in samples: not every driver counts all."""
    then, now = before.get("slowdown_ns") or {}, gpu.get("slowdown_ns") or {}
    counted: dict[int, int] = {}
    for name, more in grown(then, now).items():
        counted[COUNTED_SLOWDOWNS[name]] = max(counted.get(COUNTED_SLOWDOWNS[name], 0), more)
    normal, faults = NORMAL_SLOWDOWNS.get(str(gpu["name"]), 0), []
    for bit, code in SLOWDOWNS.items():
        nanoseconds = counted.get(bit, 0)
        if not normal & bit and (nanoseconds > 0 or seen & bit):
            lasting = f" for {nanoseconds / 1e9:.3g} s" if nanoseconds > 0 else ""
            faults.append(gpu_fault(code, gpu, f"{CLOCK_EVENTS[bit]}{lasting} (clock event 0x{bit:x})"))
    return faults


def held_clocks(gpu: Gpu, seen: ClocksUnderLoad) -> list[Fault]:
    """Clocks that somebody holds low. Heat, the power brake and a reached power limit excuse the SM clock."""
    reached = CLOCKS_REACHED if gpu.of_data_centre else CLOCKS_REACHED_ELSEWHERE
    faults = unreadable(gpu, ["sm_clock_max_mhz", "memory_clock_max_mhz"])
    limit, shared = gpu.power_limit_watts or 0.0, any(name in gpu.name for name in SHARED_POWER)
    at_the_limit = shared or not limit or not seen.watts or seen.watts >= AT_THE_LIMIT * limit
    excused = seen.reasons & (HELD_BACK | (POWER_CAP if at_the_limit else 0))
    at_power = f", at {seen.watts:.0f} W of {limit:.0f} W" if seen.reasons & POWER_CAP else ""
    clocks = (("SM clock", seen.sm, gpu.get("sm_clock_max_mhz"), excused, at_power),
              ("memory clock", seen.memory, gpu.get("memory_clock_max_mhz"), 0, ""))  # fmt: skip
    return faults + [
        gpu_fault("clocks_pinned", gpu, f"{words} of at most {clock} MHz under load, of {best}{power}")
        for words, clock, best, excuse, power in clocks
        if best and clock < reached * best and not excuse
    ]


def low_default_power(gpu: Gpu, rated: float) -> list[Fault]:
    """A default power limit below that of the model's data sheet, in watts: no setting of an operator shows it."""
    default = gpu.get("power_limit_default_watts")
    if default is None or default >= ROUNDED_WATTS * rated:
        return unreadable(gpu, ["power_limit_default_watts"])
    return [gpu_fault("power_limit_below_model", gpu, f"its default is {default:g} W, of this model {rated:g} W")]


def corrected_errors(before: Gpu, now: Gpu, seconds: float) -> list[Fault]:
    """Memory errors that were corrected, between two readings so many seconds apart: a few are normal."""
    text = "{:,} corrected errors in {} in {:.0f} s, {:,} a day"
    return [
        gpu_fault("many_corrected_errors", before, text.format(more, part.upper(), seconds, CORRECTED_A_DAY[part]))
        for part, more in grown(before["ecc_corrected"], now["ecc_corrected"]).items()
        if more > CORRECTED_A_DAY[part] * max(1.0, seconds / 86_400)
    ]


def corrected_rows(before: Gpu, now: Gpu, seconds: float) -> list[Fault]:
    """Rows of memory that were remapped for errors that were still corrected: one in a run is normal."""
    more = since(before["remapped_rows"][0], now["remapped_rows"][0])
    what = f"{more} rows were remapped for corrected errors in {seconds:.0f} s, at most {CORRECTED_ROWS} are normal"
    return [gpu_fault("many_corrected_errors", before, what)] if more > CORRECTED_ROWS else []


# Errors of one NVLink that are still healthy, by kind; of any other kind one is too many. DCGM allows CRC errors of
# flits that rate too. But a flit with a wrong CRC has to be sent again, like all that replays and recoveries count, and
# where H200 count thousands of the others, they count none of these.
# What the forward error correction of NVLink 5 could not mend is sent again. NVIDIA calls a link of its networks faulty
# above one such error in 1e14 bits (optics.EFFECTIVE_BER), which are 4e11 a second here; a few at once are one event.
NVLINK_ERRORS_A_SECOND = {"crc_data": 100, "effective": 0.004, "symbol": 0.004}
NVLINK_ERRORS_AT_ONCE = {"effective": 10, "symbol": 10}
# nvml.h, NVML_GPU_FABRIC_HEALTH_MASK: where a part of the mask begins, how many bits it has, and a value of it that is
# bad: in words what that says. DCGM judges the same ones.
FABRIC_HEALTH = {
    (0, 2, 1): "its bandwidth is degraded",
    (2, 2, 1): "a route is being recovered",
    (4, 2, 1): "a route is unhealthy",
    (6, 2, 1): "an access timed out and is being recovered",
    **{(8, 4, bad): f"wrong configuration: {what}" for bad, what in enumerate((
        "system GUID", "serial number of the chassis", "no partition", "too few NVLinks", "firmware of the GPU",
        "location", "state of the GPU",
    ), start=2)},
}  # fmt: skip
FABRIC_SINCE, HGX_GPUS = (9, 0), 8


def peer_access(topology: GpuTopology) -> Callable[[Gpu], dict[str, list[int]]]:
    """The nvmlGpuP2PStatus_t that each GPU should have with the others: 0 (OK) over NVLinks; over PCIe to read and
    write where any two such GPUs with such a way have it; otherwise what it is."""
    gpus = topology.gpus

    def kind(one: Gpu, other: Gpu) -> tuple[str, ...]:
        return topology.kind(Pair(one.place, other.place))

    able = {
        (name, kind(gpu, other))
        for gpu in gpus
        for name, statuses in (gpu.get("p2p") or {}).items()
        for other, status in zip(gpus, statuses, strict=True)
        if gpu is not other and status == 0 and name in ("read", "write")
    }

    def can(name: str, gpu: Gpu, other: Gpu) -> bool:
        return other.place == gpu.place or kind(gpu, other)[-1] == "NV" or (name, kind(gpu, other)) in able

    return lambda gpu: {
        name: [0 if can(name, gpu, other) else status for other, status in zip(gpus, statuses, strict=True)]
        for name, statuses in gpu["p2p"].items()
    }


def link_errors(before: Gpu, now: Gpu, seconds: float) -> list[Fault]:
    """Links correct CRC errors in data themselves: an idle, healthy H200 does so once in ten seconds."""
    then, after, what = before["nvlink_errors"], now["nvlink_errors"], list[str]()
    for kind in {**then, **after}:
        earlier, counts = then.get(kind, []), after.get(kind, [])
        if len(counts) != len(earlier):
            what.append(f"{kind} errors are counted on {len(counts)} NVLinks, at the beginning on {len(earlier)}")
        allowed = max(NVLINK_ERRORS_A_SECOND.get(kind, 0) * seconds, NVLINK_ERRORS_AT_ONCE.get(kind, 0))
        for link, (old, new) in enumerate(zip(earlier, counts, strict=False)):
            if old is None or new is None:
                if old is not new:
                    what.append(f"{kind} errors of NVLink {link} were {old} and are {new}: they cannot always be read")
            elif since(old, new) > allowed:
                what.append(f"NVLink {link} had {since(old, new)} {kind} errors in {seconds:.0f} s")
    return [gpu_fault("nvlink_errors", before, each) for each in what]


def pcie_errors(before: Gpu, now: Gpu, seconds: float) -> list[Fault]:
    grown, allowed = since(before["pcie_replays"], now["pcie_replays"]), replays_allowed(before, seconds / 60)
    what = f"{grown} PCIe replays in {seconds:.0f} s, a healthy link has at most {allowed:.0f}"
    return [gpu_fault("pcie_replays", before, what)] if grown > allowed else []


def fabric_faults(gpus: Sequence[Gpu]) -> Iterator[Fault]:
    """What its health mask says, and GPUs in another clique or cluster than most, which no NVLink connects to them."""
    members = [gpu for gpu in gpus if (gpu.get("fabric") or {}).get("state") == COMPLETED]
    known = [(gpu, health) for gpu in members if (health := gpu.get("fabric_health")) is not None]
    yield from (fault for gpu in members for fault in unreadable(gpu, ["fabric_health"]))
    for gpu, health in known:
        for (shift, width, bad), words in FABRIC_HEALTH.items():
            if health["mask"] >> shift & (1 << width) - 1 == bad:
                yield gpu_fault("fabric_degraded", gpu, words)
    for key in ("cluster", "clique"):
        values = [health[key] for _, health in known]
        usual = max(values, key=values.count, default=None)
        for gpu, value in ((gpu, health[key]) for gpu, health in known if health[key] != usual):
            yield gpu_fault("fabric_split", gpu, f"it is in {key} {value} of the fabric, others are in {usual}")


def has_nvswitch(gpus: Sequence[Gpu], topology: GpuTopology, links_of_model: int) -> bool:
    """Whether NVSwitches connect these GPUs: a link ends at one, or there are eight GPUs of a model whose NVLinks need
    no bridge: without a fabric manager the links of a Hopper are down, and none says where it ends."""
    hopper = all((gpu.compute_capability or (0, 0)) >= FABRIC_SINCE for gpu in gpus)
    return hopper and (topology.fabric == "nvswitch" or (links_of_model > 0 and len(gpus) >= HGX_GPUS))


def numa_mismatch(gpu: Gpu) -> list[Fault]:
    """A GPU whose CPU affinity, by the driver, has no processor of those next to the root of its PCI bus."""
    near, of_bus = gpu.get("cpu_affinity"), gpu.get("pci_bus_cpus")
    cpus = [n * 64 + bit for n, word in enumerate(near or ()) for bit in range(64) if word >> bit & 1]
    if not cpus or not of_bus or not set(of_bus).isdisjoint(cpus):
        return unreadable(gpu, ["cpu_affinity", "pci_bus_cpus"])
    what = "the driver calls processors {} to {} near, next to its PCI bus are {} to {}"
    return [gpu_fault("gpu_numa_mismatch", gpu, what.format(cpus[0], cpus[-1], min(of_bus), max(of_bus)))]


def pcie_lanes(gpu: Gpu) -> int:
    """As many as the GPU itself can use, whatever the slot has: NVML's maximum is that of both."""
    return max(int(gpu.get("pcie_width_max") or 0), int((gpu.get("pcie_width_able") or {"gpu": 0})["gpu"]))


def replays_allowed(gpu: Gpu, minutes: float) -> float:
    rate = REPLAYS.get(gpu.get("pcie_generation_max"), min(REPLAYS.values()))
    return rate * (gpu.get("pcie_width") or 1) * max(minutes, 1.0)


REASONS, TEMPERATURES = "clock_event_reasons", ("temperature_c", "memory_temperature_c")
WATCHED = (*COUNTERS, REASONS)


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """`noticed`: what condemns nothing. With the places of a node alone (node 0). `unseen`: what nobody could see."""

    faults: tuple[Fault, ...] = ()
    noticed: tuple[Fault, ...] = ()
    unseen: str = ""


class Guard:
    """Reads counters, clock events and the kernel log of a node before and after each test."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._failed = False  # the check before
        self._lock = threading.Lock()
        self._forget()
        self._before = self._node.facts(WATCHED)
        self._since = time.monotonic()

    def note(self, sample: Sample) -> None:
        """Take in a sample of telemetry: what happens between two readings counts too."""
        with self._lock:
            for readings, seen in zip(sample.gpus, self._seen, strict=True):
                seen[REASONS] |= int(readings[REASONS] or 0)
                seen.update({name: max(seen[name], readings[name] or 0) for name in TEMPERATURES})

    def _forget(self) -> None:
        gpus = self._node.topology.gpus
        self._seen: list[dict[str, Any]] = [dict.fromkeys((REASONS, *TEMPERATURES), 0) for _ in gpus]

    def check(self, failed: bool = False) -> Health:
        """What got worse since the last call. `failed`: the check that ends has failed, and its processes are gone."""
        after, now = self._node.facts(WATCHED), time.monotonic()
        both = list(zip(self._before, after, strict=True))
        problems = [each for old, new in both for each in worsened(old, new, (now - self._since) / 60)]
        logged = self._node.kernel_log()
        # What processes leave behind belongs to the check that failed, and some of it comes only in the next one.
        # Without such a check, a crash of any process is reported; that one was ended is not.
        leftovers = frozenset() if failed else OF_PROCESSES if self._failed else OF_PROCESSES - OF_CRASHES
        problems += kernel_log.xids_of(after, [xid for xid in logged.xids if xid.number not in leftovers])
        found, noticed = kernel_log.judged(logged.host, after, "during")
        problems += found
        self._failed = failed
        with self._lock:
            everything = self._seen
            self._forget()
        for (before, gpu), seen in zip(both, everything, strict=True):
            problems += slowdowns(before, gpu, seen[REASONS] | (gpu.get(REASONS) or 0)) + too_hot(gpu, seen)
        self._before, self._since = after, now
        unseen = f"an XID may have gone unseen: {logged.unread}" if logged.unread else ""
        return Health(tuple(problems), tuple(noticed), unseen)
