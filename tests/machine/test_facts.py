"""Single facts of NVML where a part of them cannot be had, and what a GPU must have by its model."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from pytest_gpufleet import expect
from pytest_gpufleet.machine import gpu_facts, local_node, network_ports, nvml as driver
from pytest_gpufleet.machine.gpu_facts import MUST_HAVE, NVLINK_5_COUNTERS, NVLINK_COUNTERS
from pytest_gpufleet.model.place import Gpu, Missing
from pytest_gpufleet.plugin.assertions import LiveMachine
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from pytest_gpufleet.verdict.gaps import counted, gaps, without_telemetry
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.verdict import conclude
from tests.machine.fake_nvml import switched
from tests.machine.trees import written

LIMITS = {0: 95, 1: 89, 2: 95, 3: 87}  # nvml.h: shutdown, slowdown, memory_max, gpu_max


def source(**functions):
    """A GPU of a driver that has these functions alone."""
    return driver.Nvml(SimpleNamespace(NVMLError=pynvml.NVMLError, **functions), [object()])


def failing(error, answer=lambda *_: None, of=lambda *_: True):
    """A function of NVML that fails with this error if asked what `of` says, and else gives this answer."""

    def call(*asked):
        if of(*asked):
            raise pynvml.NVMLError(error)
        return answer(*asked)

    return call


def limited(error, limits=LIMITS):
    """A GPU with these temperature thresholds, of which the last one fails."""
    threshold = failing(error, lambda handle, number: limits[number], lambda handle, number: number == 3)
    return source(nvmlDeviceGetTemperatureThreshold=threshold)


def test_every_gpu_is_present_hidden_and_lost_ones_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", switched(4, lost=(2,)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with local_node.opened() as node:
        assert len(node.topology.gpus) == 1
        assert node.present() == ("00000000:1B:00.0", "00000000:2B:00.0", "", "00000000:4B:00.0")


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_older_drivers_have_clock_events_by_their_older_name(error):
    older = {"nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x40}
    not_known = {"nvmlDeviceGetCurrentClocksEventReasons": failing(error)}
    for functions in (older | not_known, older):  # an older driver, and an older nvidia-ml-py
        assert source(**functions).ask(0, "clock_event_reasons") == 0x40


def fields(values, **more):
    """A GPU whose fields have these values, by field or (field, link); an int that is negative is an NVML error."""

    def answer(handle, asked):
        found = [values.get(field if isinstance(field, int) else tuple(field), -3) for field in asked]
        union = pynvml.c_nvmlFieldValue_t * len(found)
        answers = union()
        for answer, value in zip(answers, found, strict=True):
            answer.nvmlReturn, answer.valueType = max(0, -value), pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            answer.value.ullVal = max(0, value)
        return answers

    return source(nvmlDeviceGetFieldValues=answer, **more)


OF_NVLINK_5 = {
    "malformed_packets": "MALFORMED_PACKET_ERRORS", "buffer_overruns": "BUFFER_OVERRUN_ERRORS", "receive": "RCV_ERRORS",
    "remote_receive": "RCV_REMOTE_ERRORS", "general_receive": "RCV_GENERAL_ERRORS", "symbol": "SYMBOL_ERRORS",
    "link_integrity": "LOCAL_LINK_INTEGRITY_ERRORS", "failed_recovery": "LINK_RECOVERY_FAILED_EVENTS",
    "recovery": "LINK_RECOVERY_EVENTS", "effective": "EFFECTIVE_ERRORS",
}  # fmt: skip
FIELDS = {
    **{f"NVLINK_COUNT_{OF_NVLINK_5[kind]}": number for kind, number in NVLINK_5_COUNTERS.items()},
    "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": gpu_facts.FIELDS_SLOWDOWN["sw_thermal"],
    "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": gpu_facts.FIELDS_SLOWDOWN["hw_thermal"],
    "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": gpu_facts.FIELDS_SLOWDOWN["power_brake"],
    "PWR_SMOOTHING_ENABLED": gpu_facts.FIELDS_POWER_SMOOTHING[0],
    "PWR_SMOOTHING_ACTIVE_PRESET_PROFILE": gpu_facts.FIELDS_POWER_SMOOTHING[1],
    "PERF_POLICY_THERMAL": gpu_facts.FIELD_THERMAL_POLICY,
    "NVLINK_GET_SPEED": gpu_facts.FIELD_NVLINK_SPEED,
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_those_of_nvml(name):
    """As nvidia-ml-py has them from nvml.h; releases that do not know one are older than it."""
    of_nvml = [getattr(pynvml, f"NVML_FI_{prefix}{name}", FIELDS[name]) for prefix in ("DEV_", "")]
    assert of_nvml == [FIELDS[name]] * 2


NOT_SUPPORTED, LOST = pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST
SLOWDOWNS = (269, 270, 271, 75)
# Two links, of which the second does not count symbols. An H200 with driver 580 does not support these fields.
OF_TWO_LINKS = {
    **{(field, link): 100 * link + field for field in NVLINK_5_COUNTERS.values() for link in (0, 1)},
    (NVLINK_5_COUNTERS["symbol"], 1): -pynvml.NVML_ERROR_UNKNOWN,
}
OLDER = fields({}, nvmlDeviceGetNvLinkErrorCounter=lambda handle, link, number: 10 * link + number)
OF_PLACES = failing(NOT_SUPPORTED, lambda *_: 17, lambda handle, kind, since, place: place == 7)
OF_ONE_PLACE = failing(pynvml.NVML_ERROR_INVALID_ARGUMENT, lambda *_: 17, lambda handle, kind, since, place: place == 7)


@pytest.mark.parametrize(("asked", "fact", "value"), [
    (limited(NOT_SUPPORTED), "temperature_limits_c",
     {"shutdown": 95, "slowdown": 89, "memory_max": 95, "gpu_max": None}),
    (fields(OF_TWO_LINKS), "nvlink_errors",
     {**{kind: [n, 100 + n] for kind, n in NVLINK_5_COUNTERS.items()}, "symbol": [221, None]}),
    (OLDER, "nvlink_errors", {kind: [10 * link + n for link in range(18)] for kind, n in NVLINK_COUNTERS.items()}),
    (fields({269: 5, 270: 6, 271: 7, 75: 8}), "slowdown_ns", {"sw_thermal": 5, "hw_thermal": 6, "power_brake": 7}),
    (fields({75: 8}), "slowdown_ns", {"thermal": 8}),  # an older driver
    (source(nvmlDeviceGetMemoryErrorCounter=OF_PLACES), "ecc_corrected", {"dram": 17}),
    (source(nvmlDeviceGetMemoryErrorCounter=OF_ONE_PLACE), "ecc_corrected", {"dram": 17}),
])  # fmt: skip
def test_what_a_part_of_which_is_missing_costs_no_other(asked, fact, value):
    assert asked.ask(0, fact) == value


@pytest.mark.parametrize(("asked", "fact", "absent"), [
    (limited(NOT_SUPPORTED, {0: 0, 1: 0, 2: 0}), "temperature_limits_c", True),  # some drivers give 0
    (limited(LOST), "temperature_limits_c", False),
    (source(nvmlDeviceGetCurrentClocksEventReasons=failing(LOST)), "clock_event_reasons", False),
    (fields({(field, 0): -LOST for field in NVLINK_5_COUNTERS.values()}), "nvlink_errors", False),
    # an H200, and a B200 whose BMC keeps it
    (fields({}), "power_smoothing", True),
    (fields(dict.fromkeys((251, 264), -pynvml.NVML_ERROR_NO_PERMISSION)), "power_smoothing", True),
    (fields(dict.fromkeys((251, 264), -LOST)), "power_smoothing", False),
    # a driver that does not know these fields
    (fields(dict.fromkeys(SLOWDOWNS, -pynvml.NVML_ERROR_INVALID_ARGUMENT)), "slowdown_ns", True),
    (fields(dict.fromkeys(SLOWDOWNS, -NOT_SUPPORTED)), "slowdown_ns", True),
    (fields(dict.fromkeys(SLOWDOWNS, -LOST)), "slowdown_ns", False),
])  # fmt: skip
def test_what_a_gpu_does_not_have_is_absent_unless_it_is_lost(asked, fact, absent):
    assert asked.ask(0, fact).absent is absent


def slot(tmp_path, monkeypatch, lanes=16, virtual=0, module=0):
    """A GPU behind a port, in slot 21 of a machine or of a virtual one, with the lanes that the system says it has."""
    device = tmp_path / "0000:15:01.0" / "0000:1b:00.0"
    slots = {"slots/20/address": "0000:1a:00\n", "slots/21/address": "0000:1b:00\n"}
    written(tmp_path, {"devices/0000:1b:00.0": device, f"{device}/max_link_width": f"{lanes}\n", **slots})
    monkeypatch.setattr(gpu_facts, "PCI_DEVICES", tmp_path / "devices")
    monkeypatch.setattr(gpu_facts, "PCI_SLOTS", tmp_path / "slots")

    def module_id(handle, reference):
        reference._obj.value = module
        return 0

    return source(
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=b"00000000:1B:00.0"),
        nvmlDeviceGetModuleId=module_id,
        nvmlDeviceGetVirtualizationMode=lambda handle: virtual,
    )


@pytest.mark.parametrize(("shown", "lanes"), [(16, {"gpu": 16}), (255, None)])
def test_lanes_of_a_gpu_by_the_system(tmp_path, monkeypatch, shown, lanes):
    able = slot(tmp_path, monkeypatch, shown).ask(0, "pcie_width_able")
    assert able == lanes if lanes else able.absent


def test_the_network_adapter_next_to_a_gpu(tmp_path, monkeypatch):
    node = slot(tmp_path, monkeypatch)
    written(tmp_path, {"infiniband/mlx5_3/device": tmp_path / "0000:15:01.0" / "0000:1c:00.0"})
    monkeypatch.setattr(network_ports, "ADAPTERS", tmp_path / "infiniband")
    assert node.ask(0, "network_adapters") == ["mlx5_3"]


def test_where_a_gpu_sits(tmp_path, monkeypatch):
    node = slot(tmp_path, monkeypatch, module=3)
    facts = {fact: node.ask(0, fact) for fact in ("module_id", "physical_slot")}
    assert (facts, Gpu(0, facts).position) == ({"module_id": 3, "physical_slot": "21"}, "module 3, slot 21")
    assert Gpu(0).position == ""


@pytest.mark.parametrize(("fact", "virtual", "slots"), [
    ("module_id", 0, True),  # a card: on no baseboard
    ("physical_slot", 1, True),  # the slots of a virtual machine are its hypervisor's
    ("physical_slot", 0, False),
])  # fmt: skip
def test_where_a_gpu_sits_is_absent_where_nothing_shows_it(tmp_path, monkeypatch, fact, virtual, slots):
    node = slot(tmp_path, monkeypatch, virtual=virtual)
    if not slots:
        monkeypatch.setattr(gpu_facts, "PCI_SLOTS", tmp_path / "none")
    assert node.ask(0, fact).absent


def test_the_health_of_the_fabric():
    def answer(handle, reference):
        info = reference._obj
        info.state, info.healthMask, info.cliqueId = 3, 0x1A9, 7
        info.clusterUuid[:] = range(16)

    gpu = source(c_nvmlGpuFabricInfoV_t=pynvml.c_nvmlGpuFabricInfoV_t, nvmlDeviceGetGpuFabricInfoV=answer)
    cluster = "000102030405060708090a0b0c0d0e0f"
    assert gpu.ask(0, "fabric_health") == {"mask": 0x1A9, "clique": 7, "cluster": cluster}


MISSPELT = {
    "machine.gpus[0][...]": lambda name: Gpu(0, {"name": "NVIDIA H200"})[name],
    "expect": lambda name: expect([Gpu(0, {})], name, 16),
    "expect in a rehearsal": lambda name: expect([], name, 16),
    "machine.now": LiveMachine(Run(Options(rehearse=2))).now,
}


@pytest.mark.parametrize("ask", MISSPELT.values(), ids=MISSPELT)
def test_a_misspelt_fact_raises(ask):
    with pytest.raises(KeyError, match=r"no GPU has a fact 'pcie_widht': did you mean 'pcie_width' or "):
        ask("pcie_widht")
    with pytest.raises(KeyError, match="no GPU has a fact 'colour': there are application_clock_default_mhz, "):
        ask("colour")


def test_a_fact_that_an_old_snapshot_lacks_is_not_recorded():
    assert str(Gpu(0, {})["pcie_width"]) == "not recorded"
    assert Gpu(0, {"of_a_later_version": 3})["of_a_later_version"] == 3


ECC = {"ecc_uncorrected_volatile", "ecc_uncorrected_aggregate", "ecc_corrected_volatile"}
ALWAYS = {"ecc_mode", "pcie_replays", "power_limit_watts", *gpu_facts.TELEMETRY}
SERVER, LINKED = ALWAYS | ECC | {"remapped_rows"}, ALWAYS | ECC | {"remapped_rows", "nvlink_errors"}
LINKS = [1] * 18

# Name, what can be read, and the facts that it must have besides.
MODELS = {
    "an H200 of which only the name can be read": ("NVIDIA H200", {}, SERVER),
    "a GH200, the same": ("NVIDIA GH200 480GB", {}, SERVER),
    "an L40, the same": ("NVIDIA L40", {}, SERVER),
    "an H200 with links": ("NVIDIA H200", {"nvlink_states": LINKS, "compute_capability": [9, 0]}, LINKED),
    "an unknown model of a data centre": ("NVIDIA H200 NVL", {"compute_capability": [9, 0]}, SERVER),
    "a B300": ("NVIDIA B300 SXM6 AC", {"nvlink_states": LINKS, "compute_capability": [10, 3]}, LINKED),
    "a T4 retires pages": ("Tesla T4", {"compute_capability": [7, 5]}, ALWAYS | ECC | {"retired_pages_pending"}),
    "sold with error correction off": ("NVIDIA RTX A6000", {"ecc_mode": [0, 0]}, ALWAYS - {"ecc_mode"}),
    "a GeForce of a shipped profile": ("NVIDIA GeForce RTX 3090", {"compute_capability": [8, 6]}, set()),
    "a TITAN": ("NVIDIA TITAN V", {"compute_capability": [7, 0]}, set()),
    "an unknown card": ("NVIDIA X9000", {"compute_capability": [8, 6]}, set()),
}


@pytest.mark.parametrize(("model", "facts", "expected"), MODELS.values(), ids=MODELS)
def test_what_a_model_must_have(model, facts, expected):
    gpu = Gpu(5, {**dict.fromkeys(MUST_HAVE, Missing("NVML: Not Supported", absent=True)), "name": model, **facts})
    lines = gpu_facts.unreadable_by_model([gpu], MUST_HAVE)
    missing = [fact for fact in MUST_HAVE if any(f": {fact} cannot be read (NVML: Not" in line for line in lines)]
    assert set(missing) == expected
    assert all(line.startswith(f"GPU 5 {model}, ") for line in lines)


@pytest.fixture
def recorded():
    return replace(read(Path(__file__).parents[1] / "recorded" / "h200x1-e" / "evidence.jsonl"), verdict=None)


@pytest.mark.parametrize("name", gpu_facts.TELEMETRY)
def test_telemetry_without_one_value_is_a_gap(recorded, name):
    assert without_telemetry(recorded) == []
    for sample in recorded.telemetry[1:]:
        sample.gpus[0][name] = None
    assert without_telemetry(recorded) == [], "one value is enough"
    recorded.telemetry[0].gpus[0][name] = None
    identity = recorded.topology.gpus[0].identity
    verdict, reasons = conclude(recorded)
    assert verdict == "INCOMPLETE"
    assert f"{identity}: telemetry never had {name}: no slowdown would have been seen" in reasons
    assert "1 GPU without telemetry" in counted(gaps(recorded))


@pytest.mark.parametrize("kept", ["samples of nothing", "no sample"])
@pytest.mark.parametrize("model", ["NVIDIA H200", "NVIDIA X9000"])
def test_telemetry_that_is_not_there_at_all_is_a_gap(recorded, kept, model):
    (gpu,) = recorded.topology.gpus
    recorded.topology = replace(recorded.topology, gpus=(replace(gpu, facts={**gpu.facts, "name": model}),))
    recorded.telemetry = [replace(sample, gpus=()) for sample in recorded.telemetry if kept == "samples of nothing"]
    assert len(without_telemetry(recorded)) == 1
    assert conclude(recorded)[0] == "INCOMPLETE"
