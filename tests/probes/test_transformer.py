"""A transformer is computed as its formulas say, counted right, and fits where it is said to."""

import inspect
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pytest_gpufleet.model.conditions import TRANSFORMERS
from pytest_gpufleet.model.endings import NotApplicable
from pytest_gpufleet.model.metric import GiB
from pytest_gpufleet.probes import inference
from pytest_gpufleet.probes.training import transformer
from pytest_gpufleet.probes.training.loop import not_learned
from pytest_gpufleet.probes.training.transformer import SHAPES, first_difference, rotary, rotated, sequences

CPU, TINY = torch.device("cpu"), SHAPES["transformer-tiny"]


def plain_attention(q, k, v, *, is_causal):
    assert is_causal
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def gradients():
    model = transformer.transformer(TINY, "fp32", CPU).double()
    model.dtype = torch.float64
    loss = model(*sequences(TINY, 2, 0, CPU))
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_loss_and_gradients_are_those_of_plain_attention(monkeypatch):
    loss, grads = gradients()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", plain_attention)
    plain_loss, plain = gradients()
    assert torch.allclose(loss, plain_loss, rtol=1e-10)
    for name, grad in grads.items():
        assert torch.allclose(grad, plain[name], rtol=1e-8, atol=1e-12), name


def test_rotated_products_depend_on_distance_alone():
    rotation = rotary(TINY).double()
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)
    products = rotated(q.expand(1, 1, 32, 32), rotation) @ rotated(k.expand(1, 1, 32, 32), rotation).transpose(-1, -2)
    for distance in range(5):
        each = products[0, 0].diagonal(distance)
        assert torch.allclose(each, each[0].expand_as(each), atol=1e-5)


def test_operations_are_those_that_torch_counts():
    """6N + 12 L H Q T for each token, exactly."""
    model, data = transformer.transformer(TINY, "fp32", CPU), sequences(TINY, 2, 0, CPU)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*data).backward()
    assert counter.get_total_flops() == TINY.flop_a_token * data[0].numel()


def test_every_weight_has_its_bytes():
    model = transformer.transformer(TINY, "bf16", CPU)
    assert TINY.bytes_of_weights == 18 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("model", "memory", "batch"), [
    ("transformer-0.6b", 141, 4), ("transformer-0.6b", 24, 1), ("transformer-0.6b", 16, 0),
    ("transformer-0.1b", 16, 4), ("transformer-1.3b", 80, 4), ("transformer-1.3b", 24, 0),
])  # fmt: skip
def test_so_many_sequences_fit(model, memory, batch):
    assert transformer.fitting_batch(SHAPES[model], 0.8 * memory * GiB) == batch


@pytest.mark.parametrize(("memory", "fits"), [(8, False), (12, False), (15, True), (24, True)])
def test_what_is_decoded_is_for_gpus_that_hold_it(monkeypatch, memory, fits):
    monkeypatch.setattr(transformer, "agree", lambda rank, number: number)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory * GiB))
    monkeypatch.setattr(inference, "Decoder", lambda *how: pytest.skip("it fits"))
    rank = SimpleNamespace(device=torch.device("cuda"), size=1, phase=lambda name: nullcontext())
    with pytest.raises(pytest.skip.Exception if fits else NotApplicable, match="it fits" if fits else "takes 14 GiB"):
        inspect.unwrap(inference.decode)(rank, together=False)


def test_kernels_for_tensor_cores_take_every_shape():
    for name in TRANSFORMERS:
        shape = SHAPES[name]
        assert not any(size % 16 for size in (shape.width, shape.hidden, shape.vocabulary, shape.sequence))
        assert shape.width % shape.heads == 0


def test_losses_that_differ_are_described():
    assert first_difference([2.0, 1.0], [2.0, 1.005], 0.01, "in fp32") == ""
    assert first_difference([2.0, 1.0], [2.0, 1.1], 0.01, "in fp32") == "the loss of step 1 is 1, and 1.1 in fp32"
    assert first_difference([math.nan], [2.0], 0.01, "in fp32") == "the loss of step 0 is nan, and 2 in fp32"
    gradients = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    assert transformer.unlike(gradients, gradients, 0.0) == ""
    assert transformer.unlike({**gradients, "a": torch.tensor([3.0, 3.0])}, gradients, 0.1) == (
        "1 of 2 gradients are not those in fp32, a by 20.0%"
    )
    assert "b by nan" in transformer.unlike({**gradients, "b": torch.tensor([math.nan])}, gradients, 0.1)
    assert not_learned(4.0, 2.0, 0.8) == ""
    assert not_learned(4.0, 3.9, 0.8) == "it did not learn: loss 4 at first, 3.9 in the end"
