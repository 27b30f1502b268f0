"""How the report puts figures, conditions and places into words."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from unicodedata import east_asian_width

from pytest_gpufleet.model.conditions import CONDITIONS, Condition, ConditionType
from pytest_gpufleet.model.finding import Finding, Limit
from pytest_gpufleet.model.language import say, some
from pytest_gpufleet.model.metric import METRICS, goodness
from pytest_gpufleet.model.place import Gpu, Where, called
from pytest_gpufleet.redaction import clean as clean, one_line as one_line

SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
SYMBOLS = {
    **dict.fromkeys(("met", "passed"), "✓"),
    **dict.fromkeys(("missed", "failed", "unfinished"), "✗"),
    **dict.fromkeys(("not judged", "skipped"), "○"),
    **dict.fromkeys(("not applicable", "for information"), "·"),
}
Hosts = Mapping[int, str]  # the names of the nodes of a run, by their numbers
ALONE: Hosts = {}
place = called
# A figure is named by these even if all beside it have them in common.
LEADING = {name for name, condition in CONDITIONS.items() if condition.leads}
# What changes along a curve: small messages are launched in CUDA graphs, large ones one by one.
ALONG = {"bytes": ("bytes", "method"), "nodes": ("nodes", "ranks"), "batch": ("batch",)}


def ascii_signs(text: str) -> str:
    """For terminals: many a serial console knows ASCII only."""
    return text.replace("≥", ">=").replace("≤", "<=")


def capitalised(text: str) -> str:
    """With a capital first letter; the others as they are: "NVLink errors", "Bus bandwidth"."""
    return text[:1].upper() + text[1:]


def gap(text: str) -> str:
    """A sentence or a half of one, as it stands before the next. Punctuation of Chinese has the gap in itself."""
    return text if east_asian_width(text[-1:] or " ") in ("F", "W") else f"{text} "


def sentences(*texts: str) -> str:
    """Those that there are, one after the other."""
    said = [text for text in texts if text]
    return "".join([*map(gap, said[:-1]), *said[-1:]])


def number(value: float, digits: int = 4) -> str:
    """With thousands separators and at most `digits` significant digits: "48,170", "0.0123", "1e+308"."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else f"{value}"
    if value == 0:
        return "0"
    if not 1e-12 < abs(value) < 1e15:
        return f"{value:.{digits}g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, decimals):,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def models(gpus: Iterable[Gpu]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in Counter(gpu.name for gpu in gpus).items())


def size(nbytes: float) -> str:
    """`nbytes` in binary units: "64 MiB"."""
    power = 0
    while abs(nbytes) >= 1024 and power < len(SIZES) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{number(nbytes)} {SIZES[power]}"


def percent(fraction: float, digits: int = 3) -> str:
    return f"{number(100 * fraction, digits)} %"


def quantity(value: float, unit: str, digits: int = 4) -> str:
    """A value and its unit: "366.9 GB/s"; a ratio in per cent, bytes in binary units."""
    match unit:
        case "ratio":
            return percent(value, digits)
        case "B" | "bytes":
            return size(value)
        case "":
            return number(value, digits)
        case _:
            return f"{number(value, digits)} {unit}"


