"""Measurements held against limits and peers, and which of them are measured a second time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.finding import Finding
from pytest_gpufleet.model.gpu import Gpu, GpuTopology
from pytest_gpufleet.model.limit import Limit, Tolerance
from pytest_gpufleet.model.measurement import GpuState, Measurement
from pytest_gpufleet.model.metric import GiB, over_network
from pytest_gpufleet.model.place import Where
from pytest_gpufleet.verdict.peaks import NoPeak
from pytest_gpufleet.verdict.peers import slower_than_peers
from pytest_gpufleet.verdict.physical_limits import UNKNOWN_NETWORK, is_required, physical_limit
from pytest_gpufleet.verdict.profile import Profile

STEADY = 0.05
# NCCL by itself, without this package, gave samples of all_gather and reduce_scatter of 8 GiB that differ by up to 7 %
# on two healthy H200, whatever allocated the buffers; here they once did by 5.8 and 5.4 % in a row (docs/results).
UNSTEADY_IN_NCCL, UNSTEADY_FROM = ("all_gather", "reduce_scatter"), GiB
AS_NCCL_IS = 0.10
STEADINESS = (
    "a figure that changes from one sample to the next is no figure: something else uses the GPU, or it throttles"
)
WEAK = (
    "its only limit is a weak one, which machines that are far from healthy meet too: calibrate on a known-good machine"
)
# Which would meet every limit at 0, and cannot be: work takes time and memory. Events, shares and skews may be 0.
NEVER_ZERO = ("collective_latency", "launch_time", "pair_latency", "train_memory")
# Without a profile, of metrics whose peers are not simply all places of their kind.
OF_EVERY_MACHINE = (
    # GPUs that copy at the same time share the way out of their socket, and not alike: of a healthy 8x H200 those at
    # one node gave 29, 30, 43 and 30 GB/s. Who has much more is no measure for others; half the lanes give half.
    Tolerance("host_bandwidth", 0.20, "median", within="numa node", conditions={"at_once": "all"}),
    # Two sockets are enough to tell: nothing makes memory faster than its channels are.
    Tolerance("host_memory_bandwidth", 0.06, source="one memory channel of twelve is 8 %, one of eight 12 %"),
)


class LimitMissed(AssertionError):
    """Measurements missed their limits, or a GPU is slower than its peers. `findings` has the figures.

    `causes`, if anybody found any, come first in the message.
    """

    def __init__(self, findings: Sequence[Finding], topology: GpuTopology, causes: Iterable[Fault] = ()) -> None:
        self.findings = tuple(findings)
        self.causes = tuple(causes)
        lines = [line for finding in findings for line in _lines(finding, topology)]
        super().__init__("\n".join([*(fault.told(topology.identity) for fault in self.causes), *lines]))


def judge(
    measurement: Measurement,
    profile: Profile | None,
    topology: GpuTopology,
    check: str,
    *,
    rehearsal: bool,
    required: bool = True,
    measured: Sequence[Measurement] = (),
    network: float | None = 0.0,
) -> Finding:
    """Hold a measurement against the limit of the profile that fits it, and each GPU against its peers.

    `required`: where the profile has no limit, what the hardware can do makes one, by its facts and by all figures that
    were `measured` in the run; where that says nothing either, the finding is "not judged", which makes a verdict
    incomplete. Any other figure without a limit is "for information".

    `network`: of a run on many nodes the Gbit/s that each GPU has of what is between them; 0 if nobody tells, None if
    nothing is asked of it.
    """
    between = not rehearsal and over_network(measurement.metric, measurement.conditions)
    if between and network:
        measurement = replace(measurement, conditions={"network": network, **measurement.conditions})
    # First, so that a metric that contradicts the profile fails in a rehearsal too.
    limit = profile.limit_for(measurement, topology.fabric) if profile else None
    if rehearsal:
        reason = "rehearsal: figures of CPU ranks are not judged"
        return Finding(check, measurement, "not judged", reason=reason, required=required)
    tolerances = tolerances_of(measurement, profile.tolerances_for(measurement) if profile else ())
    if between:
        required = network is not None and (required or is_required(measurement, measured))
        tolerances = tolerances if network is not None else ()
    finding = Finding(check, measurement, "not judged", limit, required=required, tolerances=tolerances)
    limit, why = deciding(finding, topology, measured)
    no_limit = f"{_no_limit(profile, topology)}{why and f'; nor do the facts of the hardware make one: {why}'}"
    no_limit = why if why == UNKNOWN_NETWORK else no_limit
    return held(replace(finding, limit=limit), topology, no_limit)


def deciding(finding: Finding, topology: GpuTopology, measured: Sequence[Measurement]) -> tuple[Limit | None, str]:
    """The limit that decides where a finding has that of its profile: what the hardware can do goes before a weak one
    that is met; whoever misses a weak one is broken, also where the hardware's facts ask for less. And why the hardware
    makes none, where it does not."""
    limit, measurement = finding.limit, finding.measurement
    decided = limit and not (limit.weak and all(map(limit.met_by, measurement.values.values())))
    if decided or not finding.required or not measurement.values:
        return limit, ""
    try:
        return physical_limit(measurement, topology, measured), ""
    except NoPeak as why:
        return limit, str(why)


def tolerances_of(measurement: Measurement, of_profile: tuple[Tolerance, ...]) -> tuple[Tolerance, ...]:
    """By how much the places of a measurement may differ: by what its profile says, else by what its metric does. None
    where its places are no peers."""
    worse = measurement.definition.peer_tolerance
    if worse is None:
        return ()
    without = tuple(each for each in OF_EVERY_MACHINE if each.holds(measurement))
    return of_profile or without or (Tolerance(measurement.metric, worse),)


def held(finding: Finding, topology: GpuTopology, no_limit: str) -> Finding:
    """Hold the values of a finding against its limit, and each place against its peers. `no_limit`: why it has none."""
    measurement, limit = finding.measurement, finding.limit
    if not measurement.values:  # which would meet every limit
        return replace(finding, state="not judged", limit=None, tolerances=(), reason="nothing was measured")
    missed = tuple(
        place
        for place, value in measurement.values.items()
        if not _possible(value, measurement) or (limit and not limit.met_by(value))
    )
    slower = slower_than_peers(measurement, finding.tolerances, topology)
    finding = replace(finding, slower_than_peers=slower)
    if missed or slower:
        reason = _missed_reason(len(missed), len(slower or ()))
        return _counted(replace(finding, state="missed", missed=missed, reason=reason))
    if limit and not limit.weak:
        return _counted(replace(finding, state="met"))
    if finding.required:
        return replace(finding, state="not judged", reason=WEAK if limit else no_limit)
    return replace(finding, state="for information")


def _counted(finding: Finding) -> Finding:
    return measured_again(finding, finding.again) if finding.again else finding


def measured_again(finding: Finding, why: str) -> Finding:
    """A judged finding of something that was measured once more: it is told and counts no longer."""
    missed = f"{finding.reason}, but " if finding.missed or finding.slower_than_peers else ""
    told = f"{missed}{why}: it was measured once more, and the next finding counts"
    return replace(finding, state="for information", again=why, reason=told)


def _possible(value: float, measurement: Measurement) -> bool:
    """Nothing that is measured here can be infinite or negative, and NaN is no figure."""
    return math.isfinite(value) and (value > 0 or (value == 0 and measurement.metric not in NEVER_ZERO))


def allowed_spread(measurement: Measurement) -> float:
    """By how much the samples of a judged figure may differ."""
    collective, nbytes = (measurement.conditions.get(name) for name in ("collective", "bytes"))
    by_nccl = collective in UNSTEADY_IN_NCCL and isinstance(nbytes, int) and nbytes >= UNSTEADY_FROM
    return AS_NCCL_IS if by_nccl else STEADY


def unsteady(finding: Finding) -> Finding | None:
    """A finding of its own for a judged figure whose samples differ by more than they may; else None. Others may use
    the network between nodes too."""
    measurement, allowed = finding.measurement, allowed_spread(finding.measurement)
    judged = measurement.definition.steady and finding.state in ("met", "missed")
    judged = judged and not over_network(measurement.metric, measurement.conditions)
    if not judged or all(spread <= allowed for spread in measurement.spread.values()):
        return None
    limit = Limit("spread", "max", allowed, "ratio", "project", STEADINESS, {}, "")
    spread = Measurement("spread", measurement.spread, {"metric": measurement.metric, **measurement.conditions})
    missed = tuple(place for place, value in spread.values.items() if not limit.met_by(value))
    return Finding(finding.check, spread, "missed", limit, missed, {}, _missed_reason(len(missed), 0))


def _missed_reason(missed: int, slower: int) -> str:
    parts = []
    if missed:
        parts.append(f"{missed} {'place misses' if missed == 1 else 'places miss'} the limit")
    if slower:
        parts.append(f"{slower} {'place is' if slower == 1 else 'places are'} slower than the peers")
    return ", ".join(parts)


def _no_limit(profile: Profile | None, topology: GpuTopology) -> str:
    if profile is None or not profile.match:
        models = " and ".join(sorted({gpu.name for gpu in topology.gpus})) or "this machine"
        return f"no profile knows {models}: give one with --fleet-profile"
    return f"profile {profile.name} has no limit for these conditions: calibrate on a known-good machine"


def _lines(finding: Finding, topology: GpuTopology) -> list[str]:
    measurement, limit = finding.measurement, finding.limit
    what = f"{measurement.definition.title} ({', '.join(f'{k}={v}' for k, v in measurement.conditions.items())})"
    lines = [f"{what}: {finding.reason}"]
    for place in finding.missed:
        value = measurement.values[place]
        against = f"limit {limit}" if _possible(value, measurement) else "which no measurement can give"
        lines.append(f"  {topology.identity(place)}: {value:,.4g} {measurement.unit}, {against}")
    for place, fraction in (finding.slower_than_peers or {}).items():
        value = measurement.values[place]
        lines.append(
            f"  {topology.identity(place)}: {value:,.4g} {measurement.unit}, {fraction:.1%} worse than its peers "
            f"(at most {' and '.join(each.told for each in finding.tolerances)})"
        )
    if limit is not None:
        whose = "the customer's profile" if limit.given else "profile"
        origin = f"{whose} {limit.profile}, " if limit.profile else ""
        lines.append(f"  limit from {origin}{limit.grade}: {limit.full_source}")
    return lines


# Which figures are measured a second time. The second one counts; both stay on record.
#
# A figure that missed while its GPU still held itself back, from the heavy load of the checks before, says nothing
# about what it is for. Nor does one that met its limit by samples that differ: what the host did for a moment is no
# fault of a GPU, and a fault that makes figures change from one sample to the next does so again. One that misses for
# no such reason is not measured again: whoever tries until something passes has tested nothing. Nor are figures whose
# own work is the heavy load, like matrix products: a GPU that is slow, or changes, once it is hot is what they are to
# find.
#
# Of all that is measured again the second figure counts, also of what had met its limit at first and was measured
# along with another: so nobody can choose between two, and one that misses then is a miss.

# The GPU begins to slow itself down at the temperature that NVML calls its slowdown, and does at its power limit. On a
# healthy H200 these are 89 C and 700 W; the hottest that was recorded had 67 C, and 480 W while its memory was copied.
NEAR_KELVIN = 10.0
AT_LIMIT = 0.95
OWN_LOAD = (
    "gemm", "gemm_relative", "soak_temperature", "soak_clock", "soak_power", "burn_power", "burn_retention",
    "step_power", "power_swing", "step_skew", "step_retention",
)  # fmt: skip

ALONG = "a figure that was measured with it had to be measured again"


def to_measure_again(findings: Sequence[Finding], topology: GpuTopology) -> list[Finding]:
    """The figures among them, if there is a reason to measure one again and none missed without; else none."""
    figures = [finding for finding in findings if finding.measurement.metric != "spread"]
    why = [why_again(each, topology) for each in figures]
    missed_without = any(each.state == "missed" and not reason for each, reason in zip(figures, why, strict=True))
    return figures if any(why) and not missed_without else []


def set_aside(first: Sequence[Finding], second: Sequence[Finding], topology: GpuTopology) -> list[Finding]:
    """The findings of a first measurement when the second is there: those of figures that are in both count no longer,
    and say why."""
    measured = [_figure(finding) for finding in second]
    return [
        measured_again(each, why_again(each, topology) or ALONG) if _figure(each) in measured else each
        for each in first
    ]


def _figure(finding: Finding) -> tuple[str, Mapping[str, object]]:
    return finding.measurement.metric, finding.measurement.conditions


def why_again(finding: Finding, topology: GpuTopology) -> str:
    """Why a figure is measured a second time; empty if it is not."""
    if finding.measurement.metric in OWN_LOAD:
        return ""
    if finding.state == "missed":
        return _held_back(finding, topology)
    if not (spread := unsteady(finding)):
        return ""
    return "; ".join(f"the samples of {at} differed by {spread.measurement.values[at]:.1%}" for at in spread.missed)


def _held_back(finding: Finding, topology: GpuTopology) -> str:
    """What held GPUs back, by the temperatures and the power that stand beside a missed figure; empty if nothing did,
    or if nobody knows."""
    measurement = finding.measurement
    found = {at: _reason_of(state, _of(at, topology)) for at, state in measurement.gpu_states.items()}
    blamed = {*finding.missed, *(finding.slower_than_peers or ())}
    return "; ".join(f"{at} had {what}" for at, what in found.items() if what and at in blamed)


def _of(where: Where, topology: GpuTopology) -> list[Gpu]:
    """The GPUs behind a place; all of them where they measured one thing together."""
    return [gpu for gpu in topology.gpus if gpu.place in where.parts] or list(topology.gpus)


def _reason_of(state: GpuState, gpus: list[Gpu]) -> str:
    slowdowns = [(gpu.get("temperature_limits_c") or {}).get("slowdown") for gpu in gpus]
    celsius, watts = state.temperature_c or 0.0, state.power_watts or 0.0
    hot = [f"{celsius:g} C, and slows down at {each:g}" for each in slowdowns if each and celsius >= each - NEAR_KELVIN]
    full = [
        f"{watts:g} W of {each:g}"
        for each in (gpu.power_limit_watts for gpu in gpus)
        if each and watts >= AT_LIMIT * each
    ]
    return " and ".join([*hot[:1], *full[:1]])
