"""Which signals a run hears, and which it leaves to others."""

import os
import signal
from contextlib import nullcontext

import pytest

from pytest_gpufleet.run.interruption import HEEDED, Interruption

DEADLY = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def untouched():
    """As in a process that nobody has told anything, such as that it is in the background (SIGINT is ignored there)."""
    before = {number: signal.signal(number, usual) for number, usual in HEEDED.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", DEADLY)
def test_it_is_told_once_and_no_test_can_keep_it_for_itself(number):
    told = []
    interruption = Interruption(told.append)
    with interruption.heed():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        for again in DEADLY:
            os.kill(os.getpid(), again)
        with pytest.raises(KeyboardInterrupt):
            interruption.before_test()
    assert (told, interruption.deadly) == ([f"ended by {number.name}"], number)
    assert [signal.getsignal(each) for each in DEADLY] == [signal.SIG_DFL] * 2


@pytest.mark.parametrize("number", DEADLY)
def test_what_comes_after_a_ctrl_c_that_a_test_has_kept_ends_the_run_as_what_it_is(number):
    interruption = Interruption(lambda what: None)
    with interruption.heed():
        for _ in range(2):  # the next test hears the next one
            interruption.before_test()
            with pytest.raises(KeyboardInterrupt, match="interrupted"):
                os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt, match=f"ended by {number.name}"):
            interruption.before_test()


def test_what_others_have_decided_about_a_signal_stays():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    signal.signal(signal.SIGTERM, handler := lambda number, frame: None)  # the program that runs pytest
    interruption = Interruption(pytest.fail)
    with interruption.heed():
        assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == (signal.SIG_IGN, handler)
        for number in DEADLY:
            os.kill(os.getpid(), number)
    interruption.pass_on()  # nothing


@pytest.mark.parametrize("finishing", [False, True])
def test_what_is_being_written_is_written_whole(finishing):
    interruption, done = Interruption(lambda what: None), []
    interruption.finishing = finishing

    def write():
        with interruption.deferred():
            with interruption.deferred():
                os.kill(os.getpid(), signal.SIGTERM)
            done.append("written")

    with interruption.heed(), nullcontext() if finishing else pytest.raises(KeyboardInterrupt):
        write()
    assert (done, interruption.deadly) == (["written"], signal.SIGTERM)
