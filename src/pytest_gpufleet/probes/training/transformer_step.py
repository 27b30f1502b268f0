"""How fast a small language model is trained, on each GPU alone and on all together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pytest_gpufleet.hardware.telemetry import Watch
from pytest_gpufleet.model.conditions import NO_SYNC
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.measurement import GpuState, Reading
from pytest_gpufleet.model.metric import Condition, GiB
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.compute.rate import lacking
from pytest_gpufleet.probes.timing.all_ranks import agree, everyones
from pytest_gpufleet.probes.training import parallel_methods
from pytest_gpufleet.probes.training.lap import SAMPLES, Lap, Step, lap, record_losses
from pytest_gpufleet.probes.training.loop import returns_memory
from pytest_gpufleet.probes.training.sharding import fully_sharded
from pytest_gpufleet.probes.training.transformer import SHAPES, Shape, Transformer, transformer
from pytest_gpufleet.world.rank import Rank

LARGEST_FIRST = ("transformer-0.6b", "transformer-0.1b")
REHEARSAL = "transformer-tiny"
RECIPE = "bf16"
FILLED = 0.8  # of the memory of a GPU
LEARNING_RATE = 1e-3
LEAD_IN = 0.25  # of the time of the samples: clock and power settle
LEAST_STEPS = 2  # of a sample

ALONE, TOGETHER = "", ("ddp", "fsdp")


@dataclass(frozen=True)
class Training:
    """A model by the name of its shape, as all GPUs of a world train it."""

    model: str
    batch: int

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def tokens(self) -> int:
        """Of a step, on one GPU."""
        return self.batch * self.shape.sequence

    def conditions(self, ranks: int, method: str) -> dict[str, Condition]:
        """What the figure depends on. Of another workload than ResNet, so that no limit of that holds for it."""
        conditions: dict[str, Condition] = {
            "model": self.model,
            "recipe": RECIPE,
            "ranks": ranks,
            "batch": self.batch,
            "sequence": self.shape.sequence,
            "workload": "transformer",
        }
        return {**conditions, "method": method} if method else conditions


def must_train(rank: Rank) -> None:
    """End the test as not applicable where a device does not have bf16."""
    if rank.device.type == "cuda" and (reason := lacking(RECIPE, rank.device)):
        not_applicable(reason)


def training_on(rank: Rank, model: str | None = None) -> Training:
    """The training of `model`, by default of the largest that fits, which all ranks come to alike: with half of its
    batch, or a quarter, where the memory of the smallest GPU has room for no more."""
    must_train(rank)
    if rank.device.type == "cpu":
        return Training(REHEARSAL, SHAPES[REHEARSAL].batch)
    room = FILLED * agree(rank, torch.cuda.get_device_properties(rank.device).total_memory)
    names = [model] if model else LARGEST_FIRST
    fitting = (Training(name, batch) for name in names if (batch := fitting_batch(SHAPES[name], room)))
    training = next(fitting, None)
    if training is None:
        shape = SHAPES[names[-1]]
        need = (shape.bytes_of_weights + shape.bytes_of_a_sequence) / FILLED / GiB
        not_applicable(f"{names[-1]} takes {need:.0f} GiB of GPU memory")
    return training


def fitting_batch(shape: Shape, room: float) -> int:
    """So many sequences as fit beside the weights into `room` bytes: the shape's batch, or that halved; 0 for none."""
    batch = shape.batch
    while batch and shape.bytes_of_weights + batch * shape.bytes_of_a_sequence > room:
        batch //= 2
    return batch


def sequences(shape: Shape, batch: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and the ones that follow them, (batch, sequence) each: each sequence counts up from a random token, which
    a model learns within some steps."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(shape.vocabulary, (batch, 1), generator=generator)
    tokens = ((first + torch.arange(shape.sequence + 1)) % shape.vocabulary).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def under(method: str, rank: Rank, model: Transformer) -> nn.Module:
    """The model as `method` trains it: "ddp", "fsdp", or alone."""
    if method == "ddp":
        return parallel_methods.distributed(rank, model)
    if method == "fsdp":
        return fully_sharded(rank, model, model.dtype, model.blocks)
    return model


def optimizer_of(module: nn.Module, method: str) -> torch.optim.Optimizer:
    """AdamW in one kernel for all weights; not under FSDP, whose shards older versions of torch do not fuse."""
    parameters = list(module.parameters())
    fused = method != "fsdp" and parameters[0].device.type == "cuda"
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=fused)


