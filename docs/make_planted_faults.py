"""Writes docs/planted-faults.md: `python docs/make_planted_faults.py`, after every change of a limit, a rule or a row.

A row says what is planted and where; all else that the page tells is what the program says when this runs.
"""

# ruff: noqa: E402

import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the tests have what was recorded, and what describes machines

from pytest_gpufleet.machine.gpudirect import misplaced_adapters
from pytest_gpufleet.machine.health import ClocksUnderLoad, held_clocks
from pytest_gpufleet.machine.nccl_log import Beside, fallbacks
from pytest_gpufleet.machine.rdma import lost_packets, wired_otherwise
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import HostFound
from pytest_gpufleet.model.place import GpuTopology, gpu
from pytest_gpufleet.model.record import Record
from pytest_gpufleet.run import resume
from pytest_gpufleet.run.folder import RunFolder
from pytest_gpufleet.verdict.across_runs.rejudgement import judge_again
from pytest_gpufleet.verdict.fleet.equality import ports_unlike, unlike
from pytest_gpufleet.verdict.fleet.fleet_peers import clocks_apart, nodes_differ, slow_places
from pytest_gpufleet.verdict.judgement import read
from pytest_gpufleet.verdict.profile import for_gpu
from pytest_gpufleet.verdict.verdict import remarks
from pytest_gpufleet.world.engines.processes import CANNOT_ANSWER
from pytest_gpufleet.world.failure import RankFailure
from tests.acceptance import test_faulty_machines as faulty, test_pcie
from tests.boards import BOARDS
from tests.fleets import host_run, measured_twice
from tests.machine import test_network_ports as network_tests
from tests.machine.test_kernel_log import SEGFAULT
from tests.machine.test_nccl_log import PORTS, TWO_NODES, cards, log
from tests.machine.test_pcie import BY_TWO, ON_TWO_SOCKETS, machine as described
from tests.machines import recorded, set_gpu, set_gpus, set_host, set_machine, set_port, then
from tests.planted import (
    FOUR,
    H100,
    H200,
    TWO,
    Case,
    Row,
    as_recorded,
    collectives,
    each_gpu,
    every,
    exchanged,
    half_of_the_sockets,
    links,
    load,
    model_row,
    of,
    of_eight,
    of_facts,
    of_run,
    of_values,
    one,
    pairs,
    run_of,
    said,
    samples,
    slow_beside_peers,
    slow_gpu,
    slowed,
    soak,
    two_of_eight,
    warmer,
    who_has_slow_pairs,
    without_switch,
)  # fmt: skip
from tests.recorded.test_recorded import RUNS as RECORDED, by_todays_limits
from tests.run.test_resume import CHASSIS, DMI
from tests.verdict import test_healthy_figures as healthy_figures
from tests.verdict.test_between_nodes import port
from tests.world.fake_engine import FakeEngine, Hangs, world_of
from tests.world.test_pool import BEFORE, HERE

PAGE = ROOT / "docs" / "planted-faults.md"
COMMAND = "python docs/make_planted_faults.py"

FOUR_H200 = BOARDS[H200].machine(4)
# What it takes to find what is not found yet.
APART = "healthy ones were seen 6 % apart"
ALL = "gpu0 gpu1 gpu2 gpu3"


def always(at, named):
    """A fault that has no size. `at`: its places, "" for none."""
    return [Case(frozenset(at.split() or [""]), lambda size: named())]


