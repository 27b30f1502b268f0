"""The program gpufleet, as its commands are tested."""

from collections.abc import Callable

import pytest

from pytest_gpufleet import cli

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def gpufleet(capsys: pytest.CaptureFixture[str]) -> Command:
    """gpufleet(*arguments): the exit status and all that was printed, its lines joined as a reader joins them."""

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    return run
