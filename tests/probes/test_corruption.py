"""Silent data corruption in matmuls: planted at a rate, in one bit, in tiles and in places; and what is excluded."""

import random
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.model.fault import Faults
from pytest_gpufleet.model.levels import NO_EVENT
from pytest_gpufleet.model.place import WORLD, gpu
from pytest_gpufleet.probes import comparison
from pytest_gpufleet.probes.compute import corruption, rate
from pytest_gpufleet.probes.compute.corruption import ROUND, Amount, Compared, Matmuls, bound, dissents
from tests.acceptance.checks import ranks  # of the folder that it found

CPU = torch.device("cpu")


def plant(monkeypatch, spoil):
    """`spoil` has the bits of each result of a matmul."""
    genuine = rate.multiplication

    def multiplication(precision, a, b):
        multiply = genuine(precision, a, b)

        def spoiled():
            result = multiply()
            spoil(comparison.bits(result))
            return result

        return spoiled

    monkeypatch.setattr(rate, "multiplication", multiplication)


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_events_at_the_rate_that_is_excluded_are_found_in_95_of_100_runs(monkeypatch, precision):
    """Of the lowest bit of one element of one matmul."""
    work, rounds, chance = Matmuls(CPU, precision), 6, random.Random(0)
    rarely = NO_EVENT / (rounds * ROUND)

    def spoil(bits):
        if chance.random() < rarely:
            bits[chance.randrange(len(bits)), chance.randrange(bits.shape[1])] ^= 1

    plant(monkeypatch, spoil)
    found = sum(any(work.run(0.0, rounds * run + number).trouble for number in range(rounds)) for run in range(100))
    assert 90 <= found < 100