SLOW, MISSED = "slower_than_peers", "limit_missed"
FIGURES = [
    Row("one GPU slow in products and training, of its own", each_gpu(slow_gpu), SLOW,
        "one GPU 8 K warmer, which costs it 1.8 %",
        lambda: set.union(*(case.named(8) for case in each_gpu(warmer))), (3, 5, 8)),
    Row("one GPU slower in products than its peers are", each_gpu(slow_beside_peers), SLOW, sizes=(3, 5, 8)),
    Row("all GPUs slow in products", every("gemm"), MISSED, "as recorded", as_recorded("gemm"), (2, 5, 8, 15)),
    Row("all GPUs slow in training", every("solo_train_throughput"), MISSED, "as recorded",
        as_recorded("solo_train_throughput"), (2, 5, 10, 50)),
    Row("one memory slow", one("memory_bandwidth"), SLOW, "GPUs exchanged for boards of another part number", exchanged,
        (0.5, 1, 5)),
    Row("all memories slow", every("memory_bandwidth"), MISSED, "as recorded", as_recorded("memory_bandwidth"), (0.5,
        1, 3)),
    Row("one link to the host slow", links(one), SLOW, "half of 8 GPUs at another socket, 4.3 % less",
        half_of_the_sockets,
        (3, 4, 5)),
    Row("all links to the host slow", links(every), MISSED, "as recorded", as_recorded("host_bandwidth"), (5, 10, 15)),
    Row("all pairs of one GPU slow", pairs(one, whole=True), SLOW, "as recorded", as_recorded("pair_bandwidth"),
        (0.3, 0.6, 1)),
    Row("the same: who has them", each_gpu(who_has_slow_pairs), "links_slow", sizes=(0.6, 1)),
    Row("one pair slow in one direction", pairs(one), SLOW, sizes=(0.3, 0.6, 1)),
    Row("all pairs slow", pairs(every), MISSED, sizes=(0.5, 1, 2)),
    Row("collectives of 4 GPUs slow (17 of 18 NVLinks: 5.6 %)", collectives(*FOUR), MISSED, "as recorded",
        as_recorded("busbw"), (2, 3, 5.6)),
    Row("collectives of 2 GPUs with 17 of 18 NVLinks", collectives(*TWO), MISSED, sizes=(5.6,)),
    Row("collectives of 2 GPUs slow", collectives(*TWO), MISSED, sizes=(2, 4, 8)),
    Row("collectives of 8 GPUs with 17 of 18 NVLinks", of_eight(), MISSED, sizes=(5.6,)),
    Row("collectives of 8 GPUs slow, from the figures of their limits", of_eight(), MISSED, sizes=(2, 4, 8)),
    Row("the same: all_gather and reduce_scatter, which NCCL itself makes unsteady", of_eight(True), MISSED,
        sizes=(5.6, 8, 12)),
    Row("samples of memory bandwidth differ, twice (H100)", samples("memory_bandwidth", operation="copy"), MISSED,
        "those of the H100's host link, by 26 %", lambda: of_run(run_of("h100x1-h")), (3, 6, 10)),
    Row("host link stalls in one sample of four, twice (H100)", samples("host_bandwidth", direction="host to device"),
        MISSED, sizes=(26, 50, 80)),
    *(Row(f"without an NVSwitch ({', '.join(names)}): {what}", without_switch(way, *names), SLOW, "the same, whole",
          lambda way=way, names=names: set.union(*(case.named(0) for case in without_switch(way, *names))), sizes)
      for what, way, names, sizes in (
          ("one way between two GPUs over PCIe slow", frozenset({0, 1}), ("8x RTX 4090", "4x L40S", "4x T4"),
           (20, 30, 50)),
          ("NVLinks between two GPUs slow", frozenset({0, 1}), ("8x A100 PCIe, bridges", "DGX-1 V100"), (2, 5, 50)),
          ("a slot of 4 lanes of 16", frozenset({2}), ("8x RTX PRO 6000", "4x L40S", "HGX A100 x4"), (50, 75)))),
    Row("memory of one NUMA node slow: a channel of twelve is missing", of_values("host_memory_bandwidth", [230] * 2,
        "numa1", operation="triad"), SLOW, "3 % less",
        lambda: of_values("host_memory_bandwidth", [230] * 2, "numa1", operation="triad")[0].named(3), (3, 8.3)),
]  # fmt: skip


LOAD = [
    *(Row(f"one GPU of three too warm for its power: bad paste; others {usual} C", soak([usual] * 3), MISSED, alike,
          lambda celsius=celsius: said(BOARDS[H200].machine(8), load(celsius)), (8, 12, 20), "K")
      for usual, alike, celsius in (
          (41, "water in series: half of them 11 K warmer", [33] * 4 + [44] * 4),
          (56, "a rear row in air, 8 K warmer", [55, 56, 54, 57, 63, 64, 62, 65]),
          (73, "the same, 2 of 4", [72, 73, 80, 81]))),
    Row("one GPU draws 600 of 700 W", of_values("soak_power", [692] * 3, at_power_limit=True), SLOW,
        "a chip that draws 5 % less at its clock",
        lambda: of_values("soak_power", [692] * 3, at_power_limit=True)[0].named(5), (5, 9, 14.3)),
    Row("one GPU's SM clock lower under load than its peers'", of_values("soak_clock", [1470] * 3), SLOW, sizes=(6, 10),
        later=APART),
]  # fmt: skip
ALSO = [  # figures that limits name themselves, and one of the copy on the SMs
    ("NVIDIA A100-SXM4-80GB", "gemm", healthy_figures.IN_BF16, 256, "Azure/AI-benchmarking-guide", 35),
    (H100, "gemm", healthy_figures.IN_BF16, 675, "lowest of several, source not found", 19),
    (
        "Tesla V100-SXM2-16GB",
        "gemm",
        {**healthy_figures.IN_BF16, "precision": "fp16"},
        94,
        "short runs, source not found",
        25,
    ),
    (
        "NVIDIA A100-SXM4-80GB",
        "memory_bandwidth",
        {"operation": "copy"},
        1371,
        "cudaMemcpy, superbench-results v0.4.0",
        15,
    ),
    (
        "NVIDIA A100-SXM4-40GB",
        "memory_bandwidth",
        {"operation": "copy"},
        1156,
        "cudaMemcpy, superbench-results v0.4.0",
        15,
    ),
    (
        "NVIDIA B300 SXM6 AC",
        "gemm",
        healthy_figures.IN_BF16,
        1485,
        "as a B200, which has as many TFLOP/s in 16 bits",
        40,
    ),
    ("NVIDIA H20", "memory_bandwidth", {"operation": "copy"}, 2232, "NVIDIA/nvbandwidth issue 48, H20-3e", 30),
]
MODELS = [
    model_row(model, metric, conditions, figure, source, *sizes)
    for model, metric, conditions, figure, source, *sizes in [*ALSO, *healthy_figures.PUBLISHED]
    if "nodes" not in conditions
]


# ---------------------------------------------------------------- nodes


