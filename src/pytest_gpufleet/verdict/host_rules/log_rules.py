"""What the kernel log says of the host, as faults: what speaks against the machine, and what is only shown."""

from collections.abc import Iterable, Sequence
from typing import Literal

from pytest_gpufleet.model.fault import CODES, KERNEL_LOG, Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.grouping import grouped
from pytest_gpufleet.model.log_catalogue import HostMessage
from pytest_gpufleet.model.place import THIS_NODE


def judged(
    messages: Sequence[HostMessage], gpus: Sequence[Gpu], when: Literal["before", "during"]
) -> tuple[list[Fault], list[Fault]]:
    """What condemns the machine, of messages from before the run or from during it, and the others of them."""
    told = _faults((message for message in messages if getattr(message, when)), gpus)
    return told, _faults((message for message in messages if not getattr(message, when)), gpus)


def remarks(noticed: Iterable[Fault]) -> list[str]:
    """What was only shown, in a sentence for each kind."""
    told = []
    for code, each in grouped(dict.fromkeys((fault.name, fault.what) for fault in noticed)).items():
        heard = "the kernel log: " if CODES[code].number in KERNEL_LOG else ""
        more = f", and {len(each) - 1} more" if len(each) > 1 else ""
        told.append(f"{heard}{CODES[code].message}: {each[0]}{more}")
    return told


def _faults(messages: Iterable[HostMessage], gpus: Iterable[Gpu]) -> list[Fault]:
    """A GPU is named if the message is about it, or about a port that has no other GPU below it; else the node."""
    at = {str(gpu["pci_bus_id"]): gpu.place for gpu in gpus}
    faults = []
    for message in messages:
        below = [at[each] for each in message.gpus if each in at]
        subject = below[0] if len(below) == 1 else THIS_NODE
        faults.append(Fault(message.code, (subject,), _told(message), story=message.line))
    return faults


def _told(message: HostMessage) -> str:
    """ "nvme nvme0: controller is down ... (3 times, 51 to 207 s after boot)" """
    parts = [f"{message.times:,} times"] if message.times > 1 else []
    if message.first is not None and message.last is not None:
        span = [message.first] if message.first == message.last else [message.first, message.last]
        parts.append(f"{' to '.join(f'{at:,.0f}' for at in span)} s after boot")
    return f"{message.line} ({', '.join(parts)})" if parts else message.line
