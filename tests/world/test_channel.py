"""What the controller makes of bytes from a rank, whatever they are, without waiting for it."""

import socket

import pytest

from pytest_gpufleet.world.engines import channel
from pytest_gpufleet.world.engines.channel import FILE, INLINE_BYTES, PARCEL, ControllerEnd, Garbled, RankEnd

LARGE = b"x" * (INLINE_BYTES + 1)


@pytest.fixture
def ends(tmp_path):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ControllerEnd(ours, tmp_path), theirs


def test_what_a_rank_sent_comes_before_its_end_whatever_it_has_not_read(ends, tmp_path):
    controller, rank = ends
    end = RankEnd(rank, tmp_path)
    controller.send(PARCEL + b"unread")
    for parcel in (b"one", LARGE[1:]):
        end.send(parcel)
    rank.close()
    assert controller.receive() == [b"one", LARGE[1:]]
    with pytest.raises(EOFError):
        controller.receive()


def test_a_large_parcel_lies_in_a_file_until_it_is_read(ends, tmp_path):
    controller, rank = ends
    end = RankEnd(rank, tmp_path)
    end.send(LARGE)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [len(LARGE)]
    assert controller.receive() == [LARGE]
    assert list(tmp_path.iterdir()) == []
    controller.send(channel.message_or_file(LARGE, tmp_path)[0])  # of several ranks, none of which may remove it
    assert end.receive() == LARGE
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "sent",
    [b"\xff" * 64, PARCEL + LARGE, PARCEL + LARGE * 4, FILE + b"/etc/hostname", FILE + b"no such file", FILE + b"a\0b"],
    ids=["garbage", "too long", "far too long", "a file of somebody else", "no file", "no name of a file"],
)  # fmt: skip
def test_garbage_is_recognised(ends, sent):
    controller, rank = ends
    rank.sendall(sent)
    with pytest.raises(Garbled):
        controller.receive()


def test_a_file_that_is_gone_is_no_parcel(ends, tmp_path):
    test_garbage_is_recognised(ends, FILE + bytes(tmp_path / "gone.parcel"))


def test_sending_waits_for_nobody(ends, tmp_path):
    controller, rank = ends
    end, count = RankEnd(rank, tmp_path), 0
    while not controller.has_unsent:  # more than the socket holds
        count += 1
        controller.send(PARCEL + b"%d" % count * 4000)
    controller.send(PARCEL + b"last")
    for number in range(1, count + 1):
        assert end.receive() == b"%d" % number * 4000
        controller.flush()
    assert (end.receive(), controller.has_unsent) == (b"last", False)
    rank.close()
    controller.send(PARCEL + b"too late")
    assert not controller.has_unsent
