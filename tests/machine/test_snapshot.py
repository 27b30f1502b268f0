"""gpufleet snapshot."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT


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
