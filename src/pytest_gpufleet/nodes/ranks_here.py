"""The ranks of a run that are on this node. All others know them by their numbers among the ranks of all nodes, the
engine by their places among those here."""

import pickle
import resource
import selectors
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from pytest_gpufleet.nodes.messages import RankAnswered, RankDied
from pytest_gpufleet.world.call import RankSpec, nothing
from pytest_gpufleet.world.engines.local import LocalEngine
from pytest_gpufleet.world.engines.protocol import Answer, Death, Trace


def of_network(interface: str, local_index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """On which interface a rank talks to those of other nodes: the one of its node, unless somebody has chosen others.

    NCCL takes a name for the begin of names, but for "=". Gloo knows one interface: where there are several to choose
    from, the ranks of a node take turns, as the GPUs of a node have a rail each.
    """
    if not interface:
        return {}
    names = (environment.get("GLOO_SOCKET_IFNAME") or interface).split(",")
    return {
        "NCCL_SOCKET_IFNAME": environment.get("NCCL_SOCKET_IFNAME") or f"={interface}",
        "GLOO_SOCKET_IFNAME": names[local_index % len(names)],
    }


class RanksHere:
    """What goes wrong with starting and sending is the death of the ranks that it was for, and raises nothing."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._numbers: tuple[int, ...] = ()  # among all ranks, of each that was started here
        self._died: list[RankDied] = []

    def get_ready(self) -> None:
        """Have the ranks start sooner. If that cannot be, `start` tells why."""
        with suppress(OSError), _most_open_files():
            self._engine.get_ready(nothing)

    def start(self, specs: bytes) -> None:
        """`specs`: pickled, as the controller has them. They come from whoever has started this process."""
        started: Sequence[RankSpec] = pickle.loads(specs)
        self._numbers = tuple(spec.index for spec in started)
        try:
            with _most_open_files():
                self._engine.start(started)
        except Exception as error:
            self._lose(self._numbers, f"before it had started: {_text(error)}")
            self._numbers = ()

    def submit(self, ranks: Iterable[int], parcel: bytes) -> None:
        here = [rank for rank in ranks if rank in self._numbers]
        try:
            self._engine.submit(map(self._numbers.index, here), parcel)
        except Exception as error:
            self._lose(here, f"for its controller: nothing can be sent to it: {_text(error)}")

    def watch(self, selector: selectors.BaseSelector) -> None:
        if self._numbers:
            self._engine.watch(selector)

    def news(self) -> list[RankAnswered | RankDied]:
        """What has happened by now."""
        died, self._died = self._died, []
        happened = self._engine.wait(0.0) if self._numbers and not died else []
        return [*died, *(self._news(each) for each in happened)]

    def examine(self, ranks: Iterable[int]) -> dict[int, Trace]:
        """Of those that are here."""
        here = [rank for rank in ranks if rank in self._numbers]
        traces = self._engine.examine(map(self._numbers.index, here)) if here else {}
        return {self._numbers[place]: trace for place, trace in traces.items()}

    def kill(self, timeout: float) -> dict[int, str]:
        left = self._engine.kill(timeout)
        numbers, self._numbers, self._died = self._numbers, (), []
        return {numbers[place]: state for place, state in left.items()}

    def _news(self, event: Answer | Death) -> RankAnswered | RankDied:
        number = self._numbers[event.rank]
        if isinstance(event, Answer):
            return RankAnswered(number, event.parcel)
        return RankDied(number, event.reason)

    def _lose(self, ranks: Iterable[int], how: str) -> None:
        self._died += [RankDied(rank, how) for rank in ranks]


@contextmanager
def _most_open_files() -> Iterator[None]:
    """What is started here may open as many as the system allows: from about 4 nodes on NCCL needs more than the usual
    1,024 ("Too many open files" in its bootstrap). Not this process, whose own limit is the one that is judged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # the system's own limit was lowered since
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
