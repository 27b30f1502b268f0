"""Codes of faults are for machines, which keep them for years."""

from collections import Counter
from pathlib import Path
from typing import get_args

from pytest_gpufleet.model.fault import CODES, Action

# Never shortened, and no number or name in it is changed: somebody's program knows them.
FROZEN = {
    101: "gpu_missing",
    102: "software_unfit",
    103: "gpu_unlike_others",
    104: "memory_incomplete",
    105: "fact_unreadable",
    106: "foreign_process",
    107: "harmful_variable",
    108: "pcie_width_reduced",
    109: "pcie_generation_reduced",
    110: "nvlink_down",
    111: "nvlink_slow",
    112: "fabric_not_ready",
    113: "no_peer_access",
    114: "ecc_off",
    115: "mig_on",
    116: "compute_mode_limited",
    117: "persistence_mode_off",
    118: "power_limit_lowered",
    119: "clocks_pinned",
    120: "recovery_pending",
    121: "inforom_invalid",
    122: "shared_memory_small",
    123: "locked_memory_limited",
    124: "open_files_limited",
    125: "processors_slowed",
    126: "processors_far",
    127: "network_port_unlike_others",
    128: "memory_occupied",
    129: "fact_unexpected",
    130: "pcie_slot_narrow",
    131: "fabric_degraded",
    132: "fabric_split",
    133: "network_port_pcie",
    134: "host_unlike_others",
    135: "node_missing",
    136: "node_too_many",
    137: "node_unfit",
    138: "clock_off",
    145: "pcie_path_reduced",
    146: "adapter_far",
    147: "gpudirect_module_missing",
    148: "iommu_translates",
    149: "acs_redirects",
    201: "ecc_uncorrected",
    202: "row_remapping_pending",
    203: "row_remapping_failed",
    204: "many_rows_remapped",
    205: "sram_threshold_exceeded",
    206: "page_retirement_pending",
    207: "pcie_replays",
    208: "nvlink_errors",
    209: "hardware_slowdown",
    210: "thermal_slowdown",
    211: "power_brake",
    212: "too_hot",
    213: "xid_reset",
    214: "xid_restart",
    215: "xid_mechanical",
    216: "xid_workflow",
    217: "xid_application",
    218: "xid_other",
    219: "gpu_lost",
    220: "sxid_fatal",
    221: "sxid",
    222: "counter_unreadable",
    224: "rows_remapped",
    225: "xid_of_process",
    226: "memory_unrepairable",
    227: "spare_rows_used_up",
    228: "many_corrected_errors",
    229: "network_port_errors",
    230: "node_lost",
    231: "pcie_uncorrected",
    232: "pcie_corrected",
    236: "machine_check",
    237: "machine_check_corrected",
    238: "dimm_uncorrected",
    239: "dimm_corrected",
    240: "pcie_error_logged",
    241: "pcie_corrected_logged",
    242: "host_stalled",
    243: "disk_failing",
    244: "file_system_failed",
    245: "host_out_of_memory",
    246: "nic_underpowered",
    247: "nic_too_hot",
    248: "nic_firmware_failed",
    249: "processor_throttled",
    267: "power_supply_failed",
    268: "power_not_redundant",
    269: "fan_failed",
    270: "inlet_temperature",
    271: "part_temperature",
    272: "bmc_memory_error",
    273: "bmc_processor_error",
    274: "bmc_bus_error",
    275: "bmc_power_error",
    276: "bmc_cooling_error",
    277: "bmc_log_full",
    280: "network_module_fault",
    281: "network_link_errors",
    282: "network_link_flaps",
    285: "dcgm_part_broken",
    286: "dcgm_reset_needed",
    287: "dcgm_setting",
    288: "dcgm_test_failed",
    289: "dcgm_remark",
    301: "product_wrong",
    302: "product_changes",
    303: "memory_wrong",
    304: "collective_wrong",
    305: "copy_wrong",
    306: "training_wrong",
    307: "replicas_differ",
    309: "computes_otherwise",
    310: "machine_computes_otherwise",
    401: "limit_missed",
    402: "slower_than_peers",
    403: "rank_comes_late",
    404: "links_slow",
    405: "link_slow",
    406: "slows_collectives",
    407: "cause_unclear",
    408: "node_slow",
    409: "rail_slow",
    410: "node_link_slow",
    411: "network_between_nodes_slow",
    412: "network_adapter_slow",
    413: "network_adapter_fails",
    415: "above_peak",
    501: "rank_died",
    502: "rank_hung",
    503: "rank_raised",
    901: "check_failed",
}


def test_no_code_is_taken_back():
    known = {code.number: code.name for code in CODES.values()}
    assert FROZEN.items() <= known.items()


def test_a_number_is_used_once_and_stands_in_its_place():
    numbers = [code.number for code in CODES.values()]
    assert numbers == sorted(set(numbers))
    assert all(code.name == name for name, code in CODES.items())


def test_every_code_says_what_it_is_and_what_to_do():
    categories = {code.category for code in CODES.values()}
    for code in CODES.values():
        assert code.action in get_args(Action)
        assert code.message
        assert code.next_step
        assert not (code.message + code.next_step).endswith(".")
        assert set(code.explains) <= categories - {code.category}


def test_messages_are_told_apart():
    assert Counter(code.message for code in CODES.values()).most_common(1)[0][1] == 1


def test_every_code_is_given_somewhere() -> None:
    root = Path(__file__).parents[2]
    files = [path for folder in ("src", "acceptance") for path in (root / folder).rglob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files if not path.name.endswith("codes.py"))
    assert {name for name in CODES if f'"{name}"' not in source} == set()
