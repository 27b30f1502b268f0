"""The kernels of recipe peak compute what torch does."""

import pytest

from tests.conftest import INNER


def test_fused_kernels_compute_what_torch_does(run_fresh):
    pytest.importorskip("triton")
    # Triton reads the variable when it is imported.
    run = run_fresh("test_inner.py", files={"test_inner.py": INNER / "fused_network.py"}, TRITON_INTERPRET="1")
    assert run.status == 0, run.text
    assert "5 passed" in run.text
