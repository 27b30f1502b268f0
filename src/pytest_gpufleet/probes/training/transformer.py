"""A small language model as Llama is built (Touvron et al. 2023, arXiv:2302.13971), in plain PyTorch: RMSNorm before
each part, rotary positions, causal attention, SwiGLU, no biases, no dropout.

Weights are kept in float32 and cast to the precision of the matmuls where they are used, so that one model serves
every precision and every way to train on several GPUs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gpufleet.machine.nvml import Watch
from pytest_gpufleet.model.conditions import NO_SYNC, Condition
from pytest_gpufleet.model.endings import not_applicable
from pytest_gpufleet.model.metric import GiB, Reading
from pytest_gpufleet.probes.compute.rate import must_have
from pytest_gpufleet.probes.timing import agree, everyones
from pytest_gpufleet.probes.training import loop
from pytest_gpufleet.probes.training.correctness import differences, full_precision
from pytest_gpufleet.probes.training.recipes import Step, make_optimizer
from pytest_gpufleet.world.world import Rank

NORM_EPSILON, ROTARY_BASE, INITIAL_DEVIATION = 1e-5, 10_000.0, 0.02  # as Llama 2 has them


@dataclass(frozen=True)
class Shape:
    """`hidden`: the width of SwiGLU. `sequence`: tokens of one. `batch`: sequences a GPU, where they fit."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def multiplied(self) -> int:
        """The weights that take part in matmuls: all but those of the norms and of the embedding."""
        return self.layers * (4 * self.width**2 + 3 * self.width * self.hidden) + self.width * self.vocabulary

    @property
    def flop_a_token(self) -> float:
        """Operations of a training step for each token, 6N + 12 L H Q T (Chowdhery et al. 2022, PaLM, arXiv:2204.02311,
        appendix B): N weights that are multiplied, L layers of H heads of Q numbers, T tokens a sequence. As there, the
        half of attention that a causal mask leaves out is counted, and nothing that is computed a second time."""
        return 6 * self.multiplied + 12 * self.layers * self.width * self.sequence

    @property
    def least_flop_a_token(self) -> float:
        """The same without the half that is masked, which good kernels do not compute."""
        return 6 * self.multiplied + 6 * self.layers * self.width * self.sequence

    @property
    def bytes_of_weights(self) -> int:
        """Of training: weights, gradients and two moments of Adam in float32, and a copy of the weights in 16 bits."""
        every = self.multiplied + self.width * self.vocabulary + (2 * self.layers + 1) * self.width
        return (4 + 4 + 8 + 2) * every

    @property
    def bytes_of_a_sequence(self) -> int:
        """What forward keeps for backward, in 16 bits: of a layer both norms' inputs and outputs, queries, keys and
        values, attention, and four of the hidden width; of the loss the logits, in float32, softmax and gradient."""
        return self.sequence * (self.layers * (18 * self.width + 8 * self.hidden) + 14 * self.vocabulary)


# On an H200 a step of the first takes some tenths of a second, so that seconds hold many of them; by its memory it is
# the largest of which a GPU with 24 GiB still trains one sequence. The second is for GPUs with less.
SHAPES = {
    "transformer-0.6b": Shape(1536, 16, 12, 4096, 32_000, 4096, batch=4),
    "transformer-0.1b": Shape(768, 12, 12, 2048, 32_000, 2048, batch=4),
    "transformer-1.3b": Shape(2048, 24, 16, 5504, 32_000, 4096, batch=4),
    # To decode: layers as wide as those of Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288), a fourth as many, since
    # narrower ones wait for launches and not for memory.
    "transformer-1.8b": Shape(4096, 8, 32, 11_008, 32_000, 1024, batch=64),
    # To be compared and not timed: heads as wide as those above, so that the same kernels compute them.
    "transformer-check": Shape(256, 2, 2, 512, 256, 256, batch=4),
    "transformer-tiny": Shape(64, 2, 2, 128, 64, 32, batch=2),  # of a rehearsal
}


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of matmuls and activations, by recipe


