"""What the controller makes of bytes from a rank, whatever they are, without waiting for it."""

import os
import resource
import socket

import pytest

from pytest_gpufleet.world.engines import channel
from pytest_gpufleet.world.engines.channel import INLINE_BYTES, MEMORY, PARCEL, Garbled, Message

LARGE = b"x" * (INLINE_BYTES + 1)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_what_a_rank_sent_comes_before_its_end_whatever_it_has_not_read(ends):
    controller, rank = ends
    channel.offer(controller, Message(b"unread"))
    for parcel in (b"one", LARGE[1:]):
        channel.Message(parcel).send(rank)
    rank.close()
    assert channel.received(controller) == [b"one", LARGE[1:]]
    with pytest.raises(EOFError):
        channel.received(controller)


def test_a_large_parcel_lies_in_memory_until_all_have_read_it(ends):
    controller, rank = ends
    before = os.listdir("/proc/self/fd")
    channel.Message(LARGE).send(rank)
    assert channel.received(controller) == [LARGE]
    channel.offer(controller, message := Message(LARGE))
    channel.offer(controller, message)  # another rank's
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
        channel.received(controller)


@pytest.mark.parametrize("left", [0, 1])  # one is for the memory, another one to read it
def test_who_has_no_descriptor_left_blames_no_rank(ends, left):
    controller, rank = ends
    Message(LARGE).send(rank)
    usual, taken = resource.getrlimit(resource.RLIMIT_NOFILE), [os.open("/", os.O_RDONLY) for _ in range(100)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + left, usual[1]))  # as many are open, and none between
    try:
        with pytest.raises(OSError, match="Too many open files"):
            channel.received(controller)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        for each in taken:
            os.close(each)


def test_nobody_waits_for_a_rank_that_reads_nothing_or_is_gone(ends):
    controller, rank = ends
    for _ in range(1000):  # more than the socket holds
        channel.offer(controller, Message(b"x" * 4000))
    rank.close()
    channel.offer(controller, Message(b"too late"))
