"""The options of the ResNet checks: what their training is like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpufleet.model.conditions import CONDITIONS, RESNETS
from pytest_gpufleet.run.settings import whole_number

if TYPE_CHECKING:
    import pytest

NUMBERS = {
    "--resnet-batch": "images a GPU and step (default: the recipe's, halved until they fit into the memory)",
    "--resnet-steps": "steps of each sample (default: about a second)",
    "--resnet-warm-up": "steps before the first sample (default: 8 to 30)",
    "--resnet-workers": "loader processes a GPU (default: a core each, 16 at most, as far as their batches fit into "
    "/dev/shm)",
}


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpufleet-resnet", "what the ResNet checks of the acceptance suite do")
    group.addoption("--resnet-model", choices=RESNETS, default="resnet50", help="the network (default: resnet50)")
    optimizers = CONDITIONS["optimizer"].values
    group.addoption("--resnet-optimizer", choices=optimizers, default="sgd", help="the optimizer (default: sgd)")
    for flag, text in NUMBERS.items():
        group.addoption(flag, type=whole_number, metavar="N", help=text)
