"""ib_write_bw as a program that stands for it: its server listens and ends with its client, which writes the report."""

import sys

import pytest

from pytest_gpufleet.machine import network_ports, rdma
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.rdma import Write
from pytest_gpufleet.machine.tools import Absent, Unreadable

# Options and the report are those of perftest 6.29 (src/perftest_parameters.c and .h: usage, write_test_info_to_file,
# REPORT_FMT_JSON); BW_average is above the gate of oci-hpc for ports of 400 Gb/s, 384.
PROGRAM = """#!{python}
import os, socket, sys
arguments = sys.argv[1:]
def given(name):
    return arguments[arguments.index(name) + 1]
if "--help" in arguments:
    print("      --out_json  Save the report in a json file\\n      {bind}  Source IP")
    sys.exit({help_status})
device, service = given("-d"), int(given("-p"))
assert "--bind_source_ip=127.0.0.1" in arguments and "--report_gbits" in arguments, arguments
if device == "{broken}":
    sys.exit("Unable to find the Infiniband/RoCE device")
if arguments[-1] != "127.0.0.1":
    with socket.create_server(("127.0.0.1", service)) as server:
        server.accept()[0].recv(1)
    sys.exit(0)
with socket.create_connection(("127.0.0.1", service)) as client:
    client.send(b"x")
(report,) = (each.partition("=")[2] for each in arguments if each.startswith("--out_json_file="))
with open(report, "w") as file:
    file.write('''{report}''')
"""
REPORT = """{
"test_info": { "test": "RDMA_Write_BW_Test", "Device": "mlx5_0", "Number_of_qps": 1, "Connection_type": "RC" },
"results": { "MsgSize": 8388608, "n_iterations": 1000, "BW_peak": 0.00, "BW_average": 389.61, "MsgRate": 0.005806 }
}
"""


def ports(*names, rate="400 Gb/sec (4X NDR)", state="4: ACTIVE", layer="InfiniBand"):
    return [Port(name, state, rate, layer) for name in names]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """ib_write_bw on the PATH, with something different about it; the adapters of this host."""

    def install(adapters, **different):
        usual = {"bind": "--bind_source_ip", "help_status": 0, "broken": "none", "report": REPORT}
        text = PROGRAM.replace("{python}", sys.executable)
        for name, value in (usual | different).items():
            text = text.replace(f"{{{name}}}", str(value))
        program = tmp_path / "ib_write_bw"
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(network_ports, "read", lambda: adapters)

    return install


def test_each_port_at_the_highest_rate_writes_to_itself(installed):
    """Ports for storage, those without a cable, and those that are no InfiniBand and no RoCE are not asked."""
    others = [*ports("mlx5_8/1", rate="200 Gb/sec (4X HDR)"), *ports("mlx5_9/1", state="1: DOWN")]
    others += ports("rdmap79s0/1", layer="Unspecified")
    installed([*ports("mlx5_0/1", "mlx5_1/1"), *others], help_status=1)
    assert rdma.read() == [Write(name, 8 << 20, 389.61) for name in ("mlx5_0/1", "mlx5_1/1")]


def test_a_pod_with_a_part_of_the_adapters_is_not_judged(installed, tmp_path, monkeypatch):
    installed(ports("mlx5_0/1", "mlx5_1/1"), broken="mlx5_1")
    for number in (0, 1):
        (tmp_path / f"mlx5_{number}/device/infiniband_verbs/uverbs{number}").mkdir(parents=True)
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(network_ports, "ADAPTERS", tmp_path)
    monkeypatch.setattr(rdma, "DEVICE_FILES", tmp_path)
    with pytest.raises(Unreadable, match="mlx5_1/1 have no device file"):
        rdma.read()


def test_a_port_that_cannot_leaves_the_others(installed):
    installed(ports("mlx5_0/1", "mlx5_1/1"), broken="mlx5_1")
    whole, broken = rdma.read()
    assert (whole.gigabits, broken.port, "ended with status 1" in broken.why) == (389.61, "mlx5_1/1", True)


@pytest.mark.parametrize(("adapters", "different", "state", "why"), [
    ([], {}, Absent, "no InfiniBand or RoCE port is active"),
    (ports("mlx5_0/1"), {"bind": "--source_ip"}, Unreadable, "no --bind_source_ip: install perftest 23.07"),
    (ports("mlx5_0/1"), {"broken": "mlx5_0"}, Unreadable, "reaches no adapter"),
    (ports("mlx5_0/1"), {"report": "{"}, Unreadable, "wrote no report"),
], ids=["no port", "an old program", "no port that works", "no report"])  # fmt: skip
def test_nothing_can_be_measured(installed, adapters, different, state, why):
    installed(adapters, **different)
    with pytest.raises(state, match=why):
        rdma.read()


def test_it_is_not_installed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(network_ports, "read", lambda: ports("mlx5_0/1"))
    with pytest.raises(Unreadable, match="ib_write_bw is not installed"):
        rdma.read()
