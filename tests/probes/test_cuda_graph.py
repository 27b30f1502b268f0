"""What recipe peak needs of the host and of Triton before it trains with kernels of its own."""

import sysconfig
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.model.endings import NotApplicable
from pytest_gpufleet.probes.training import cuda_graph
from pytest_gpufleet.probes.training.recipes import USUAL, Workload, plan
from tests.conftest import INNER

RANK = SimpleNamespace(device=torch.device("cpu"))


def use_kernels(workload=USUAL):
    cuda_graph._use_kernels(RANK, torch.nn.Identity(), plan("peak", workload, RANK.device))


@pytest.mark.parametrize(("files", "compiler", "triton", "words"), [
    ("gcc Python.h", "", None, "need Triton"),
    ("cc Python.h", "", "triton", "install gcc"),  # for which Triton does not look
    ("gcc", "", "triton", "python3-dev"),
    ("gcc Python.h", "", "triton", "up to 131,071 images"),
    ("clang Python.h", "", "triton", "up to 131,071 images"),
    ("Python.h", "/opt/icx", "triton", "up to 131,071 images"),
])  # fmt: skip
def test_what_triton_lacks_is_named_and_it_does_not_apply(monkeypatch, tmp_path, files, compiler, triton, words):
    """Where it lacks nothing, no batch is larger than kernels can count."""
    for name in files.split():
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(cuda_graph, "find_spec", lambda name: triton)
    with pytest.raises(NotApplicable, match=words):
        use_kernels(Workload(batch=200_000))


@pytest.mark.parametrize(("off", "raised"), [
    ([0.014, 0.014], None),
    ([1.4, 1.4], NotApplicable),  # a fault of the compiler
    ([float("nan"), float("nan")], NotApplicable),
    ([1.4, 0.014], ArithmeticError),  # of this GPU
    ([float("nan"), 0.014], ArithmeticError),
    ([0.014, 1.4], None),  # of another
])  # fmt: skip
def test_kernels_that_compute_otherwise_than_torch_are_not_used(monkeypatch, off, raised):
    fused_norm = pytest.importorskip("pytest_gpufleet.probes.training.peak")
    fused = []
    monkeypatch.setenv("TRITON_CACHE_DIR", "as the site says")
    monkeypatch.setattr(cuda_graph, "lacking", lambda: None)
    monkeypatch.setattr(cuda_graph, "everyones", lambda rank, values: [[each] for each in off])
    monkeypatch.setattr(fused_norm, "off_torch", lambda device: off[0])
    monkeypatch.setattr(fused_norm, "fuse", fused.append)
    with pytest.raises(raised) if raised else nullcontext():
        use_kernels()
    assert bool(fused) == (raised is None)


# ---------------------------------------------------------------- the kernels of recipe peak compute what torch does
def test_fused_kernels_compute_what_torch_does(run_fresh):
    pytest.importorskip("triton")
    # Triton reads the variable when it is imported.
    run = run_fresh("test_inner.py", files={"test_inner.py": INNER / "fused_network.py"}, TRITON_INTERPRET="1")
    assert run.status == 0, run.text
    assert "4 passed" in run.text
