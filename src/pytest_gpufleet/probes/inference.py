"""Inference: a language model, that of the transformer check, decodes one token of each sequence a step. It is bound by
memory, since every step reads all weights and all keys and values of before, and on several GPUs by the latency of
small all_reduces."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from pytest_gpufleet.machine.nvml import Watch
from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.metric import Reading
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes import comparison
from pytest_gpufleet.probes.compute.corruption import kind
from pytest_gpufleet.probes.timing import agree, captured, everyones, seconds
from pytest_gpufleet.probes.training import loop, transformer
from pytest_gpufleet.probes.training.correctness import differences
from pytest_gpufleet.probes.training.transformer import NORM_EPSILON, SHAPES, Block, Shape, rotary, rotated
from pytest_gpufleet.world.world import Rank

# `sequence`: tokens that the cache has room for.
MODELS = {
    "cuda": ("transformer-1.8b", SHAPES["transformer-1.8b"]),
    "cpu": ("transformer-tiny", Shape(64, 2, 8, 128, 64, 32, batch=2)),
}
RECIPES = {"cuda": ("bf16", torch.bfloat16), "cpu": ("fp32", torch.float32)}
BATCHES = {"cuda": (1, 64), "cpu": (1, 2)}
TOKENS = {"cuda": 64, "cpu": 4}  # that are decoded in a run, behind a context that fills the rest of the cache
SAMPLES = 3
SAMPLE_SECONDS = {"cuda": 0.05, "cpu": 0.0}  # a sample is the median of as many runs as fill it
WARM_UP = 3  # steps before a CUDA graph is captured


class Decoder:
    """Greedy decoding of `batch` sequences behind a context of random keys and values. Attention reads the whole cache
    in every step, of which what comes later is masked: each step costs the same, and one CUDA graph serves all.
    `together`: tensor parallel (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053): a rank has a share of the heads
    and of the hidden width of each layer, and two all_reduces a layer add up the parts. Embedding and logits are on
    every rank. `decoded`: tokens, and the sums of the bits of their logits, (tokens, batch) each."""

    def __init__(self, rank: Rank, shape: Shape, dtype: torch.dtype, together: bool) -> None:
        self.rank, self.shape, self.together = rank, shape, together and rank.size > 1
        index, size = (rank.index, rank.size) if together else (0, 1)
        first, last = (each * shape.heads // size for each in (index, index + 1))
        self.heads, self.numbers = last - first, shape.width // shape.heads

        def own(weight: Tensor, rows: bool = True) -> Tensor:
            each = weight.shape[0 if rows else 1] // shape.heads
            part = slice(first * each, last * each)
            return (weight[part] if rows else weight[:, part]).to(dtype).contiguous()

        with torch.no_grad():
            made = transformer.transformer(shape, "fp32", rank.device)
            self.layers: list[tuple[Tensor, ...]] = []
            for block in made.blocks:
                assert isinstance(block, Block)
                queries = own(block.queries.weight) / math.sqrt(self.numbers)  # of attention, once for all steps
                self.layers.append((
                    block.before_attention.weight.to(dtype),
                    torch.cat([queries, own(block.keys.weight), own(block.values.weight)]),
                    own(block.output.weight, rows=False),
                    block.before_hidden.weight.to(dtype),
                    torch.cat([own(block.gate.weight), own(block.up.weight)]),
                    own(block.down.weight, rows=False),
                ))  # fmt: skip
            ends = made.embedding, made.logits, made.norm
            self.embedding, self.logits, self.norm = (end.weight.to(dtype) for end in ends)
            self.rotation = rotary(shape).to(rank.device, dtype)
        self.positions = torch.arange(shape.sequence, device=rank.device)

    def begin(self, batch: int) -> None:
        """A cache and what is decoded, of so many sequences: the same numbers on every device of one kind."""
        device, tokens = self.rank.device, TOKENS[self.rank.device.type]
        torch.manual_seed(1)
        cache = (len(self.layers), 2, batch, self.heads, self.shape.sequence, self.numbers)
        self.cache = torch.randn(cache, device=device, dtype=self.embedding.dtype)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.decoded = [torch.zeros((tokens, batch), dtype=torch.int64, device=device) for _ in range(2)]
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def again(self) -> None:
        self.at.zero_()
        self.token.copy_(torch.arange(len(self.token)) % self.shape.vocabulary)

    @property
    def nbytes(self) -> int:
        """What a step reads on this rank: its weights but the embedding, and its keys and values."""
        return sum(each.nbytes for each in (*sum(self.layers, ()), self.norm, self.logits, self.cache))

    @torch.no_grad()
    def step(self, communicate: bool = True) -> None:
        """Decode the next token of each sequence; without communication a wrong one, at the same cost."""
        tokens, sums = self.decoded
        here = self.at + (self.shape.sequence - len(tokens))
        later, rotation = self.positions > here, self.rotation.index_select(1, here)
        x = functional.embedding(self.token, self.embedding)
        for layer, (keys, values) in zip(self.layers, self.cache, strict=True):
            before_attention, attend, output, before_hidden, grow, down = layer
            parts = functional.linear(_norm(x, before_attention), attend)
            parts = parts.view(len(x), 3, self.heads, 1, self.numbers)
            query, key = rotated(parts[:, :2], rotation).unbind(1)
            keys.index_copy_(2, here, key)
            values.index_copy_(2, here, parts[:, 2])
            scores = query @ keys.transpose(-1, -2)
            mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ values
            x = x + self._sum(functional.linear(mixed.flatten(1), output), communicate)
            gate, up = functional.linear(_norm(x, before_hidden), grow).chunk(2, -1)
            x = x + self._sum(functional.linear(functional.silu(gate) * up, down), communicate)
        logits = functional.linear(_norm(x, self.norm), self.logits)
        self.token.copy_(logits.argmax(-1))
        tokens.index_copy_(0, self.at, self.token[None])
        sums.index_copy_(0, self.at, comparison.bits(logits).sum(-1, dtype=torch.int64)[None])
        self.finite.logical_and_(logits.isfinite().all())
        self.at += 1

    def _sum(self, part: Tensor, communicate: bool) -> Tensor:
        if self.together and communicate:
            dist.all_reduce(part, group=self.rank.group)
        return part


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, NORM_EPSILON)


def _needed(shape: Shape) -> int:
    """Bytes of GPU memory: of weights in fp32 and 16 bits, while it is made, or of the latter and the largest cache."""
    weights = 2 * (shape.multiplied + shape.width * shape.vocabulary)
    return weights + max(2 * weights, 4 * shape.layers * max(BATCHES["cuda"]) * shape.sequence * shape.width)


@loop.returns_memory()
def decode(rank: Rank, together: bool) -> tuple[list[Reading], str]:
    """Tokens/s of decoding at batch 1 and a larger one, in bf16. Each GPU has a model of its own, or `together` all
    have a part of one; then also the share of a step that waits for all_reduces. And what differed, if anything."""
    model, shape = MODELS[rank.device.type]
    recipe, dtype = RECIPES[rank.device.type]
    if together and rank.size > shape.heads:
        not_applicable(f"the model has {shape.heads} heads, fewer than there are ranks")
    if _needed(shape) > transformer.room(rank):
        transformer.too_large(model, _needed(shape))
    readings, trouble = [], []
    with rank.phase(f"decoding, {'tensor parallel' if together else 'each alone'}"):
        decoder = Decoder(rank, shape, dtype, together)
        for batch in BATCHES[rank.device.type]:
            decoder.begin(batch)
            # Shares of the heads may differ by one: the rank with most decides.
            nbytes = int(max(each for (each,) in everyones(rank, [decoder.nbytes])))
            with Watch(rank.gpu) as watch:
                taken, unlike = _timed(rank, decoder)
            way: dict[str, Condition] = {
                "model": model, "recipe": recipe, "ranks": rank.size if together else 1, "batch": batch,
                "sequence": shape.sequence, "workload": "inference",
            }  # fmt: skip
            rates = tuple(batch / each for each in taken)
            details: dict[str, Condition] = {"time a token": loop.ms(median(taken))}
            metric, place = ("decode_throughput", WORLD) if together else ("solo_decode_throughput", None)
            under = {**way, "bytes": nbytes}
            readings.append(Reading(metric, median(rates), under, rates, place, details, watch.state()))
            trouble += [f"batch {batch}: {each}" for each in (*unlike, *_unlike_others(rank, decoder))]
            if together:
                quiet, _ = _timed(rank, decoder, communicate=False)
                readings.append(replace(loop.communication_share(rank, way, taken, quiet), gpu_state=watch.state()))
    return readings, "; ".join(trouble)


def _timed(rank: Rank, decoder: Decoder, communicate: bool = True) -> tuple[tuple[float, ...], list[str]]:
    """Seconds of a step, by sample, and how what was decoded differed from one run to another."""
    count = TOKENS[rank.device.type]
    trouble: list[str] = []

    def run(step: Callable[[], object], usual: Sequence[Tensor] = ()) -> float:
        decoder.again()
        each = seconds(rank, step, count)
        for what, found, right in zip(("token", "logits of token"), decoder.decoded, usual, strict=False):
            if len(wrong := (found != right).nonzero()):
                number, sequence = wrong[0].tolist()
                trouble.append(f"{what} {number} of sequence {sequence} is another one when decoded again")
                break
        return each

    decoder.again()  # the steps that warm up go on from here, and behind the end of the cache there is nothing
    with _launched(rank, lambda: decoder.step(communicate)) as step:
        first = run(step)
        usual = [each.clone() for each in decoder.decoded]
        runs = agree(rank, min(max(math.ceil(SAMPLE_SECONDS[rank.device.type] / (first * count)), 1), 5))
        taken = tuple(median(run(step, usual) for _ in range(runs)) for _ in range(SAMPLES))
    return taken, trouble[:1]


@contextmanager
def _launched(rank: Rank, do: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """`do`, on GPUs as a CUDA graph on a stream of its own."""
    if rank.device.type != "cuda":
        for _ in range(WARM_UP):
            do()
        yield do
        return
    graph = captured(do, WARM_UP)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            yield graph.replay
    finally:
        torch.cuda.synchronize()
        graph.reset()  # one that holds a communicator keeps it from ending


def _unlike_others(rank: Rank, decoder: Decoder) -> list[str]:
    """What this rank decoded otherwise than most ranks. Only devices of one kind compute the same bits."""
    found = [] if decoder.finite else ["logits are NaN or infinite"]
    if len({number for (number,) in everyones(rank, [crc32(kind(rank.device).encode())])}) == 1:
        found += differences(rank, dict(zip(("tokens", "sums of logits"), decoder.decoded, strict=True)))
    return found
