"""Writes docs/power.md: `python docs/make_power.py`, after every change of a limit or a spread."""

from collections.abc import Iterator
from pathlib import Path

from pytest_gpufleet.commands.power import by_fault, by_measurement, of_1000, rejects
from pytest_gpufleet.model.place import grouped
from pytest_gpufleet.report.tables import Table
from pytest_gpufleet.verdict import power
from pytest_gpufleet.verdict.noise import REJECTED
from pytest_gpufleet.verdict.profile import Profile, shipped

PAGE = Path(__file__).parent / "power.md"
COMMAND = "python docs/make_power.py"
LEVEL, SHOWN = "standard", "h200"
# Machines with another number of GPUs than 8.
GPUS = {"gb200": 4, "gb300": 4, "gh200": 1, "gh200-144gb": 1, "gb10": 1, "vr200": 4}
GIB = 1 << 30
STEADY = ("all_reduce", "reduce", "all_to_all", "sendrecv")

INTRODUCTION = f"""\
# Power and false rejects

<!-- Written by `{COMMAND}`: change that, or the program. -->

How small a fault is found, with which probability, and how often a healthy machine is rejected, by the limits that are
shipped. `gpufleet power PROFILE|RUN --gpus N --nodes M` ([commands](commands.md#power)) prints the same for your
machines.

- A healthy value is the mean of its kind times 1 + *between* + *within*, both normal. The line of a comparison follows
  from these spreads, from the number of comparisons and from the smallest fault that matters ([profiles](profiles.md)).
- Spreads stand at the upper end of their 95 % confidence interval, and below the line, where a smaller one finds less,
  at what is known. A reference is itself off by chance, as the mean of so many machines is.
- A fault is found if the best single measurement of those that show it is beyond its line. More are not counted: all
  that computes on one GPU goes up and down with the chip (correlation 0.78).
- A second measurement changes nothing here: it takes out what was a disturbance, and a chip is the same the second
  time.
- *peers*: against the mean of the other GPUs, pairs or adapters of the machine. *reference*: the mean of a whole
  machine against that of healthy machines. *fixed*: a tolerance that no spread was measured for. A fault without a row
  has no measurement with a reference or peers; floors are not counted, since nobody knows how far above them healthy
  machines are.
- With `--nodes` each node counts by its own run, and what is measured between nodes by its references. What nodes show
  beside each other, and accuse by two measurements, comes on top.
- Numbers are per cent. *95 % from*: the smallest fault that is found with that probability.

What no data can reach: at the power limit the chips themselves differ, by 0.5 to 1.4 % (17 H200). However many machines
are measured, a matmul that draws all power does not show one GPU that is 2 % slow beside its peers. A matmul below the
power limit does, and so does the GPU's own earlier run (`gpufleet compare --same-machine`)."""

# From what size on faults were found in recorded machines of 4x H200 (docs/planted-faults.md, 5e232b7d), at the first
# place and at the last, when tolerances were fixed and limits were parts of one measurement.
BEFORE = {
    "one GPU": "2.9 to 4.5 %",
    "one GPU, at its power limit alone": "2.9 to 4.5 %",
    "all GPUs": "4.1 to 11.5 %",
    "all GPUs, at their power limit alone": "4.1 to 11.5 %",
    "one memory": "0.5 to 0.6 %",
    "all memories": "3.1 to 3.8 %",
    "links of one GPU": "0.5 %",
    "links of all GPUs": "2 to 2.2 %",
    "host link of one GPU": "4.5 to 4.6 %",
}
SIMULATED = """\
`python benchmarks/false_rejects.py`, 2026-11-23: healthy H200 by chance, with the spreads that were recorded, boards of
both part numbers and references that are off by chance, through the program's own judging. Before: 30802ceb.

| rejected | before | now | before, 1.5 x as noisy | now |
| --- | ---: | ---: | ---: | ---: |
| machines of 8 GPUs | 20 of 1,000 | 0 of 1,000 | 305 of 1,000 | 2 of 1,000 |
| 64 nodes of 8, any by its own run | 10 of 20 | 0 of 10 | 5 of 5 | 0 of 3 |
| 64 nodes of 8, any beside the others | 20 of 20 | 0 of 10 | 5 of 5 | 0 of 3 |
| 500 nodes of 8, any by its own run or beside the others | not run | 0 of 1 | | |"""


