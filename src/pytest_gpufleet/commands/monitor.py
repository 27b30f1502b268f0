"""`gpufleet monitor` and `gpufleet snapshot`: what all GPUs do now, and everything the inventory reads."""

import argparse
import json
import queue
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from pytest_gpufleet.commands.command import argument, as_json, new_console, subcommand
from pytest_gpufleet.machine import local_node
from pytest_gpufleet.machine.local_node import LocalNode, Sampler, take
from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.metric import Sample
from pytest_gpufleet.model.place import GpuTopology, clock_events
from pytest_gpufleet.redaction import aliased, use_aliases
from pytest_gpufleet.run.settings import seconds

SILENCE_SECONDS = 30.0  # after which a driver that gives no sample is taken for dead


@subcommand(
    "show utilisation, power, clocks and temperatures of all GPUs, once a second",
    argument("--once", action="store_true", help="show one sample and end"),
    as_json(help="no table, but a JSON object a sample, each on its line"),
    argument("--interval", type=seconds, default=1.0, metavar="SECONDS", help="between two samples (default: 1)"),
    argument("--fleet-dir", type=Path, default=Path("reports"), metavar="DIR",
             help="where runs leave their evidence, which names the running test (default: reports)"),
)  # fmt: skip
def monitor(given: argparse.Namespace) -> int:
    from pytest_gpufleet.report.terminal.live import running_check

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it must not leave a terminal without cursor
    with (
        suppress(KeyboardInterrupt),
        local_node.opened() as node,
        _shown(node.topology, partial(running_check, given.fleet_dir), given) as show,
        closing(_samples(node, given.interval)) as samples,
    ):
        for sample in samples:
            show(sample)
            if given.once:
                break
    return 0


def _samples(node: LocalNode, interval: float) -> Generator[Sample]:
    """One sample after the other. This thread only waits for them, so that Ctrl-C works even where a driver hangs."""
    taken: queue.SimpleQueue[Sample] = queue.SimpleQueue()
    sampler = Sampler(node, interval, taken.put)
    sampler.start()
    try:
        while True:
            yield taken.get(timeout=interval + SILENCE_SECONDS)
    except queue.Empty:
        trouble = sampler.trouble or "the driver hangs: see the kernel log"
        raise Refused(f"no answer from the GPUs for {SILENCE_SECONDS:g} s: {trouble}") from None
    finally:
        sampler.stop()


@contextmanager
def _shown(
    topology: GpuTopology, running: Callable[[], str], given: argparse.Namespace
) -> Iterator[Callable[[Sample], None]]:
    """On a terminal one table that changes, elsewhere (and for --once) one below the other, or JSON."""
    from rich.live import Live

    from pytest_gpufleet.report.terminal.live import table

    console = new_console()
    if given.json:
        yield partial(_print_json, topology, running)
    elif given.once or not console.is_terminal or console.is_dumb_terminal:
        yield lambda sample: console.print(table(sample, topology, running()), "", sep="\n", end="")
    else:
        with Live("waiting for the first sample", console=console, screen=True, auto_refresh=False) as screen:
            yield lambda sample: screen.update(table(sample, topology, running()), refresh=True)


def _print_json(topology: GpuTopology, running: Callable[[], str], sample: Sample) -> None:
    gpus = [
        {
            "gpu": str(gpu.place), "uuid": gpu.uuid, **readings, "name": gpu.name, "memory_bytes": gpu.memory_bytes,
            "power_limit_watts": gpu.power_limit_watts,
            "clock_event_reasons_in_words": clock_events(int(readings["clock_event_reasons"] or 0)),
        }
        for gpu, readings in zip(topology.gpus, sample.gpus, strict=True)
    ]  # fmt: skip
    print(json.dumps({"time": sample.time, "running": running() or None, "gpus": gpus}), flush=True)


@subcommand(
    "print everything the inventory reads, as one JSON document, secrets hidden",
    argument("--anonymous", action="store_true", help="aliases, as --fleet-alias puts them in"),
)  # fmt: skip
def snapshot(given: argparse.Namespace) -> int:
    with local_node.opened() as node:
        taken = take(node)
    # Of the environment it holds what environment.relevant() shows.
    topology = codec.plain(replace(node.topology, gpus=taken.gpus))
    # Schema 1 had no topology, 2 the facts of GPUs beside it.
    document = {"schema": 3, "taken": taken.taken, "host": codec.plain(dict(taken.host)), "topology": topology}
    use_aliases(given.anonymous)
    print(json.dumps(aliased(document), indent=1))
    return 0
