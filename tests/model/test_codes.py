"""Codes of faults are for machines, which keep them for years."""

from pathlib import Path
from typing import get_args

import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.fault import CODES, Action, Fault

# Never shortened, and no number in it is changed: somebody's program knows them. Names changed in 0.4. Each line
# begins with the number of its first name, and counts up.
ROWS = """
101 gpu_missing software_mismatch gpu_unlike_others memory_incomplete fact_unreadable foreign_process harmful_variable
108 pcie_width_reduced pcie_generation_reduced nvlink_down nvlink_slow fabric_not_ready no_peer_access ecc_off
115 mig_on compute_mode_limited persistence_mode_off power_limit_lowered clocks_pinned recovery_pending
121 inforom_invalid shared_memory_small locked_memory_limited open_files_limited cpu_governor cpu_affinity
127 network_port_unlike_others memory_occupied fact_unexpected pcie_slot_narrow fabric_degraded fabric_split
133 nic_pcie_slow host_unlike_others node_missing node_too_many node_unfit clock_skew
145 pcie_path_reduced nic_not_local gpudirect_module_missing iommu_not_passthrough acs_enabled
201 ecc_uncorrected row_remapping_pending row_remapping_failed many_rows_remapped sram_threshold_exceeded
206 page_retirement_pending pcie_replays nvlink_errors hardware_slowdown thermal_slowdown power_brake too_hot
213 xid_reset xid_restart xid_mechanical xid_workflow xid_application xid_other gpu_lost sxid_fatal sxid
222 counter_unreadable
224 rows_remapped xid_of_process memory_unrepairable spare_rows_used_up many_corrected_errors network_port_errors
230 node_lost pcie_uncorrected pcie_corrected
236 machine_check machine_check_corrected dimm_uncorrected dimm_corrected pcie_error_logged pcie_corrected_logged
242 hung_task disk_failing file_system_failed host_out_of_memory nic_underpowered nic_too_hot nic_firmware_failed
249 processor_throttled
267 power_supply_failed power_not_redundant fan_failed inlet_temperature component_temperature bmc_memory_error
273 bmc_processor_error bmc_bus_error bmc_power_error bmc_cooling_error bmc_log_full
280 transceiver_fault network_link_errors network_link_flaps
285 dcgm_part_broken dcgm_reset_needed dcgm_setting dcgm_test_failed dcgm_warning
301 matmul_wrong matmul_nondeterministic memory_data_error collective_wrong link_data_error training_wrong
307 replicas_differ
309 gpu_bits_differ machine_bits_differ
401 limit_missed slower_than_peers straggler links_slow link_slow slows_collectives cause_unclear node_slow
409 rail_slow node_link_slow network_between_nodes_slow network_adapter_slow network_adapter_fails
415 implausible_value
501 rank_died rank_hung rank_raised node_hung
901 check_failed
"""
FROZEN = {
    number: name
    for first, *names in map(str.split, ROWS.strip().splitlines())
    for number, name in enumerate(names, int(first))
}


def test_no_code_is_taken_back_and_a_number_is_used_once():
    assert FROZEN.items() <= {code.number: code.name for code in CODES.values()}.items()
    numbers = [code.number for code in CODES.values()]
    assert numbers == sorted(set(numbers))
    assert all(code.name == name for name, code in CODES.items())


def test_a_fault_of_old_evidence_is_read_by_its_number():
    read = codec.typed({"name": "host_stalled", "code": 242, "subjects": [], "what": ""}, Fault)
    assert read == Fault("hung_task", (), "")
    for name, number in (("host_stalled", 0), ("hung_task", 243), ("of a later version", 99)):
        with pytest.raises(ValueError, match="there is no fault"):
            codec.typed({"name": name, "code": number, "subjects": [], "what": ""}, Fault)


def test_every_code_says_what_it_is_and_what_to_do_and_is_given_somewhere():
    categories = {code.category for code in CODES.values()}
    assert len({code.message for code in CODES.values()}) == len(CODES)
    for code in CODES.values():
        assert code.action in get_args(Action)
        assert code.message
        assert code.next_step
        assert not (code.message + code.next_step).endswith(".")
        assert set(code.explains) <= categories - {code.category}
    root = Path(__file__).parents[2]
    files = [path for folder in ("src", "acceptance") for path in (root / folder).rglob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files if not path.name.endswith("codes.py"))
    assert {name for name in CODES if f'"{name}"' not in source} == set()
