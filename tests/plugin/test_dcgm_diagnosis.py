"""NVIDIA's own diagnostic in a run: the GPUs are free for it, and what it printed is on record."""

from types import SimpleNamespace

import pytest

from pytest_gpufleet.machine import dcgm
from pytest_gpufleet.machine.tools import NoAnswer, Unreadable
from pytest_gpufleet.model.endings import NotApplicable, NotJudged
from pytest_gpufleet.model.events import recorded
from pytest_gpufleet.plugin import fixtures
from tests.machine.test_dcgm import EIGHT, on_eight, result


class Run:
    """What the diagnosis uses of a run."""

    def __init__(self, gpus=EIGHT, present=8):
        self.done = []
        self.target = SimpleNamespace(topology=SimpleNamespace(gpus=gpus), gpus_present=present)
        self.ranks = SimpleNamespace(in_use=SimpleNamespace(stop=lambda: self.done.append("ranks are gone")))
        self.options = SimpleNamespace(dcgm=2, without=())

    def record(self, event):
        self.done.append(event.fact)
        recorded(event)

    def notice(self, shown):
        self.noticed = [(fault.name, fault.check) for fault in shown]


def test_the_ranks_are_gone_before_it_begins_and_what_it_printed_is_on_record(monkeypatch):
    run = Run()

    def read(level):
        run.done.append(f"level {level}")
        return dcgm.Printed(level, 0, on_eight(result(0, warnings=["look at it"])))

    monkeypatch.setattr(dcgm, "read", read)
    found = fixtures.diagnose(run, "test_x")
    assert run.done == ["ranks are gone", "level 2", "dcgm"]
    assert run.noticed == [("dcgm_warning", "test_x")]
    assert (found.faults, found.unseen) == ([], [])


def test_it_leaves_gpus_alone_that_are_not_the_runs():
    with pytest.raises(NotApplicable, match="all 8 GPUs of the machine, and this run has 4"):
        fixtures.diagnose(run := Run(EIGHT[:4]), "test_x")
    assert run.done == []


@pytest.mark.parametrize(
    "why",
    [Unreadable("dcgmi is not installed", "apt install it"), NoAnswer("dcgmi did not answer within 900 s")],
    ids=["without dcgmi", "it hangs"],
)
def test_it_ends_in_one_sentence_where_there_is_no_result(monkeypatch, why):
    def read(level):
        raise why

    monkeypatch.setattr(dcgm, "read", read)
    with pytest.raises(NotJudged, match=str(why)):
        fixtures.diagnose(Run(), "test_x")
