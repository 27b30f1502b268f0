"""What is cheap to change on a rank, and is put back before another test uses it. Runs on ranks.

Between the calls of one test everything stays as the test left it, but for filters of warnings and the level of the
root logger. What only a new process can put back (niceness, threads that still run, memory that is held, modules that
are loaded) is left to the marker fresh_world.
"""

import faulthandler
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import IO, Any

import torch
import torch.distributed

from pytest_gpufleet.world.call import Output
from pytest_gpufleet.world.engines.processes import current_folder

ROUTINES = (FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
# Namespaces of which functions are replaced by hand, as in `dist.all_reduce = mine`.
PATCHED = (torch, torch.distributed, torch.nn.functional, torch.Tensor)
LEFT_ALONE = {"manual_seed"}  # torch replaces it itself, at the first compilation
# torch's data loader sets the handler of SIGCHLD once, for all loaders to come.
SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _list(owner: Any, name: str) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    return lambda: list(getattr(owner, name)), lambda before: setattr(owner, name, list(before))


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _enter(folder: str) -> None:
    with suppress(OSError):  # it was removed
        os.chdir(folder)


def _set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _set_handlers(handlers: list[Any]) -> None:
    for number, handler in zip(SIGNALS, handlers, strict=True):
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


# How each setting is read and written.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: dict(os.environ), _set_environment),
    (current_folder, _enter),
    (_umask, os.umask),
    (lambda: [signal.getsignal(number) for number in SIGNALS], _set_handlers),
    _list(sys, "path"),
    (lambda: logging.root.level, logging.root.setLevel),
    _list(logging.root, "handlers"),
    (lambda: logging.root.manager.disable, logging.disable),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    (partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)),
    (partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()), partial(signal.pthread_sigmask, signal.SIG_SETMASK)),
    (random.getstate, random.setstate),
    (torch.get_default_device, lambda before: torch.set_default_device(None)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    *(
        (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device))
        for device in ("cuda", "cpu")
    ),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(_attribute(torch.backends.cuda.matmul, name) for name in (
        "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
    )),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
)  # fmt: skip

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


class RankState:
    """The state of a rank at its start. `stacks` is the file to which a rank that hangs writes its stack, `output`
    that of what it prints."""

    def __init__(self, device: torch.device, stacks: IO[bytes], output: Output) -> None:
        self.device = device
        self._stacks = stacks
        self._output = output
        self._modes: list[torch.inference_mode] = []
        self._settings = [read() for read, _ in SETTINGS]
        self._float32 = [read() for read, _ in (*FLOAT32, *FLOAT32_BY_OPERATION)]
        self._routines = [
            {name: each for name, each in vars(namespace).items() if type(each) in ROUTINES and name not in LEFT_ALONE}
            for namespace in PATCHED
        ]
        self._random = torch.get_rng_state()
        self._cuda_seed = torch.cuda.initial_seed() if device.type == "cuda" else 0

    def put_back(self) -> None:
        self._output.restore()
        for timer in TIMERS:  # which would go off without its handler
            signal.setitimer(timer, 0)
        for before, (read, write) in zip(self._settings, SETTINGS, strict=True):
            if read() != before:
                write(before)
        # These are set in C, past what Python knows of handlers: again, whatever was done to them.
        faulthandler.disable()
        faulthandler.enable(self._stacks)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, self._stacks)
        if torch.is_inference_mode_enabled():  # entered and never left
            self._modes.append(torch.inference_mode(False))  # it lasts as long as the object lives
            self._modes[-1].__enter__()
        newest = FLOAT32_BY_OPERATION or FLOAT32
        if [read() for read, _ in newest] != self._float32[-len(newest) :]:
            for value, (_, write) in zip(self._float32, (*FLOAT32, *FLOAT32_BY_OPERATION), strict=True):
                write(value)
        for namespace, routines in zip(PATCHED, self._routines, strict=True):
            now = vars(namespace)
            for name, routine in routines.items():
                if now.get(name) is not routine:
                    setattr(namespace, name, routine)
            if isinstance(namespace, type):  # a method that hides one of a base
                for name in list(now.keys() - routines.keys()):
                    if type(now[name]) in ROUTINES and any(name in vars(base) for base in namespace.__mro__[1:]):
                        delattr(namespace, name)
        torch.set_rng_state(self._random)
        if "numpy.random" in sys.modules:  # loaded by a test; it was seeded with noise then
            sys.modules["numpy.random"].seed()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.default_stream(self.device))
            torch.cuda.manual_seed(self._cuda_seed)  # unlike reading its state this does not wait for the GPU
