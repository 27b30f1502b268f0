"""How NVML answers: errors that say that there is no such thing here, texts, and fields by number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Errors by which NVML says that there is no such thing here; all others are trouble.
NOT_HERE = ("NotSupported", "FunctionNotFound", "ArgumentVersionMismatch")
INVALID_ARGUMENT, NOT_SUPPORTED = 2, 3  # nvml.h: nvmlReturn_t
# By nvmlValueType_t. The first is double by nvml.h, but no field here is one, and counters come with it all the same.
VALUE_TYPES = ("ullVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def named(error: BaseException, *names: str) -> bool:
    return type(error).__name__.removeprefix("NVMLError_") in names


def text(value: Any) -> Any:
    """Releases of nvidia-ml-py differ in what gives bytes and what gives text."""
    return value.decode() if isinstance(value, bytes) else value


def field_values(nvml: Any, handle: Any, wanted: Iterable[Any]) -> list[Any]:
    """The values of fields, None for one that is not told. Raises what the first one says if none is; a field that the
    driver does not know is an invalid argument to it, which is to say that there is no such thing here."""
    told = list(nvml.nvmlDeviceGetFieldValues(handle, list(wanted)))
    if all(each.nvmlReturn for each in told):
        error = told[0].nvmlReturn
        raise nvml.NVMLError(NOT_SUPPORTED if error == INVALID_ARGUMENT else error)
    return [None if each.nvmlReturn else getattr(each.value, VALUE_TYPES[each.valueType]) for each in told]
