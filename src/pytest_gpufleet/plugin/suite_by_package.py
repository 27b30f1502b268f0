"""The suite named by its package, as a wheel has it: a run on all GPUs that are here, as `pytest acceptance/` is.

There it is acceptance/conftest.py that says so, which pytest reads too late where it is told a package.
"""

from __future__ import annotations

import pytest

from pytest_gpufleet.plugin.options import MAKES_A_RUN


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    says_nothing = all(config.getoption(name) is None for name in MAKES_A_RUN)
    if says_nothing and config.option.pyargs and any(map(_is_suite, config.args)):
        config.option.gpus = "auto"


def _is_suite(argument: str) -> bool:
    """Whether it names the package of the suite, or a module of it."""
    from pytest_gpufleet.model.suite import PACKAGED  # with msgspec

    return f"{argument.partition('::')[0]}.".startswith(f"{PACKAGED}.")
