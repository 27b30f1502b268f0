"""One GPU, watched by the process that works on it: what it is like while something is measured."""

from __future__ import annotations

import threading
from contextlib import suppress
from statistics import median
from types import TracebackType

from pytest_gpufleet.hardware import nvml
from pytest_gpufleet.hardware.node import NoGpus
from pytest_gpufleet.hardware.nvml import Nvml
from pytest_gpufleet.model.facts import Unavailable
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.measurement import GpuState

READ = ("temperature_c", "sm_clock_mhz", "power_watts")  # the fields of GpuState
INTERVAL_SECONDS = 0.1  # as often as a GPU measures its power anew


def state_of(gpu: Gpu | None) -> GpuState | None:
    """What a GPU is like at this moment; None for a CPU rank, and where NVML does not tell."""
    if gpu is None:
        return None
    with suppress(NoGpus), nvml.session() as driver, suppress(driver.NVMLError):
        read = nvml.read(Nvml(driver, [driver.nvmlDeviceGetHandleByIndex(gpu.index)]), 0, READ)
        return GpuState(**{name: float(value) for name, value in read.items() if not isinstance(value, Unavailable)})
    return None


class Watch:
    """Reads temperature, SM clock and power of a GPU while the block runs, in a thread of its own.

    with Watch(rank.gpu) as watch:
        work()
    watch.state

    What NVML does not tell is left out; nothing that it does ends the work. None stands for a CPU rank.
    """

    def __init__(self, gpu: Gpu | None) -> None:
        self._read: dict[str, list[float]] = {}
        self._over = threading.Event()
        self._thread = None
        if gpu is not None:
            self._thread = threading.Thread(target=self._run, args=(gpu.index,), name="gpufleet-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(nvml.ANSWER_SECONDS)

    @property
    def state(self) -> GpuState | None:
        """The medians of what was read; None if nothing was."""
        return GpuState(**{name: median(values) for name, values in self._read.items()}) if self._read else None

    def _run(self, index: int) -> None:
        with suppress(NoGpus), nvml.session() as driver, suppress(driver.NVMLError):
            gpu = Nvml(driver, [driver.nvmlDeviceGetHandleByIndex(index)])
            while True:
                for name, value in nvml.read(gpu, 0, READ).items():
                    if not isinstance(value, Unavailable):
                        self._read.setdefault(name, []).append(float(value))
                if self._over.wait(INTERVAL_SECONDS):
                    return