SPOILED = {
    "the lowest bit": lambda bits: bits[5, 9].bitwise_xor_(1),
    "a unit that is wrong with some data only": lambda bits: bits.bitwise_xor_((bits % 1021 == 5).to(bits.dtype)),
    "tiles change places": lambda bits: bits[:32, :32].copy_(bits[:32, :32].roll(16, dims=0)),
    "rows change places": lambda bits: bits[3:41:37].copy_(bits[3:41:37].flip(0)),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_is_always_wrong_is_found_beside_other_gpus(monkeypatch, spoil):
    healthy = [Matmuls(CPU, "bf16").run(0.0) for _ in range(2)]
    plant(monkeypatch, spoil)
    wrong = Matmuls(CPU, "bf16").run(0.0)
    assert (wrong.trouble, dissents(healthy)) == ("", {})
    found = dissents([healthy[0], wrong, healthy[1]])
    assert {index: each[:3] for index, each in found.items()} == {1: (0, 0, 2)}


def test_operands_change_every_round_and_come_again_by_their_number_and_cpu_ranks_have_no_clock():
    work = Matmuls(CPU, "fp32")
    hashes = [work.run(0.0, number).hashes.item() for number in range(200)]
    assert len(set(hashes)) == 200
    assert work.run(0.0, 137).hashes.item() == hashes[137]
    compared = Matmuls(CPU, "fp32").run(0.0, least=3)
    assert compared.amounts.keys() == {0}
    assert compared.amounts[0].matmuls == 3 * ROUND
    assert bound(SimpleNamespace(size=1), [compared]).details.keys() == {"compared"}


def test_gpus_of_other_kinds_do_not_dissent_and_of_two_neither_is_believed(monkeypatch):
    def did(kind, *hashes):
        return Compared(kind, "bf16", (1, 1, 1), "", 7, torch.tensor(hashes), 2, {})

    assert dissents([did("A", 1, 2, 3), did("B", 4, 5), did("A", 1, 2)]) == {}
    (found,) = dissents([did("A", 1, 2, 3), did("A", 1, 2, 9), did("B", 4), did("A", 1, 2, 3)]).items()
    assert (found[0], found[1][0]) == (1, 9)
    world = SimpleNamespace(size=2, run=lambda again, rows, *round: [[torch.zeros(1)] * 2] * 2)
    for text in corruption.dissenters(world, [did("A", 1), did("A", 2)]):
        assert text.startswith(
            "its matmul of round 7 is another one than that of 1 of 2 ranks (A) from the same data; "
        )
        assert text.endswith("nobody can say which is right: computed again it is right")
    with_another_model = [did("A", 1), did("B", 4), did("A", 2), did("A", 1)]
    ranks = [SimpleNamespace(index=index, device=CPU, phase=lambda name: nullcontext()) for index in range(4)]
    asked = []
    monkeypatch.setattr(corruption, "Matmuls", lambda *how: asked.append(how) or Matmuls(CPU, "bf16"))
    world = SimpleNamespace(size=4, run=lambda again, *round: [again(rank, *round) for rank in ranks])
    assert [bool(text) for text in corruption.dissenters(world, with_another_model)] == [False, False, True, False]
    assert len(asked) == 2  # by the one and one of the usual ones: others may not have the precision
    halves = dissents([did("A", *hashes) for hashes in ((1, 2), (1, 2), (1, 3), (1, 3))])
    others = {index: each[:3] for index, each in halves.items()}
    assert others == {0: (8, 2, 2), 1: (8, 2, 2), 2: (8, 0, 2), 3: (8, 0, 2)}


@pytest.mark.parametrize(("kinds", "alone"), [("AA", False), ("A", True), ("AAB", True)])
def test_the_bound_counts_what_was_compared_by_clock(kinds, alone):
    amounts = {1400: Amount(30.0, 3000), 1410: Amount(10.0, 1000), 1980: Amount(10.0, 1000), 1200: Amount(0.5, 30)}
    every = [Compared(kind, "bf16", (1000, 1000, 500), "", 0, torch.empty(0), 2_000_000, amounts) for kind in kinds]
    several, many = len(kinds) > 1, len(kinds)
    measured = bound(SimpleNamespace(size=many), [every[0].and_also(every[0]), *every[1:]] if several else every)
    many += several
    assert measured.values == {WORLD: pytest.approx(50.5 * many / 2.9957, rel=1e-4)}
    assert ("not seen" in str(measured.details["compared"])) == alone
    lower, usual, higher = (str(measured.details[f"at {state} SM clocks"]) for state in ("lower", "usual", "higher"))
    assert lower.startswith(f"1,200 MHz: {0.5 * many:,.1f} GPU-seconds, ")
    assert usual.startswith(f"1,400 to 1,410 MHz: {40 * many:,.1f} GPU-seconds, {4e-3 * many:.2f} PFLOP, ")
    assert higher.endswith(f" TB, 0 differences: less than one in {10 * many / 2.9957:,.3g} s at 95 %")


def test_a_turn_of_the_soak_that_was_done_again_is_held_against_the_other_gpus_too(monkeypatch):
    def turn(*hashes):
        amounts = {0: Amount(1.0, ROUND)}
        every = [Compared("A", "bf16", (1, 1, 1), "", 0, torch.tensor([each]), 2, amounts) for each in hashes]
        return [SimpleNamespace(compared=each) for each in every]

    def dissenters(world, every):
        return ["other bits" if index in dissents(every) else "" for index in range(world.size)]

    monkeypatch.setattr(corruption, "dissenters", dissenters)
    turns = [turn(1, 1, 1), turn(1, 2, 1)]
    with pytest.raises(Faults) as found:
        import_module("test_4_each_gpu").test_products_repeat_bit_for_bit(
            ranks(3), None, lambda precision: turns[0], {"bf16": turns}, "bf16"
        )
    assert [(fault.name, fault.subjects) for fault in found.value.faults] == [("matmul_wrong", (gpu(1),))]


def test_of_a_soak_all_is_compared_and_the_rate_is_of_its_end(two_ranks):
    every = two_ranks.run(corruption.soak, "fp32", 0.3)
    for compared, measured, _ in every:
        assert 0.3 <= compared.seconds < 3
        assert (len(measured.samples), len(compared.hashes)) == (rate.PARTS, compared.amounts[0].matmuls // ROUND)
    assert dissents([compared for compared, *_ in every]) == {}
