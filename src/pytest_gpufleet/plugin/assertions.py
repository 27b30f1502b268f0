"""What checks assert: facts by expect(), measurements by judge(); and the machine that they ask."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

import pytest

from pytest_gpufleet.machine import host, network_ports, rdma, software
from pytest_gpufleet.machine.gpu_facts import COUNTERS, NAMES, unreadable_by_model
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.machine.tools import HostFact
from pytest_gpufleet.model import place
from pytest_gpufleet.model.conditions import c_number
from pytest_gpufleet.model.endings import not_applicable, not_judged
from pytest_gpufleet.model.events import Judged
from pytest_gpufleet.model.fault import Fault, expect_none
from pytest_gpufleet.model.language import some
from pytest_gpufleet.model.metric import Measurement
from pytest_gpufleet.model.place import Gpu, Missing, check_name
from pytest_gpufleet.plugin import compat, listeners
from pytest_gpufleet.plugin.compat import MISSED, RUN
from pytest_gpufleet.redaction import redacted
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.verdict.fleet.host_runs import HostRun
from pytest_gpufleet.verdict.judgement import LimitMissed, set_aside, to_measure_again
from pytest_gpufleet.verdict.outliers import figure_of

__tracebackhide__ = True  # of no frame of this module is anything shown to who reads why a check failed
T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What a value should be: `words` say it, `test` says whether it is."""

    words: str
    test: Callable[[Any], bool]


def at_least(least: Any) -> Wanted:
    return Wanted(f"at least {least}", lambda value: not isinstance(least, Missing) and bool(value >= least))


def expect(
    gpus: Sequence[Gpu], fact: str, wanted: Any, *, code: str = "fact_unexpected", must_exist: bool = False
) -> None:
    """Fail the check if a fact of any GPU is not `wanted`: a value, a Wanted, or a function of the GPU that gives one.

    Raises Faults of the kind `code` that name the GPUs, also those that do not answer. Where no GPU of this machine
    has such a thing, the check does not apply, unless it `must_exist`; where the model has it, it is not judged.
    KeyError if nothing is called `fact`."""
    if not must_exist:
        require_any(gpus, fact)
    faults = []
    for gpu in gpus:
        value = gpu[fact]
        if isinstance(value, Missing):
            faults.append(Fault("fact_unreadable", (gpu.place,), f"{fact} cannot be read ({value})"))
        elif differs := _difference(value, wanted(gpu) if callable(wanted) else wanted):
            faults.append(Fault(code, (gpu.place,), f"{fact} {differs}"))
    expect_none(faults)


def _difference(value: Any, wanted: Any) -> str:
    if wanted.test(value) if isinstance(wanted, Wanted) else value == wanted:
        return ""
    return f"is {value}, should be {wanted.words if isinstance(wanted, Wanted) else wanted}"


def require_any(gpus: Sequence[Gpu], fact: str) -> None:
    """End the check as not applicable where no GPU has such a fact; as not judged where the model has it."""
    check_name(fact)
    if all(isinstance(gpu[fact], Missing) and gpu[fact].absent for gpu in gpus):
        require_readable(gpus, [fact])
        not_applicable(f"{fact}: {gpus[0][fact] if gpus else 'there is no GPU'}")


def require_readable(gpus: Sequence[Gpu], facts: Collection[str] = tuple(COUNTERS)) -> None:
    """End the check as not judged if facts that a GPU has by its model cannot be read; by default error counters."""
    if lines := unreadable_by_model(gpus, facts):
        not_judged("\n".join(lines))


def expect_host(machine: Machine, fact: HostFact[Any], wanted: Any, *, code: str) -> None:
    """Fail the check if a fact of the host is not `wanted`, a value or a Wanted; not applicable where it is unknown."""
    if differs := _difference(of_host(machine.host.get, fact), wanted):
        expect_none([Fault(code, (place.THIS_NODE,), f"{fact.name} {differs}")])


def of_host(read: Callable[[str], Any], fact: HostFact[T], read_before: bool = False) -> T:
    """A fact of the host, by machine.now or machine.host.get (`read`). Ends the check as not applicable where there is
    no such thing; as not judged where it cannot be read, or no longer (`read_before`: it was when the run began)."""
    value = fact.of({fact.name: read(fact.name)})
    if isinstance(value, Missing):
        if read_before:
            not_judged(f"{value}, though it could be read when the run began")
        (not_applicable if value.absent else not_judged)(str(value))
    return value


