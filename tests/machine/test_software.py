"""What is read of the software, and no secret of the environment gets into what a run leaves behind."""

import subprocess
import sys

import pytest

from pytest_gpufleet.machine import software
from pytest_gpufleet.machine.network_ports import Port
from pytest_gpufleet.machine.software import TopologyFile, read_topology_file, relevant
from pytest_gpufleet.machine.tools import Absent
from pytest_gpufleet.model.place import Gpu, GpuTopology
from tests.conftest import SECONDS

# As on a machine with a GPU that cuDNN no longer knows.
ON_OLD_GPU = """
import torch
known = torch.backends.cudnn.version()

def capability(*device):
    raise RuntimeError("CUDA was started")

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_capability = torch.cuda._lazy_init = capability
torch.backends.cudnn._init.__globals__["__cudnn_version"] = None
from pytest_gpufleet.machine.software import _cudnn_text, software
assert software()["cudnn"] == (_cudnn_text(known) if known else None), software()
"""


def test_no_gpu_is_asked_for_versions():
    ended = subprocess.run([sys.executable, "-c", ON_OLD_GPU], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr


SECRETS = (
    "NVIDIA_NGC_APIKEY", "TORCH_HUB_PAT", "NCCL_AUTH", "NCCL_PASSPHRASE", "TORCH_Secret_Of_Mine", "CUDA_CREDS",
    "TORCH_ACCESSTOKEN", "TRITON_PWD", "NVIDIA_LOGIN",
)  # fmt: skip
URLS = {"TORCH_INDEX_URL": ("https://me:s3kret-10@host/simple", "https://(hidden)@host/simple")}
HARMLESS = {
    "NCCL_P2P_DISABLE": "1", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "TORCH_SIGNAL_HANDLER": "1",
    "LD_PRELOAD": "/a.so:/b@2.so", "NVIDIA_VISIBLE_DEVICES": "GPU-00000002-77aa",
}  # fmt: skip
ELSEWHERE = {"AWS_SESSION": "s3kret-14", "HOME_OF_NCCL_KEYS": "s3kret-15", "NVIDIA_REQUIRE_CUDA": "cuda>=12"}


def test_what_looks_like_a_secret_is_hidden(monkeypatch):
    given = {name: url for name, (url, _) in URLS.items()}
    for name, value in {**dict.fromkeys(SECRETS, "s3kret"), **given, **HARMLESS, **ELSEWHERE}.items():
        monkeypatch.setenv(name, value)
    found = relevant()
    assert {name: found[name] for name in SECRETS} == dict.fromkeys(SECRETS, "(hidden)")
    assert {name: found[name] for name in URLS} == {name: shown for name, (_, shown) in URLS.items()}
    assert {name: found[name] for name in HARMLESS} == HARMLESS
    assert not ELSEWHERE.keys() & found.keys()
    assert list(found) == sorted(found)


def test_what_nccl_reads_from_its_files_counts_too(monkeypatch, tmp_path):
    lines = "# of the image\nNCCL_P2P_DISABLE=1\r\nNCCL_NVLS_ENABLE=0\nOTHER=2\nNCCL_ALGO = Ring\n"
    (tmp_path / "my.conf").write_bytes(lines.encode())
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "my.conf"))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    found = relevant()
    assert (found["NCCL_P2P_DISABLE"], found["NCCL_NVLS_ENABLE"]) == ("1", "1")
    assert not {"OTHER", "NCCL_ALGO"} & found.keys()  # NCCL looks for no variable "NCCL_ALGO "


HOPPER = [Gpu(index, {"compute_capability": [9, 0]}) for index in range(2)]
AMPERE = [Gpu(index, {"compute_capability": [8, 0]}) for index in range(2)]


def machine(gpus, fabric, link):
    return GpuTopology(gpus=tuple(gpus), links=(("X", link), (link, "X")), fabric=fabric)


