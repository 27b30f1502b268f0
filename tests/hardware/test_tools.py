"""Programs of the system: what they print, and why nothing is known where they print nothing."""

import pytest

from pytest_gpufleet.hardware import host
from pytest_gpufleet.hardware.tools import Untold, output
from pytest_gpufleet.model.facts import Unavailable


def test_what_a_program_prints_is_told():
    assert output("sh", "-c", "echo $LC_ALL; echo noise >&2; exit 4", statuses=(0, 4)) == "C\n"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("no-such-program", "-x"), "no-such-program is not installed"),
        (("sh", "-c", "echo first; echo no rights >&2; exit 3"), "sh failed with status 3: no rights"),
        (("sh", "-c", "exit 3"), "sh failed with status 3"),
        (("sleep", "60"), "sleep did not answer within 0.1 s"),
        (("/etc",), "/etc cannot be started: Permission denied"),
    ],
)
def test_why_nothing_is_told_is_one_sentence(command, why):
    with pytest.raises(Untold) as untold:
        output(*command, seconds=0.1 if command[0] == "sleep" else 20)
    assert str(untold.value) == why


def test_a_fact_that_a_program_would_tell_says_why_it_is_unknown(monkeypatch):
    monkeypatch.setitem(host.ON_REQUEST, "bmc", lambda: output("no-such-program"))
    assert host.read(("bmc",)) == {"bmc": Unavailable("no-such-program is not installed", False)}
    assert "bmc" not in host.read()
