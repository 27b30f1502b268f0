"""Work beside a thread that must not wait."""

import select
import threading

import pytest

from pytest_gpufleet.nodes.agent import Aside


def take_in(aside, until):
    while not until():
        assert select.select([aside], [], [], 60)[0]
        aside.take_in()


def test_what_never_comes_back_holds_up_its_own_thread_alone():
    aside, stuck, done = Aside(), threading.Event(), []
    try:
        aside.do("node", stuck.wait)
        aside.do("node", lambda: "after it", done.append)
        aside.do("ranks", lambda: "beside it", done.append)
        take_in(aside, lambda: aside.idle("ranks"))
        assert (done, aside.idle("node")) == (["beside it"], False)
    finally:
        stuck.set()
    take_in(aside, lambda: aside.idle("node"))
    assert done == ["beside it", "after it"]


def test_what_work_raises_is_raised_where_its_result_is_taken_in():
    aside = Aside()
    aside.do("node", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        take_in(aside, lambda: False)
