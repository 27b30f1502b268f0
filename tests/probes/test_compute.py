"""Matmuls that go wrong on one rank are found, and the rank and the element named."""

from pathlib import Path

import pytest

EACH_GPU = Path(__file__).parents[2] / "acceptance" / "test_4_each_gpu.py"
REPEAT = "test_products_repeat_bit_for_bit"
EXACT = "test_matrix_product_is_exact"

# Spoils element [5, 9] of results of torch.mm on one rank: of the third product, of every second one, or of each.
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
        if "always" in fault or ("now and then" in fault and products % 2) or products == 3:
            if "bit" in fault:
                result.view(getattr(torch, BITS[result.element_size()]))[5, 9] ^= 1
            else:
                result[5, 9] = float("nan")
        return result

    if rank.index == 1:
        torch.mm = mm
"""


OTHER = "its matmul is another one than that of 2 of 3 ranks (CPU)"
LINES = "1 row (the first is 5) and 1 column (the first is 9) differ"
WRONG = "1 of 262,144 elements are wrong: row 5, column 9 is"
# By fault, what the checks say of the rank.
SAID = {
    "one bit": {f"{REPEAT}[fp32]": ("wrong elements: 1, in 1 of ", "matmul 3, row 5, column 9 is 0x")},
    "always bit": {f"{REPEAT}[fp16]": (OTHER, LINES), f"{EXACT}[fp32]": (WRONG,)},
    "always NaN": {
        f"{REPEAT}[fp32]": ("NaN or infinite elements in the first matmul: 1",),
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


def test_of_two_ranks_that_disagree_neither_is_believed(planted):
    run = planted(FAULT, "always bit", f"{EACH_GPU}::{REPEAT}[fp32]", "--rehearse=2")
    message = run.check(f"{REPEAT}[fp32]").message
    assert "its matmul is another one than that of 1 of 2 ranks (CPU)" in message
    assert "nobody can say which is right" in message