def two_recorded_nodes(there, said, part):
    """Of a single H200 each, with what a network of 400 Gb/s carries, or a part of it, in place of their loopback."""
    folder = RunFolder(RECORDED["h200x2-as-two-nodes"])
    record = folder.record()
    record.run = msgspec.structs.replace(record.run, network=said)
    for number, found in record.machines.items():
        record.machines[number] = msgspec.structs.replace(found, host={**found.host, "network_ports": there})
    reached = {"rail_bandwidth": 48.0 * part, "busbw": 43.0 * part}
    for number, finding in enumerate(record.findings):
        if value := reached.get(finding.measurement.metric):
            figures = replace(finding.measurement, values=dict.fromkeys(finding.measurement.values, value))
            record.findings[number] = replace(finding, measurement=figures)
    return judge_again(record, for_gpu(H200), own=folder.own_runs(record))


def network(carried, said="", ports=1):
    return of_run(two_recorded_nodes([port(number) for number in range(ports)], said, carried))


def slow_nodes(*runs):
    """By the tolerances of today."""
    today = [replace(run, record=judge_again(run.record, for_gpu(H200))) for run in runs]
    return of(each.fault for each in slow_places(dict(enumerate(today))).slow)


def boards():
    return slow_nodes(*(host_run(name, folder=name) for name in ("h200x4-a", "h200x4-c", "h200x1-e", "h200x2-g")))


def among_nodes(**differing):
    """One node of four: what differs in its evidence."""
    return lambda: of(
        nodes_differ(dict(enumerate(host_run(f"node-{n}", **(differing if n == 2 else {})) for n in range(4))), unlike)
    )


def of_one_node(percent):
    def change(metric, at, value):
        return value * (1 - percent / 100 * (metric == "memory_bandwidth" and at == gpu(1)))

    slow = measured_twice(host_run("node-2", change=change))  # as a run does that misses at home
    return slow_nodes(*(slow if n == 2 else host_run(f"node-{n}") for n in range(4)))


