"""What the fixture `machine` gives: a machine as it was when the run began, and what it answers now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_gpufleet.machine import host
from pytest_gpufleet.machine.gpu_facts import NAMES
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.model.gpu import Missing, check_name

if TYPE_CHECKING:
    from pytest_gpufleet.run.run import Run
    from pytest_gpufleet.verdict.fleet.host_runs import HostRun


@dataclass(frozen=True)
class Node:
    """A node of a run on several. `machine`: as it was when the run began, None if it takes no part any more. `run`:
    what it came to by itself. `clock_ahead`: by how many seconds its clock is ahead of that where pytest runs."""

    number: int
    machine: Machine | None
    run: HostRun | None
    clock_ahead: float | None
    ask: Callable[[str], Mapping[int, Any]]  # all nodes at the same time, by their numbers

    def now(self, fact: str) -> Any:
        """A fact of its host, as it is at this moment; Missing if it does not answer."""
        return self.ask(fact).get(self.number, Missing("the node does not answer"))


class LiveMachine(Machine):
    """A Machine that can be asked again. In a check between nodes it has `nodes`, and no GPUs of its own."""

    _run: Run
    _left_out: dict[str, Missing]

    def __init__(self, run: Run) -> None:
        left_out = {fact.name: host.left_out(fact.subject) for fact in host.ALL if fact.subject in run.options.without}
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
        """The same when the run began. What is read on request: as `now` gave it first in this run, and in the one that
        it goes on with (--fleet-resume) if there is one."""
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
        return tuple(Node(each, machines.get(each), runs.get(each), clocks.get(each), ask) for each in numbers)
