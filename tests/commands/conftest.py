"""The program gpufleet, as its commands are tested."""

import pytest

from pytest_gpufleet import cli


@pytest.fixture
def gpufleet(capsys):
    """gpufleet(*arguments): the exit status and all that was printed, its lines joined as a reader joins them."""

    def run(*arguments):
        capsys.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())

    return run
