"""A small language model as Llama is built (Touvron et al. 2023, arXiv:2302.13971), in plain PyTorch: RMSNorm before
each part, rotary positions, causal attention, SwiGLU, no biases, no dropout.

Weights are kept in float32 and cast to the precision of the products where they are used, so that one model serves
every precision and every way to train on several GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPSILON, ROTARY_BASE, INITIAL_DEVIATION = 1e-5, 10_000.0, 0.02  # as Llama 2 has them


@dataclass(frozen=True)
class Shape:
    """`width`, `layers`, `heads` and the `hidden` width of SwiGLU; `sequence`: tokens of one; `batch`: sequences a GPU,
    where they fit."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def multiplied(self) -> int:
        """The weights that take part in matrix products: all but those of the norms and of the embedding, in which a
        token is looked up."""
        return self.layers * (4 * self.width**2 + 3 * self.width * self.hidden) + self.width * self.vocabulary

    @property
    def flop_a_token(self) -> float:
        """Operations of a training step for each token, 6N + 12 L H Q T: Chowdhery et al. 2022 (PaLM,
        arXiv:2204.02311), appendix B. N: weights that are multiplied; L layers of H heads of Q numbers; T tokens a
        sequence. As there, the half of attention that a causal mask leaves out is counted, and nothing that is computed
        a second time."""
        return 6 * self.multiplied + 12 * self.layers * self.width * self.sequence

    @property
    def least_flop_a_token(self) -> float:
        """The same without the half that is masked, which good kernels do not compute."""
        return 6 * self.multiplied + 6 * self.layers * self.width * self.sequence

    @property
    def bytes_of_weights(self) -> int:
        """GPU memory of what training keeps for the weights: in float32 themselves, their gradients and two moments of
        Adam, and a copy in 16 bits."""
        every = self.multiplied + self.width * self.vocabulary + (2 * self.layers + 1) * self.width
        return (4 + 4 + 8 + 2) * every

    @property
    def bytes_of_a_sequence(self) -> int:
        """GPU memory of what forward keeps for backward, in 16 bits: of a layer both norms' inputs and outputs,
        queries, keys, values, the output of attention, and four of the hidden width; of the loss the logits in 16 bits,
        in float32, their softmax and its gradient."""
        return self.sequence * (self.layers * (18 * self.width + 8 * self.hidden) + 14 * self.vocabulary)


# On an H200 a step of the first takes some tenths of a second, so that seconds hold many of them; by its memory it is
# the largest of which a GPU with 24 GiB still trains one sequence. The second is for GPUs with less.
SHAPES = {
    "transformer-0.6b": Shape(1536, 16, 12, 4096, 32_000, 4096, batch=4),
    "transformer-0.1b": Shape(768, 12, 12, 2048, 32_000, 2048, batch=4),
    "transformer-1.3b": Shape(2048, 24, 16, 5504, 32_000, 4096, batch=4),
    # To be compared and not timed: heads as wide as those above, so that the same kernels compute them.
    "transformer-check": Shape(256, 2, 2, 512, 256, 256, batch=4),
    "transformer-tiny": Shape(64, 2, 2, 128, 64, 32, batch=2),  # of a rehearsal
}


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of products and activations, by recipe


class Linear(nn.Module):
    """A linear layer without bias that multiplies in the precision of x."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.normal_(self.weight, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        # A weight of another type would keep torch from its fused kernel.
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPSILON)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.queries, self.keys, self.values, self.output = (Linear(shape.width, shape.width) for _ in range(4))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        mixed = functional.scaled_dot_product_attention(rotated(q, turn), rotated(k, turn), v, is_causal=True)
        together: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return together


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (Linear(shape.width, shape.hidden) for _ in range(2))
        self.down = Linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return down


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.before_hidden = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attention, self.hidden = Attention(shape), SwiGLU(shape)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), turn)
        grown: Tensor = x + self.hidden(self.before_hidden(x))
        return grown


class Transformer(nn.Module):
    """Gives the loss of a batch: the mean cross entropy of the next token, in float32."""

    turn: Tensor

    def __init__(self, shape: Shape, recipe: str) -> None:
        super().__init__()
        self.dtype = PRECISIONS[recipe]
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=INITIAL_DEVIATION)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.logits = Linear(shape.width, shape.vocabulary)
        self.register_buffer("turn", turns(shape), persistent=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens).to(self.dtype)
        turn = self.turn.to(self.dtype)
        for block in self.blocks:
            x = block(x, turn)
        return functional.cross_entropy(self.logits(self.norm(x)).flatten(0, 1).float(), following.flatten())


def turns(shape: Shape) -> Tensor:
    """Cosine and sine of each position and each pair of a head's numbers: (2, sequence, numbers of a head)."""
    numbers = shape.width // shape.heads
    frequencies = ROTARY_BASE ** (-torch.arange(0, numbers, 2).double() / numbers)
    angles = torch.outer(torch.arange(shape.sequence).double(), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """x (batch, heads, sequence, numbers), turned by its positions: number i with number i + half."""
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-second, first], -1) * turn[1]


def transformer(shape: Shape, recipe: str, device: torch.device) -> Transformer:
    """The model, with the same weights on every device of one kind."""
    torch.manual_seed(0)
    with device:  # made there: on the CPU it takes seconds
        made = Transformer(shape, recipe)
    return made.train()
