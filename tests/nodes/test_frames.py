"""Messages over a stream: whole, in their order, whatever pieces they come in and whatever the peer does."""

import socket

import pytest

from pytest_gpufleet.nodes.agent_process import HEADER, MARK, MOST_BYTES, Frames
from pytest_gpufleet.world.engines.channel import Garbled


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def everything(receiver, sender, count):
    messages = []
    while len(messages) < count:
        sender.flush()
        messages += receiver.receive()
    return messages


def test_messages_arrive_whole_and_in_their_order(ends):
    near, far = map(Frames, ends)
    sent = [b"", b"a", bytes(20 << 20), b"the last"]
    for message in sent:
        near.send(message)
    assert near.has_unsent  # a socket does not hold as much, and nobody has waited
    assert everything(far, near, len(sent)) == sent
    assert not near.has_unsent
    assert far.receive() == []


def test_a_message_in_pieces_is_kept_until_it_is_whole(ends):
    frames, far = Frames(ends[0]), ends[1]
    whole = HEADER.pack(MARK, 5) + b"hello"
    for piece in (whole[:3], whole[3:14]):
        far.sendall(piece)
        assert frames.receive() == []
    far.sendall(whole[14:] + whole)
    assert frames.receive() == [b"hello", b"hello"]


def test_the_end_is_told_after_the_last_message(ends):
    near, far = map(Frames, ends)
    near.send(b"last")
    near.close()
    assert far.receive() == [b"last"]
    with pytest.raises(EOFError):
        far.receive()
    far.send(b"nobody reads this")  # and nothing is raised


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n", HEADER.pack(MARK, MOST_BYTES + 1)], ids=["text", "length"])
def test_what_is_no_frame_is_told(ends, start):
    frames = Frames(ends[0])
    ends[1].sendall(start)
    with pytest.raises(Garbled):
        frames.receive()
