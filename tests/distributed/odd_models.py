"""Small models that ask for trouble when they are spread over ranks, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.models.gpt import GPT
from tests.distributed import cases
from tests.distributed.cases import BATCH

SHAPE = cases.SHAPE | {"layers": 4}


class Odd(nn.Module):
    """Parameters with fewer rows, columns or elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.shift = nn.Parameter(torch.randn(3))
        self.up = nn.Linear(5, 3)
        self.down = nn.Linear(3, 2)
        self.one = nn.Linear(2, 1)
        self.head = nn.Linear(1, 10)

    tp_plan = {"up": "colwise", "down": "rowwise", "one": "colwise_rep", "head": "colwise_rep"}  # noqa: RUF012

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.scale * (inputs + F.pad(self.shift, (0, 2)))
        logits: Tensor = self.head(self.one(self.down(self.up(hidden).tanh())))
        return logits


def unrouted() -> nn.Module:
    """A mixture whose last expert no token ever chooses."""
    model = cases.MODELS["moe"]()
    with torch.no_grad():
        for block in model.blocks:
            # The router's first input is the same for every token, and speaks against one expert.
            block.mlp_norm.weight[0], block.mlp_norm.bias[0] = 0.0, 100.0
            block.mlp.router.weight[:, 0] = 0.0
            block.mlp.router.weight[4, 0] = -1.0
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **cases.MODELS,
    "gpt": lambda: GPT(**SHAPE, tied=False, bias=True),
    "tied": lambda: GPT(**SHAPE, tied=True, bias=False),
    "few_words": lambda: GPT(**(SHAPE | {"vocabulary": 3}), tied=False, bias=True),
    "few_words_tied": lambda: GPT(**(SHAPE | {"vocabulary": 3}), tied=True, bias=True),
    "odd": Odd,
    "unrouted": unrouted,
}
NOT_OF_TOKENS = ("conv", "odd")


def make(model: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """One of MODELS, the same weights each time."""
    torch.manual_seed(0)
    return MODELS[model]().to(dtype)


def batch_for(model: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a whole batch."""
    generator = torch.Generator().manual_seed(1)
    if model not in NOT_OF_TOKENS:
        words = 3 if model.startswith("few_words") else SHAPE["vocabulary"]
        drawn = torch.randint(words, (2, BATCH, 12), generator=generator)
        return drawn[0], drawn[1]
    shape = (BATCH, 1, 8, 8) if model == "conv" else (BATCH, 5)
    inputs = torch.randn(shape, generator=generator).to(dtype)
    return inputs, torch.randint(10, (BATCH,), generator=generator)