class Linear(nn.Linear):
    """A linear layer that multiplies in the precision of x."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        # A weight of another type would keep torch from its fused kernel.
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPSILON)


class Block(nn.Module):
    """A layer: attention, then SwiGLU, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, square, wide = shape.heads, (shape.width, shape.width), (shape.width, shape.hidden)
        self.before_attention, self.before_hidden = RMSNorm(shape.width), RMSNorm(shape.width)
        self.queries, self.keys, self.values, self.output = (Linear(*square, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (Linear(*each, bias=False) for each in (wide, wide, wide[::-1]))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        own, parts = self.before_attention(x), (self.queries, self.keys, self.values)
        q, k, v = (part(own).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(rotated(q, rotation), rotated(k, rotation), v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        own = self.before_hidden(x)
        result: Tensor = x + self.down(functional.silu(self.gate(own)) * self.up(own))
        return result


class Transformer(nn.Module):
    """Gives the loss of a batch."""

    rotation: Tensor

    def __init__(self, shape: Shape, recipe: str) -> None:
        super().__init__()
        self.dtype = PRECISIONS[recipe]
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=INITIAL_DEVIATION)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.logits = Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("rotation", rotary(shape), persistent=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens).to(self.dtype)
        rotation = self.rotation.to(self.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        return functional.cross_entropy(self.logits(self.norm(x)).flatten(0, 1).float(), following.flatten())


def rotary(shape: Shape) -> Tensor:
    """Cosine and sine of each position and each pair of a head's numbers: (2, sequence, numbers of a head)."""
    numbers = shape.width // shape.heads
    frequencies = ROTARY_BASE ** (-torch.arange(0, numbers, 2).double() / numbers)
    angles = torch.outer(torch.arange(shape.sequence).double(), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """x (batch, heads, sequence, numbers), rotated by its positions: number i with number i + half."""
    first, second = x.chunk(2, -1)
    return x * rotation[0] + torch.cat([-second, first], -1) * rotation[1]


def transformer(shape: Shape, recipe: str, device: torch.device) -> Transformer:
    torch.manual_seed(0)  # the same weights on every device of one kind
    with device:  # made there: on the CPU it takes seconds
        made = Transformer(shape, recipe)
    return made.train()


REHEARSAL = "transformer-tiny"
RECIPE = "bf16"
FILLED = 0.8  # of the memory of a GPU
LEAD_IN = 0.25  # of the time of the samples: clock and power settle

ALONE, TOGETHER = "", ("ddp", "fsdp")


def fitting_model(rank: Rank, model: str | None = None) -> tuple[str, int]:
    """A model by the name of its shape, by default the largest that fits the smallest GPU, and its batch there."""
    must_have(RECIPE, rank.device)
    if rank.device.type == "cpu":
        return REHEARSAL, SHAPES[REHEARSAL].batch
    for name in [model] if model else ["transformer-0.6b", "transformer-0.1b"]:
        if batch := fitting_batch(SHAPES[name], room(rank)):
            return name, batch
    return too_large(name, SHAPES[name].bytes_of_weights + SHAPES[name].bytes_of_a_sequence)


def room(rank: Rank) -> float:
    """Bytes of memory that may be taken of every GPU."""
    on_gpu = rank.device.type == "cuda"
    return FILLED * agree(rank, torch.cuda.get_device_properties(rank.device).total_memory) if on_gpu else math.inf


def too_large(model: str, nbytes: int) -> NoReturn:
    not_applicable(f"{model} takes {nbytes / FILLED / GiB:.0f} GiB of GPU memory")


def fitting_batch(shape: Shape, room: float) -> int:
    """So many sequences as fit beside the weights into `room` bytes: the shape's batch, or that halved; 0 for none."""
    batch = shape.batch
    while batch and shape.bytes_of_weights + batch * shape.bytes_of_a_sequence > room:
        batch //= 2
    return batch


def sequences(shape: Shape, batch: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and the ones that follow them, (batch, sequence) each, which count up from a random token: soon learnt."""
    first = torch.randint(shape.vocabulary, (batch, 1), generator=torch.Generator().manual_seed(seed))
    tokens = ((first + torch.arange(shape.sequence + 1)) % shape.vocabulary).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trainer(module: nn.Module, method: str, data: Sequence[Tensor]) -> tuple[Step, torch.optim.Optimizer]:
    """A step, and AdamW, in one kernel but under FSDP, whose shards older versions of torch do not fuse."""
    parameters = list(module.parameters())
    device = parameters[0].device.type
    optimizer = make_optimizer("adamw", parameters, fused=method != "fsdp" and device == "cuda")
    return partial(loop.fed(module, optimizer, torch.amp.GradScaler(device, enabled=False)), *data), optimizer


@loop.returns_memory()
def token_throughput(rank: Rank, method: str = ALONE, model: str | None = None, *, seconds: float) -> list[Reading]:
    """Tokens/s of training a transformer in bf16 for about `seconds` in all: forward, loss, backward, AdamW; the median
    of three samples. Each GPU trains a model of its own at the same time; with a `method` of TOGETHER all ranks train
    one. With "ddp" also what each GPU does without communication, and the share of a step that waits for it."""
    model, batch = fitting_model(rank, model)
    shape, together = SHAPES[model], method in TOGETHER
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with rank.phase(f"{model} in bf16, batch {batch}, {method or 'alone'}"):
        made = transformer(shape, RECIPE, rank.device)
        module = loop.under(method, rank, made, made.blocks, made.dtype)
        step, _ = trainer(module, method, sequences(shape, batch, 1 + rank.index, rank.device))
        quiet = loop.without_communication(module, step) if method == "ddp" else None
        course = [loop.lap(rank, step, 1, together=together), loop.lap(rank, step, 2)]
        count = agree(rank, max(2, math.ceil(seconds / loop.SAMPLES / (2 if quiet else 1) / course[-1].mean)))
        warm_up = max(1, math.ceil(LEAD_IN * loop.SAMPLES * count) - 2)
        course.append(loop.lap(rank, step, warm_up, together=together))
        with Watch(rank.gpu) as watch:
            laps = loop.sampled(rank, course, step, quiet, count, together=True)
    # Of another workload than ResNet, so that no limit of that holds for it.
    size: dict[str, Condition] = {"batch": batch, "sequence": shape.sequence}
    under = {"model": model, "recipe": RECIPE, "ranks": rank.size if together else 1, **size, "workload": "transformer"}
    alone, under = under | {"ranks": 1, "method": NO_SYNC}, under | ({"method": method} if method else {})
    loop.record_losses(rank, under, course, together=together)
    loop.must_have_learned(course[0], laps.usual[-1])

    def reading(of: list[loop.Lap], at: dict[str, Condition], together: bool) -> Reading:
        tokens = (rank.size if together else 1) * batch * shape.sequence  # of a step
        flop = batch * shape.sequence / median(each.mean for each in of) * shape.flop_a_token
        about = loop.details(rank, "in bf16, with weights, optimizer and loss in fp32", course[0], of)
        about["TFLOP/s a GPU"] = float(f"{flop / 1e12:.4g}")
        return loop.throughput("token_throughput", tokens, of, at, together, details=about, gpu_state=watch.state())

    readings = [reading(laps.usual, under, together)]
    if quiet:
        readings.append(reading(laps.quiet, alone, False))
        readings.append(loop.communication_share(rank, under, *([each.mean for each in some] for some in laps[:2])))
    return readings


# Whether a transformer is trained right: as in float32, as on one GPU, and to the same bits on all ranks.

STEPS = 20
LEARNED = 0.8  # of the first loss is left after so many
# By how much the loss of a step in bf16 may differ, of the loss in float32. On a CPU the two shapes that are compared
# differed by up to 0.7 %; without the gradient of one of its linear layers the small one by 1.7 %.
TOLERANCE = 0.015
# The same of the first gradient of each weight, which shows what the losses of so simple data do not need, such as
# attention: its difference from that of float32, of the length of that. There up to 1.1 %.
GRADIENT_TOLERANCE = 0.05
# The same in float32. On a CPU sums in another order made 2e-7, and one of four ranks whose gradient was lost 8e-3.
SAME = 1e-3


def _trained(
    rank: Rank, recipe: str, method: str, parts: Iterable[int], steps: int = STEPS
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    """The losses of steps on the sequences of these ranks, and what was trained, by what."""
    shape = SHAPES["transformer-check" if rank.device.type == "cuda" else REHEARSAL]
    with full_precision():
        model = transformer(shape, recipe, rank.device)
        module = loop.under(method, rank, model, model.blocks, model.dtype)
        parted = [sequences(shape, shape.batch, part, rank.device) for part in parts]
        step, optimizer = trainer(module, method, [torch.cat(each) for each in zip(*parted, strict=True)])
        losses = torch.stack([step() for _ in range(steps)])
    return losses.tolist(), module, optimizer


@loop.returns_memory()
def follows_fp32(rank: Rank) -> str:
    """Which first gradients of each rank in bf16 differ from those in float32, where losses part, or did not fall."""
    must_have(RECIPE, rank.device)

    def first_gradients(recipe: str) -> dict[str, Tensor]:
        _, model, _ = _trained(rank, recipe, ALONE, [0], steps=1)
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    with rank.phase("transformer in bf16, against fp32"):
        if different := unlike(first_gradients(RECIPE), first_gradients("fp32"), GRADIENT_TOLERANCE):
            return different
        losses, exact = (_trained(rank, each, ALONE, [0])[0] for each in (RECIPE, "fp32"))
    return first_difference(losses, exact, TOLERANCE, "in fp32") or loop.not_learned(losses[0], losses[-1], LEARNED)


@loop.returns_memory()
def trains_as_one(rank: Rank, method: str) -> str:
    """The same of one in float32 by "ddp" or "fsdp", each rank on data of its own, and alone on the data of all."""
    with rank.phase(f"transformer by {method}, against one rank"):
        alone, *_ = _trained(rank, "fp32", ALONE, range(rank.size))
        own, *_ = _trained(rank, "fp32", method, [rank.index])
        together = [fmean(step) for step in zip(*everyones(rank, own), strict=True)]
    return first_difference(together, alone, SAME, "on one rank") or loop.not_learned(alone[0], alone[-1], LEARNED)


@loop.returns_memory()
def ends_alike(rank: Rank) -> str:
    """Which weights, gradients or moments of Adam differ in any bit from those of most ranks, after training by DDP."""
    must_have(RECIPE, rank.device)
    with rank.phase("transformer in bf16 by ddp, compared between ranks"):
        _, module, optimizer = _trained(rank, RECIPE, "ddp", [rank.index])
        state: dict[str, Tensor] = {}
        for name, weight in module.named_parameters():
            assert weight.grad is not None  # every weight takes part
            state |= {f"weight {name}": weight.detach(), f"gradient {name}": weight.grad}
            state |= {f"{moment} {name}": optimizer.state[weight][moment] for moment in ("exp_avg", "exp_avg_sq")}
        return "; ".join(differences(rank, state)[:3])


def unlike(gradients: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> str:
    """How many gradients are off by more than a part of their length, as NaN is, and the worst; "" if none."""
    parts = {name: float((gradients[name] - right).norm() / right.norm()) for name, right in exact.items()}
    wrong = {name: part for name, part in parts.items() if not part <= tolerance}
    if not wrong:
        return ""
    worst = max(wrong, key=lambda name: (math.isnan(wrong[name]), wrong[name]))
    return f"{len(wrong)} of {len(parts)} gradients are not those in fp32, {worst} by {wrong[worst]:.1%}"


def first_difference(losses: list[float], exact: list[float], tolerance: float, what: str) -> str:
    """The first step in which losses differ by more than a part of the exact ones; "" if none does. NaN does."""
    for step, (loss, right) in enumerate(zip(losses, exact, strict=True)):
        if not abs(loss - right) <= tolerance * right:
            return f"the loss of step {step} is {loss:.5g}, and {right:.5g} {what}"
    return ""