def made_of(profile: Profile) -> list[power.Comparison]:
    return power.of_profile(profile, GPUS.get(profile.path.stem, 8), 1, LEVEL)


def markdown(table: Table) -> Iterator[str]:
    yield f"| {' | '.join((table.corner, *table.columns))} |"
    yield f"| --- |{' ---: |' * len(table.columns)}"
    for row in table.rows:
        yield f"| {' | '.join((row.name, *(cell.text for cell in row.cells)))} |"


def aims(made: list[power.Comparison]) -> Iterator[str]:
    """What was to be reached on 8 GPUs, and what is."""

    def size(probability: float, *shown: list[power.Comparison]) -> float:
        """The worst of the best of each."""
        return max(min((power.size_found(probability, each.line) for each in some), default=1.0) for some in shown)

    links = [each for each in power.showing("links of one GPU", made) if each.held == "peers"]
    below = [each for each in made if each.metric == "gemm_full_clock" and each.held == "peers"]
    large = [each for each in made if each.metric == "busbw" and dict(each.conditions).get("bytes", 0) >= GIB]
    steady = [[each] for each in large if dict(each.conditions)["collective"] in STEADY]
    rows = [
        ("one memory 1 % slow, with 99 %", size(0.99, power.showing("one memory", made)), 0.01),
        ("NVLinks of one GPU 1 % slow, with 99 %", size(0.99, links), 0.01),
        ("one GPU 2 % slow in a matmul below the power limit, with 99 %", size(0.99, below), 0.02),
        (f"{', '.join(STEADY)} from 1 GiB 4 % slow, with 95 %", size(0.95, *steady) if steady else 1.0, 0.04),
    ]
    yield "| aim | reached |"
    yield "| --- | --- |"
    for aim, reached, wanted in rows:
        text = "no measurement of it" if reached == 1.0 else f"from {100 * reached:.2g} % on"
        yield f"| {aim} | {'yes' if reached <= wanted else '**no**'}: {text} |"
    for by, chance in zip(
        ("spreads that are known", "upper ends of the spreads"), power.rejected_by_chance(made), strict=True
    ):
        yes = "yes" if chance < REJECTED else "**no**"
        yield f"| a healthy machine rejected less than once in 1,000, by the {by} | {yes}: {of_1000(chance)} |"


def compared(made: list[power.Comparison]) -> Iterator[str]:
    """With what was found before."""
    yield "| slow | before, found from | now, line | now, 95 % from |"
    yield "| --- | ---: | ---: | ---: |"
    for fault, before in BEFORE.items():
        for best in power.showing(fault, made)[:1]:
            sure = power.size_found(0.95, best.line)
            yield f"| {fault} | {before} | {100 * best.line.at:.2g} % | {100 * sure:.2g} % |"
    yield ""
    yield "At the power limit a GPU is found later than before, when healthy machines were rejected for it (see below)."
    yield "Machines on record: [planted faults](planted-faults.md)."


def page() -> str:
    profiles = {each.path.stem: each for each in shipped()}
    made = made_of(profiles[SHOWN])
    text = [INTRODUCTION, "", "## Aims", "", f"On 8 GPUs, profile {profiles[SHOWN].name}.", "", *aims(made), ""]
    text += ["## Before, by fixed tolerances", "", *compared(made), "", "## Simulated", "", SIMULATED, ""]
    text += [f"## Each measurement: {profiles[SHOWN].name}, 8 GPUs", "", *markdown(by_measurement(made, "")), ""]
    alike = grouped((tuple(of_profile(profile)), profile.name) for profile in profiles.values())
    for lines, names in alike.items():
        text += [f"## {', '.join(names)}", "", *lines, ""]
    return "\n".join([*text, f"## Observed\n\n{rejects(made)[-1].capitalize()}.\n"])


def of_profile(profile: Profile) -> Iterator[str]:
    made, gpus = made_of(profile), GPUS.get(profile.path.stem, 8)
    if not made:
        yield f"On {gpus} GPU{'s' * (gpus > 1)} nothing has a reference or peers: limits are floors or physical."
        return
    yield f"On {gpus} GPUs. {rejects(made)[0].capitalize()}."
    yield from ("", *markdown(by_fault(made, "")))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
