"""What the GPUs do while a run goes on, sampled in threads."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import fmean, median

from pytest_gpufleet.machine import nvml
from pytest_gpufleet.machine.local_node import LocalNode
from pytest_gpufleet.machine.nvml import NoGpus, Nvml
from pytest_gpufleet.model.metric import GpuState, Sample
from pytest_gpufleet.model.place import Gpu, Missing

CLOCK = "sm_clock_mhz"
READ, ENERGY = ("temperature_c", CLOCK, "power_watts"), "energy_joules"  # the fields of GpuState
REASONS = "clock_event_reasons"
INTERVAL_SECONDS = 0.1  # as often as a GPU measures its power anew


class Watch:
    """Reads temperature, SM clock, power and energy of a GPU in a thread while its `with` block runs. What NVML cannot
    read is left out; nothing that it does ends the work. None stands for a CPU rank."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._read: list[tuple[float, dict[str, float]]] = []  # when, and what was read by its name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(gpu,), name="gpufleet-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(nvml.ANSWER_SECONDS)

    @property
    def medians(self) -> GpuState | None:
        """`state` without the spikes, of which a mean has its part: for what is a figure itself."""
        return self.state(of=median)

    @property
    def sm_clock_mhz(self) -> int:
        """As it was read last; 0 if it was not."""
        return int(next((read[CLOCK] for _, read in reversed(self._read) if CLOCK in read), 0))

    def held_by(self, reason: int) -> bool:
        """Whether a clock event reason was there half of the time or more, as far as NVML showed any."""
        seen = [int(read[REASONS]) & reason > 0 for _, read in self._read if REASONS in read]
        return 2 * sum(seen) >= len(seen) > 0

    def state(self, since: float = -math.inf, of: Callable[[list[float]], float] = fmean) -> GpuState | None:
        """The means of what was read from a moment of time.monotonic() on, and the energy; None if nothing was read."""
        read = [each for moment, each in self._read if moment >= since]
        values = {name: [each[name] for each in read if name in each] for name in (*READ, ENERGY)}
        energy = values.pop(ENERGY)
        states = {name: of(each) for name, each in values.items() if each}
        spent = {ENERGY: energy[-1] - energy[0]} if len(energy) > 1 else {}
        return GpuState(**states, **spent) if states else None

    def _run(self, gpu: Gpu | None) -> None:
        if gpu is None:
            return
        with suppress(NoGpus), nvml.session() as driver, suppress(driver.NVMLError):
            one, over = Nvml(driver, [driver.nvmlDeviceGetHandleByIndex(gpu.index)]), False
            while True:
                found = nvml.read(one, 0, (*READ, ENERGY, REASONS)).items()
                known = {name: float(value) for name, value in found if not isinstance(value, Missing)}
                # The means are of the block.
                here = {name: value for name, value in known.items() if name == ENERGY or not over}
                self._read.append((time.monotonic(), here))
                if over:
                    return
                over = self._over.wait(INTERVAL_SECONDS)


LONGEST_GAP = 10  # intervals, of a second at least: without samples for longer, what happened went unseen


class Sampler:
    """A daemon thread that hands a Sample to `on_sample` every `interval_seconds`. What fails costs one sample;
    `trouble`: what did last, or that there was no sample for LONGEST_GAP."""

    def __init__(self, node: LocalNode, interval_seconds: float, on_sample: Callable[[Sample], None]) -> None:
        self.trouble = ""
        self._node = node
        self._interval = interval_seconds
        self._on_sample = on_sample
        self._latest = 0.0  # monotonic time of the last sample, or of the start
        self._sampled = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpufleet-telemetry", daemon=True)

    def start(self) -> None:
        self._latest = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples. Waits for one that is being taken, for one interval at the most."""
        running = self._thread.is_alive() and not self._stopped.is_set()
        self._stopped.set()
        if running:
            self._thread.join(self._interval)
            self._note_gap(self._thread.is_alive() and not self._sampled)

    def _note_gap(self, always: bool = False) -> None:
        gap = time.monotonic() - self._latest
        if always or gap > LONGEST_GAP * max(self._interval, 1.0):
            self.trouble = f"no answer from the driver for {gap:.1f} s"

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            try:
                taken = self._node.sample()
                if not self._stopped.is_set():
                    self._note_gap()
                    self._latest, self._sampled = time.monotonic(), True
                    self._on_sample(taken)
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
            # The next beat of a fixed rhythm; beats that were missed are left out, not made up for.
            due += self._interval * max(1, math.ceil((time.monotonic() - due) / self._interval))