def step_of(module: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> Step:
    """One step of training on one batch."""

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = module(*data)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


@returns_memory
def token_throughput(rank: Rank, method: str = ALONE, model: str | None = None, *, seconds: float) -> list[Reading]:
    """Tokens/s of training a transformer in bf16 for about `seconds` in all: forward, loss, backward, AdamW.

    Each GPU trains a model of its own at the same time; with a `method` of TOGETHER all ranks train one, and the figure
    is their sum at the pace of the slowest. The median of three samples. With "ddp" steps without communication take
    turns with those: so there is also what each GPU does by itself, and the share of a step that waits for
    communication. Raises FloatingPointError if the loss is not finite.
    """
    training, together = training_on(rank, model), method in TOGETHER
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with rank.phase(f"{training.model} in bf16, batch {training.batch}, {method or 'alone'}"):
        module = under(method, rank, transformer(training.shape, RECIPE, rank.device))
        step = step_of(
            module,
            optimizer_of(module, method),
            sequences(training.shape, training.batch, 1 + rank.index, rank.device),
        )
        first = lap(rank, step, 1, together=together)
        samples_of = [step] if method != "ddp" else [step, _quiet(module, step)]
        tried = lap(rank, step, 2)
        count, warm_up = _counts(rank, tried, seconds / SAMPLES / len(samples_of))
        warm = lap(rank, step, warm_up, together=together)
        with Watch(rank.gpu) as watch:
            laps = [[lap(rank, each, count) for each in samples_of] for _ in range(SAMPLES)]
    usual, *quiet = zip(*laps, strict=True)
    conditions = training.conditions(rank.size if together else 1, method)
    course = [first, tried, warm, *(each for pair in laps for each in pair)]
    record_losses(rank, conditions, course, together=together)
    readings = [_throughput(rank, training, method, first, usual, watch.state)]
    for each in quiet:
        readings.append(_throughput(rank, training, NO_SYNC, first, each, watch.state))
        readings.append(_communication_share(rank, conditions, usual, each))
    return readings


def _quiet(module: nn.Module, step: Step) -> Step:
    """The same step without communication, after which ranks differ."""
    assert isinstance(module, DistributedDataParallel)

    def quiet() -> Tensor:
        with module.no_sync():
            return step()

    return quiet


def _counts(rank: Rank, tried: Lap, seconds: float) -> tuple[int, int]:
    """Steps of a sample of so many seconds, and of the warm-up, as the slowest rank would have them."""
    count = agree(rank, max(LEAST_STEPS, math.ceil(seconds / tried.mean)))
    return count, max(1, math.ceil(LEAD_IN * SAMPLES * count) - len(tried.steps))


def _throughput(
    rank: Rank,
    training: Training,
    method: str,
    first: Lap,
    laps: Sequence[Lap],
    state: GpuState | None,
) -> Reading:
    together = method in TOGETHER
    ranks = rank.size if together else 1
    rates = tuple(ranks * training.tokens * len(each.steps) / each.seconds for each in laps)
    return Reading(
        "token_throughput" if together else "solo_token_throughput",
        median(rates),
        training.conditions(ranks, method),
        rates,
        WORLD if together else None,
        _details(rank, training, first, laps, median(rates) / ranks),
        state,
    )


def _details(rank: Rank, training: Training, first: Lap, laps: Sequence[Lap], rate: float) -> dict[str, Condition]:
    """`rate`: tokens/s of one GPU."""
    step = median(seconds for each in laps for seconds in each.steps)
    details: dict[str, Condition] = {
        "computed": "in bf16, with weights, optimizer and loss in fp32",
        "step": f"{1e3 * step:.4g} ms",
        "TFLOP/s a GPU": float(f"{rate * training.shape.flop_a_token / 1e12:.4g}"),
        "loss": f"{first.loss:.3g} at first, {laps[-1].loss:.3g} in the end",
    }
    if rank.device.type == "cuda":
        details["memory"] = f"{torch.cuda.max_memory_allocated() / GiB:.1f} GiB a GPU"
    return details


def _communication_share(
    rank: Rank, conditions: dict[str, Condition], usual: Sequence[Lap], quiet: Sequence[Lap]
) -> Reading:
    """What the slowest rank's step is longer with communication than without."""
    every = everyones(rank, [each.mean for each in (*usual, *quiet)])
    slowest = [max(column) for column in zip(*every, strict=True)]
    pairs = zip(slowest[: len(usual)], slowest[len(usual) :], strict=True)
    shares = tuple(max(0.0, 1 - alone / all_in) for all_in, alone in pairs)
    return Reading("communication_share", median(shares), conditions, shares, WORLD)
