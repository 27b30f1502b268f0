"""The collectives: how each is started, what it must deliver, and what it moves."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pytest_gpufleet.world.world import Rank

Combine = Callable[[Tensor], Tensor]
Make = Callable[[int], Tensor]
SUM = dist.ReduceOp.SUM


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Collective:
    """`call(group, output, input, root, op)` is torch's call of it, which takes `async_op`.
    `expected(inputs, me, root, combine)` is rank `me`'s output from the stacked inputs of all ranks, None where it is
    undefined; `combine` is what the operation makes of stacked inputs.
    `one_part`: S has a part for each rank, and this buffer holds only one of them; None where S has no parts.
    `in_place`: whether torch has it in place only, also, or never."""

    call: Callable[[ProcessGroup, Tensor, Tensor, int, Any], Callable[..., Any]]
    expected: Callable[[Tensor, int, int, Combine], Tensor | None]
    factor: Callable[[int], float] = lambda n: 1.0  # busbw over algbw
    one_part: Literal["input", "output", "neither"] | None = None
    in_place: Literal["always", "also", "never"] = "never"
    reduces: bool = False
    rooted: bool = False

    def launch(
        self, group: ProcessGroup, output: Tensor, input: Tensor, root: int = 0, op: Any = SUM, async_op: bool = True
    ) -> list[dist.Work]:
        """Start it, on a stream of its own, and give what to wait for."""
        works = self.call(group, output, input, root, op)(async_op=async_op)
        return works if isinstance(works, list) else [works] if works else []

    def run(self, group: ProcessGroup, output: Tensor, input: Tensor, root: int = 0) -> None:
        """Start it in the order of the current stream, as nccl-tests does; a CPU rank waits for it. To change streams
        and back takes about 5 us: reduce_scatter of 64 MiB was 2 % slower on two H200, and 8 bytes in a CUDA graph,
        where each operation then depends on all before it, took 10 us and not 6. Before torch 2.11 it may do so."""
        for work in self.launch(group, output, input, root, async_op=False):
            work.wait()

    @property
    def timed_in_place(self) -> bool:
        """Whether it is measured in place. torch has some in place only. Of gather and scatter it copies the root's own
        part itself, beside NCCL and in the memory that NCCL reads and writes (on two H200 that took 3 and 5 % of their
        bandwidth at 8 GiB), and in place there is nothing to copy, as with NCCL's own gather and scatter."""
        return self.in_place == "always" or bool(self.rooted and self.one_part)

    def total(self, count: int, n: int) -> int:
        """Elements of S: at least `count`, and as many for each part."""
        return -(-count // n) * n if self.one_part else count

    def sizes(self, total: int, n: int) -> tuple[int, int]:
        """Of input and output, out of place."""
        part = total // n
        return part if self.one_part == "input" else total, part if self.one_part == "output" else total

    def held(self, nbytes: int, n: int) -> int:
        """Memory that both take, out of place where there is a choice."""
        return nbytes if self.in_place == "always" else sum(self.sizes(nbytes, n))

    def buffers(self, total: int, n: int, me: int, in_place: bool, empty: Make) -> tuple[Tensor, Tensor]:
        """Rank `me`'s input and output, made by `empty(count)`; in place they share memory."""
        input, output = self.sizes(total, n)
        if not in_place:
            return empty(input), empty(output)
        whole, begin = empty(total), total // n * me
        input_begin, output_begin = (0 if size == total else begin for size in (input, output))
        return whole[input_begin:][:input], whole[output_begin:][:output]

    def zeros(self, rank: Rank, nbytes: int, in_place: bool | None = None) -> tuple[Tensor, Tensor]:
        """This rank's input and output of float32 for about S = `nbytes`, `in_place` if that is how it is measured."""
        n, count = rank.size, max(1, nbytes // 4)
        if self.one_part:
            # As nccl-tests: each part a multiple of 16 bytes, or the figure would depend on how the parts are aligned.
            count = count // (4 * n) * 4 * n or count
        in_place = self.timed_in_place if in_place is None else in_place
        return self.buffers(self.total(count, n), n, rank.index, in_place, partial(torch.zeros, device=rank.device))


def _send_to_next(group: ProcessGroup, output: Tensor, input: Tensor, async_op: bool) -> list[dist.Work] | None:
    """torch sends and receives on a stream of its own only. In the order of the current stream it has the same two
    calls of NCCL as an all_to_all in which a rank's parts for all others are empty."""
    me, n = dist.get_rank(group), dist.get_world_size(group)
    to, source = (me + 1) % n, (me - 1) % n
    if not async_op:
        sent, received = ([input.numel() if rank == other else 0 for rank in range(n)] for other in (to, source))
        dist.all_to_all_single(output, input, received, sent, group=group)
        return None
    both = ((dist.isend, input, to), (dist.irecv, output, source))
    ends = [dist.P2POp(call, data, _global(group, peer), group) for call, data, peer in both]
    works: list[dist.Work] = dist.batch_isend_irecv(ends)
    return works


_global = dist.get_global_rank


def _at_root(group: ProcessGroup, root: int, whole: Tensor) -> list[Tensor] | None:
    """The parts of a buffer that only the root has."""
    return list(whole.chunk(dist.get_world_size(group))) if dist.get_rank(group) == root else None


def _of_parts(n: int) -> float:
    return (n - 1) / n


COLLECTIVES = {
    "all_reduce": Collective(
        lambda group, output, input, root, op: partial(dist.all_reduce, output, op, group=group),
        lambda inputs, me, root, combine: combine(inputs),
        lambda n: 2 * (n - 1) / n, in_place="always", reduces=True,
    ),
    "all_gather": Collective(
        lambda group, output, input, root, op: partial(dist.all_gather_into_tensor, output, input, group=group),
        lambda inputs, me, root, combine: inputs.flatten(),
        _of_parts, one_part="input", in_place="also",
    ),
    "reduce_scatter": Collective(
        lambda group, output, input, root, op: partial(dist.reduce_scatter_tensor, output, input, op, group=group),
        lambda inputs, me, root, combine: combine(inputs).chunk(len(inputs))[me],
        _of_parts, one_part="output", in_place="also", reduces=True,
    ),
    "broadcast": Collective(
        lambda group, output, input, root, op: partial(dist.broadcast, output, _global(group, root), group=group),
        lambda inputs, me, root, combine: inputs[root],
        in_place="always", rooted=True,
    ),
    "reduce": Collective(
        lambda group, output, input, root, op: partial(dist.reduce, output, _global(group, root), op, group=group),
        lambda inputs, me, root, combine: combine(inputs) if me == root else None,
        in_place="always", reduces=True, rooted=True,
    ),
    "all_to_all": Collective(
        lambda group, output, input, root, op: partial(dist.all_to_all_single, output, input, group=group),
        lambda inputs, me, root, combine: torch.cat([each.chunk(len(inputs))[me] for each in inputs]),
        _of_parts, one_part="neither",
    ),
    "gather": Collective(
        lambda group, output, input, root, op: partial(
            dist.gather, input, _at_root(group, root, output), _global(group, root), group=group),
        lambda inputs, me, root, combine: inputs.flatten() if me == root else None,
        _of_parts, one_part="input", in_place="also", rooted=True,
    ),
    "scatter": Collective(
        lambda group, output, input, root, op: partial(
            dist.scatter, output, _at_root(group, root, input), _global(group, root), group=group),
        lambda inputs, me, root, combine: inputs[root].chunk(len(inputs))[me],
        _of_parts, one_part="output", in_place="also", rooted=True,
    ),
    "sendrecv": Collective(
        lambda group, output, input, root, op: partial(_send_to_next, group, output, input),
        lambda inputs, me, root, combine: inputs[me - 1],
    ),
}  # fmt: skip
