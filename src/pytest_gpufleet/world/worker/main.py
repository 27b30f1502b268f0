"""A rank process: it starts, says so, and then runs what it is sent until it is killed."""

from __future__ import annotations

import bdb
import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_gpufleet.model.events import LossCurve
from pytest_gpufleet.redaction import shortened
from pytest_gpufleet.world.call import ENDINGS, START, Call, Outcome, Output, RankSpec, pack, unpack
from pytest_gpufleet.world.engines import channel
from pytest_gpufleet.world.engines.rank_files import Progress, RankFiles
from pytest_gpufleet.world.world import Rank

# torch is imported only once a failure of it can be reported: a library that does not load is a finding.
if TYPE_CHECKING:
    import torch

# torch's own records of collectives: NCCL's, and from torch 2.8 on also Gloo's.
FLIGHT_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
TEXT_LIMIT = 64 * 1024  # characters of one exception's story: a rank must not flood the report


def main(end: socket.socket, spec: RankSpec, files: RankFiles, environment: dict[str, str]) -> None:
    """The whole life of a rank process."""
    output = _settle_in(files, environment)
    spec.prepare()
    progress = Progress(files.path("progress"))
    bdb.Bdb.set_trace = _refuse_a_debugger  # type: ignore[method-assign]  # breakpoint() and pdb.set_trace() end there
    rank: Rank  # both since `start`: the controller sends nothing to a rank that did not start
    put_back: Callable[[], None]
    test = 0
    losses: list[LossCurve] = []  # recorded by the call at work

    def start() -> None:
        nonlocal rank, put_back
        device = _prepare_device(spec, progress)
        from pytest_gpufleet.world.worker.state import remembered

        put_back = remembered(device, output)
        rank = Rank(spec.index, spec.size, spec.node, spec.local_size, device, spec.gpu, {}, {}, None, progress, losses)

    def run(call: Call) -> Any:
        nonlocal test
        if call.test != test:
            rank.kept.clear()
            put_back()
        test = call.test
        members = next(each for each in call.groups if spec.index in each)
        local, own = call.nodes.count(spec.node), members if call.with_group else None
        here = replace(rank, index=members.index(spec.index), size=len(members), local_size=local, _members=own)
        function, args, kwargs = unpack(call.work)
        result = function(here, *args, **kwargs)
        if spec.gpu is not None:  # what fails or hangs there later would be that of the next call
            sys.modules["torch"].cuda.synchronize(rank.device)
        return result

    def answer(number: int, name: str, body: Callable[[], Any]) -> None:
        progress.phase(name)
        began = time.monotonic()
        ending = {**_ending(body, progress), "seconds": time.monotonic() - began}
        outcome = Outcome(call=number, output=output.take(), losses=tuple(losses), **ending)
        losses.clear()
        channel.Message(pickle.dumps(outcome)).send(end)

    answer(START, "start", start)
    while True:
        try:
            call: Call = pickle.loads(channel.receive(end))
        except EOFError:
            return
        answer(call.number, call.name, partial(run, call))


def _settle_in(files: RankFiles, environment: dict[str, str]) -> Output:
    """Gives where what the process prints goes."""
    os.environ.clear()
    os.environ.update(environment)
    # multiprocessing, by which data loaders pass tensors, would put its sockets below TMPDIR, where the path may be too
    # long for one, and where a rank that is killed would leave them.
    files.path("sockets").mkdir()
    multiprocessing.current_process()._config["tempdir"] = str(files.path("sockets"))  # type: ignore[attr-defined]
    output, stacks = Output(files.path("output")), files.path("stack").open("wb")
    faulthandler.enable(stacks)
    # Written in C and without the GIL: it answers even while a C extension holds the GIL.
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which then ends the ranks
    # Blocked before any other thread starts, so that the signal is left to sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    threading.Thread(target=_wait_for_requests, args=[files.path("recorder")], daemon=True).start()
    return output


def _refuse_a_debugger(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError(
        "no debugger on a rank, which has no terminal: what it prints and logs is shown with the failure, and a "
        "function that needs no other rank can be called, and debugged, outside of world.run and spmd"
    )


def _ending(body: Callable[[], Any], progress: Progress) -> dict[str, Any]:
    """However a call ends, that is part of its Outcome; after a failure the phase stays for the report."""
    rank = os.getpid()
    try:
        try:
            result = body()
        finally:
            if os.getpid() != rank:  # a child that it forked, and that comes back as well, would answer in its place
                os._exit(0)
        try:
            return {"kind": "returned", "result": pack(result)}
        except Exception as error:  # pickling runs the object's own code, which may raise anything
            raise TypeError(f"the result ({type(result).__name__}) cannot be sent back: {error}") from None
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the story must get out
        for kind, (raised, _) in ENDINGS.items():
            if isinstance(error, raised):
                return {"kind": kind, "error_text": shortened(str(error), TEXT_LIMIT)}
        type_, frames = type(error), error.__traceback__
        # The traceback from the shipped function on: how it was called is no news to its author.
        while frames is not None and frames.tb_next is not None:
            if frames.tb_frame.f_code.co_filename != __file__ and "__tracebackhide__" not in frames.tb_frame.f_locals:
                break
            frames = frames.tb_next
        try:
            text = str(error)
            lines = traceback.format_exception(type_, error, frames)
        except BaseException as broken:  # an exception whose own __str__ raises, be it SystemExit
            why = "".join(traceback.format_exception_only(broken)).strip()
            text, lines = f"(its text cannot be shown: {why})", traceback.format_tb(frames)
        return {
            "kind": "raised",
            "phase": progress.now,
            "error_type": shortened(f"{type_.__module__}.{type_.__qualname__}", TEXT_LIMIT),
            "error_text": shortened(text, TEXT_LIMIT),
            "traceback": shortened("".join(lines), TEXT_LIMIT),
        }


def _prepare_device(spec: RankSpec, progress: Progress) -> torch.device:
    """Make the device current and create its context, so that no test pays for it."""
    progress.phase("import torch")
    import torch
    import torch.distributed

    device = torch.device(spec.device)
    if spec.cpu_threads:
        torch.set_num_threads(spec.cpu_threads)
    if spec.size > spec.local_size:  # from about 4 nodes on NCCL needs more files than the usual 1,024 in its bootstrap
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):  # the system's own limit was lowered since
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if spec.gpu is not None:
        progress.phase("create the CUDA context")
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        if (uuid := f"GPU-{torch.cuda.get_device_properties(device).uuid}") != spec.gpu.uuid:
            raise RuntimeError(
                f"{device} is {uuid}, but NVML says that it should be {spec.gpu.identity}: "
                "CUDA and NVML disagree about the order of the GPUs (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER)"
            )
    return device


def _wait_for_requests(path: Path) -> NoReturn:
    """On SIGUSR2 write what torch's flight recorder knows, in a thread, since the main one may hang."""
    while True:
        signal.sigwait({signal.SIGUSR2})
        distributed = sys.modules.get("torch._C._distributed_c10d")
        for dump in filter(None, (getattr(distributed, name, None) for name in FLIGHT_RECORDERS)):
            recorded = dump()
            text = recorded if isinstance(recorded, str) else recorded.decode()
            if '"entries"' in text:
                path.write_text(text)
                break
