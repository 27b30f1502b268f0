"""What `pytest acceptance/` runs on. The checks need nothing of it: each file is a start for one's own."""

import pytest

import pytest_gpufleet as pytest_gpufleet  # which refuses to be started by Python alone


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest acceptance/` is a run on all GPUs that are here."""
    if _says_nothing(config):
        config.option.gpus = "auto"


def pytest_configure(config: pytest.Config) -> None:
    """Where pytest finds this folder by itself, it does not ask the hook above."""
    if _says_nothing(config) and not config.option.collectonly:
        raise pytest.UsageError("say what the acceptance suite is to run on: --gpus N, --gpus all or --rehearse")


def _says_nothing(config: pytest.Config) -> bool:
    given = config.option
    return not any((given.gpus, given.rehearse, given.nodes, config.getini("gpus"), config.getini("nodes")))
