"""Matmuls that go wrong on one rank are found, and the rank and the element named; and fingerprints of ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pytest_gpufleet.model.metric import GpuState, Reading
from pytest_gpufleet.model.place import gpu
from pytest_gpufleet.probes.compute import rate
from pytest_gpufleet.probes.compute.corruption import exact_matmul
from pytest_gpufleet.probes.compute.rate import full_clock_rates, why_below_full_clock
from pytest_gpufleet.verdict.judgement import judge
from tests.acceptance.checks import ranks
from tests.boards import BOARDS
from tests.conftest import ACCEPTANCE

EACH_GPU, FINGERPRINT = (ACCEPTANCE / f"test_{name}.py" for name in ("4_each_gpu", "3_fingerprint"))
REPEAT = "test_products_repeat_bit_for_bit"
EXACT = "test_matrix_product_is_exact"

# Spoils element [5, 9] of results of torch.mm on one rank: of the third that is compared, of every second one, or
# of each. The first of all is not compared.
FAULT = """
BITS = {2: "int16", 4: "int32", 8: "int64"}

def plant(rank, fault):
    import torch

    genuine = torch.mm
    products = 0

    def mm(a, b):
        nonlocal products
        products += 1
        result = genuine(a, b)
        if "always" in fault or ("now and then" in fault and products % 2) or products == 4:
            if "bit" in fault:
                result.view(getattr(torch, BITS[result.element_size()]))[5, 9] ^= 1
            else:
                result[5, 9] = float("nan")
        return result

    if rank.index == 1:
        torch.mm = mm
    elif "others are old" in fault:
        from pytest_gpufleet.probes.compute import rate

        rate.lacking = lambda precision, device: f"{precision} came later"