def duration(seconds: float) -> str:
    """ "< 0.1 s", "0.4 s", "41 s", "12 min 5 s", "71 h 59 min" """
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 0.1:
        return "< 0.1 s"
    if seconds < 60:
        return say("{seconds} s", seconds=number(seconds, 2))
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return say("{minutes} min {seconds} s", minutes=minutes, seconds=rest)
    return say("{hours} h {minutes} min", hours=minutes // 60, minutes=minutes % 60)


def moment(utc: object) -> str:
    """ "2026-11-20T09:14:03+00:00" as people write it; anything else as it is."""
    text = str(utc or "")
    try:
        return f"{datetime.fromisoformat(text.replace('Z', '+00:00')):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return text


def span(values: Iterable[float], unit: str, digits: int = 4) -> str:
    """One value, or the lowest and the highest of several: "11.9 to 12.3 GB/s"."""
    every = list(values)
    numbers = [value for value in every if not math.isnan(value)]
    if not numbers:
        return number(math.nan)
    low, high = (quantity(end(numbers), unit, digits) for end in (min, max))
    sign = "%" if unit == "ratio" else unit
    text = low if low == high else say("{first} to {last}", first=low.removesuffix(f" {sign}"), last=high)
    return text if len(numbers) == len(every) else f"{text}, and {number(math.nan)}"


def value_and_limit(value: float, limit: Limit) -> tuple[str, str]:
    """With as many digits as it takes to tell them apart: "329.4, limit 329.4, missed" would make a reader doubt."""
    for digits in range(4, 10):
        texts = quantity(value, limit.unit, digits), quantity(limit.value, limit.unit, digits)
        if texts[0] != texts[1] or value == limit.value:
            break
    return texts[0], f"{'≥' if limit.sense == 'min' else '≤'} {texts[1]}"


def words(conditions: Mapping[str, Condition]) -> list[str]:
    """Each condition in plain words, ["all_reduce", "8 GiB", "8 ranks", "NVLS off"]; an unknown one by its name."""
    result = []
    for key in (key for key in {**CONDITIONS, **conditions} if key in conditions):
        value, known = conditions[key], CONDITIONS.get(key) or ConditionType(None, form=f"{key.replace('_', ' ')} {{}}")
        if value in known.words:
            result.append(say(known.words[value]))
            continue
        if isinstance(value, bool | str):
            text = say(value if isinstance(value, str) else "on" if value else "off")
        elif key == "nccl":
            text = f"{value // 10_000:.0f}.{value // 100 % 100:.0f}.{value % 100:.0f}"
        else:
            text = size(value) if key == "bytes" else number(value, 6)
        result.append(say(known.form).replace("{}", text))
    return result


def conditions(finding: Finding) -> list[str]:
    """The conditions of a finding in plain words, without what its title says already."""
    given = finding.measurement.conditions
    return words({key: value for key, value in given.items() if not (_is_spread(finding) and key == "metric")})


def shared_and_own(findings: Sequence[Finding], without: Collection[str] = ()) -> tuple[str, list[str]]:
    """The conditions that all findings share, in words; and for each finding those that tell it apart."""
    conditions = [finding.measurement.conditions for finding in findings]
    every = {key for each in conditions for key in each}
    shared = {key for key in every - LEADING if len({each.get(key) for each in conditions}) == 1}
    apart = every - {*without} - shared
    if len(findings) == 1 or any(not each.keys() & apart for each in conditions):
        shared, apart = set(), every - {*without}

    def named(given: Mapping[str, Condition], keys: set[str]) -> str:
        return say(", ").join(words({key: value for key, value in given.items() if key in keys}))

    return named(conditions[0], shared), [named(each, apart) for each in conditions]


def title(finding: Finding) -> str:
    """What was measured: "bus bandwidth", "spread of bus bandwidth"."""
    if not _is_spread(finding):
        return say(finding.measurement.definition.title)
    of = str(finding.measurement.conditions.get("metric", ""))
    return say("spread of {metric}", metric=say(METRICS[of].title) if of in METRICS else of)


def _is_spread(finding: Finding) -> bool:
    return finding.measurement.metric == "spread" and "metric" in finding.measurement.conditions


def worst(finding: Finding) -> tuple[Where, float] | None:
    """The place a reader should look at first, and its value; None where nothing was measured."""
    values = finding.measurement.values
    blamed = finding.missed or tuple(finding.slower_than_peers or ())
    missed = {name: values[name] for name in blamed if name in values}
    of = finding.measurement.definition
    return min((missed or values).items(), key=lambda item: goodness(item[1], of), default=None)


def places(every: Sequence[Where], most: int = 4, hosts: Hosts = ALONE) -> str:
    """Several places as people say them: "GPU 1, GPU 3", "GPU 0 to GPU 5, GPU 1 to GPU 5 and 12 more"."""
    return say(some([place(name, hosts) for name in every], most))


def count(number: int, noun: str) -> str:
    """ "1 check", "3 checks" """
    return f"{number} {say(noun if number == 1 else f'{noun}s')}"


def off_peers(finding: Finding) -> float:
    """How far off its peers the worst place is, of what missed these and not its limit; else 0."""
    of_peers = finding.state == "missed" and _to_limit(finding) >= 0
    return max((finding.slower_than_peers or {}).values(), default=0.0) if of_peers else 0.0


def margin(finding: Finding) -> float:
    """How far inside its limit the worst value is, or off its peers, as a fraction; without both, infinitely far."""
    return -off_peers(finding) or _to_limit(finding)


def _to_limit(finding: Finding) -> float:
    furthest, limit = worst(finding), finding.limit
    if furthest is None or limit is None or limit.value == 0:
        return math.inf
    if math.isnan(furthest[1]):
        return -math.inf
    sign = 1 if limit.sense == "min" else -1
    return sign * (furthest[1] - limit.value) / abs(limit.value)
