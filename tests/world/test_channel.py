"""What the controller makes of bytes from a rank, whatever they are, without waiting for it."""

import socket

import pytest

from pytest_gpufleet.world.engines.channel import (
    FILE,
    HEADER,
    INLINE_BYTES,
    PARCEL,
    ControllerEnd,
    Garbled,
    RankEnd,
    message,
    message_of_file,
    message_or_file,
)

LARGE = b"x" * (INLINE_BYTES + 1)


@pytest.fixture
def ends(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ControllerEnd(ours, tmp_path), theirs


def test_parcels_arrive_whole_however_they_are_cut(ends):
    controller, rank = ends
    sent = message(b"one") + message(b"x" * INLINE_BYTES)
    received = []
    for start in range(0, len(sent), 797):
        rank.sendall(sent[start : start + 797])
        received += controller.receive()
    assert received == [b"one", b"x" * INLINE_BYTES]
    assert controller.receive() == []
    rank.sendall(message(b"last") + PARCEL)  # half of another: its rank ends here
    rank.close()
    assert controller.receive() == [b"last"]
    with pytest.raises(EOFError):
        controller.receive()


def test_a_large_parcel_lies_in_a_file_until_it_is_read(ends, tmp_path):
    controller, rank = ends
    end = RankEnd(rank, tmp_path)
    end.send(LARGE)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [len(LARGE)]
    assert controller.receive() == [LARGE]
    assert list(tmp_path.iterdir()) == []
    controller.send(message_or_file(LARGE, tmp_path)[0])  # of several ranks, none of which may remove it
    assert end.receive() == LARGE
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "sent",
    [b"\xff" * 64, HEADER.pack(PARCEL, 2**31 - 1), HEADER.pack(PARCEL, INLINE_BYTES + 1),
     message_of_file("/etc/hostname"), message_of_file("no such file"), HEADER.pack(FILE, 3) + b"a\0b"],
    ids=["garbage", "2 GB", "too long", "a file of somebody else", "no file", "no name of a file"],
)  # fmt: skip
def test_garbage_is_recognised(ends, sent):
    controller, rank = ends
    rank.sendall(sent)
    with pytest.raises(Garbled):
        controller.receive()


def test_a_file_that_is_gone_is_no_parcel(ends, tmp_path):
    test_garbage_is_recognised(ends, message_of_file(tmp_path / "gone.parcel"))


def test_sending_waits_for_nobody(ends):
    controller, rank = ends
    sent = message(b"x" * (8 << 20)) + message(b"small")  # more than any socket holds
    controller.send(sent)
    assert controller.has_unsent
    rank.setblocking(False)
    received = bytearray()
    while controller.has_unsent:
        received += rank.recv(1 << 20)
        controller.flush()
    rank.setblocking(True)
    rank.settimeout(60)
    while len(received) < len(sent):
        received += rank.recv(1 << 20)
    assert received == sent
    rank.close()
    controller.send(message(b"too late"))
    assert not controller.has_unsent
