"""Whether a transformer is trained right: as in float32, as on one GPU, and to the same bits on all ranks."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_gpufleet.model.conditions import Condition
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.probes.training import transformer
from pytest_gpufleet.probes.training.correctness import differences, full_precision
from pytest_gpufleet.probes.training.loop import returns_memory
from pytest_gpufleet.probes.training.methods import under
from pytest_gpufleet.probes.training.transformer import ALONE, RECIPE, SHAPES, must_train, optimizer_of, step_of
from pytest_gpufleet.world.rank import Rank

STEPS = 20
# By how much the loss of a step in bf16 may differ, of the loss in float32. On a CPU the two shapes that are compared
# differed by up to 0.7 %; without the gradient of one of its linear layers the small one by 1.7 %.
TOLERANCE = 0.015
# The same of the first gradient of each weight, which shows what the losses of so simple data do not need, such as
# attention: its difference from that of float32, of the length of that. There up to 1.1 %.
GRADIENT_TOLERANCE = 0.05
# The same in float32. On a CPU sums in another order made 2e-7, and one of four ranks whose gradient was lost 8e-3.
SAME = 1e-3
LEARNED = 0.8  # of the first loss, at most, after so many steps


def _compared(rank: Rank) -> str:
    return "transformer-check" if rank.device.type == "cuda" else "transformer-tiny"


def _training(rank: Rank, recipe: str) -> dict[str, Condition]:
    """What of a training is the same on one rank and on all."""
    return {"model": _compared(rank), "recipe": recipe, "batch": SHAPES[_compared(rank)].batch}


def _losses(rank: Rank, recipe: str, method: str, parts: Iterable[int]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of STEPS steps on the sequences of these ranks, a batch each; what is left of the weights, their
    gradients and both moments of Adam."""
    name = _compared(rank)
    shape = SHAPES[name]
    with full_precision():
        model = transformer.transformer(shape, recipe, rank.device)
        module = under(method, rank, model, model.blocks, model.dtype)
        optimizer = optimizer_of(module, method)
        parted = [transformer.sequences(shape, shape.batch, part, rank.device) for part in parts]
        tokens, following = map(torch.cat, zip(*parted, strict=True))
        step = step_of(module, optimizer, (tokens, following))
        losses = torch.stack([step() for _ in range(STEPS)])
    return losses.tolist(), _state(module, optimizer)


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None  # every weight takes part
        state[f"weight {name}"], state[f"gradient {name}"] = parameter.detach(), parameter.grad
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{moment} {name}"] = optimizer.state[parameter][moment]
    return state


def _first_gradients(rank: Rank, recipe: str) -> dict[str, Tensor]:
    shape = SHAPES[_compared(rank)]
    with full_precision():
        model = transformer.transformer(shape, recipe, rank.device)
        model(*transformer.sequences(shape, shape.batch, 0, rank.device)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@returns_memory
def follows_fp32(rank: Rank) -> str:
    """Train a small transformer in bf16 and in float32, each rank alone and all on the same data: which of the first
    gradients differ, where the losses part, or that it did not learn; "" if all is well."""
    must_train(rank)
    with rank.phase("transformer in bf16, against fp32"):
        gradients, right = (_first_gradients(rank, each) for each in (RECIPE, "fp32"))
        if told := unlike(gradients, right, GRADIENT_TOLERANCE):
            return told
        (losses, _), (exact, _) = (_losses(rank, each, ALONE, [0]) for each in (RECIPE, "fp32"))
    for each, course in ((RECIPE, losses), ("fp32", exact)):
        rank.record_losses({**_training(rank, each), "ranks": 1}, dict(enumerate(course, 1)))
    return parting(losses, exact, TOLERANCE, "in fp32") or not_learned(losses)


@returns_memory
def trains_as_one(rank: Rank, method: str) -> str:
    """Train a small transformer in float32 by "ddp" or "fsdp", each rank on data of its own, and alone on the data of
    all: where the losses part, or that it did not learn; "" if neither."""
    with rank.phase(f"transformer by {method}, against one rank"):
        alone, _ = _losses(rank, "fp32", ALONE, range(rank.size))
        own, _ = _losses(rank, "fp32", method, [rank.index])
        mean = torch.tensor(own, dtype=torch.float64, device=rank.device)
        dist.all_reduce(mean, group=rank.group)
    together: list[float] = (mean / rank.size).tolist()
    if rank.index == 0:
        training = {**_training(rank, "fp32"), "ranks": rank.size, "method": method}
        rank.record_losses(training, dict(enumerate(together, 1)), WORLD)
    return parting(together, alone, SAME, "on one rank") or not_learned(alone)


@returns_memory
def ends_alike(rank: Rank) -> str:
    """Train a small transformer by DDP, each rank on data of its own: which weights, gradients or moments of Adam then
    differ in any bit from those of most ranks; "" if none does."""
    must_train(rank)
    with rank.phase("transformer in bf16 by ddp, compared between ranks"):
        return "; ".join(differences(rank, _losses(rank, RECIPE, "ddp", [rank.index])[1])[:3])


def unlike(gradients: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> str:
    """How many gradients differ from the exact ones by more than a part of their length, and the one that does most; ""
    if none does. NaN does."""
    parts = {name: float((gradients[name] - right).norm() / right.norm()) for name, right in exact.items()}
    wrong = {name: part for name, part in parts.items() if not part <= tolerance}
    if not wrong:
        return ""
    worst = max(wrong, key=lambda name: (math.isnan(wrong[name]), wrong[name]))
    return f"{len(wrong)} of {len(parts)} gradients are not those in fp32, {worst} by {wrong[worst]:.1%}"


def parting(losses: list[float], exact: list[float], tolerance: float, what: str) -> str:
    """The first step in which losses differ by more than a part of the exact ones; "" if none does. NaN does."""
    for step, (loss, right) in enumerate(zip(losses, exact, strict=True)):
        if not abs(loss - right) <= tolerance * right:
            return f"the loss of step {step} is {loss:.5g}, and {right:.5g} {what}"
    return ""


def not_learned(losses: list[float]) -> str:
    first, last = losses[0], losses[-1]
    return "" if last <= LEARNED * first else f"it did not learn: loss {first:.4g} at first, {last:.4g} in the end"
