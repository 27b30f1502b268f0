"""What is told of the software, and no secret of the environment gets into what a run leaves behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpufleet.hardware.software import relevant
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
from pytest_gpufleet.hardware.software import _cudnn_text, software
assert software()["cudnn"] == (_cudnn_text(known) if known else None), software()
"""


def test_no_gpu_is_asked_for_versions() -> None:
    ended = subprocess.run([sys.executable, "-c", ON_OLD_GPU], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr


SECRETS = {
    "NVIDIA_NGC_APIKEY": "s3kret-1",
    "NVIDIA_API_KEY": "s3kret-2",
    "TORCH_HUB_PAT": "s3kret-3",
    "NCCL_AUTH": "s3kret-4",
    "NCCL_PASSPHRASE": "s3kret-5",
    "TORCH_Secret_Of_Mine": "s3kret-6",
    "CUDA_CREDS": "s3kret-7",
    "TORCH_ACCESSTOKEN": "s3kret-8",
    "TRITON_PWD": "s3kret-9",
    "NVIDIA_LOGIN": "s3kret-16",
}
URLS = {"TORCH_INDEX_URL": ("https://me:s3kret-10@host/simple", "https://(hidden)@host/simple")}
HARMLESS = {
    "NCCL_P2P_DISABLE": "1",
    "CUDA_PATH": "/usr/local/cuda",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    "TORCH_SIGNAL_HANDLER": "1",
    "CUDA_CACHE_PATH": "/x",
    "TORCH_PATHS": "KEYS=3 TOKENIZERS_PARALLELISM=false",
    "LD_PRELOAD": "/a.so:/b@2.so",
    "NVIDIA_VISIBLE_DEVICES": "GPU-00000002-77aa",
}
ELSEWHERE = {"AWS_SESSION": "s3kret-14", "HOME_OF_NCCL_KEYS": "s3kret-15", "NVIDIA_REQUIRE_CUDA": "cuda>=12"}


def test_what_looks_like_a_secret_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: url for name, (url, _) in URLS.items()}
    for name, value in {**SECRETS, **given, **HARMLESS, **ELSEWHERE}.items():
        monkeypatch.setenv(name, value)
    found = relevant()
    assert {name: found[name] for name in SECRETS} == dict.fromkeys(SECRETS, "(hidden)")
    assert {name: found[name] for name in URLS} == {name: shown for name, (_, shown) in URLS.items()}
    assert {name: found[name] for name in HARMLESS} == HARMLESS
    assert not ELSEWHERE.keys() & found.keys()
    assert list(found) == sorted(found)


def test_what_nccl_reads_from_its_files_counts_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my.conf").write_text("# of the image\nNCCL_P2P_DISABLE = 1\nNCCL_NVLS_ENABLE=0\nOTHER=2\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "my.conf"))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    found = relevant()
    assert (found["NCCL_P2P_DISABLE"], found["NCCL_NVLS_ENABLE"]) == ("1", "1")
    assert "OTHER" not in found
