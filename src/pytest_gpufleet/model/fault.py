"""What is wrong with a machine, as data from where it is found until somebody reads it, and the kinds of faults.

A number is never used again, and lines are only added, each at the end of its block."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pytest_gpufleet.model.place import THIS_NODE, Where

# The severity of a kind of fault, as what happens to the node next: MONITOR (keep it, watch), CONFIG (a setting is
# wrong, no part is broken), RESET (reset the GPU or reboot), ISOLATE (take it out of service, a part is broken), TRIAGE
# (take it out until a person has found the part).
Action = Literal["MONITOR", "CONFIG", "RESET", "ISOLATE", "TRIAGE"]


@dataclass(frozen=True)
class Code:
    """A kind of fault. `explains`: the categories of faults at the same place that may be its effects."""

    number: int
    name: str
    category: str
    action: Action
    message: str
    next_step: str = "Do what the check's text says"
    explains: tuple[str, ...] = ()


# fmt: off
_CODES = (
    # ---------------------------------------------------------------- 1xx what is in the machine, and how it is set up
    Code(101, "gpu_missing", "presence", "TRIAGE", "a GPU is missing",
         "Compare `nvidia-smi -L` and `lspci` with the delivery note; reseat or replace the GPU that is not listed"),
    Code(102, "software_mismatch", "presence", "CONFIG", "driver, CUDA, cuDNN, NCCL and torch do not fit together",
         "Update the driver, or install a torch that was built for it"),
    Code(103, "gpu_unlike_others", "identity", "TRIAGE", "this GPU is not like the others of the machine",
         "Replace it, or bring its firmware to the others' version"),
    Code(104, "memory_incomplete", "identity", "TRIAGE", "this GPU has less memory than its model",
         "Compare its model and memory with the order, then replace it"),
    Code(105, "fact_unreadable", "identity", "TRIAGE", "a value of this GPU cannot be read",
         "Look at the kernel log, and check that this user may run `nvidia-smi -q`; if it stays, replace the GPU"),
    Code(106, "foreign_process", "setting", "CONFIG", "another process uses this GPU",
         "End that process (`nvidia-smi` lists it; in a container it may belong to another one) and run again",
         ("performance", "occupied memory")),
    Code(107, "harmful_variable", "setting", "CONFIG", "an environment variable slows down NCCL or CUDA",
         "Unset it and run again", ("performance",)),
    Code(108, "pcie_width_reduced", "link", "TRIAGE", "the PCIe link has lost lanes",
         "Reseat the GPU or riser and clean the contacts; if it stays, the board or the slot is bad"),
    Code(109, "pcie_generation_reduced", "link", "TRIAGE", "the PCIe link runs at a lower generation under load",
         "Look at the BIOS setting of the slot, then at riser, retimer and slot"),
    Code(110, "nvlink_down", "link", "RESET", "an NVLink is down or missing",
         "Reset the GPU and look for XID 74; if it stays, the GPU, the bridge or the switch board is bad"),
    Code(111, "nvlink_slow", "link", "RESET", "an NVLink runs at a lower speed",
         "Reset the GPU; replace it if the link stays slow"),
    Code(112, "fabric_not_ready", "setting", "CONFIG", "this GPU is not registered in the NVSwitch fabric",
         "Start nvidia-fabricmanager of exactly the driver's version and read its log"),
    Code(113, "no_peer_access", "setting", "CONFIG", "no peer access (P2P) between GPUs that should have it",
         "Look at `nvidia-smi topo -p2p r`, at IOMMU and ACS settings, and whether the fabric is ready"),
    Code(114, "ecc_off", "setting", "CONFIG", "error correction is off", "Turn it on: `nvidia-smi -e 1`, then reboot"),
    Code(115, "mig_on", "setting", "CONFIG", "MIG is on", "Turn it off: `nvidia-smi -mig 0`",
         ("performance", "occupied memory")),
    Code(116, "compute_mode_limited", "setting", "CONFIG", "compute mode is not Default",
         "Set compute mode 0: `nvidia-smi -c 0`"),
    Code(117, "persistence_mode_off", "setting", "CONFIG", "persistence mode is off", "Enable nvidia-persistenced"),
    Code(118, "power_limit_lowered", "setting", "CONFIG", "the power limit was lowered",
         "Set the default with `nvidia-smi -pl` and run again", ("performance",)),
    Code(119, "clocks_pinned", "setting", "CONFIG", "clocks are locked",
         "Reset them with `nvidia-smi -rac`, `-rgc` and `-rmc`, and run again", ("performance",)),
    Code(120, "recovery_pending", "error", "RESET", "a recovery action of this GPU is pending",
         "Do what it calls for: 1 is a reset, 2 a reboot, 3 and 4 draining it first; then run again"),
    Code(121, "inforom_invalid", "identity", "ISOLATE", "InfoROM is corrupted", "Replace the GPU"),
    Code(122, "shared_memory_small", "setting", "CONFIG", "/dev/shm is too small",
         "Start containers with --ipc=host or --shm-size=16g"),
    Code(123, "locked_memory_limited", "setting", "CONFIG", "memlock limit is too low",
         "Set memlock to unlimited: --ulimit memlock=-1 for containers, limits.conf on the host"),
    Code(124, "open_files_limited", "setting", "CONFIG", "limit of open files is too low",
         "Raise `ulimit -Hn`: --ulimit nofile=1048576 for containers, limits.conf on the host"),
    Code(125, "cpu_governor", "setting", "CONFIG", "CPU governor is not performance",
         "Set the governor: `cpupower frequency-set -g performance`"),
    Code(126, "cpu_affinity", "setting", "CONFIG", "CPU affinity: no CPU next to this GPU may be used",
         "Give the container or job the processors that `nvidia-smi topo -m` lists under CPU affinity"),
    Code(127, "network_port_unlike_others", "network", "TRIAGE", "a network port is down, or unlike the others",
         "Look at cable, transceiver and switch port: `ibstat`"),
    Code(128, "memory_occupied", "occupied memory", "TRIAGE", "memory of this GPU is not free",
         "End the process that holds it (`nvidia-smi` lists it); without one, reset the GPU"),
    Code(129, "fact_unexpected", "identity", "TRIAGE", "a property or setting of this GPU is not as expected"),
    Code(130, "pcie_slot_narrow", "link", "TRIAGE", "the PCIe slot has fewer lanes than the GPU",
         "Move the GPU to a slot with all its lanes, or look at riser and cable; if it was ordered like this, "
         "put pcie_width into the facts of a profile"),
    Code(131, "fabric_degraded", "link", "RESET", "the NVSwitch fabric state of this GPU is degraded",
         "Read the log of the fabric manager, look for XIDs and SXids, then reset all GPUs; if it stays, the GPU, a "
         "switch or a cable is bad"),
    Code(132, "fabric_split", "setting", "CONFIG", "the GPUs are in different partitions of the NVSwitch fabric",
         "Look at the partitions of the fabric manager"),
    Code(133, "nic_pcie_slow", "network", "TRIAGE", "the PCIe link of a network adapter is slow",
         "Reseat the adapter and clean its contacts, or move it to a slot with all its lanes"),
    Code(134, "host_unlike_others", "identity", "CONFIG", "this host is not like the others of the fleet",
         "Bring its driver, firmware, software and settings to those of the others, and run again there"),
    Code(135, "node_missing", "presence", "TRIAGE", "a node is missing",
         "Check that it is powered on, and what its launcher or terminal printed, then run again"),
    Code(136, "node_too_many", "presence", "CONFIG", "there are more nodes than were asked for",
         "Compare the nodes with the order: take out what is not part of it, or give --nodes its number"),
    Code(137, "node_unfit", "presence", "TRIAGE", "this node cannot take part in the run",
         "Do what its message says, then run again"),
    Code(138, "clock_skew", "setting", "CONFIG", "the clock of this node is off",
         "Look at its time service: `chronyc tracking` or `timedatectl timesync-status`"),
    Code(139, "gpus_not_as_ordered", "identity", "TRIAGE", "the GPUs are not those that were ordered",
         "Compare `nvidia-smi -L` with the order and the delivery note; have GPUs of another model exchanged"),
    Code(140, "host_not_as_ordered", "identity", "TRIAGE", "the host is not the one that was ordered",
         "Compare `lscpu`, `dmidecode -t memory` and the label with the order; reseat modules "
         "that are missing, have the rest exchanged"),
    Code(141, "drives_not_as_ordered", "presence", "TRIAGE", "the drives are not those that were ordered",
         "Compare `nvme list` with the order; reseat drives that are missing"),
    Code(142, "ports_not_as_ordered", "network", "TRIAGE", "the network ports are not those that were ordered",
         "Compare `ibstat` and `lspci` with the order; reseat adapters that are missing"),
    Code(143, "version_not_as_ordered", "setting", "CONFIG", "a version is not the one that was ordered",
         "Install the version that was ordered, or correct the order"),
    Code(145, "pcie_path_reduced", "link", "TRIAGE", "a PCIe link above a device has lost lanes or speed",
         "Reseat riser or cable between the two addresses that are named (`lspci -tv`); if it stays, the retimer, the "
         "switch board or the slot is bad"),
    Code(146, "nic_not_local", "setting", "CONFIG",
         "a GPU has no network adapter under its PCIe switch, as others have",
         "Compare `nvidia-smi topo -m` with another machine of this kind: the adapter is in the wrong slot, has no "
         "link or is gone", ("performance",)),
    Code(147, "gpudirect_module_missing", "setting", "CONFIG", "network adapters cannot reach the memory of GPUs",
         "Load the module (`modprobe nvidia_peermem`), or install NVIDIA's open driver with kernel 5.12 or newer",
         ("performance",)),
    Code(148, "iommu_not_passthrough", "setting", "CONFIG", "IOMMU is not in passthrough mode",
         "Boot with `iommu=pt`, or turn the IOMMU off in the BIOS", ("performance",)),
    Code(149, "acs_enabled", "setting", "CONFIG", "ACS redirects GPU-NIC traffic",
         "Turn Access Control Services off in the BIOS, or at every boot: `setpci -s ADDRESS ECAP_ACS+0x6.w=0000`",
         ("performance",)),
    Code(150, "gsp_firmware_differs", "identity", "CONFIG", "this GPU runs other GSP firmware than the others",
         "Reinstall the driver, which contains the firmware, and reboot; if it stays, replace the GPU"),
    Code(151, "bar1_small", "setting", "CONFIG", "this GPU's BAR1 is smaller than that of others",
         "Look at the BIOS (Above 4G Decoding, Resizable BAR) and at the slot; GPUDirect maps memory through BAR1",
         ("performance",)),
    Code(152, "gpu_numa_mismatch", "setting", "CONFIG", "this GPU's CPU affinity is not that of its PCI bus",
         "Look at the BIOS (NUMA, SRAT) and update it; compare `nvidia-smi topo -m` with another machine of this kind",
         ("performance",)),
    Code(153, "power_limit_below_model", "identity", "TRIAGE", "the default power limit is below the model's",
         "Compare part number and VBIOS with the order: it is another board, or its firmware was made for less power",
         ("performance",)),
    Code(155, "clock_source_slow", "setting", "CONFIG", "clock source of this node is slow",
         "Find out why the kernel gave up the fast one (`dmesg | grep -i clocksource`): often firmware or BIOS",
         ("performance",)),
    Code(156, "cpu_offline", "setting", "CONFIG", "CPUs of this node are offline",
         "Bring them back: `echo 1 > /sys/devices/system/cpu/cpuN/online`; if they stay away, look at the kernel log "
         "and the BIOS"),
    Code(157, "numa_memory_imbalance", "presence", "TRIAGE", "a socket has less memory than another one",
         "Compare `dmidecode -t memory` with the order: reseat or replace the module that is missing there"),
    Code(158, "dimm_mismatch", "identity", "TRIAGE", "a memory module of the host is unlike the others",
         "Compare it with the order, and replace it with one like the others"),
    Code(159, "dimm_slow", "setting", "TRIAGE", "a memory module of the host runs slower than the others",
         "Look at the BIOS setting of the memory's speed; reseat or replace the module"),
    Code(170, "nic_misplaced", "setting", "CONFIG", "a network adapter is next to other GPUs than its own",
         "Compare `nvidia-smi topo -m` with another machine of this kind: the adapter is in the wrong slot, or a cable "
         "to its switch board is swapped", ("performance",)),
    Code(171, "acs_between_gpus", "setting", "CONFIG", "ACS redirects GPU-GPU traffic over the root complex",
         "Turn Access Control Services off in the BIOS, or at every boot: `setpci -s ADDRESS ECAP_ACS+0x6.w=0000`",
         ("performance",)),
    Code(172, "nic_rate_low", "network", "TRIAGE", "a network port runs at half the rate of its board",
         "Look at the speed of the switch port (`ibstat`, `mlxlink -d DEVICE`), at cable and splitter; if it was "
         "ordered like this, put its rate into the order", ("performance",)),
    Code(173, "mtu_mismatch", "network", "CONFIG", "the MTU of a network port differs from its peers'",
         "Set the MTU of its peers: `ip link set INTERFACE mtu N`, and in the configuration of the network",
         ("performance",)),
    Code(174, "subnet_mismatch", "network", "CONFIG", "a rail is not in the subnet of the same rail on other nodes",
         "Look at its address (`ip -4 addr`, of InfiniBand the subnet manager) and in which switch its cable is",
         ("performance",)),
    Code(175, "p2p_not_used", "setting", "CONFIG", "NCCL does not use P2P between GPUs that have peer access",
         "Read why in its log (NCCL_DEBUG=INFO): often a container without --ipc=host, or another /dev/shm for each "
         "process", ("performance",)),
    Code(176, "sockets_used", "setting", "CONFIG", "NCCL uses sockets instead of the RDMA network adapters",
         "Read why in its log (NCCL_DEBUG=INFO, lines with NET/): /dev/infiniband in the container, unlimited memlock, "
         "libibverbs, NCCL_IB_HCA", ("performance",)),
    Code(177, "nvls_not_used", "setting", "CONFIG", "NCCL does not use NVLS, though GPUs and NVSwitches support it",
         "Restart nvidia-fabricmanager of exactly the driver's version, then the machine; read NCCL's log "
         "(NCCL_DEBUG=INFO, lines with NVLS)", ("performance", "process")),
    Code(178, "p2p_hangs", "setting", "CONFIG", "peer to peer does not work between two GPUs",
         "Turn IOMMU and ACS off (`iommu=pt`, `setpci`), and look at the fabric manager and at XIDs of both; if it "
         "stays, a GPU or what connects them is bad", ("performance", "process")),
    Code(180, "packets_lost", "network", "TRIAGE", "the network loses packets of a node",
         "Look at cable, transceiver and switch port (`ethtool -S`, `mlxlink -e`), then at PFC and ECN of the switches",
         ("performance",)),
    Code(181, "cable_swapped", "network", "CONFIG", "a cable is in the switch of another rail",
         "Put the cable into the switch that has the same port of the other nodes", ("performance",)),
    Code(182, "port_set_up_otherwise", "setting", "CONFIG", "a network port is not configured as on other nodes",
         "Give its ports the names (udev), addresses and partitions that those of other nodes have", ("performance",)),
    Code(183, "topology_file_unfit", "setting", "CONFIG", "NCCL's topology file is missing, or another machine's",
         "Mount the file into the container (`-v FILE:FILE:ro`; with Pyxis --container-mounts), take that of this "
         "machine type, or unset NCCL_TOPO_FILE", ("performance",)),
    Code(184, "version_defective", "setting", "CONFIG", "this version has a known defect",
         "Install the version that is named, or a newer one of its train"),
    Code(185, "version_old", "setting", "MONITOR", "this version lacks a security update",
         "Install the version that is named, or a newer one of its train"),
    Code(186, "hot_at_idle", "slowdown", "TRIAGE", "this GPU is hot without work",
         "Look at its cooling: fan curve, blocked air, cold plate, thermal paste; then at inlet air or water",
         ("performance",)),
    Code(187, "coolant_leak", "cooling", "ISOLATE", "a leak sensor reports coolant",
         "Disconnect power and coolant, then find the leak: `ipmitool sdr elist`, LeakDetection of Redfish"),
    Code(188, "power_smoothing_differs", "setting", "CONFIG", "this GPU's power smoothing is not that of the others",
         "Set the profile of the others: `nvidia-smi power-smoothing -h`", ("performance",)),
    Code(190, "imex_channel_missing", "setting", "CONFIG", "no IMEX channel is available to programs",
         "Create channel 0: `NVreg_CreateImexChannel0=1` of the nvidia module, and give it to containers",
         ("performance", "process")),
    Code(191, "imex_down", "setting", "CONFIG", "the IMEX daemon of this node is not ready",
         "Look at `journalctl -u nvidia-imex`, start it (`systemctl start nvidia-imex`), and ask `nvidia-imex-ctl -N`",
         ("performance", "process")),
    Code(192, "imex_nodes_differ", "setting", "CONFIG", "the IMEX node list of this node differs from its domain's",
         "Copy /etc/nvidia-imex/nodes_config.cfg of another node of the domain as it is, and restart nvidia-imex",
         ("performance", "process")),
    Code(193, "nvlink_domain_split", "link", "TRIAGE", "this node is outside the NVLink domain of its rack",
         "Compare ClusterUUID and CliqueId of `nvidia-smi -q` with the others': look at the partitions of the NVLink "
         "switches (NMX, NVOS), then at the seating of the tray", ("performance", "process")),
    Code(194, "nvlink_domain_incomplete", "presence", "TRIAGE", "an NVLink domain is not as large as ordered",
         "Compare its nodes with the order: one may be off, in another partition, or not among --nodes"),
    # ---------------------------------------------------------------- 2xx health: what GPUs, host and nodes tell
    Code(201, "ecc_uncorrected", "error", "ISOLATE", "uncorrectable memory errors", "Replace the GPU"),
    Code(202, "row_remapping_pending", "error", "RESET", "row remapping is pending", "Reset the GPU"),
    Code(203, "row_remapping_failed", "error", "ISOLATE", "row remapping failed", "Replace the GPU"),
    Code(204, "many_rows_remapped", "error", "ISOLATE", "too many rows are remapped", "Replace the GPU"),
    Code(205, "sram_threshold_exceeded", "error", "ISOLATE", "too many errors in SRAM", "Replace the GPU"),
    Code(206, "page_retirement_pending", "error", "RESET", "page retirement is pending", "Reset the GPU"),
    Code(207, "pcie_replays", "link error", "TRIAGE", "the PCIe link has replays",
         "Reseat the GPU, its riser or cable; if replays come back, try another slot: they stay with what is bad"),
    Code(208, "nvlink_errors", "link error", "RESET", "an NVLink has errors",
         "Reset the GPU; if they come back, the GPU or the switch board is bad"),
    Code(209, "hardware_slowdown", "slowdown", "TRIAGE", "hardware slowdown lowered the clocks of the GPU",
         "Look at its cooling and at its power supply"),
    Code(210, "thermal_slowdown", "slowdown", "TRIAGE", "thermal slowdown lowered the clocks of the GPU",
         "Look at its cooling: fans, cold plate, thermal paste, blocked air"),
    Code(211, "power_brake", "slowdown", "TRIAGE", "power brake lowered the clocks of the GPU",
         "Look at power supplies and power cables of the machine"),
    Code(212, "too_hot", "slowdown", "TRIAGE", "this GPU got hotter than its own limit allows",
         "Look at its cooling: fans, cold plate, thermal paste, blocked air"),
    Code(213, "xid_reset", "error", "RESET", "an XID that calls for a reset of the GPU",
         "Reset the GPU; replace it if the XID comes back", ("stall",)),
    Code(214, "xid_restart", "error", "RESET", "an XID that calls for a restart of the machine",
         "Restart the machine; replace the GPU if the XID comes back", ("stall",)),
    Code(215, "xid_mechanical", "error", "TRIAGE", "an XID that calls for a look at the GPU's cables and seating",
         "Check power cables and seating of the GPU"),
    Code(216, "xid_workflow", "error", "ISOLATE", "an XID for which NVIDIA has a workflow",
         "Follow NVIDIA's workflow for this XID; keep the GPU out of service until then"),
    Code(217, "xid_application", "error", "MONITOR", "an XID of a program error, unless other XIDs come with it",
         "Run again; look at the hardware if the XID comes back"),
    Code(218, "xid_other", "error", "MONITOR", "an XID without an action", "Look it up in NVIDIA's XID catalogue"),
    Code(219, "gpu_lost", "presence", "ISOLATE", "the kernel log names a GPU that is no longer here",
         "Find the GPU at that PCI address; reseat or replace it", ("stall",)),
    Code(220, "sxid_fatal", "switch", "RESET", "an NVSwitch has a fatal error",
         "Reset all GPUs, and with them the NVSwitches, or restart the machine; if it comes back, have the NVSwitch "
         "board and the link checked"),
    Code(221, "sxid", "switch", "MONITOR", "an NVSwitch has an error",
         "Nothing, unless it comes back; then have the link checked"),
    Code(222, "counter_unreadable", "error", "TRIAGE", "an error counter can no longer be read",
         "Look at the kernel log for XIDs of this GPU; reset it"),
    Code(223, "new_gpu_remapped_rows", "error", "ISOLATE", "a new GPU has remapped rows",
         "Have it replaced; for hardware that is not new give --fleet-used"),
    Code(233, "new_gpu_ecc_errors", "error", "ISOLATE", "a new GPU has had uncorrectable memory errors",
         "Have it replaced; for hardware that is not new give --fleet-used"),
    Code(224, "rows_remapped", "error", "ISOLATE", "rows of memory failed or were remapped during the run",
         "Reset the GPU; replace it if more are remapped"),
    Code(225, "xid_of_process", "process", "MONITOR", "an XID that a process leaves behind when it crashes or is ended",
         "Look at what that process did; the GPU itself is healthy, unless programs that are known to be good crash on "
         "it alone"),
    Code(226, "memory_unrepairable", "error", "ISOLATE", "the driver says that memory of this GPU cannot be repaired",
         "Replace the GPU"),
    Code(227, "spare_rows_used_up", "error", "ISOLATE", "memory of this GPU has no spare rows left",
         "Replace the GPU: the next row that fails there cannot be remapped"),
    Code(228, "many_corrected_errors", "error", "TRIAGE", "memory of this GPU has many errors, all corrected",
         "Reset the GPU and run again; replace it if they come back: uncorrectable errors follow"),
    Code(229, "network_port_errors", "network", "TRIAGE", "a network port has errors",
         "Look at its cable, transceiver and switch port: `ibstat`, `perfquery`, `mlxlink`"),
    Code(230, "node_lost", "presence", "TRIAGE", "a node was lost during the run",
         "Look at its power, its network and its kernel log, then run again", ("process",)),
    Code(231, "pcie_uncorrected", "link error", "TRIAGE", "a PCIe link lost data",
         "Reseat what is at the two addresses that are named (`lspci -tv`), look at riser, cable and retimer; a "
         "restart clears the counters"),
    Code(232, "pcie_corrected", "link error", "TRIAGE", "a PCIe link has many errors, all corrected",
         "Reseat what is at the two addresses that are named (`lspci -tv`), look at riser, cable and retimer; if "
         "errors come back in another slot, the device is bad"),
    Code(250, "host_memory_uncorrected", "error", "ISOLATE", "host memory had errors that could not be corrected",
         "Replace the memory module that is named"),
    Code(251, "host_memory_corrected", "error", "TRIAGE", "a memory module of the host has many errors, all corrected",
         "Reseat the module that is named; replace it if they come back"),
    Code(252, "drive_failing", "error", "ISOLATE", "SMART: a drive reports failure", "Replace the drive"),
    Code(253, "drive_worn", "error", "TRIAGE", "SMART: a drive is worn out",
         "Replace it, or ask why a drive of a new machine was written to for so long"),
    Code(254, "drive_errors", "error", "TRIAGE", "SMART: a drive had media errors",
         "Look at `smartctl -x` and at the kernel log; replace the drive"),
    Code(255, "drive_too_hot", "slowdown", "TRIAGE", "SMART: a drive is above its temperature limit",
         "Look at the cooling of its bay: fans, blanks of empty bays, heat sink"),
    Code(256, "drive_data_error", "data", "ISOLATE", "a drive does not give back what was written to it",
         "Look at the kernel log; replace the drive that the folder lies on, or its cable or controller"),
    Code(257, "drive_unreadable", "error", "TRIAGE", "a drive could not be written or read",
         "Look at the kernel log and at `smartctl -x` of the drive that the folder lies on"),
    Code(258, "host_memory_slow", "performance", "TRIAGE", "host memory is far slower than the rating of its modules",
         "Look for what else runs on the host, at the BIOS settings of memory and power, and at the governor"),
    Code(267, "power_supply_failed", "power", "TRIAGE", "a power supply has failed, or has no mains input",
         "Look at its cable and at the socket, then replace it: `ipmitool sdr type \"Power Supply\"`",
         ("performance",)),
    Code(268, "power_not_redundant", "power", "TRIAGE", "the power supplies are not redundant",
         "Look for a power supply that is missing, without mains or dead: `ipmitool sdr type \"Power Supply\"`"),
    Code(269, "fan_failed", "cooling", "ISOLATE", "a fan has failed",
         "Replace it: `ipmitool sdr type Fan`; look for what blocks it", ("performance",)),
    Code(270, "inlet_temperature", "cooling", "CONFIG", "inlet temperature is outside BMC thresholds",
         "Look at the cooling of the room and of the rack, and for what blocks the air", ("performance",)),
    Code(271, "component_temperature", "cooling", "TRIAGE", "a component temperature is above BMC thresholds",
         "Look at fans, air ducts and heat sinks: `ipmitool sdr type Temperature`", ("performance",)),
    Code(272, "bmc_memory_error", "error", "ISOLATE", "the BMC's log has an uncorrectable error of host memory",
         "Replace the memory module that it names: `ipmitool sel elist`; save and clear the log afterwards"),
    Code(273, "bmc_processor_error", "error", "TRIAGE", "the BMC's log has a fatal error of a processor",
         "Look it up with the vendor, `ipmitool sel elist`; save and clear the log once it is mended"),
    Code(274, "bmc_bus_error", "error", "TRIAGE", "the BMC's log has a fatal error of PCIe or another bus",
         "Look for the slot in `ipmitool sel elist -v` and in the kernel log; reseat or replace what is in it"),
    Code(275, "bmc_power_error", "power", "TRIAGE", "the BMC's log has an error of power",
         "Look at the power supply that it names and its mains: `ipmitool sel elist`; clear the log once it is mended"),
    Code(276, "bmc_cooling_error", "cooling", "TRIAGE", "the BMC's log has an error of cooling",
         "Look at fans, air ducts and the part that it names: `ipmitool sel elist`; clear the log once it is mended"),
    Code(277, "bmc_log_full", "error", "MONITOR", "the BMC's event log is full",
         "Save it and clear it (`ipmitool sel save FILE`, `ipmitool sel clear`), then run again"),
    Code(280, "transceiver_fault", "network", "TRIAGE", "the transceiver of a network port reports a fault",
         "Clean its connector, reseat it and look at its cooling; then exchange it: `mlxlink -d DEVICE -m`"),
    Code(281, "network_link_errors", "network", "TRIAGE", "a network link has more bit errors than a healthy one",
         "Clean and reseat the connectors at both ends, then exchange the cable: `mlxlink -d DEVICE -c`"),
    Code(282, "network_link_flaps", "network", "TRIAGE", "a network link goes down again and again",
         "Reseat the cable at both ends, then exchange it; then look at the switch port"),
    # what the kernel log tells of the host (machine/kernel_log.py has its lines)
    Code(236, "machine_check", "host error", "TRIAGE", "a processor reports an error that it could not correct",
         "Read the BMC's event log for the part: a processor, a DIMM or a PCIe device", ("process", "stall")),
    Code(237, "machine_check_corrected", "host error", "MONITOR", "a processor reports errors that were corrected",
         "Nothing, unless they become many; then look at the part that the BMC's event log names"),
    Code(238, "dimm_uncorrected", "host error", "ISOLATE", "memory of the host has uncorrectable errors",
         "Replace the DIMM that is named (`dmidecode -t memory` has its slot)", ("process", "stall")),
    Code(239, "dimm_corrected", "host error", "MONITOR", "memory of the host has errors that were corrected",
         "Nothing, unless they become many; then replace the DIMM that is named"),
    Code(240, "pcie_error_logged", "host error", "TRIAGE", "a PCIe device or port has an error that was not corrected",
         "Reseat what is below it, its riser or cable; if it comes back, that device or the slot is bad",
         ("link", "link error", "stall")),
    Code(241, "pcie_corrected_logged", "host error", "MONITOR", "a PCIe device or port had errors that were corrected",
         "Nothing, unless they become many; then reseat the device, its riser or cable"),
    Code(242, "hung_task", "stall", "TRIAGE", "CPU lockup or hung task on the host",
         "Read the kernel log around that line: what they waited for, and whether an XID or a disk error came before"),
    Code(243, "disk_failing", "disk", "TRIAGE", "a disk does not answer, or cannot be read or written",
         "Look at it with `smartctl -a` or `nvme smart-log`; reseat or replace it", ("file system", "stall")),
    Code(244, "file_system_failed", "file system", "TRIAGE", "a file system has errors or became read-only",
         "Look for errors of its disk first; then unmount and check it"),
    Code(245, "host_out_of_memory", "host memory", "CONFIG", "the host, or the container of the run, ran out of memory",
         "End what else uses the host's memory, or raise the container's limit, and run again", ("process",)),
    Code(246, "nic_underpowered", "network", "TRIAGE", "a network adapter or its transceiver gets too little power",
         "Look at the slot's power in the BIOS, at the riser, and whether the transceiver fits the adapter"),
    Code(247, "nic_too_hot", "network", "TRIAGE", "a network adapter or its transceiver is too hot",
         "Look at its cooling: fans, blocked air, the slot next to it"),
    Code(248, "nic_firmware_failed", "network", "TRIAGE", "the firmware of a network adapter has failed",
         "Look for heat and PCIe errors before it; reset the adapter (`mlxfwreset`), or replace it"),
    Code(249, "processor_throttled", "host cooling", "TRIAGE", "thermal throttling of the host's processors",
         "Look at their cooling: fans, heat sinks, blocked air", ("performance",)),
    # what DCGM's diagnostic finds, a line for each severity that it has
    Code(285, "dcgm_part_broken", "diagnostic", "ISOLATE", "DCGM's diagnostic found an error that calls for isolation",
         "Replace the GPU; the JSON of the diagnostic (`dcgmi diag --json`) goes with it"),
    Code(286, "dcgm_reset_needed", "diagnostic", "RESET", "DCGM's diagnostic found an error that calls for a reset",
         "Drain and reset the GPU, then run again; replace it if it comes back"),
    Code(287, "dcgm_setting", "diagnostic", "CONFIG", "DCGM's diagnostic found a setting or software that is wrong",
         "Do what its text says, then run again"),
    Code(288, "dcgm_test_failed", "diagnostic", "TRIAGE", "a test of DCGM's diagnostic failed",
         "Read its text and /var/log/nvidia-dcgm/nvvs.log; run `dcgmi diag -r 3` on this GPU alone"),
    Code(289, "dcgm_warning", "diagnostic", "MONITOR", "DCGM's diagnostic warned of something, or left it out",
         "Nothing, unless it comes back together with faults of the same GPU"),
    # ---------------------------------------------------------------- 3xx wrong data
    Code(301, "matmul_wrong", "data", "ISOLATE", "this GPU computes wrong results",
         "Replace the GPU; if all GPUs do it, look at the driver and the CUDA libraries first"),
    Code(302, "matmul_nondeterministic", "data", "ISOLATE", "this GPU corrupts results silently", "Replace the GPU"),
    Code(303, "memory_data_error", "data", "ISOLATE", "this GPU's memory does not hold what is written",
         "Replace the GPU"),
    Code(304, "collective_wrong", "data", "TRIAGE", "a collective delivered wrong data",
         "Look for NVLink and ECC errors of the GPUs that are named (`nvidia-smi nvlink -e`) and replace them"),
    Code(305, "link_data_error", "data", "TRIAGE", "data arrived wrong over a link",
         "Look at the NVLink errors of the GPUs that are named and for XIDs; over PCIe at IOMMU and ACS settings"),
    Code(309, "gpu_bits_differ", "data", "TRIAGE", "this GPU computes other bits than the others of the same model",
         "Run again: if it is the same GPU, replace it; if two differ and nobody can say which, run the suite on a "
         "machine with the same GPUs and libraries and hold both against each other: `gpufleet compare`"),
    Code(310, "machine_bits_differ", "data", "TRIAGE", "this machine computes other bits than others of its kind",
         "Compare its CUDA libraries and environment with the others' (`pip list`, LD_PRELOAD, LD_LIBRARY_PATH) and "
         "install them anew; if its GPUs still compute otherwise, they, or what they share, are bad"),
    Code(306, "training_wrong", "data", "TRIAGE", "training gives wrong results",
         "Replace the GPU if one is named; if all are, look at driver, CUDA libraries and torch first"),
    Code(307, "replicas_differ", "data", "TRIAGE", "after training this GPU has other weights than the others",
         "Look at its memory, ECC and NVLink errors, and run the exact collectives again; replace it if it stays"),
    Code(311, "inference_wrong", "data", "TRIAGE", "inference gives wrong results",
         "If one GPU is named, replace it; if all are, look at the exactness of collectives, and at the versions of "
         "torch and CUDA"),
    # ---------------------------------------------------------------- 4xx performance
    Code(401, "limit_missed", "performance", "TRIAGE", "a measurement is outside its limit"),
    Code(402, "slower_than_peers", "performance", "TRIAGE", "this place is slower than its peers"),
    Code(403, "straggler", "performance", "CONFIG", "straggler: the process of this GPU makes all others wait",
         "Look for what else runs on the processors that it may use"),
    Code(404, "links_slow", "performance", "TRIAGE", "links of this GPU are slow",
         "Look at its NVLinks (`nvidia-smi nvlink -s`); reseat or replace it"),
    Code(405, "link_slow", "performance", "TRIAGE", "the link between two GPUs is slow",
         "Look at the NVLinks of both (`nvidia-smi nvlink -s`)"),
    Code(406, "slows_collectives", "performance", "TRIAGE", "collectives are fast only without this GPU",
         "Look at its links, clocks and temperature, and at what else runs on it"),
    Code(407, "cause_unclear", "performance", "TRIAGE", "nothing points to a single GPU or link",
         "Look at what all GPUs share: switches, host, software, settings"),
    Code(408, "node_slow", "performance", "TRIAGE", "this node is slow with every other one",
         "Look at its network adapters, cables and switch ports (`ibstat`, `mlxlink`), and at NCCL's settings there"),
    Code(409, "rail_slow", "performance", "TRIAGE", "one rail of this node is slow",
         "Look at the network adapter that is named, its cable and its switch port (`ibstat`, `mlxlink`)"),
    Code(410, "node_link_slow", "performance", "TRIAGE", "the network between two nodes is slow",
         "Both are fast with others: look at the switches and cables between these two"),
    Code(411, "network_between_nodes_slow", "performance", "TRIAGE", "nothing points to a single node or its network",
         "Look at what all nodes share: switches, routing, congestion control, NCCL's settings"),
    Code(412, "network_adapter_slow", "performance", "TRIAGE", "a network adapter is slow in loopback",
         "Look at its PCIe link, at IOMMU and ACS, and whether GPUDirect RDMA works; then reseat or exchange it"),
    Code(413, "network_adapter_fails", "network", "TRIAGE", "nothing can be sent through a network adapter",
         "Look at the state of its port (`ibstat`), at /dev/infiniband and at the limit of locked memory"),
    Code(415, "implausible_value", "performance", "TRIAGE", "a measurement is above what this GPU can do",
         "The GPU is not what it says it is, or its clock is wrong: compare model, clocks and SMs with the data sheet"),
    Code(416, "nvlink_domain_slow", "performance", "TRIAGE", "an NVLink domain is slower than the others",
         "Look at its NVLink switches: links that are down (`nvidia-smi nvlink -s` of all its nodes), errors and "
         "temperatures in NVOS, seating of switch trays and cable cartridges"),
    # ---------------------------------------------------------------- 5xx processes
    Code(501, "rank_died", "process", "TRIAGE", "the process of a GPU died",
         "Look at the kernel log for XIDs and for the out-of-memory killer"),
    Code(502, "rank_hung", "process", "TRIAGE", "the process of a GPU did not answer",
         "Look at the kernel log for XIDs and at what the process waited for; where no GPU is named, at what all GPUs "
         "share: switches, driver, host"),
    Code(503, "rank_raised", "process", "TRIAGE", "the rank of this GPU raised an error",
         "Read its error; look at the kernel log for XIDs of this GPU"),
    Code(504, "node_hung", "process", "TRIAGE", "this node's own run makes no progress, while the others' do",
         "Look at its kernel log for XIDs, and for what its process waits (`cat /proc/PID/stack`): a driver, a drive "
         "or a file server that does not answer"),
    Code(505, "node_cut_off", "network", "TRIAGE", "other nodes cannot work with this one",
         "Look at its firewall (`nft list ruleset`: nodes need net.ipv4.ip_local_port_range), cable, VLAN, MTU and "
         "route (`ip route get ADDRESS`), NCCL_SOCKET_IFNAME; if it hangs though it is reached, at NCCL's log "
         "(NCCL_DEBUG=INFO), `ibstat` and GID index", ("process",)),
    Code(506, "nodes_cut_off", "network", "TRIAGE", "two nodes cannot work with each other",
         "Look at what lies between these two: routes and firewall rules of both (`ip route get ADDRESS`, "
         "`nft list ruleset`), VLAN, PKey, subnet, switches", ("process",)),
    Code(507, "network_cut", "network", "TRIAGE", "groups of nodes cannot work with each other",
         "Look at the switches between them, at routes, VLANs and flow control", ("process",)),
    # ---------------------------------------------------------------- 6xx what is not as it was before a repair
    Code(610, "part_gone", "presence", "TRIAGE", "a part that was there before the repair is gone",
         "Reseat what was opened (`lspci`, `dmidecode -t memory`); ask who worked on the machine where the part is"),
    Code(611, "part_not_named", "identity", "TRIAGE", "a part was replaced that --fleet-replaced does not name",
         "Compare its serial number with the work order; name it with --fleet-replaced if it was to be replaced"),
    Code(612, "part_not_replaced", "identity", "TRIAGE", "a part that should have been replaced is still the same",
         "Compare its serial number with the work order, and replace it"),
    Code(613, "part_changed", "identity", "CONFIG", "a part, or the link of two, is not as before the repair",
         "Bring its place, firmware and links back (`nvidia-smi topo -m`); give --fleet-replaced firmware if that was "
         "updated on purpose"),
    Code(614, "slower_than_before", "performance", "TRIAGE", "a measurement is worse than before the repair",
         "Look at what the repair touched: cooler, power cable, riser, cable"),
    # ---------------------------------------------------------------- 9xx an author's own assertions
    Code(901, "check_failed", "check", "TRIAGE", "a check failed"),
)
# fmt: on

CODES = {code.name: code for code in sorted(_CODES, key=lambda code: code.number)}
BY_NUMBER = {code.number: code for code in CODES.values()}
KERNEL_LOG = range(236, 250)  # the numbers of what the kernel log tells of the host


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong. `name`, a key of CODES, says what kind of thing, and what to do; `number` is its code.

    `subjects` are the places that are to blame, most suspicious first; none if nobody knows. `what` tells of this one
    in a few words, with figures and without the subjects. `story` is for who digs deeper: log lines, what each rank
    did. `check` is the node id of the test that found it or, if it was `watched`, that ran when it happened."""

    name: str
    subjects: tuple[Where, ...]
    what: str
    story: str = ""
    check: str = ""
    watched: bool = False
    number: int = msgspec.field(default=0, name="code")  # 0: that of its kind

    def __post_init__(self) -> None:
        """ValueError if it is none that this version knows. Evidence of before 0.4 may have another name."""
        kind = BY_NUMBER.get(self.number) or CODES.get(self.name)
        if kind is None or (self.name in CODES and self.name != kind.name):
            raise ValueError(f"there is no fault {self.name} with code {self.number}")
        msgspec.structs.force_setattr(self, "name", kind.name)
        msgspec.structs.force_setattr(self, "number", kind.number)

    def changed(self, **changes: Any) -> "Fault":
        return msgspec.structs.replace(self, number=0, **changes)

    @property
    def kind(self) -> Code:
        return CODES[self.name]

    @property
    def nodes(self) -> frozenset[int]:
        parts = (part for subject in self.subjects for part in subject.parts)
        return frozenset(part.node for part in parts if part.is_on_node)

    def described(self, named: Callable[[Where], str] = str) -> str:
        """ "GPU 3: 17 PCIe replays", if `named` calls a place so."""
        subjects = ", ".join(map(named, self.subjects))
        return f"{subjects}: {self.what}" if subjects else self.what


def node_fault(code: str, what: str) -> Fault:
    """A fault of this machine as a whole."""
    return Fault(code, (THIS_NODE,), what)


class Faults(AssertionError):
    """Raised by a check that found faults. Its text is for who has nothing better; the plugin records `faults`."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(fault.described() for fault in faults))
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[Any, ...]:
        return Faults, (self.faults,)


def expect_none(faults: Iterable[Fault]) -> None:
    """Fail the check if there is any fault. Raises Faults."""
    __tracebackhide__ = True
    if found := tuple(faults):
        raise Faults(found)
