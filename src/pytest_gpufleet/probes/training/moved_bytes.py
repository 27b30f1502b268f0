"""What a step of training reads and writes beside its matrix products, counted as the step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_TRAFFIC = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "detach")


def moved_bytes(step: Callable[[], object]) -> int:
    """The bytes that all operations of one eager step read and write, those of products and attention left out: these
    compute meanwhile. What a cache serves is counted too, so it is at most so much that comes from memory."""
    counter = _Counter()
    with counter:
        step()
    return counter.moved


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # which imports Triton

        self._computed = flop_registry
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if not (func.is_view or packet.__name__ in NO_TRAFFIC or packet in self._computed):
            given = [*args, *(kwargs or {}).values()]
            changed = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self.moved += _bytes(given) + _bytes(changed or [result])
        return result


def _bytes(values: Iterable[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(list(values)) if isinstance(each, Tensor))
