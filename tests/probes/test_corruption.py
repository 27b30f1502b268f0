"""Silent data corruption in matmuls: planted at a rate, in one bit, in tiles and in places; and what is excluded."""

import random
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.model.measurement import GpuState
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes import comparison
from pytest_gpufleet.probes.compute import corruption, rate
from pytest_gpufleet.probes.compute.corruption import ROUND, Compared, Matmuls, bound, dissents

CPU = torch.device("cpu")


@pytest.fixture
def planting(monkeypatch):
    """planting(spoil): spoil(bits) has those of each result of a matmul."""

    def plant(spoil):
        genuine = rate.multiplication

        def multiplication(precision, a, b):
            multiply = genuine(precision, a, b)

            def spoiled():
                result = multiply()
                spoil(comparison.bits(result))
                return result

            return spoiled

        monkeypatch.setattr(rate, "multiplication", multiplication)

    return plant


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_events_at_the_rate_that_is_excluded_are_found_in_95_of_100_runs(planting, precision):
    """Of the lowest bit of one element of one matmul."""
    work, rounds, chance = Matmuls(CPU, precision), 6, random.Random(0)
    rarely = corruption.NO_EVENT / (rounds * ROUND)

    def spoil(bits):
        if chance.random() < rarely:
            bits[chance.randrange(len(bits)), chance.randrange(bits.shape[1])] ^= 1

    planting(spoil)
    found = sum(any(work.run(0.0, rounds * run + number).trouble for number in range(rounds)) for run in range(100))
    assert 90 <= found < 100


def lowest_bit(bits):
    bits[5, 9] ^= 1


def lowest_bit_of_some(bits):
    """A unit that is wrong with some data only."""
    bits[bits % 1021 == 5] ^= 1


def tiles_change_places(bits):
    bits[:16, :32], bits[16:32, :32] = bits[16:32, :32].clone(), bits[:16, :32].clone()


def rows_change_places(bits):
    bits[[3, 40]] = bits[[40, 3]]


@pytest.mark.parametrize("spoil", [lowest_bit, lowest_bit_of_some, tiles_change_places, rows_change_places])
def test_what_is_always_wrong_is_found_beside_other_gpus(planting, spoil):
    healthy = [Matmuls(CPU, "bf16").run(0.0) for _ in range(2)]
    planting(spoil)
    wrong = Matmuls(CPU, "bf16").run(0.0)
    assert (wrong.trouble, dissents(healthy)) == ("", {})
    found = dissents([healthy[0], wrong, healthy[1]])
    assert {index: (each.number, each.usual, each.agreeing) for index, each in found.items()} == {1: (0, 0, 2)}


def test_operands_change_every_round_and_come_again_by_their_number():
    work = Matmuls(CPU, "fp32")
    hashes = [work.run(0.0, number).hashes.item() for number in range(200)]
    assert len(set(hashes)) == 200
    assert work.run(0.0, 137).hashes.item() == hashes[137]


def test_gpus_of_other_kinds_and_other_numbers_of_rounds_do_not_dissent():
    def did(kind, *hashes):
        return Compared(kind, "bf16", (1, 1, 1), "", 7, torch.tensor(hashes), 1.0, 1.0, 1)

    assert dissents([did("A", 1, 2, 3), did("B", 4, 5), did("A", 1, 2)]) == {}
    (found,) = dissents([did("A", 1, 2, 3), did("A", 1, 2, 9), did("B", 4), did("A", 1, 2, 3)]).items()
    assert (found[0], found[1].number) == (1, 9)


@pytest.mark.parametrize(("kinds", "alone"), [("AA", False), ("A", True), ("AAB", True)])
def test_the_bound_counts_what_was_compared(kinds, alone):
    every = [Compared(kind, "bf16", (1, 1, 1), "", 0, torch.empty(0), 50.0, 3e15, 4e12) for kind in kinds]
    clocks = [GpuState(60.0, clock, 700.0) for clock in (1400.0, 1500.0, 1450.0)[: len(kinds)]]
    measured = bound(SimpleNamespace(size=len(kinds)), every, clocks)
    assert measured.values == {WORLD: pytest.approx(50 * len(kinds) / 2.9957, rel=1e-4)}
    assert ("not seen" in str(measured.details["compared"])) == alone
    assert str(measured.details["SM clock"]).startswith("1,400")
