"""What the kernel log says of the host, as faults and as remarks."""

import pytest

from pytest_gpufleet.machine.kernel_log import TABLE, Logged, judged, recognised, remarks
from pytest_gpufleet.machine.machine import Machine
from pytest_gpufleet.model.endings import NotJudged
from pytest_gpufleet.model.fault import CODES, Fault
from pytest_gpufleet.model.gpu import Gpu
from pytest_gpufleet.model.place import THIS_NODE, gpu
from pytest_gpufleet.plugin.assertions import grave_host_messages
from pytest_gpufleet.verdict.accusations import explaining

GPUS = [Gpu(index, {"pci_bus_id": f"00000000:{index}B:00.0"}) for index in range(4)]
FATAL = "pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)"
CORRECTED = "pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Receiver ID)"
STALLED = "watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python3:2254956]"


def message(line, **more):
    found = recognised(line)
    return type(found)(**{**vars(found), **more})


@pytest.mark.parametrize(
    ("line", "before", "during"), [(FATAL, True, True), (STALLED, False, True), (CORRECTED, False, False)]
)
def test_what_condemns_is_told_and_the_rest_is_shown(line, before, during):
    found = [recognised(line)]
    assert [len(each) for each in judged(found, GPUS, "before")] == [before, not before]
    assert [len(each) for each in judged(found, GPUS, "during")] == [during, not during]


@pytest.mark.parametrize(
    ("below", "place"),
    [
        (("00000000:2B:00.0",), gpu(2)),
        (("00000000:1B:00.0", "00000000:2B:00.0"), THIS_NODE),
        (("00000000:9B:00.0",), THIS_NODE),  # that of another run
        ((), THIS_NODE),
    ],
)
def test_a_port_names_the_gpu_if_there_is_one_alone_below_it(below, place):
    (fault,), _ = judged([message(FATAL, gpus=below)], GPUS, "during")
    assert (fault.name, fault.subjects) == ("pcie_error_logged", (place,))


def test_a_message_is_told_with_how_often_it_came():
    often = message(FATAL, times=12_000, first=51.2, last=1207.4)
    told, _ = judged([often, message(FATAL, first=51.2, last=51.2), message(FATAL)], GPUS, "before")
    assert [fault.what for fault in told] == [
        f"{FATAL} (12,000 times, 51 to 1,207 s after boot)",
        f"{FATAL} (51 s after boot)",
        FATAL,
    ]


def test_what_is_shown_is_one_remark_a_kind():
    messages = [message(CORRECTED, device=str(number)) for number in range(3)] + [recognised(STALLED)]
    _, shown = judged(messages, GPUS, "before")
    shown = [Fault(each.name, each.subjects, f"{each.what} {number}") for number, each in enumerate(shown)]
    assert remarks(shown) == [
        f"the kernel log: {CODES['pcie_corrected_logged'].message}: {CORRECTED} 0, and 2 more",
        f"the kernel log: {CODES['hung_task'].message}: {STALLED} 3",
    ]
    assert remarks([]) == []


def test_every_row_has_a_code_and_what_never_condemns_is_to_be_watched():
    for row in TABLE:
        assert (CODES[row.code].action == "MONITOR") == (not row.before and not row.during)


HUNG = Fault("hung_task", (THIS_NODE,), "INFO: task python3:7 blocked for more than 120 seconds.")


@pytest.mark.parametrize(
    ("effect", "cause", "explains"),
    [
        (HUNG, Fault("xid_restart", (gpu(2),), "XID 79"), True),
        (HUNG, Fault("disk_failing", (THIS_NODE,), "nvme0"), True),
        (HUNG, Fault("xid_application", (gpu(2),), "XID 94"), False),
        (Fault("pcie_replays", (gpu(2),), ""), Fault("pcie_error_logged", (gpu(2),), ""), True),
        (Fault("pcie_replays", (gpu(2),), ""), Fault("pcie_error_logged", (gpu(3),), ""), False),
        (Fault("file_system_failed", (THIS_NODE,), ""), Fault("disk_failing", (THIS_NODE,), ""), True),
        (Fault("rank_died", (gpu(0),), ""), Fault("host_out_of_memory", (THIS_NODE,), ""), True),
    ],
)
def test_causes_explain_effects(effect, cause, explains):
    assert explaining(effect, [cause, effect]) == ([cause] if explains else [])


def test_a_log_that_nobody_may_read_is_not_judged():
    machine = Machine((), logged=Logged(trouble="the kernel log /dev/kmsg cannot be read: Permission denied"))
    with pytest.raises(NotJudged, match="cannot be read"):
        grave_host_messages(machine)
