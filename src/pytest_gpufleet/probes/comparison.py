"""Elements that are not what they should be, counted and described."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHOWN = 3  # elements that are described
Shown = Callable[[Tensor], object]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


def hexadecimal(element: Tensor) -> str:
    """The bits of a whole number, be it negative: "0x3f80"."""
    size = element.element_size()
    return f"0x{int(element) & (1 << 8 * size) - 1:0{2 * size}x}"


def unlike(
    found: Tensor, right: Tensor, at: Callable[..., str], shown: Shown = Tensor.item, wrong: Tensor | None = None
) -> tuple[int, list[str]]:
    """How many elements are not the right ones (NaN never is), or `wrong`, and the first; `at(*index)`: where."""
    wrong = found != right if wrong is None else wrong
    first = wrong.nonzero()[:SHOWN].tolist()
    return int(wrong.sum()), [f"{at(*i)} is {shown(found[(*i,)])}, expected {shown(right[(*i,)])}" for i in first]


def wrong_elements(found: Tensor, right: Tensor, noun: str = "elements", at: str = "[{}]", **how: Any) -> str:
    """The same in a text; "" if none is wrong."""
    count, texts = unlike(found, right, at.format, **how)
    return f"{count:,} of {found.numel():,} {noun} are wrong: {'; '.join(texts)}" if count else ""
