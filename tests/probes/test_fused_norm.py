"""The kernels of recipe fused compute what torch does."""

import pytest

from tests.conftest import INNER


def test_fused_kernels_compute_what_torch_does(run_fresh):
    pytest.importorskip("triton")
    # Triton reads the variable when it is imported.
    run = run_fresh("test_inner.py", files={"test_inner.py": INNER / "fused_network.py"}, TRITON_INTERPRET="1")
    assert run.status == 0, run.text
    assert "3 passed" in run.text


def test_the_largest_batch_has_fewer_elements_than_kernels_can_count():
    pytest.importorskip("triton")
    from pytest_gpufleet.probes.training.fused_norm import most_images

    most, an_image = most_images(224), 64 * 112 * 112
    assert most * an_image < 2**31 <= (most + 1) * an_image
