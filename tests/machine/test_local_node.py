"""This machine as a node. The driver is a stand-in, the kernel log a file."""

import json
import os
import subprocess
import sys
from itertools import count
from types import SimpleNamespace

from pytest_gpufleet.machine.gpu_facts import COUNTERS, SLOW_COUNTERS
from pytest_gpufleet.machine.kernel_log import Logged, Xid
from pytest_gpufleet.machine.local_node import LocalNode, take
from pytest_gpufleet.model.place import Gpu, GpuTopology, Missing
from tests.conftest import ROOT

TOPOLOGY = GpuTopology(gpus=tuple(Gpu(i, {"name": "H200", "pci_bus_id": f"00000000:{i}B:00.0"}) for i in range(2)))
FELL_OFF = "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"


def driver(*reported):
    """Two GPUs that count up with every answer; `reported`: XIDs by question."""
    answers, xids = count(), iter(reported)
    lost = Missing("NVML: GPU is lost")
    return SimpleNamespace(
        count=lambda: 2,
        ask=lambda index, fact: lost if (index, fact) == (1, "remapped_rows") else next(answers),
        xids=lambda: next(xids, []),
        present=lambda: ("00000000:0B:00.0", "00000000:1B:00.0", ""),
    )


def test_facts_of_now_stand_beside_those_that_do_not_change():
    node = LocalNode(driver(), TOPOLOGY)
    before, lost = node.facts(("remapped_rows", "pcie_replays"))
    after, _ = node.facts(("pcie_replays",))
    assert (before.identity, before["pcie_replays"] < after["pcie_replays"]) == (TOPOLOGY.gpus[0].identity, True)
    assert lost["remapped_rows"] == Missing("NVML: GPU is lost")


def test_an_xid_that_both_the_log_and_nvml_report_is_one(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(FELL_OFF)
    later_than_the_log = [(1, 79)]
    node = LocalNode(driver([(1, 79), (0, 79), (1, 48)], later_than_the_log), TOPOLOGY, str(log))
    found = [(xid.number, xid.of("00000000:1B:00.0")) for xid in node.kernel_log().xids]
    assert found == [(79, True), (79, False), (48, True)]
    assert node.kernel_log() == Logged()
    assert node.kernel_log() == Logged()


def test_where_nobody_may_read_the_log_xids_are_reported_but_those_of_nvlink_5(tmp_path):
    """Without the sub-codes that the log has nobody can tell whether there is anything to do."""
    logged = LocalNode(driver([(0, 79)]), TOPOLOGY, str(tmp_path / "none")).kernel_log()
    assert (logged.xids, logged.unread) == ((Xid("00000000:0B:00.0", 79, ""),), "")
    assert "cannot be read: No such file or directory" in logged.trouble
    unread = LocalNode(driver([(0, 145)]), TOPOLOGY, str(tmp_path / "none")).kernel_log()
    assert (unread.xids, "[145]" in unread.unread) == ((), True)
    (tmp_path / "kmsg").touch()
    assert LocalNode(driver([(0, 145)]), TOPOLOGY, str(tmp_path / "kmsg")).kernel_log() == Logged()


def test_what_is_taken_at_the_begin_also_of_a_node_without_gpus(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(FELL_OFF)
    machine = take(LocalNode(driver(), TOPOLOGY, str(log)))
    assert [xid.number for xid in machine.logged.xids] == [79]
    assert len(machine.present) == 3
    assert {"name", *COUNTERS, *SLOW_COUNTERS} <= machine.gpus[0].facts.keys()
    assert machine.host["processors"]
    node = LocalNode(None, GpuTopology(absent="--rehearse was given"))
    assert (node.facts(("name",)), node.present(), node.kernel_log()) == ((), (), Logged())
    node.lock().close()
    assert take(node).host["processors"]


# ---------------------------------------------------------------- gpufleet snapshot
def test_snapshot_is_what_the_inventory_reads_without_names(tmp_path):
    uuid = "GPU-0c0ffee0-77aa-4c1e-9b1d-5a0c33e9f100"
    change = (
        f"gpus[1].update(serial='S3CRET', uuid='{uuid}')\nhost['name'] = 'n0de'\nmachine.processes = {{2: ['miner']}}\n"
        f"host['environment']['CUDA_VISIBLE_DEVICES'] = 'GPU-x,{uuid}'\n"
        "host['nvme'] = [dict(name='nvme0', serial='S666NE0T000001')]\n"
        "host['memory_modules'] = [dict(locator='A1', serial='1'), dict(locator='A2', serial=None)]"
    )
    both = """
import tests.machine.recorded
from pytest_gpufleet.cli import main
for options in [], ["--anonymous"]:
    main(["snapshot", *options])
    print("=====")
"""
    around = {**os.environ, "PYTHONPATH": str(ROOT), "CHANGE": change}
    ended = subprocess.run([sys.executable, "-c", both], cwd=tmp_path, env=around, stdout=subprocess.PIPE, check=True)
    texts = ended.stdout.decode().split("=====\n")[:2]
    whole, anonymous = map(json.loads, texts)
    topology = whole["topology"]
    gpus = [gpu["facts"] for gpu in topology["gpus"]]
    assert (whole["schema"], gpus[1]["serial"], gpus[1]["uuid"]) == (3, "S3CRET", uuid)
    assert (topology["driver"], topology["nccl"], topology["torch"]) == ("580.159.04", "2.28.9", "2.11.0+cu130")
    assert (topology["fabric"], topology["links"][0]) == ("nvswitch", ["X", "NV18", "NV18", "NV18"])
    assert [facts["processes"] for facts in gpus] == [[], [], ["miner"], []]
    assert not [name for name in ("S3CRET", uuid, "n0de") if name not in texts[0] or name in texts[1]]
    facts = anonymous["topology"]["gpus"][1]["facts"]
    assert facts["uuid"] in anonymous["host"]["environment"]["CUDA_VISIBLE_DEVICES"]
    (drive,), (module, _) = anonymous["host"]["nvme"], anonymous["host"]["memory_modules"]
    assert [each["serial"][:6] for each in (facts, drive, module)] == ["alias-"] * 3
