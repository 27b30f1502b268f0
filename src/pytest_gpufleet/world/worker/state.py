"""What a test most often changes on a rank, and is put back before the next one. Runs on ranks.

The rest (signal handlers, logging, functions of torch that were replaced, threads that still run, memory that is held)
is left to the marker fresh_world. The checks of the suite never get ranks that another test has used."""

import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from pytest_gpufleet.world.call import Output
from pytest_gpufleet.world.engines.processes import current_folder


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _enter(folder: str) -> None:
    with suppress(OSError):  # it was removed
        os.chdir(folder)


def _set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


# How each setting is read and written.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: dict(os.environ), _set_environment),
    (current_folder, _enter),
    (lambda: list(sys.path), lambda before: setattr(sys, "path", list(before))),
    (partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)),
    (partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()), partial(signal.pthread_sigmask, signal.SIG_SETMASK)),
    (random.getstate, random.setstate),
    (torch.get_default_device, lambda before: torch.set_default_device(None)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    *(_attribute(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction") for kind in ("fp16", "bf16")),
)

# How float32 is computed, by torch's two interfaces. The second came with torch 2.9: it knows what was changed by the
# first, and the first refuses to be read once the second has changed something.
_MATMUL, _CUDNN, _MKLDNN = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
FLOAT32: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute(_MATMUL, "allow_tf32"),
    _attribute(_CUDNN, "allow_tf32"),
)
FLOAT32_BY_OPERATION = tuple(
    _attribute(owner, "fp32_precision")
    for owner in (
        torch.backends, _MATMUL, _CUDNN, _MKLDNN,
        *(getattr(library, name, None) for library in (_CUDNN, _MKLDNN) for name in ("conv", "rnn", "matmul")),
    )
    if hasattr(owner, "fp32_precision")
)  # fmt: skip


def remembered(device: torch.device, output: Output) -> Callable[[], None]:
    """The state of a rank at its start, as what puts it back. `output`: the file of what it prints."""
    settings = [read() for read, _ in SETTINGS]
    float32 = [read() for read, _ in (*FLOAT32, *FLOAT32_BY_OPERATION)]
    random_state = torch.get_rng_state()
    cuda_seed = torch.cuda.initial_seed() if device.type == "cuda" else 0

    def put_back() -> None:
        output.restore()
        for before, (read, write) in zip(settings, SETTINGS, strict=True):
            if read() != before:
                write(before)
        newest = FLOAT32_BY_OPERATION or FLOAT32
        if [read() for read, _ in newest] != float32[-len(newest) :]:
            for value, (_, write) in zip(float32, (*FLOAT32, *FLOAT32_BY_OPERATION), strict=True):
                write(value)
        torch.set_rng_state(random_state)
        if "numpy.random" in sys.modules:  # loaded by a test; it was seeded with noise then
            sys.modules["numpy.random"].seed()
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.default_stream(device))
            torch.cuda.manual_seed(cuda_seed)  # unlike reading its state this does not wait for the GPU

    return put_back