"""


OTHER = "its matmul of round 0 is another one than that of 2 of 3 ranks ("
LINES = "so it is again, in 1 row and 1 column: row 5, column 9 is 0x"
WRONG = "1 of 6,144 elements are wrong: row 5, column 9 is"
ONCE = ("wrong elements: 1, in ", "round 0, matmul 3, row 5, column 9 is 0x", "computed again it is right")
# By fault, what the checks say of the rank.
SAID = {
    "one bit": {f"{REPEAT}[fp32]": ONCE},
    "always bit": {f"{REPEAT}[fp16]": (OTHER, LINES), f"{EXACT}[fp32]": (WRONG,)},
    "always bit, others are old": {f"{EXACT}[fp16]": (WRONG,)},
    "always NaN": {
        f"{REPEAT}[fp32]": ("NaN or infinite elements: 1", OTHER, LINES),
        f"{EXACT}[bf16]": (f"{WRONG} nan, expected",),
    },
}


@pytest.mark.parametrize("fault", SAID)
def test_a_wrong_element_is_found_and_the_rank_named(planted, fault):
    run = planted(FAULT, fault, *(f"{EACH_GPU}::{check}" for check in SAID[fault]), "--rehearse=3")
    assert run.status == 1, run.text
    for check, phrases in SAID[fault].items():
        message = run.check(check).message
        assert "rank 0 of 3" not in message
        assert "rank 2 of 3" not in message
        assert [phrase for phrase in ("CPU rank 1: ", *phrases) if phrase not in message] == []


def test_the_exact_matmul_is_as_large_as_what_loads_a_whole_gpu(monkeypatch):
    """One of 512 x 512 has tiles for 16 of 132 multiprocessors."""

    def spoiled(precision, a, b):
        (result := a @ b)[-1, -1] += 1
        return lambda: result

    monkeypatch.setattr(rate, "shape_on", lambda device, precision: (1024, 1536, 128))
    monkeypatch.setattr(rate, "multiplication", spoiled)
    rank = SimpleNamespace(device=torch.device("cpu"), phase=lambda name: nullcontext())
    assert exact_matmul(rank, "fp32").startswith("1 of 1,572,864 elements are wrong: row 1023, column 1535 is ")


@pytest.mark.parametrize(("capability", "has"), [((8, 0), True), ((8, 9), False), ((99, 0), True)])
def test_a_gpu_of_which_nobody_knows_that_it_has_no_fp64_is_tried(monkeypatch, capability, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (rate.lacking("fp64", torch.device("cuda")) == "") is has


USUAL, PINNED = (51.04, 1980.0), (50.2, 1947.0)  # TFLOP/s of an H200 and MHz; at a clock that is held 1.7 % lower
FEWER = (50.27, 1980.0)  # without two of its 132 multiprocessors


def at_full_clock(*each, capped=()):
    """What GPUs give, of which the power cap holds some."""
    readings = []
    for index, (tflops, clock) in enumerate(each):
        reading = Reading("gemm_full_clock", tflops, {"precision": "fp32"}, gpu_state=GpuState(50.0, clock, 440.0))
        readings.append((reading, index in capped))
    return full_clock_rates(ranks(len(each), lambda probe: readings))


@pytest.mark.parametrize(("each", "slow", "why"), [
    ([USUAL] * 3 + [PINNED], {gpu(3)}, "its SM clock was 1,947 MHz, that of the fastest 1,980"),
    ([USUAL, FEWER, USUAL, USUAL], {gpu(1)}, "at 1,980 MHz it does 1.5% less than the fastest"),
    ([USUAL] * 3 + [(50.95, 1980.0)], set(), "all alike, at 1,980 MHz"),
    ([PINNED] * 4, set(), "all alike, at 1,947 MHz"),
])  # fmt: skip
def test_a_gpu_that_is_a_hundredth_slow_at_full_clock_is_found_and_why(each, slow, why):
    measured = at_full_clock(*each)
    board = BOARDS["NVIDIA H200"]
    finding = judge(measured, None, board.machine(4), "check", rehearsal=False, required=False)
    assert finding.slower_than_peers.keys() == slow
    cause = why_below_full_clock(measured, board.machine(4).gpus)
    assert why in (cause if isinstance(cause, str) else cause[0].what)


def test_a_gpu_of_a_slower_model_is_not_why_another_one_missed():
    faster, slower = (BOARDS[name].machine(4).gpus for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"))
    measured = at_full_clock(USUAL, FEWER, (19.4, 1410.0), (19.4, 1410.0))
    (fault,) = why_below_full_clock(measured, [*faster[:2], *slower[2:]])
    assert fault.subjects == (gpu(1),)


def test_cards_that_are_at_their_power_limit_even_so_are_measured_under_another_condition():
    """Of three one that the cap holds alone is slow for it."""
    every = [at_full_clock(USUAL, USUAL, PINNED, capped=capped) for capped in ({2}, {1, 2})]
    assert [each.conditions["at_power_limit"] for each in every] == [False, True]


# ---------------------------------------------------------------- fingerprints
CASES = ("products", "reductions", "training")


def test_all_ranks_compute_the_same_and_again_in_another_run(run_pytest):
    first, second = (
        run_pytest(FINGERPRINT, "--rehearse=2", "--fleet-dir=runs", OMP_NUM_THREADS=threads) for threads in ("1", "2")
    )
    assert (first.status, set(first.outcomes.values())) == (0, {"passed"}), first.text
    taken = first.record.fingerprints
    assert len(taken) == len(CASES) + 1
    assert all(part.output for each in taken.values() for one in each for part in one.parts.values())
    assert taken == second.record.fingerprints  # whatever the number of threads


@pytest.mark.parametrize(
    ("fault", "what"), [("always bit", "other bits than most"), ("now and then bit", "other bits each time")]
)
def test_a_rank_that_computes_otherwise_is_named(planted, fault, what):
    run = planted(FAULT, fault, FINGERPRINT, "-k", "same_bits", "--rehearse=3")
    outcomes = {name.partition("[")[2][:-1]: outcome for name, outcome in run.outcomes.items()}
    assert outcomes == {"products": "failed", "reductions": "passed", "training": "passed"}
    (fault,) = run.record.faults
    assert (fault.name, [*map(str, fault.subjects)]) == ("gpu_bits_differ", ["cpu1"])
    assert what in fault.what
