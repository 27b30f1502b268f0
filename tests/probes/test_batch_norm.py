"""BatchNorm in one pass computes what torch's does, forward and backward."""

import copy

import pytest
import torch
from torch import nn

from pytest_gpufleet.probes.training.batch_norm import OnePassBatchNorm, in_one_pass


def two_networks():
    torch.manual_seed(0)
    usual = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8))
    nn.init.normal_(usual[1].weight)
    nn.init.normal_(usual[1].bias)
    fast = copy.deepcopy(usual)
    in_one_pass(fast)
    return usual, fast


def test_it_is_torchs_batch_norm_by_another_formula():
    usual, fast = two_networks()
    assert [type(module) for module in fast] == [nn.Conv2d, OnePassBatchNorm, nn.ReLU, OnePassBatchNorm]
    images = torch.randn(4, 3, 9, 9) * 3 + 2
    upstream = torch.randn(4, 8, 7, 7)
    for network in (usual, fast):
        network(images).backward(upstream)
    for (name, expected), computed in zip(usual.named_parameters(), fast.parameters(), strict=True):
        assert (computed.grad - expected.grad).norm() < 1e-3 * expected.grad.norm(), name
    for (name, expected), computed in zip(usual.named_buffers(), fast.buffers(), strict=True):
        torch.testing.assert_close(computed, expected, msg=name)


@pytest.mark.parametrize("far", [0.0, 10.0])  # mean of the images, in standard deviations
def test_a_mean_far_from_zero_costs_little(far):
    usual, fast = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    in_one_pass(fast)
    images = (torch.randn(8, 2, 32, 32) + far).requires_grad_()
    expected = usual(images.double().float())
    torch.testing.assert_close(fast(images), expected, rtol=1e-3, atol=1e-3)


def test_a_channel_that_is_constant_gives_its_bias_and_no_nan():
    fast = nn.BatchNorm2d(1)
    in_one_pass(fast)
    images = torch.full((2, 1, 4, 4), 3.3, requires_grad=True)
    result = fast(images)
    result.sum().backward()
    assert result.abs().max() < 0.5
    assert images.grad.isfinite().all()


def test_16_bit_activations_come_back_in_16_bits():
    fast = nn.BatchNorm2d(2)
    in_one_pass(fast)
    assert fast(torch.randn(2, 2, 4, 4).half()).dtype is torch.float16
