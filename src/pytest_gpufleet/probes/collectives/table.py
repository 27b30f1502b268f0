"""The collectives: how each is started, what it must deliver, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Combine = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Collective:
    """One collective over n ranks.

    `launch(group, output, input, root, op)` starts it and gives what to wait for.
    `expected(inputs, me, root, combine)` is rank `me`'s output from the stacked inputs of all ranks, None where it is
    undefined; `combine` is what the operation makes of stacked inputs.
    `in_parts`: S has a part for each rank; `one_part`: the buffer that holds only one of them.
    `in_place`: whether torch has it in place only, also, or never.
    """

    launch: Callable[[ProcessGroup, Tensor, Tensor, int, Any], list[dist.Work]]
    expected: Callable[[Tensor, int, int, Combine], Tensor | None]
    factor: Callable[[int], float]
    in_parts: bool = False
    one_part: Literal["input", "output"] | None = None
    in_place: Literal["always", "also", "never"] = "never"
    reduces: bool = False
    rooted: bool = False

    def total(self, count: int, n: int) -> int:
        """Elements of S: at least `count`, and as many for each part."""
        return -(-count // n) * n if self.in_parts else count

    def buffers(
        self, total: int, n: int, me: int, in_place: bool, empty: Callable[[int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Rank `me`'s input and output, made by `empty(count)`; in place they share memory."""
        part = total // n
        if in_place:
            whole = empty(total)
            mine = whole[part * me : part * (me + 1)]
            return mine if self.one_part == "input" else whole, mine if self.one_part == "output" else whole
        sizes = [part if self.one_part == buffer else total for buffer in ("input", "output")]
        return empty(sizes[0]), empty(sizes[1])


def _start(function: Callable[..., Any], *tensors: Any, **how: Any) -> list[dist.Work]:
    return [function(*tensors, **how, async_op=True)]


def _send_to_next(group: ProcessGroup, output: Tensor, input: Tensor) -> list[dist.Work]:
    me, n = dist.get_rank(group), dist.get_world_size(group)
    send = dist.P2POp(dist.isend, input, _global(group, (me + 1) % n), group)
    receive = dist.P2POp(dist.irecv, output, _global(group, (me - 1) % n), group)
    works: list[dist.Work] = dist.batch_isend_irecv([send, receive])
    return works


def _global(group: ProcessGroup, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _at_root(group: ProcessGroup, root: int, whole: Tensor) -> list[Tensor] | None:
    """The parts of a buffer that only the root has."""
    return list(whole.chunk(dist.get_world_size(group))) if dist.get_rank(group) == root else None


def _part(tensor: Tensor, index: int, n: int) -> Tensor:
    return tensor.chunk(n)[index]


COLLECTIVES = {
    "all_reduce": Collective(
        launch=lambda group, output, input, root, op: _start(dist.all_reduce, output, op, group=group),
        expected=lambda inputs, me, root, combine: combine(inputs),
        factor=lambda n: 2 * (n - 1) / n,
        in_place="always",
        reduces=True,
    ),
    "all_gather": Collective(
        launch=lambda group, output, input, root, op: _start(dist.all_gather_into_tensor, output, input, group=group),
        expected=lambda inputs, me, root, combine: inputs.flatten(),
        factor=lambda n: (n - 1) / n,
        in_parts=True,
        one_part="input",
        in_place="also",
    ),
    "reduce_scatter": Collective(
        launch=lambda group, output, input, root, op: _start(
            dist.reduce_scatter_tensor, output, input, op, group=group
        ),
        expected=lambda inputs, me, root, combine: _part(combine(inputs), me, len(inputs)),
        factor=lambda n: (n - 1) / n,
        in_parts=True,
        one_part="output",
        in_place="also",
        reduces=True,
    ),
    "broadcast": Collective(
        launch=lambda group, output, input, root, op: _start(dist.broadcast, output, _global(group, root), group=group),
        expected=lambda inputs, me, root, combine: inputs[root],
        factor=lambda n: 1.0,
        in_place="always",
        rooted=True,
    ),
    "reduce": Collective(
        launch=lambda group, output, input, root, op: _start(
            dist.reduce, output, _global(group, root), op, group=group
        ),
        expected=lambda inputs, me, root, combine: combine(inputs) if me == root else None,
        factor=lambda n: 1.0,
        in_place="always",
        reduces=True,
        rooted=True,
    ),
    "all_to_all": Collective(
        launch=lambda group, output, input, root, op: _start(dist.all_to_all_single, output, input, group=group),
        expected=lambda inputs, me, root, combine: torch.cat([_part(each, me, len(inputs)) for each in inputs]),
        factor=lambda n: (n - 1) / n,
        in_parts=True,
    ),
    "gather": Collective(
        launch=lambda group, output, input, root, op: _start(
            dist.gather, input, _at_root(group, root, output), _global(group, root), group=group
        ),
        expected=lambda inputs, me, root, combine: inputs.flatten() if me == root else None,
        factor=lambda n: (n - 1) / n,
        in_parts=True,
        one_part="input",
        rooted=True,
    ),
    "scatter": Collective(
        launch=lambda group, output, input, root, op: _start(
            dist.scatter, output, _at_root(group, root, input), _global(group, root), group=group
        ),
        expected=lambda inputs, me, root, combine: _part(inputs[root], me, len(inputs)),
        factor=lambda n: (n - 1) / n,
        in_parts=True,
        one_part="output",
        rooted=True,
    ),
    "sendrecv": Collective(
        launch=lambda group, output, input, root, op: _send_to_next(group, output, input),
        expected=lambda inputs, me, root, combine: inputs[me - 1],
        factor=lambda n: 1.0,
    ),
}