def require_answers(silent: Iterable[str | None]) -> None:
    """End the check as not judged if a part of the host did not answer, like a drive: each says so, or nothing."""
    if unanswered := list(filter(None, silent)):
        not_judged("; ".join(unanswered))


def ports_in_use(machine: Machine) -> list[network_ports.Port]:
    """The InfiniBand and RoCE ports of the host; ends the check as not applicable if none is active."""
    if not (ports := of_host(machine.host.get, network_ports.NETWORK_PORTS)):
        not_applicable("this system has no InfiniBand or RoCE port")
    if not network_ports.active(ports):
        not_applicable(f"none of {len(ports)} InfiniBand and RoCE ports is up: no cable, or a switch that is off")
    return ports


def rdma_rails(nodes: Sequence[Node]) -> dict[int, str]:
    """The RDMA ports by which these nodes reach each other, by rail. Ends the check as not applicable where no node has
    such ports and perftest, or NCCL is to use none, as not judged where some have, or perftest cannot try a port."""
    if c_number(software.steering().get("NCCL_IB_DISABLE") or ""):
        not_applicable("NCCL_IB_DISABLE: NCCL is to use no RDMA")
    there = {node.number: (node.machine, node.now(rdma.RDMA_PORTS.name)) for node in nodes if node.machine}
    found = {number: rdma.RDMA_PORTS.of({rdma.RDMA_PORTS.name: now}) for number, (_, now) in there.items()}
    if silent := {number: why for number, why in found.items() if isinstance(why, Missing)}:
        absent = len(silent) == len(found) and all(why.absent for why in silent.values())
        texts = [f"node {number}: {why}" for number, why in silent.items()]
        (not_applicable if absent else not_judged)(some(texts, 8, "; "))
    machines = [machine for machine, _ in there.values()]
    if not (rails := rdma.rails([network_ports.ports_of(each.host) for each in machines], machines[0].gpus)):
        not_applicable("these nodes have no active InfiniBand or RoCE port of one name")
    return rails


# Before a second measurement. Memory and clocks of a GPU recover from full load within seconds, and what keeps a host
# busy for some tenths of a second comes in bursts.
PAUSE_SECONDS = 10.0

Measure = Callable[[], Measurement | Sequence[Measurement]]
# Why figures missed: faults, or a text that names nobody.
Cause = str | Fault | Sequence[Fault]


