"""The suite named by its package, as a wheel has it: a run on all GPUs that are here, as `pytest acceptance/` is.

There it is acceptance/conftest.py that says so, which pytest reads too late where it is told a package.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_gpufleet
from pytest_gpufleet.plugin.options import MAKES_A_RUN


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    says_nothing = all(config.getoption(name) is None for name in MAKES_A_RUN)
    if says_nothing and any(_is_suite(config, argument) for argument in config.args):
        config.option.gpus = "auto"


def path_of(config: pytest.Config, argument: str) -> Path:
    """The file or folder that an argument of pytest names."""
    name = argument.partition("::")[0]
    if not _is_suite(config, argument):
        return config.invocation_params.dir / name
    path = Path(pytest_gpufleet.__file__).parents[1].joinpath(*name.split("."))
    return path if path.is_dir() else path.with_suffix(".py")


def _is_suite(config: pytest.Config, argument: str) -> bool:
    """Whether it names the package of the suite, or a module of it."""
    if not config.option.pyargs:
        return False
    from pytest_gpufleet.model.suite import PACKAGED  # with msgspec

    return f"{argument.partition('::')[0]}.".startswith(f"{PACKAGED}.")