H200, A100 = machine(HOPPER, "nvswitch", "NV18"), machine(AMPERE, "nvlink", "NV12")
PCIE, SOCKETS = machine(AMPERE, "pcie", "PXB"), machine(AMPERE, "pcie", "SYS")
# Of each variable values that harm, and such that do not, with the machine that they stand on.
SWITCHES = [
    ("NCCL_P2P_DISABLE", H200, ["1", " 1", "1 # later", "01", "0x1"], ["0", "", "00", "off", "2", "0x2", "0x"]),
    ("NCCL_SHM_DISABLE", H200, ["1"], ["0", "", "false"]),
    ("NCCL_P2P_DIRECT_DISABLE", H200, ["1", "-1"], ["0", ""]),
    ("NCCL_P2P_LEVEL", H200, ["LOC", "0"], ["NVL", "PIX", "SYS", "1", "5", "nvl", "", "-1"]),
    ("NCCL_P2P_LEVEL", PCIE, ["LOC", "0", "NVL", "PIX", "1"], ["PXB", "PHB", "SYS", "2", "9", "none"]),
    ("NCCL_P2P_LEVEL", SOCKETS, ["LOC"], ["NVL", "PXB", "SYS"]),  # NCCL keeps these apart by itself
    ("NCCL_ALGO", H200, ["Ring", "Ring,Tree", "^NVLS", "^nvls;broadcast:ring"],
     ["", "NVLS,NVLSTree,Ring,Tree", "^PAT", "^CollnetDirect,CollnetChain"]),
    ("NCCL_ALGO", A100, ["Ring", "^Tree"], ["Ring,Tree", "^NVLS"]),
    ("NCCL_PROTO", A100, ["Simple", "^LL128", "LL,Simple"], ["", "ll,ll128,simple", "^"]),
    ("NCCL_PROTO", PCIE, ["Simple"], ["LL,Simple", "^LL128"]),
    ("NCCL_MAX_NCHANNELS", H200, ["2", "0", "-1", "16", "none"], ["32", "64", "", "-2"]),
    ("NCCL_MAX_NRINGS", H200, ["1"], ["64"]),
    ("NCCL_MIN_NCHANNELS", H200, ["64"], ["0", "4", "32"]),
    ("NCCL_MIN_NRINGS", H200, ["128"], ["1"]),
    ("NCCL_MAX_P2P_NCHANNELS", H200, ["1", "0", "-2"], ["32", "64"]),
    ("NCCL_MAX_CTAS", H200, ["1", "16"], ["0", "-1", "32", "64", ""]),
    ("NCCL_NTHREADS", H200, ["64", "256"], ["512", "0", "-2", "100", "1024"]),
    ("NCCL_BUFFSIZE", H200, ["1048576", "0", "4M"], ["4194304", "8388608", "-2", ""]),
    ("NCCL_GRAPH_FILE", H200, [], ["/opt/microsoft/ncv4/graph.xml"]),
    ("CUDA_LAUNCH_BLOCKING", H200, ["1", " 1", "01"], ["0", "", "00", "2", "true"]),
    ("NVIDIA_TF32_OVERRIDE", H200, ["0", "1"], ["2", ""]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "topology", "harm", "do_not"), SWITCHES)
def test_a_variable_harms_by_its_value(name, topology, harm, do_not):
    found = [value for value in (*harm, *do_not) if software.harmful_variables({name: value}, topology)]
    assert found == harm


# As NCCL writes it, and clouds give it to virtual machines: Azure/azhpc-images, topology/ndv5-topo.xml.
TOPOLOGY = """<system version="1">
  <cpu numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="000B:00:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/>
    </pci>
  </cpu>
</system>
"""


def test_a_topology_file_is_absent_unreadable_or_read(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_TOPO_FILE", raising=False)
    with pytest.raises(Absent):
        read_topology_file(tmp_path)
    default, given = tmp_path / "var/run/nvidia-topologyd/virtualTopology.xml", tmp_path / "ndv5-topo.xml"
    default.parent.mkdir(parents=True)
    default.write_text(TOPOLOGY)
    assert read_topology_file(tmp_path) == TopologyFile(str(default), ("000b:00:00.0", "ffff:ff:01.0"))
    monkeypatch.setenv("NCCL_TOPO_FILE", str(given))
    assert read_topology_file(tmp_path) == TopologyFile(str(given), unreadable="No such file or directory")
    given.write_text("")
    assert read_topology_file(tmp_path) == TopologyFile(str(given))


@pytest.mark.parametrize(("driver", "firmware", "wrong", "shown"), [
    ("580.159.03", "28.39.8002", 0, 0),
    ("580.95.05", "28.39.8002", 0, 1),
    ("535.86.10", "28.39.8002", 1, 1),
    ("570.133.07", "28.39.2048", 1, 2),
    ("550.54.14", "28.38.1002", 0, 0),  # trains of which nothing is known
    ("", "0.0", 0, 0),
])  # fmt: skip
def test_versions_with_defects_condemn_and_those_without_a_security_update_are_shown(driver, firmware, wrong, shown):
    ports = [Port(f"mlx5_{number}/1", adapter="MT4129", firmware=firmware) for number in range(8)]
    others = [Port("bnxt_re0/1", adapter="BCM57608", firmware="1.39.1"), Port("mlx5_8/1", adapter="MT4129")]
    assert tuple(map(len, software.known_defects(driver, [*ports, *others]))) == (wrong, shown)
