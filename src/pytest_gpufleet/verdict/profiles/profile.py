"""Profiles: what is known of a GPU model, and the limits it is held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import msgspec

from pytest_gpufleet.model.limit import KnownGood, Limit
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.model.tolerance import Tolerance
from pytest_gpufleet.model.vocabulary import EXTRAORDINARY
from pytest_gpufleet.verdict import toml_table
from pytest_gpufleet.verdict.profiles import profile_file
from pytest_gpufleet.verdict.toml_table import FileError

__all__ = ["FileError", "Profile", "choose", "for_gpu", "holds", "load", "shipped"]

_HERE = Path(__file__).parent
EVERY_GPU = "every-gpu.toml"


@dataclass(frozen=True)
class Profile:
    """One GPU model: the exact names NVML gives it (`match`), its data-sheet `facts`, its `limits`, and by how much
    such GPUs differ (`tolerances`).

    The unit of a fact is in its name. Where nobody published a limit there is none: unknown stays unknown. `base`: the
    profile whose limits hold where these say nothing. `metrics`: all that its limits may be for.
    `calibrated_on`: the runs that they come from, where `gpufleet calibrate` has written them.
    """

    name: str
    match: tuple[str, ...]
    facts: Mapping[str, float]
    limits: tuple[Limit, ...]
    path: Path
    base: Profile | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    calibrated_on: tuple[KnownGood, ...] = ()
    tolerances: tuple[Tolerance, ...] = ()

    def limit_for(self, measurement: Measurement, fabric: str = "") -> Limit | None:
        """The limit that decides, of those whose every condition was measured so, on a machine whose GPUs `fabric`
        connects.

        FileError if the figure is in another unit than the profile says, or better in the other direction, whether a
        limit holds for it or not: under the conditions of a rehearsal none may.
        """
        self._check_comparable(measurement.definition)
        fitting = (limit for limit in self.limits if holds(limit, measurement, fabric))
        return best(fitting, self.base.limit_for(measurement, fabric) if self.base else None)

    def tolerances_for(self, measurement: Measurement) -> tuple[Tolerance, ...]:
        """By how much places may differ from their peers: all that hold for this metric, of this profile, else of its
        base. Methods do not matter: what differs among GPUs is the GPUs."""
        own = tuple(each for each in self.tolerances if each.holds(measurement))
        return own or (self.base.tolerances_for(measurement) if self.base else ())

    def _check_comparable(self, metric: Metric) -> None:
        own = self.metrics.get(metric.name, metric)
        if (own.unit, own.better) != (metric.unit, metric.better):
            raise FileError(
                f"{metric.name} was measured in {metric.unit}, where {metric.better} is better, but by "
                f"{self.path.name} it is in {own.unit}, and {own.better} is better; make the two the same."
            )


def best(own: Iterable[Limit], of_base: Limit | None) -> Limit | None:
    """The one that decides of the limits of a profile that hold for a figure and that of its base: one that is not weak
    before one that is, and the one of the best grade; of several one of the profile's own, however specific; of these
    the most specific."""
    first = min(own, key=lambda limit: (*limit.precedence, -len(limit.conditions)), default=None)
    if first and of_base:
        return of_base if of_base.precedence < first.precedence else first
    return first or of_base


def holds(limit: Limit, measurement: Measurement, fabric: str) -> bool:
    """Whether a limit is for this metric, and every one of its conditions was measured so."""
    measured = {"fabric": fabric, **measurement.conditions}
    return (
        limit.metric == measurement.metric
        and all(measured.get(key) == value for key, value in limit.conditions.items())
        and all(key in limit.conditions for key in EXTRAORDINARY if key in measured)
    )


@cache
def shipped() -> tuple[Profile, ...]:
    """The profiles that come with this package, one a GPU model."""
    paths = sorted(set(_HERE.glob("*.toml")) - {_HERE / EVERY_GPU})
    return tuple(replace(_load(path, (), given=False), base=of_every_gpu()) for path in paths)


@cache
def of_every_gpu() -> Profile:
    """What is asked of GPUs of every model, also of those that no shipped profile is for."""
    return _load(_HERE / EVERY_GPU, (), given=False)


def for_gpu(name: str) -> Profile | None:
    """The shipped profile for a GPU, by the exact name that NVML gives; None for an unknown model.

    Exact, because limits of one model fail or flatter another: "NVIDIA H100 NVL" has fewer links than
    "NVIDIA H100 80GB HBM3".
    """
    return next((profile for profile in shipped() if name in profile.match), None)


def load(path: Path) -> Profile:
    """Read a customer's profile from a TOML file and check all of it.

    Raises FileError for a file that cannot be read, an unknown key, a limit without unit, grade or source,
    a value in the wrong unit or sense, or two limits of which neither is more specific: a typing error in a
    profile must not let a machine pass.
    """
    profile = _load(path, shipped(), given=True)
    profile = profile if profile.base else replace(profile, base=of_every_gpu())
    if not profile.match:
        raise FileError(f'{path}: "match" is missing; list the names that NVML gives such GPUs, or extend a profile.')
    return profile


def choose(path: Path | None, gpu_names: Iterable[str]) -> Profile | None:
    """The profile for a machine with GPUs of these names: the one in the file `path`, else the shipped one, else that
    of every GPU; None without GPUs.

    No shipped profile is for GPUs of several models. FileError if the file is bad or not for all of these GPUs.
    """
    names = sorted(set(gpu_names))
    if path is None:
        known = for_gpu(names[0]) if len(names) == 1 else None
        return known or (of_every_gpu() if names else None)
    given = load(path)
    if strangers := [name for name in names if name not in given.match]:
        raise FileError(
            f"{path}: is for {', '.join(given.match)}, but this machine has {', '.join(strangers)}; "
            'add the name to "match", or give the profile of that GPU.'
        )
    return given


def _load(path: Path, bases: Iterable[Profile], *, given: bool) -> Profile:
    top = toml_table.read(path)
    top.check(profile_file.ProfileTable)
    values, by_name = top.values, {profile.name: profile for profile in bases}
    base = by_name[top.choice("extends", by_name)] if "extends" in values else None
    metrics = profile_file.metrics(top)
    return Profile(
        name=values["name"],
        match=tuple(values.get("match", base.match if base else ())),
        facts={**(base.facts if base else {}), **values.get("facts", {})},
        limits=profile_file.limits(top, metrics, given=given),
        path=path,
        base=base,
        metrics=metrics,
        tolerances=profile_file.tolerances(top, metrics),
        calibrated_on=tuple(msgspec.convert(run, KnownGood) for run in values.get("calibrated_on", ())),
    )
