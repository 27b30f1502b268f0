"""judge(), the assertion of figures: it records and returns, and what was missed fails the test at its end."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.plugin import listeners
from pytest_gpufleet.plugin.keys import FINDINGS, MISSED, RUN
from pytest_gpufleet.redaction import redacted

if TYPE_CHECKING:
    from pytest_gpufleet.verdict.judgement import LimitMissed


# Memory and clocks of a GPU recover from full load within seconds; its heat sink needs some more.
PAUSE_SECONDS = 20.0

# Why figures missed: faults, or a text that names nobody.
Cause = str | Fault | Sequence[Fault]


class Judge:
    """What the fixture `judge` gives."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def __call__(
        self,
        *measurements: Measurement,
        shown: Iterable[Measurement] = (),
        required: bool = True,
        again: Callable[[], Sequence[Measurement]] | None = None,
        on_miss: Callable[[], Cause] | None = None,
    ) -> None:
        """Hold each of the measurements against its limit and its peers, and record all. `again` measures them once
        more where one missed because its GPU was held back by the heavy load before, or met its limit by samples that
        differ; `on_miss` looks for the cause if one missed. TypeError for what is no Measurement, ValueError for none.
        """
        __tracebackhide__ = True
        from pytest_gpufleet.verdict.judgement import set_aside, to_measure_again

        run, item, shown = self._item.config.stash[RUN], self._item, tuple(shown)
        for each in (*measurements, *shown):
            if not isinstance(each, Measurement):
                raise TypeError(f"judge() takes Measurements, not {reprlib.repr(each)}")
        if not measurements:
            raise ValueError("judge() was given no measurement: nothing was judged")
        findings = run.judged(item.nodeid, measurements, required) + run.judged(item.nodeid, shown, False)
        if again and (figures := to_measure_again(findings, run.ground.topology)):
            if any(finding.missed or finding.slower_than_peers for finding in figures):
                time.sleep(PAUSE_SECONDS)
            second = run.judged(item.nodeid, again(), required)
            findings = [*set_aside(figures, second, run.ground.topology), *second]
        item.stash.setdefault(FINDINGS, []).extend(findings)
        for finding in findings:
            run.record_event("finding", finding=finding.to_json())
            listeners.tell(item.config, "pytest_gpufleet_finding", finding=finding, item=item)
        if now := [finding for finding in findings if finding.state == "missed"]:
            missed, causes = item.stash.setdefault(MISSED, ([], []))
            missed += now
            for fault in _faults(on_miss() if on_miss else "", item.nodeid):
                run.accuse(fault)
                causes.append(fault)


def _faults(cause: Cause, check: str) -> list[Fault]:
    match cause:
        case str():
            found: Sequence[Fault] = [Fault("cause_unclear", (), cause)] if cause else []
        case Fault():
            found = [cause]
        case _:
            found = cause
    return [replace(fault, check=check, what=redacted(fault.what), story=redacted(fault.story)) for fault in found]


def limit_missed(item: pytest.Item) -> LimitMissed | None:
    """The failure that judge() owes a test, once; None if nothing missed."""
    missed, causes = item.stash.get(MISSED, ([], []))
    item.stash[MISSED] = ([], [])
    if not missed:
        return None
    from pytest_gpufleet.verdict.judgement import LimitMissed

    return LimitMissed(missed, item.config.stash[RUN].ground.topology, causes)
