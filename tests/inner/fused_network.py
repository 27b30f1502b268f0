"""The kernels of recipe peak, run by Triton's interpreter on the CPU, beside torch's own operations."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchvision.models.resnet import Bottleneck

from pytest_gpufleet.probes.training import peak
from pytest_gpufleet.probes.training.cuda_graph import ALIKE

CHANNELS_LAST = {"memory_format": torch.channels_last}


class Part(nn.Module):
    """Of a ResNet: the stem from BatchNorm on, a block with a convolution beside it, and one without."""

    def __init__(self):
        super().__init__()
        beside = nn.Sequential(nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256))
        self.norm, self.first, self.second = nn.BatchNorm2d(64), Bottleneck(64, 64, 1, beside), Bottleneck(256, 64)

    def forward(self, x):
        return self.second(self.first(nn.functional.max_pool2d(self.norm(x).relu(), 3, 2, 1)))


class FusedPart(Part):
    def forward(self, x):
        pair = peak._MaxPool.apply(peak._norm(self.norm, x, relu=True))
        return self.second(self.first(pair))[0]


@pytest.fixture(autouse=True)
def one_processor(monkeypatch):
    """So few programs sum that each does so in several turns."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=1))


@pytest.fixture
def parts():
    torch.manual_seed(0)
    usual = Part().to(**CHANNELS_LAST)
    for module in usual.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    fused = copy.deepcopy(usual)
    for module in fused.modules():
        if type(module) is Bottleneck:
            module.__class__ = peak._Bottleneck
    fused.__class__ = FusedPart
    return usual, fused


def relative(computed, expected):
    return ((computed - expected).norm() / expected.norm()).item()


def test_forward_backward_and_running_statistics_are_torchs(parts):
    images, upstream = torch.randn(2, 64, 14, 10), torch.randn(2, 256, 7, 5)  # rows that fill no tile
    results, gradients = [], []
    for part in parts:
        own = images.clone(**CHANNELS_LAST).requires_grad_()
        results.append(part(own))
        results[-1].backward(upstream)
        gradients.append([own.grad, *(parameter.grad for parameter in part.parameters())])
    assert relative(results[1], results[0]) < 1e-5
    names = ["x", *(name for name, _ in parts[0].named_parameters())]
    far = {name: relative(ours, torchs) for name, torchs, ours in zip(names, *gradients, strict=True)}
    assert max(far.values()) < 1e-4, far
    for (name, torchs), ours in zip(parts[0].named_buffers(), parts[1].buffers(), strict=True):
        if "num_batches" not in name:
            assert relative(ours, torchs) < 1e-5, name


def test_of_equals_the_first_is_taken(parts):
    images = torch.ones(1, 64, 4, 4).contiguous(**CHANNELS_LAST)
    gradients = []
    for pool in (lambda x: nn.functional.max_pool2d(x, 3, 2, 1), lambda x: peak._MaxPool.apply(x)[0]):
        own = images.clone(**CHANNELS_LAST).requires_grad_()
        pool(own).sum().backward()
        gradients.append(own.grad)
    assert torch.equal(*gradients)


def test_nan_is_not_hidden(parts):
    images = torch.randn(1, 64, 4, 4).contiguous(**CHANNELS_LAST)
    images[0, 5, 1, 1] = float("nan")
    pooled, _ = peak._MaxPool.apply(images)
    assert torch.equal(pooled.isnan(), nn.functional.max_pool2d(images, 3, 2, 1).isnan())
    for part in parts:
        assert part(images).isnan().any()


def test_kernels_are_held_against_torch_before_they_train(monkeypatch):
    assert peak.off_torch(torch.device("cpu")) < ALIKE
    genuine = peak._Norm.backward

    def swapped(*args):
        of_x, *others = genuine(*args)
        return of_x.flip(1), *others  # as a compiler that mixes up bytes leaves them

    monkeypatch.setattr(peak._Norm, "backward", staticmethod(swapped))
    assert peak.off_torch(torch.device("cpu")) > 0.5
