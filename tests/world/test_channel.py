"""What the controller makes of bytes from a rank, whatever they are, without waiting for it."""

import os
import socket

import pytest

from pytest_gpufleet.world.engines import channel
from pytest_gpufleet.world.engines.channel import INLINE_BYTES, MEMORY, PARCEL, ControllerEnd, Garbled, Message

LARGE = b"x" * (INLINE_BYTES + 1)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ControllerEnd(ours), theirs


def test_what_a_rank_sent_comes_before_its_end_whatever_it_has_not_read(ends):
    controller, rank = ends
    controller.send(Message(b"unread"))
    for parcel in (b"one", LARGE[1:]):
        channel.send(rank, parcel)
    rank.close()
    assert controller.receive() == [b"one", LARGE[1:]]
    with pytest.raises(EOFError):
        controller.receive()


def test_a_large_parcel_lies_in_memory_until_all_have_read_it(ends):
    controller, rank = ends
    before = os.listdir("/proc/self/fd")
    channel.send(rank, LARGE)
    assert controller.receive() == [LARGE]
    controller.send(message := Message(LARGE))
    controller.send(message)  # another rank's
    del message
    assert channel.receive(rank) == channel.receive(rank) == LARGE
    assert os.listdir("/proc/self/fd") == before


def a_pipe():
    read, write = os.pipe()
    os.close(write)
    return read


GARBAGE = {
    "garbage": (b"\xff" * 64, None), "too long": (PARCEL + LARGE, None), "far too long": (PARCEL + LARGE * 4, None),
    "no memory": (MEMORY, None), "a pipe": (MEMORY, a_pipe), "a folder": (MEMORY, lambda: os.open("/", os.O_RDONLY)),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "opened"), GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_recognised(ends, sent, opened):
    controller, rank = ends
    socket.send_fds(rank, [sent], [opened()] if opened else [])
    with pytest.raises(Garbled):
        controller.receive()


def test_sending_waits_for_nobody(ends):
    controller, rank = ends
    count = 0
    while not controller.has_unsent:  # more than the socket holds
        count += 1
        controller.send(Message(b"%d" % count * 4000))
    controller.send(Message(b"last"))
    for number in range(1, count + 1):
        assert channel.receive(rank) == b"%d" % number * 4000
        controller.flush()
    assert (channel.receive(rank), controller.has_unsent) == (b"last", False)
    rank.close()
    controller.send(Message(b"too late"))
    assert not controller.has_unsent
