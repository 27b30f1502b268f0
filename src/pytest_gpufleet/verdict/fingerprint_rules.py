"""GPUs of one machine that compute other bits of the same data, with the same libraries, than others of their model."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_gpufleet.model.events import Fingerprint
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.place import Where

MOST_PARTS = 3  # that are named


class Work(NamedTuple):
    """What must be the same for the same bits to come out: the device, its libraries, and what it is to do."""

    kind: str
    software: tuple[tuple[str, str], ...]
    part: str


def computed(fingerprints: Iterable[Fingerprint]) -> dict[Work, dict[Where, str]]:
    """The hashes of what each place computed, by the work that places have in common; "" of what did not repeat. Before
    them those of the data that it began with, which its host made."""
    found: dict[Work, dict[Where, str]] = defaultdict(dict)
    for each in fingerprints:
        software = tuple(sorted(each.software.items()))
        for name, part in each.parts.items():
            found[Work(each.kind, software, f"the data of {name}")][each.place] = part.inputs
            found[Work(each.kind, software, name)][each.place] = part.output
    return found


def usual(hashes: Iterable[str]) -> str | None:
    """What more than half of them are, None if there is no such. Of what did not repeat nothing is known."""
    steady = [each for each in hashes if each]
    most, count = Counter(steady).most_common(1)[0] if steady else ("", 0)
    return most if 2 * count > len(steady) else None


def gpus_apart(fingerprints: Sequence[Fingerprint]) -> list[Fault]:
    """GPUs that differ from more than half of those of their kind; where there is no such majority, one fault of all
    that differ, since nobody can say which are wrong. What repeats on less than half of them is not held against
    anybody: it is the software that does not repeat it."""
    wrong, unclear = defaultdict[Where, list[str]](list), defaultdict[tuple[Where, ...], list[str]](list)
    for (*_, part), hashes in computed(fingerprints).items():
        steady = {place: each for place, each in hashes.items() if each}
        if 2 * len(steady) < len(hashes):
            continue
        most = usual(steady.values())
        if most is None and steady:
            unclear[tuple(sorted(steady))].append(part)
        for place, each in hashes.items():
            if not each or most not in (None, each):
                wrong[place].append(part if each else f"{part} (other bits each time)")
    found: dict[tuple[Where, ...], str] = {}
    for place, parts in sorted(wrong.items()):
        found[(place,)] = f"other bits than most: {some(parts, MOST_PARTS, '; ')}"
    for places, parts in unclear.items():
        found[places] = f"they differ, and nobody can say which is wrong: {some(parts, MOST_PARTS, '; ')}"
    return [Fault("gpu_bits_differ", places, what) for places, what in found.items()]


def nothing_repeats(fingerprints: Iterable[Fingerprint]) -> bool:
    return not any(part.output for each in fingerprints for part in each.parts.values())