class Judge:
    """What the fixture `judge` gives."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def __call__(
        self,
        *measurements: Measurement | Measure, shown: Iterable[Measurement] = (), required: bool = True,
        again: Measure | None = None, on_miss: Callable[[], Cause] | None = None,
    ) -> None:  # fmt: skip
        """Hold each of the measurements against its limit and its peers, and record all. Of a function, what it
        measures, and after a pause once more where one missed or is unsteady: by `again`, if that is another way, which
        may give what was only `shown` too. `on_miss` looks for the cause if one missed then. TypeError for what is no
        Measurement, ValueError for none."""
        run, item, shown = self._item.config.stash[RUN], self._item, tuple(shown)
        first, second = taken(measurements), [again] if again else [each for each in measurements if callable(each)]
        for each in (*first, *shown):
            if not isinstance(each, Measurement):
                raise TypeError(f"judge() takes Measurements, not {reprlib.repr(each)}")
        if not first:
            raise ValueError("judge() was given no measurement: nothing was judged")
        findings = run.judged(item.nodeid, first, required) + run.judged(item.nodeid, shown, False)
        if second and (figures := to_measure_again(findings)):
            time.sleep(PAUSE_SECONDS)
            beside, now = [figure_of(each) for each in shown], taken(second)
            last = run.judged(item.nodeid, [each for each in now if figure_of(each) not in beside], required)
            last += run.judged(item.nodeid, [each for each in now if figure_of(each) in beside], False)
            findings = [*set_aside(figures, last), *last]
        for finding in findings:
            run.record(Judged(finding=finding))
            for name, value in finding.properties():
                compat.junit_property(item.config, f"{item.nodeid} {name}", value)
            listeners.announce(item.config, "pytest_gpufleet_finding", finding=finding, item=item)
        if still := [finding for finding in findings if finding.state == "missed"]:
            missed, causes = item.stash.setdefault(MISSED, ([], []))
            missed += still
            cause = on_miss() if on_miss else ()
            if isinstance(cause, str):
                cause = [Fault("cause_unclear", (), cause)] if cause else []
            for fault in [cause] if isinstance(cause, Fault) else cause:
                about = {"what": redacted(fault.what), "story": redacted(fault.story)}
                causes.append(fault.changed(check=item.nodeid, **about))
                run.accuse(causes[-1])


def taken(given: Iterable[Measurement | Measure]) -> list[Measurement]:
    """What was measured, and what these functions measure now."""
    found = [each() if callable(each) else [each] for each in given]
    return [one for each in found for one in (each if isinstance(each, Sequence) else [each])]


def limit_missed(item: pytest.Item) -> LimitMissed | None:
    """The failure that judge() owes a test, once; None if nothing missed."""
    missed, causes = item.stash.get(MISSED, ([], []))
    item.stash[MISSED] = ([], [])
    return LimitMissed(missed, item.config.stash[RUN].target.topology, causes) if missed else None


@dataclass(frozen=True)
class Node:
    """A node of a run on several. `machine`: as it was when the run began, None if it takes no part any more. `run`:
    what it came to by itself. `clock_ahead`: by how many seconds its clock is ahead of that where pytest runs."""

    number: int
    machine: Machine | None
    run: HostRun | None
    clock_ahead: float | None
    ask: Callable[[str], Mapping[int, Any]]  # all nodes at the same time, by their numbers
    name: str = ""

    def now(self, fact: str) -> Any:
        """A fact of its host, as it is at this moment; Missing if it does not answer."""
        return self.ask(fact).get(self.number, Missing("the node does not answer"))


class LiveMachine(Machine):
    """A Machine that can be asked again. In a check between nodes it has `nodes`, and no GPUs of its own."""

    _run: Run
    _left_out: dict[str, Missing]

    def __init__(self, run: Run) -> None:
        without = run.options.without
        left_out = {name: host.left_out(fact.subject) for name, fact in host.FACTS.items() if fact.subject in without}
        own = vars(run.own_machine.machine) if run.options.nodes is None or not run.options.makes_a_run else {}
        if own:
            own = {**own, "host": {**own["host"], **left_out}}
        vars(self).update(own, _run=run, _left_out=left_out)

    def __getattr__(self, name: str) -> NoReturn:
        pytest.fail(f"machine.{name} is of one machine: a check between nodes asks machine.nodes", pytrace=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Ranks have the facts, and nobody to ask."""
        return Machine, (self.gpus, self.host, self.taken, self.logged, self.present, self.node)

    def now(self, fact: str) -> Any:
        """A fact as it is at this moment: one of the GPUs' as a list in the order of `gpus`, or one of the host as
        evidence has it. Missing or None where it cannot be read."""
        _ = self.gpus  # which only one machine has
        if fact not in host.FACTS or fact in NAMES:
            check_name(fact)
            return [gpu[fact] for gpu in self._run.own_machine.node.facts((fact,))]
        return self._left_out.get(fact) or self._run.host_now(fact)

    def before(self, fact: str) -> Any:
        """The same when the run began; what is read on request as `now` gave it first, also before a resume."""
        gpus = self.gpus
        if fact in NAMES:
            return [gpu[fact] for gpu in gpus]
        return ({**self._run.host_before, **self._left_out} if host.FACTS[fact].on_request else self.host).get(fact)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those that take part, were lost, or were left out. The first that is asked for a fact `now` asks all."""
        run = self._run
        machines = {machine.node: machine for machine in run.machines()}
        runs, clocks = run.runs_of_nodes(), run.clocks_ahead
        numbers = sorted({*machines, *runs, *clocks})
        left_out = {fact: dict.fromkeys(numbers, why) for fact, why in self._left_out.items()}
        ask = cache(lambda fact: left_out.get(fact) or run.hosts_now(fact))
        names = {found.index: found.host for found, _, _ in run.target.node_facts}
        return tuple(Node(at, machines.get(at), runs.get(at), clocks.get(at), ask, names.get(at, "")) for at in numbers)
