"""What the controller makes of bytes from a rank, whatever they are, without waiting for it."""

import pickle
import socket
import sys

import pytest

from pytest_gpufleet.world.engines.channel import HEADER, MARK, MOST_BYTES, ControllerEnd, Garbled, RankEnd, encode


class Exits:
    def __reduce__(self):
        return sys.exit, (3,)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ControllerEnd(ours), theirs


def framed(body):
    return HEADER.pack(MARK, len(body)) + body


def test_messages_arrive_whole_however_they_are_cut(ends):
    controller, rank = ends
    sent = encode("one") + encode({"two": "x" * 100_000})
    received = []
    for start in range(0, len(sent), 7919):
        rank.sendall(sent[start : start + 7919])
        received += controller.receive()
    assert received == ["one", {"two": "x" * 100_000}]
    assert controller.receive() == []
    rank.sendall(encode("last") + MARK)  # half of another: its rank ends here
    rank.close()
    assert controller.receive() == ["last"]
    with pytest.raises(EOFError):
        controller.receive()


@pytest.mark.parametrize(
    "sent",
    [b"\xff" * 64, HEADER.pack(MARK, 2**31 - 1), HEADER.pack(MARK, MOST_BYTES + 1), framed(b"no pickle"), framed(b""),
     framed(pickle.dumps(Exits()))],
    ids=["garbage", "2 GB", "too long", "no pickle", "nothing", "exits"],
)  # fmt: skip
def test_garbage_is_told(ends, sent):
    controller, rank = ends
    rank.sendall(sent)
    with pytest.raises(Garbled):
        controller.receive()


def test_sending_waits_for_nobody(ends):
    controller, rank = ends
    large = "x" * (8 << 20)  # more than any socket holds
    controller.send(large)
    controller.send("small")
    assert controller.has_unsent
    rank.setblocking(False)
    received = bytearray()
    while controller.has_unsent:
        received += rank.recv(1 << 20)
        controller.flush()
    rank.setblocking(True)
    rank.settimeout(60)
    while len(received) < len(encode(large)) + len(encode("small")):
        received += rank.recv(1 << 20)
    assert received == encode(large) + encode("small")
    rank.close()
    controller.send("too late")
    assert not controller.has_unsent


def test_a_rank_gets_what_it_is_sent_and_hears_of_the_end(ends):
    controller, rank = ends
    controller.send([1, "two"])
    end = RankEnd(rank)
    assert end.receive() == [1, "two"]
    controller.close()
    with pytest.raises(EOFError):
        end.receive()
