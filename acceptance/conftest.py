"""What several files of the suite share, and its own options: what the checks of ResNet training do. A figure of work
that is not the usual one needs a limit that names it, so that easier work buys no acceptance."""

import argparse

import pytest

from pytest_gpufleet import not_applicable
from pytest_gpufleet.model.conditions import CONDITIONS


def pytest_addoption(parser):
    group = parser.getgroup("ResNet of the acceptance suite")
    group.addoption("--resnet-model", choices=CONDITIONS["model"].values, default="resnet50", help="default: resnet50")
    group.addoption(
        "--resnet-batch",
        type=_count,
        metavar="N",
        help="images a GPU and step (default: as many as the recipe has, halved until they fit into the memory)",
    )
    group.addoption("--resnet-steps", type=_count, metavar="N", help="steps of each sample (default: about a second)")
    group.addoption(
        "--resnet-warm-up", type=_count, metavar="N", help="steps before the first sample (default: 8 to 30)"
    )
    group.addoption("--resnet-optimizer", choices=CONDITIONS["optimizer"].values, default="sgd")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """`pytest acceptance/` is a run on all GPUs that are here."""
    if config.option.gpus is None and config.option.rehearse is None:
        config.option.gpus = "auto"


def pytest_configure(config):
    """Where pytest finds this folder without being told, it does not ask the hook above."""
    config.addinivalue_line(
        "markers",
        "figures(metric, ..., of_several=()): what this check is there for; one that passed without them is not done. "
        "`of_several`: those that take several GPUs",
    )
    if config.option.gpus is None and config.option.rehearse is None and not config.option.collectonly:
        raise pytest.UsageError("say what the acceptance suite is to run on: --gpus N, --gpus all or --rehearse")


@pytest.fixture
def gpus(machine, gpu_topology):
    """The facts of every GPU. Not applicable in a rehearsal; fails where GPUs were asked for and none is here."""
    if not machine.gpus and not gpu_topology.problems:
        not_applicable("a rehearsal has no GPUs")
    if not machine.gpus:
        pytest.fail(f"no GPU is here: {'; '.join(gpu_topology.problems)}", pytrace=False)
    return machine.gpus


def _count(text):
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


@pytest.fixture(scope="session")
def resnet(pytestconfig):
    """What was asked of the ResNet checks (a Workload)."""
    from pytest_gpufleet.probes.training.recipes import Workload  # torch, which a check must be able to find broken

    return Workload(
        model=pytestconfig.getoption("resnet_model"),
        batch=pytestconfig.getoption("resnet_batch"),
        steps=pytestconfig.getoption("resnet_steps"),
        warm_up=pytestconfig.getoption("resnet_warm_up"),
        optimizer=pytestconfig.getoption("resnet_optimizer"),
    )
