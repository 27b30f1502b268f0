"""How NVML answers: errors that say that there is no such thing here, texts, and fields by number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Errors by which NVML says that there is no such thing here; all others are trouble.
NOT_HERE = ("NotSupported", "FunctionNotFound", "ArgumentVersionMismatch")
# By nvmlValueType_t. The first is double by nvml.h, but no field here is one, and counters come with it all the same.
VALUE_TYPES = ("ullVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def named(error: BaseException, *names: str) -> bool:
    return type(error).__name__.removeprefix("NVMLError_") in names


def text(value: Any) -> Any:
    """Releases of nvidia-ml-py differ in what gives bytes and what gives text."""
    return value.decode() if isinstance(value, bytes) else value


def field_values(nvml: Any, handle: Any, wanted: Iterable[Any]) -> list[Any]:
    """The values of fields, None for one that is not told. Raises what the first one says if none is."""
    told = list(nvml.nvmlDeviceGetFieldValues(handle, list(wanted)))
    if all(each.nvmlReturn for each in told):
        raise nvml.NVMLError(told[0].nvmlReturn)
    return [None if each.nvmlReturn else getattr(each.value, VALUE_TYPES[each.valueType]) for each in told]
