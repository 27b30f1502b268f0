"""What torch does not offer of the CUDA driver, through ctypes: copies that one side drives, memory to share.

Types and constants are those of cuda.h. A function works on the context of the calling thread, which is the one torch
uses on this rank's GPU.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

HostFunction = ctypes.CFUNCTYPE(None, c_void_p)


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

# cuda.h gives some functions a new version under a new name; these names are in every driver since CUDA 11.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyPeerAsync": (c_uint64, c_void_p, c_uint64, c_void_p, c_size_t, c_void_p),
    "cuStreamSynchronize": (c_void_p,),
    "cuLaunchHostFunc": (c_void_p, HostFunction, c_void_p),
}


class CudaError(RuntimeError):
    """A function of the CUDA driver failed; the message has its name, the error's name and what that means."""


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = types, c_int
    return driver


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver by its name. CudaError if it fails."""
    if status := getattr(_driver(), name)(*arguments):
        raise CudaError(f"{name}: {_text('cuGetErrorName', status)} ({status}): {_text('cuGetErrorString', status)}")


def _text(function: str, status: int) -> str:
    text = c_char_p()
    getattr(_driver(), function)(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


def allocate(nbytes: int) -> int:
    """The address of new memory on this rank's GPU."""
    address = c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
    return address.value


def allocate_host(nbytes: int) -> int:
    """The address of new pinned memory of the host."""
    address = c_void_p()
    call("cuMemHostAlloc", ctypes.byref(address), nbytes, 0)
    assert address.value is not None
    return address.value


def ipc_handle(address: int) -> bytes:
    """What another process needs to map memory that `allocate` gave."""
    handle = IpcHandle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle)


def map_ipc(handle: bytes) -> int:
    """The address at which the current context reaches the memory of another process."""
    address = c_uint64()
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(handle), _LAZY_ENABLE_PEER_ACCESS)
    return address.value


def can_access_peer(device: int, peer: int) -> bool:
    """Whether one GPU reads and writes the memory of another directly. CUDA's numbers of both."""
    possible = c_int()
    call("cuDeviceCanAccessPeer", ctypes.byref(possible), device, peer)
    return bool(possible.value)


def current_context() -> int | None:
    context = c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value


def retain_context(device: int) -> int | None:
    """The context that this process has on another GPU; made if it has none, which takes about 0.5 GB there."""
    context = c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context.value
