"""An engine without processes: functions run here, when they are submitted, on a clock for which nobody waits.

How a function ends says what its rank does: it returns, raises, takes its time, dies, hangs, or sends no answer."""

import heapq
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytest_gpufleet.world.call import START, Answer, Death, Outcome, RankSpec, Trace, pack, unpack
from pytest_gpufleet.world.world import Pool, Rank, World, join, join_alone


@dataclass
class Takes:
    """Ends after so many seconds as `ending` does."""

    seconds: float
    ending: Any = None


@dataclass
class Sends:
    parcel: bytes


class Dies(Exception):
    pass


class Hangs(Exception):
    pass


class Phases:
    phase = staticmethod(lambda name: None)


@dataclass
class FakeEngine:
    """`starting(rank)` runs when a rank starts, `joining(rank)` for each process group that it joins. `traces` is what
    is seen of ranks, `unkillable` those that no kill ends."""

    starting: Callable[[int], Any] = lambda rank: None
    joining: Callable[[int], Any] = lambda rank: None
    traces: dict[int, Trace] = field(default_factory=dict)
    unkillable: dict[int, str] = field(default_factory=dict)
    now: float = 0.0
    starts: int = 0
    kills: int = 0
    joined: list[tuple[int, ...]] = field(default_factory=list)
    examined: list[int] = field(default_factory=list)
    _coming: list[tuple[float, int, Answer | Death]] = field(default_factory=list)
    _order: Any = field(default_factory=itertools.count)

    def clock(self):
        return self.now

    def start(self, specs):
        self.starts += 1
        self.specs = specs
        for spec in specs:
            self._perform(spec.index, START, self.starting, spec.index)

    def rendezvous(self):
        return "fake://"

    def submit(self, ranks, parcel):
        call = pickle.loads(parcel)
        function, args, kwargs = unpack(call.work)
        if function in (join, join_alone):
            self.joined += args[0]
        for index in ranks:
            if function in (join, join_alone):
                self._perform(index, call.number, self.joining, index)
            else:
                self._perform(index, call.number, function, self._rank(index, call), *args, **kwargs)

    def then(self, rank, ending):
        self._perform(rank, START, lambda: ending)

    def _rank(self, index, call):
        members, spec = next(each for each in call.groups if index in each), self.specs[index]
        sizes = (members.index(index), len(members), spec.node, call.nodes.count(spec.node), "fake", spec.gpu)
        return Rank(*sizes, {}, {members: members}, members if call.with_group else None, Phases())

    def _perform(self, rank, number, function, *args, **kwargs):
        seconds = 0.0
        try:
            ending = function(*args, **kwargs)
            if isinstance(ending, Takes):
                seconds, ending = ending.seconds, ending.ending
            if isinstance(ending, Exception):
                raise ending
        except Hangs:
            return
        except Dies as death:
            event = Death(rank, str(death))
        except Exception as error:
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            event = _answer(rank, Outcome("raised", number, error_type=kind, error_text=str(error), seconds=seconds))
        else:
            sent = isinstance(ending, Sends)
            packed = b"" if sent else pack(ending)
            event = Answer(rank, ending.parcel) if sent else _answer(rank, Outcome("returned", number, packed))
        heapq.heappush(self._coming, (self.now + seconds, next(self._order), event))

    def wait(self, timeout):
        until = self.now + max(0.0, timeout)
        if self._coming and self._coming[0][0] <= until:
            self.now, _, event = heapq.heappop(self._coming)
            return [event]
        self.now = until
        return []

    def examine(self, ranks):
        self.examined = list(ranks)
        return {rank: self.traces.get(rank, Trace()) for rank in self.examined}

    def kill(self, timeout):
        self.kills += 1
        self._coming.clear()
        return self.unkillable


def _answer(rank, outcome):
    return Answer(rank, pickle.dumps(outcome))


def specs(*ranks_of_nodes):
    size, result = sum(ranks_of_nodes), []
    for node, count in enumerate(ranks_of_nodes):
        result += [RankSpec(len(result) + i, size, node, i, count, "cpu", None) for i in range(count)]
    return result


def world_of(engine, *ranks_of_nodes, with_group=False, **options):
    """A world whose calls have 10 s by default."""
    options = {"timeout": 10.0, "clock": engine.clock, **options}
    return World(Pool(engine, specs(*ranks_of_nodes), **options), with_group)