def wired(code, last):
    """The networks, a letter each, of four ports of four nodes; of the last these."""
    nodes = [dict(zip(("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), each, strict=True)) for each in ("ABCD",) * 3 + (last,)]
    return of(wired_otherwise(code, dict(enumerate(nodes))))


def set_up(**last):
    return of(ports_unlike(dict(enumerate(network_tests.alike(network_tests.node(network_tests.named(**last)))))))


def losing(percent):
    """Of what is sent to one of four nodes."""
    return of(lost_packets(network_tests.sent(4, lambda one, other: percent / 100 if other == 1 else 0.0)))


NODES = [
    Row("the network of two nodes carries less", [Case(frozenset({"rail0-node1/rail0", "world"}),
        lambda by: network(1 - by / 100))],
        MISSED, "the same network, whole", lambda: network(1), (50, 90, 99)),
    Row("no port shows what the network can do", always("", lambda: network(1, ports=0)), "INCOMPLETE",
        "`--fleet-network none`: nothing is asked of it", lambda: network(0.01, "none", 0)),
    Row("half of the 400 Gb/s that `--fleet-network` says", always("rail0-node1/rail0 world", lambda: network(0.5,
        "400", 0)),
        MISSED, "`--fleet-network 200`", lambda: network(0.5, "200", 0)),
    Row("all_reduce of 2x 8 H100 with NVLS: 216 to 231 GB/s", always("node-node1", lambda: two_of_eight(231, True)),
        MISSED,
        "449 GB/s", lambda: two_of_eight(449, True)),
    Row("the same with NVLS off", always("node-node1", lambda: two_of_eight(231, False)), MISSED,
        "380 and 366 GB/s, where 440 are asked with NVLS", lambda: two_of_eight(380, False) | two_of_eight(365.8,
            False)),
    Row("memory of one GPU of four nodes slow", [Case(frozenset({"node2/gpu1"}), of_one_node)], SLOW,
        "four machines of two part numbers", boards, (0.5, 1, 5)),
    Row("clock of one node is ahead", [Case(frozenset({"node1"}), lambda ms: of(clocks_apart({0: 0, 1: ms / 1000,
        2: 0})))],
        "clock_skew", "0.04 s", lambda: of(clocks_apart({0: 0, 1: 0.04, 2: 0})), (40, 60, 200), "ms"),
    Row("another driver on one node", always("node2", among_nodes(machine=lambda found: replace(found,
        driver="570.86.15"))),
        "host_unlike_others", "nodes alike", among_nodes()),
    Row("addresses of two rails of one node swapped", always("node3", lambda: wired("subnet_mismatch", "ACBD")),
        "subnet_mismatch", "a node behind other switches", lambda: wired("subnet_mismatch", "EFGH")),
    Row("cables of two rails of one node swapped", always("node3", lambda: wired("cable_swapped", "ACBD")),
        "cable_swapped", "one switch for two rails", lambda: wired("cable_swapped", "ABCD")),
    Row("MTU of one port of a node other than its peers'", always("node3", lambda: set_up(mtu=1500)), "mtu_mismatch",
        "the same one", set_up),
    Row("interface of one port of a node named otherwise", always("node3", lambda: set_up(interface="eth3")),
        "port_set_up_otherwise", "a node that does not show it", lambda: set_up(interface=None)),
    Row("the network loses packets to one node", [Case(frozenset({"node1"}), losing)], "packets_lost",
        "0.01 %", lambda: losing(0.01), (0.1, 0.5, 1)),
]  # fmt: skip


# ---------------------------------------------------------------- runs


def hang(*traces):
    engine = FakeEngine(traces=dict(enumerate(traces)))

    def hangs(rank):
        raise Hangs

    with pytest.raises(RankFailure) as failure:
        world_of(engine, len(traces)).run(hangs)
    return of([failure.value.fault([gpu(index) for index in range(len(traces))])])


def resumed(**now):
    """Whether a run that was cut short goes on here."""
    then, here = (Record(machines={0: HostFound("", {**CHASSIS, **facts})}) for facts in ({}, now))
    try:
        resume.check_same(RunFolder(Path("there")), then, here)
    except Refused:
        return {("refused", "")}
    return set()


def whole(name, at, *metrics):
    """A whole run in which these metrics are worse, all without any name, at this place or at all."""

    def named(percent):
        record, found = run_of(name), []
        for each in record.findings:
            worse = each.measurement.metric in metrics or not metrics
            found.append(replace(each, measurement=slowed(each.measurement, percent, at)) if worse else each)
        return of_run(replace(record, findings=found))

    return named


STOPPED = CANNOT_ANSWER["T"]
RUNS = [
    Row("somebody else's process computes on GPU 2", always("gpu0 gpu2", lambda: of_run(run_of("h200x4-neighbour"))),
        "INCOMPLETE"),
    Row("the same, and all figures of GPU 1 are 10 % slow",
        always("gpu0 gpu1 gpu2 world", lambda: whole("h200x4-neighbour", gpu(1))(10)), MISSED),
    Row("a run on 2x H200, ACCEPTED: memory of GPU 1 slow",
        [Case(frozenset({"gpu1"}), whole("h200x2-g", gpu(1), "memory_bandwidth"))], SLOW, "as recorded",
        lambda: of_run(run_of("h200x2-g")), (0.5, 1, 2)),
    Row("the same: GPU 1 slow in products and training",
        [Case(frozenset({"gpu1"}), whole("h200x2-g", gpu(1), "gemm", "gemm_relative", "solo_train_throughput"))], SLOW,
        sizes=(4, 8, 10)),
    Row("the same: collectives slow", [Case(frozenset({"world"}), whole("h200x2-g", None, "busbw"))], MISSED,
        sizes=(5.6, 8, 10)),
    Row("a run on 1x H100, ACCEPTED: products slow", [Case(frozenset({"gpu0"}), whole("h100x1-h", None, "gemm"))],
        MISSED, "as recorded", lambda: of_run(run_of("h100x1-h")), (5, 11, 20)),
    Row("no telemetry at all", always("", lambda: of_run(replace(run_of("h200x2-g"), telemetry=[]))), "INCOMPLETE",
        "the same run with its telemetry", lambda: of_run(run_of("h200x2-g"))),
    Row("one rank has not come to the collective for which the others wait", always("gpu2", lambda: hang(HERE, HERE,
        BEFORE, HERE)),
        "rank_hung"),
    Row("one rank is stopped", always("gpu2", lambda: hang(HERE, HERE, replace(HERE, state=STOPPED), HERE)),
        "rank_hung"),
    Row("all ranks hang in one collective: nobody is named", always("", lambda: hang(*[HERE] * 4)), "rank_hung"),
    Row("a run is resumed on another chassis", always("", lambda: resumed(dmi={**DMI, "serial": "SN-B"})), "refused",
        "the same one after a reboot", lambda: resumed(boot_id="2")),
]  # fmt: skip


# ---------------------------------------------------------------- facts of a machine


UNCHANGED = then()


def fact(planted, change, code, at="gpu2", alike="", healthy=UNCHANGED, later=""):
    """By all checks of inventory and health of a recorded 4x H200 after a change."""
    named = partial(of_facts, healthy) if alike else set
    return Row(planted, always(at, partial(of_facts, change)), code, alike, named, later=later)


def clock(which, reasons=0, watts=480.0):
    free = ClocksUnderLoad(1980, 3201, reasons, watts)
    (bad,) = (each for each in recorded().machine.gpus if each.index == 2)
    return lambda percent: of(held_clocks(bad, free._replace(**{which: getattr(free, which) * (1 - percent / 100)})))


def generation(*links):
    return of_facts(then(), "pcie_generation_under_load", [(each, 5) for each in links])


def xid(number):
    return set_machine(log=f"NVRM: Xid (PCI:0000:00:08): {number}, pid=1, ")


def later(symbol_errors):
    """What is said of a B200 with so many errors on one NVLink a moment after the run began."""
    now = recorded(faulty.blackwell, faulty.counted("symbol", symbol_errors, 5))
    return of_facts(faulty.blackwell, now=now)


LINKS = [
    fact("one NVLink of 18 is down", set_gpu(2, nvlink_states=faulty.ONE_DOWN), "nvlink_down", "gpu2",
         "A100 PCIe, of which two have a bridge and two have none", faulty.half_bridged),
    fact("one NVLink is down on every GPU", set_gpus(nvlink_states=faulty.ONE_DOWN), "nvlink_down", ALL,
         "A100 PCIe with bridges of 12 links", faulty.bridged),
    fact("NVLinks of one GPU at half speed", set_gpu(2, nvlink_speeds=[13.28] * 18), "nvlink_slow"),
    fact("NVLinks of every GPU at half speed", set_gpus(nvlink_speeds=[13.28] * 18), "nvlink_slow", ALL,
         "B200 with counters of its own", faulty.blackwell),
    Row("40 symbol errors at once on an NVLink of a B200",
        always("gpu2", lambda: later(40)), "nvlink_errors", "one", lambda: later(1)),
    fact("the fabric says that bandwidth is degraded", set_gpu(2, **faulty.fabric(mask=0x1A9)), "fabric_degraded",
         "gpu2", "a healthy one of clique 3", set_gpus(**faulty.fabric(clique=3))),
    fact("fabric state 0 on every GPU: no fabric manager", set_gpus(**faulty.NO_FABRIC),
         "fabric_not_ready", ALL, later="not judged, so the verdict is INCOMPLETE"),
    fact("a pair without peer access", faulty.no_read_of_1, "no_peer_access"),
    fact("one pair of four GPUs over PCIe without peer access", then(faulty.over_pcie, faulty.no_read_of_1),
         "no_peer_access", "gpu2", "a processor that lets no GPU reach another", faulty.unbridged),
    fact("a PCIe slot of 8 lanes", set_gpu(2, **faulty.narrow(16)), "pcie_slot_narrow", "gpu2",
         "boards that have 8 lanes, all of them", set_gpus(**faulty.narrow(8))),
    fact("a link with 8 of 16 lanes", set_gpu(2, pcie_width=8), "pcie_width_reduced"),
    Row("PCIe 4 in place of 5, one GPU", always("gpu2", lambda: generation(5, 5, 4, 5)), "pcie_generation_reduced"),
    Row("PCIe 4 in place of 5, all, as set in the BIOS", always(ALL, lambda: generation(4, 4, 4, 4)),
        "pcie_generation_reduced", "PCIe 5 under load", lambda: generation(5, 5, 5, 5)),
    fact("BAR1 of one GPU smaller", then(faulty.SAME_BAR1, set_gpu(2, bar1_bytes=256 << 20)), "bar1_small", "gpu2",
         "BAR1 of 256 GiB, all", faulty.SAME_BAR1),
]  # fmt: skip
SETTINGS = [
    fact("error correction off", set_gpu(2, ecc_mode=[0, 1]), "ecc_off", "gpu2", "a model that is sold so",
         set_gpus(ecc_mode=[0, 0], ecc_mode_default=0)),
    fact("MIG on", set_gpu(2, mig_mode=[1, 1]), "mig_on"),
    fact("persistence mode off", set_gpu(2, persistence_mode=0), "persistence_mode_off", "gpu2", "GeForce, all",
         set_gpus(persistence_mode=0, brand=5)),
    fact("power limit of 500 W, default 700 W", set_gpu(2, power_limit_watts=500.0), "power_limit_lowered", "gpu2",
         "raised to 750 W, all", set_gpus(power_limit_watts=750.0)),
    *(fact(f"default power limit of 600 W, {which}",
           change(power_limit_watts=600.0, power_limit_default_watts=600.0),
           "power_limit_below_model", at, "a limit set to 699 W by rounding",
           set_gpus(power_limit_default_watts=699.0))
      for which, change, at in (("one GPU", partial(set_gpu, 2), "gpu2"), ("all", set_gpus, ALL))),
    Row("memory clock locked", [Case(frozenset({"gpu2"}), clock("memory"))], "clocks_pinned", "clocks free",
        lambda: clock("memory")(0), (2.3, 3.8, 30)),
    Row("SM clock locked", [Case(frozenset({"gpu2"}), clock("sm"))], "clocks_pinned", "29 % less, at the power limit",
        lambda: clock("sm", 0x4, 690.0)(29), (2.3, 3.8, 29)),
    Row("SM clock locked, and the driver says power limit", [Case(frozenset({"gpu2"}), clock("sm", 0x4))],
        "clocks_pinned", "at 668 of 700 W", lambda: clock("sm", 0x4, 668.0)(29), sizes=(29,)),
    fact("another VBIOS", set_gpu(2, vbios="96.00.99.00.01"), "gpu_unlike_others", "gpu2", "another part number",
         set_gpu(2, board_part_number="692-2G520-0282-000")),
    fact("another GSP firmware", then(faulty.SAME_GSP, set_gpu(2, gsp_firmware="570")), "gsp_firmware_differs", "gpu2",
         "the same GSP firmware, all", faulty.SAME_GSP),
    fact("another profile of power smoothing", then(faulty.SMOOTHED, set_gpu(2, power_smoothing=[1, 0])),
         "power_smoothing_differs", "gpu2", "the same profile, all", faulty.SMOOTHED),
    fact("a driver that compiles wrongly (535.54.03)", set_machine(driver="535.54.03"), "version_defective", "node",
         "one that lacks a security update (580.95.05)", set_machine(driver="580.95.05")),
    fact("NCCL_TOPO_FILE of a file that is not in the container",
         faulty.topology_file(unreadable="No such file or directory"), "topology_file_unfit", "node",
         "the file of this machine", faulty.topology_file(devices=faulty.FOUR_GPUS)),
    fact("NCCL's topology file lacks a GPU", faulty.topology_file(devices=[*faulty.FOUR_GPUS[:2], faulty.FOUR_GPUS[3]]),
         "topology_file_unfit"),
    *(fact(f"{name}=1", set_host(environment={name: "1"}), "harmful_variable", "node", f"{name}=0",
           set_host(environment={name: "0"})) for name in ("NCCL_P2P_DISABLE", "CUDA_LAUNCH_BLOCKING")),
]  # fmt: skip
FELL_OFF = "0000:00:08): 79, pid=1, GPU has fallen off the bus."
XIDS = {
    48: "xid_workflow", 64: "xid_reset", 74: "xid_workflow", 95: "xid_reset", 119: "xid_reset", 149: "xid_workflow",
}  # fmt: skip


def leaks(state):
    return set_host(leaks=[{"name": "Leak_Det_CPU0", "entity": "30.1", "status": "ok", "reading": state}])


ERRORS = [
    fact("row remapping pending", set_gpu(2, remapped_rows=[0, 1, 1, 0]), "row_remapping_pending"),
    fact("an uncorrectable error since the driver started", set_gpu(2, ecc_uncorrected_volatile=1),
         "ecc_uncorrected"),
    *(Row(f"new GPU with {what}", always("gpu2", partial(of_facts, set_gpu(2, **worn))), code,
          "the same with --fleet-used", partial(of_facts, faulty.WORN, fleet_used=True))
      for what, worn, code in (
          ("one remapped row", {"remapped_rows": [0, 1, 0, 0]}, "new_gpu_remapped_rows"),
          ("one uncorrectable error in its life", {"ecc_uncorrected_aggregate": 1}, "new_gpu_ecc_errors"))),
    *(fact(f"XID {number} before the run", xid(number), code) for number, code in XIDS.items()),
    fact("XID 79 before the run", set_machine(log=f"NVRM: Xid (PCI:{FELL_OFF}"), "xid_restart", "gpu2",
         "the same words by a user: names of a program and its file",
         set_machine(log=SEGFAULT.format("NVRM: Xid (PCI:", FELL_OFF))),
    fact("uncorrectable error of a memory module",
         set_machine(log="EDAC MC0: 1 UE memory read error on DIMM_A1 (channel:0)"),
         "dimm_uncorrected", "node", "what a healthy host writes", set_machine(log=faulty.HARMLESS_LOG)),
    fact("an Ethernet link that went down twice in 24 hours", set_machine(log=2 * faulty.LINK_DOWN),
         "network_link_flaps", "node", "once, as when a switch starts", set_machine(log=faulty.LINK_DOWN)),
    fact("an InfiniBand link that went down twice in 24 hours", set_host(link_flaps={"mlx5_2/1": 2}),
         "network_link_flaps", "node", "once", set_host(link_flaps={"mlx5_2/1": 1})),
    fact("a wet leak sensor", leaks("State Asserted"), "coolant_leak", "node", "a dry one", leaks("State Deasserted")),
]  # fmt: skip
OF_GPUS = range(4)  # the ports that GPUs use
MTUS = then(faulty.ports, set_port(mtu=4200))


def adapters(groups, at):
    """Of eight GPUs that are in these groups."""
    return of(misplaced_adapters(*described(groups, at, switches=groups is BY_TWO)))


def memory_of_nodes(*nbytes):
    memory = {str(number): each for number, each in enumerate(nbytes)}
    return then(faulty.two_sockets, faulty.set_setup(numa_memory=memory))


def acs_of(control):
    with TemporaryDirectory() as folder:
        here = test_pcie.machine(Path(folder), test_pcie.one_switch(control))
        return set.union(*(of(each.faults) for each in test_pcie.checked(here).values()))


def nccl(name, topology, at=(), **beside):
    places = at or [each.place for each in topology.gpus]
    return of(fallbacks(log(name), places, [Beside(**beside)] * len(places), topology)[0])


HOST = [
    fact("3 of 4 GPUs are there", set_machine(count=3), "gpu_missing", "node"),
    fact("CPU governor powersave", set_host(cpu_governor="powersave"), "cpu_governor", "node",
         "a driver that chooses the clock",
         set_host(cpu_governor="powersave", cpu_energy_preference="balance_performance")),
    fact("/dev/shm of 64 MiB", set_host(shared_memory_bytes=64 << 20), "shared_memory_small", "node"),
    fact("a memory module missing", memory_of_nodes(1 << 40, (1 << 40) - (64 << 30)), "numa_memory_imbalance", "node",
         "a virtual machine with one NUMA node", memory_of_nodes(1 << 40)),
    fact("a network port down", then(faulty.ports, set_port(2, state="1: DOWN")), "network_port_unlike_others", "node",
         "second ports without a cable", faulty.ports),
    fact("a network port that waits (INIT)", then(faulty.ports, set_port(2, state="2: INIT")),
         "network_port_unlike_others", "node"),
    fact("all network ports of the GPUs down", then(faulty.ports, set_port(*OF_GPUS, state="1: DOWN")),
         "network_port_unlike_others", "node", "no port at all", set_host(network_ports=[])),
    fact("a network port at half its rate", then(faulty.ports, set_port(2, rate="200 Gb/sec")),
         "network_port_unlike_others", "node"),
    fact("all network ports at half the rate of their board",
         then(faulty.ports, set_port(*OF_GPUS, rate="200 Gb/sec", board="MT_0000000838")), "nic_rate_low", "node",
         "the same adapter model with a board of 200 Gb/s",
         then(faulty.ports, set_port(*OF_GPUS, rate="200 Gb/sec", board="MT_0000000834"))),
    fact("a network port with 8 lanes", then(faulty.ports_with_pcie, set_port(1, pcie=faulty.pcie(lanes=8))),
         "nic_pcie_slow", "node",
         "ports of 200 Gb/s in slots of PCIe 4",
         then(faulty.ports_with_pcie, set_port(rate="200 Gb/sec", pcie=faulty.pcie(speed=16, speed_of_port=16)))),
    fact("CPU affinity of two GPUs swapped",
         then(faulty.affinity_by_socket, set_gpu(1, cpu_affinity=faulty.SECOND), set_gpu(2, cpu_affinity=faulty.FIRST)),
         "gpu_numa_mismatch", "gpu1 gpu2", "each at its own socket", faulty.affinity_by_socket),
    fact("MTU of one port other than its peers'", then(MTUS, set_port(2, mtu=1500)), "mtu_mismatch", "node",
         "that of the port for management", then(MTUS, set_port(4, mtu=1500))),
    Row("an adapter of eight at the other socket",
        always("rail4 rail5 rail6 rail7", lambda: adapters(ON_TWO_SOCKETS, (*[0] * 5, *[1] * 3))), "nic_misplaced",
        "one for storage beside the eight", lambda: adapters(ON_TWO_SOCKETS, (*ON_TWO_SOCKETS, 0))),
    Row("an adapter of eight at another switch, which two GPUs share",
        always("rail0 rail1", lambda: adapters(BY_TWO, (0, 1, 1, 1, 2, 2, 3, 3))), "nic_misplaced",
        "adapters where their GPUs are", lambda: adapters(BY_TWO, BY_TWO)),
    Row("ACS between GPUs without NVLink", always("gpu0 gpu1", lambda: acs_of(0x1D)), "acs_between_gpus",
        "with address translation by the devices (DirectTrans+)", lambda: acs_of(0x5D)),
    Row("NCCL sends by shared memory between two GPUs of an NVSwitch",
        always("gpu1-gpu2 gpu2-gpu1", lambda: nccl("2.30.7-shm-of-one-pair", FOUR_H200)), "p2p_not_used",
        "between cards at different sockets", lambda: nccl("2.21.5-shm", cards("NODE"))),
    Row("NVLS fails, and NCCL goes on without it", always("node", lambda: nccl("2.28.9-nvls-failed", FOUR_H200)),
        "nvls_not_used", "NCCL_NVLS_ENABLE=0",
        lambda: nccl("2.28.9-nvls-failed", FOUR_H200, variables={"NCCL_NVLS_ENABLE": "0"})),
    Row("NCCL sends by sockets between nodes with InfiniBand",
        always("gpu0-node1/gpu0 node1/gpu0-gpu0", lambda: nccl("2.26.2-sockets", GpuTopology(), TWO_NODES,
        ports=PORTS.ports)), "sockets_used",
        "nodes without network adapters", lambda: nccl("2.26.2-sockets", GpuTopology(), TWO_NODES)),
    Row("a slow disk, where nobody says which folder is to be tested", [], "", later="it takes `--fleet-disk-folder`"),
]  # fmt: skip
SUBJECTS = {
    "Speed": (
        "Figures of recorded machines (4x H200: a, b, c; 2x H200: g; H100: h) that are so much worse, at each place "
        "that can have it, one after the other. One figure at a time, but for products with training.", FIGURES),
    "Under load": ("At the end of a minute of load, as described.", LOAD),
    "Models": (
        "All GPUs, or all together, slower than a figure that somebody gave of healthy ones; some without a source.",
        MODELS,
    ),
    "Between nodes": ("Two recorded nodes with a network in place of their loopback, and described nodes.", NODES),
    "Links of GPUs": ("A recorded 4x H200 with a fact changed; by all checks of inventory and health.", LINKS),
    "Settings": ("The same machine.", SETTINGS),
    "Errors on record": ("The same machine.", ERRORS),
    "Host and network ports": ("The same machine.", HOST),
    "Runs": ("Whole runs by their verdict, and ranks that hang.", RUNS),
}  # fmt: skip
# What takes processes, GPUs or files, and the test that plants it.
ELSEWHERE = {
    "a wrong bit in products, once in thousands":
        "tests/probes/test_compute.py::test_a_wrong_element_is_found_and_the_rank_named",
    "wrong results of collectives, rare ones too":
        "tests/probes/test_exactness.py::test_wrong_results_that_come_rarely_or_at_once_are_found",
    "slowdowns, power brake, XIDs and PCIe errors during a test":
        "tests/acceptance/test_worsening.py::test_what_gets_worse_is_a_fault_of_the_check_in_which_it_did",
    "errors of NVLinks, memory and PCIe during a run":
        "tests/acceptance/test_faulty_machines.py::test_what_a_run_leaves_behind",
    "network ports that flap during a run":
        "tests/acceptance/test_faulty_machines.py::test_network_ports_of_the_whole_run",
    "an RDMA port that is down, cut off, without memory or with a wrong GID, and one at half its rate":
        "tests/nodes/test_rdma_rails.py::test_who_cannot_write_is_named_with_the_port_and_what_to_do",
    "a power supply that is dead": "tests/machine/test_bmc.py::test_power_supplies_fans_and_temperatures",
    "nvidia_peermem missing, ACS, IOMMU, slots": "tests/acceptance/test_pcie.py::test_one_thing_is_wrong",
    "a figure that misses once and not again":
        "tests/verdict/test_second_measurement.py::test_both_are_on_record_and_the_second_counts",
    "`timeout = 4` in pytest.ini":
        "tests/world/test_start.py::test_a_limit_of_pytest_timeout_fails_no_check_and_is_reported",
    "a rank that raises and then dies":
        "tests/world/test_pool.py::test_a_rank_that_raises_and_dies_of_it_is_reported_by_what_it_raised",
    "an agent that was fenced":
        "tests/nodes/test_transport.py::test_a_frozen_agent_is_lost_fenced_when_it_wakes_and_answers_then",
    "one changed byte of a report": "tests/commands/test_integrity.py::test_a_difference_is_refused_in_one_sentence",
}  # fmt: skip


# ---------------------------------------------------------------- the page

MOST = {"%": 100.0, "K": 50.0, "ms": 1000.0}
STEPS = 1000  # of the largest size
NOTES = """\
- Figures of H200 that were not judged for want of a limit were measured by 0.1.0, otherwise than today.
- `h200x4-a` and `-b` were REJECTED when they ran, by a check that was withdrawn and by a limit that was too high
  ([why](../tests/recorded/README.md)).
- `h200x4-neighbour`: somebody else computed on GPU 2."""


def smallest(row):
    """From which size on the fault is found, at the first place and at the last."""
    most, found = MOST[row.unit], []
    for case in row.cases:
        low, high = 0, STEPS
        while high - low > 1 and case.named(most):
            middle = (low + high) // 2
            low, high = (low, middle) if case.named(most * middle / STEPS) else (middle, high)
        found.append(most * high / STEPS)
    first, last = f"{min(found):g}", f"{max(found):g}"
    if last == f"{most:g}":
        return "never"
    return f"{first if first == last else f'{first} to {last}'} {row.unit}"


def where(row, named):
    """At which places it was found, if that was right everywhere."""
    if not all({place for _, place in found} <= case.at for case, found in named):
        return "**at other places too**"
    places = sorted(row.cases[0].at)
    if len(row.cases) > 1:
        return "there" if len(places) == 1 else "at all of them"
    return "at no place" if places == [""] else f"all {len(places)}" if len(places) > 2 else ", ".join(places)


def line(row):
    later, places = f"**not yet**: {row.later}" if row.later else "", len(row.cases)
    if not row.cases:
        return f"| {row.planted} | {later} | | nothing reads it | |"
    named = {size: [(case, case.named(size)) for case in row.cases] for size in row.sizes or (0.0,)}
    every_one = [each for of_size in named.values() for each in of_size]
    counts = {size: sum(bool(found) for _, found in each) for size, each in named.items()}
    words = {0: "no", places: "yes"} if places == 1 else {}
    found = ", ".join(f"{size:g} {row.unit}: {words.get(count, count)}" for size, count in counts.items())
    found = found + f" of {places}" * (places > 1) if row.sizes else words[counts[0.0]]
    codes = sorted({code for _, each in every_one for code, _ in each})
    said_at = f"{', '.join(f'`{code}`' for code in codes)}: {where(row, every_one)}" if codes else "nothing"
    alike = row.alike and f"{row.alike}: {'**rejected**' if row.healthy() else 'passes'}"
    found = "; ".join(filter(None, (later, found if row.sizes or not later else "")))
    return f"| {row.planted} | {found} | {smallest(row) if row.sizes else ''} | {said_at} | {alike} |"


def of_record(name):
    """What a recorded run comes to by the limits of today, and why."""
    again = by_todays_limits(read(RECORDED[name] / "evidence.jsonl"))
    beside, why = {*remarks(again), again.judged_again}, Counter[str]()
    for reason in again.reasons if again.verdict != "ACCEPTED" else ():
        if reason not in beside:
            what = re.sub(r"^.*?\.py::[^ ]*: ", "", reason)
            judged = re.match(r"(\d+) measurements? w(?:as|ere) not judged", what)
            cause = "measurement not judged" if judged else re.match(r"(\d+ hosts? \(.*\))?[^:;,]*", what)[0]
            why[cause] += int(judged[1]) if judged else 1
    named = "; ".join(f"{count} x {what}" if count > 1 else what for what, count in why.most_common())
    return f"| `{name}` | {again.verdict} | {named} |"


def table(head, rows):
    return ["", head, re.sub(r"[^|]+", " --- ", head), *rows]


def page():
    rows = [row for _, each in SUBJECTS.values() for row in each]
    missing, alike = [row for row in rows if row.later], [row for row in rows if row.alike]
    rejected = [row.alike for row in alike if row.healthy()]
    text = [
        "# Planted faults",
        "",
        f"<!-- Written by `{COMMAND}`: change that, or the program. -->",
        "",
        f"{len(rows)} faults, planted into what was recorded of machines, or into what is described of one, and what "
        f"the program says of each by the limits that it ships ([profiles](profiles.md)). {len(rows) - len(missing)} "
        f"are found at the largest size of their row; {len(missing)} are **not yet**, with what it takes. Of "
        f"{len(alike)} healthy look-alikes {len(rejected) or 'none'} {'is' if len(rejected) == 1 else 'are'} rejected"
        f"{': ' * bool(rejected)}{'; '.join(rejected)}.",
        "",
        "- *found*: at how many of the places where it was planted, by size.",
        "- *from*: the smallest size that is found, at the first place and at the last.",
        "- *said*: the codes of the faults, and whether the places were named at which it was, and no other.",
        "",
        f"`{COMMAND}` writes this page and has a row for each: for other sizes, change them there.",
    ]  # fmt: skip
    for subject, (about, each) in SUBJECTS.items():
        text += ["", f"## {subject}", "", about]
        text += table("| planted | found | from | said | healthy look-alike |", map(line, each))
    text += ["", "## Recorded machines", "", "All are healthy. By the limits of today:"]
    text += [*table("| run | verdict | why |", map(of_record, RECORDED)), "", NOTES]
    text += ["", "## By tests of their own", "", "What takes real processes, files or a clock."]
    text += table("| planted | test |", (f"| {what} | `{test}` |" for what, test in ELSEWHERE.items()))
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
