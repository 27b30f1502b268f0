"""What recipes that compile or have kernels of their own need of the host, beside a GPU."""

import os
import sysconfig

import pytest
import torch

from pytest_gpufleet.model.endings import NotApplicable
from pytest_gpufleet.probes.training import cuda_graph, triton_needs
from pytest_gpufleet.probes.training.recipes import USUAL, plan

PEAK, FUSED = (plan(name, USUAL, torch.device("cpu")) for name in ("peak", "fused"))


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """PATH with these programs alone, no compiler named otherwise, and Triton or not."""

    def are(*names, triton=True):
        monkeypatch.setattr(triton_needs, "find_spec", lambda name: name if triton else None)
        for name in names:
            (tmp_path / name).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)

    return are


@pytest.mark.parametrize("what", [PEAK, FUSED], ids=["peak", "fused"])
def test_without_triton_they_do_not_apply(programs, what):
    programs("gcc", triton=False)
    with pytest.raises(NotApplicable, match="need Triton"):
        cuda_graph._prepared(torch.nn.Identity(), what)


@pytest.mark.parametrize("what", [PEAK, FUSED], ids=["peak", "fused"])
def test_without_a_c_compiler_they_do_not_apply_and_say_what_to_install(programs, what):
    programs("cc")  # for which Triton does not look
    with pytest.raises(NotApplicable, match="install gcc"):
        cuda_graph._prepared(torch.nn.Identity(), what)


def test_without_the_headers_of_python_neither(programs, monkeypatch, tmp_path):
    programs("gcc")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    with pytest.raises(NotApplicable, match="python3-dev"):
        cuda_graph._prepared(torch.nn.Identity(), PEAK)


@pytest.mark.parametrize("compiler", ["gcc", "clang", "CC"])
def test_any_compiler_that_triton_takes_will_do(programs, monkeypatch, tmp_path, compiler):
    programs(*{compiler} - {"CC"})
    if compiler == "CC":
        monkeypatch.setenv("CC", os.fspath(tmp_path / "icx"))
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    assert triton_needs.missing() is None
