"""Single optimizer steps in a loop of one's own, under any plugin, and how far two of them differ.

The loss is scaled by 1024 unless a test says otherwise, and a step is plain SGD at a rate of 1: so
no wrong factor goes unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner import SkipRule
from runner.booster import Booster, LossScale, Plugin, SinglePlugin
from runner.clip import Decision, build
from runner.models.gpt import GPT
from runner.parallel.full_state_dict import gathered
from tests.distributed import cases
from tests.distributed.cases import BATCH, unlike
from tests.ranks import run_ranks

Clip = tuple[str, float | None, float]
"""A mode, its threshold and its norm type."""

NORM: Clip = ("norm", 0.05, 2.0)

PLAN = {"embed": "embedding_rowwise", "up": "colwise", "down": "rowwise", "head": "colwise_rep"}
WHOLE = PLAN | {"norm": "replicated_with_grad_allreduce"}
GATHERED = {**dict.fromkeys(("up", "head"), "colwise_gather_output"), "down": "rowwise_split_input"}
PLUGINS: dict[str, Callable[[], Plugin]] = cases.PLUGINS | {
    "some_split": partial(
        cases.Tensors, tp_plan={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    ),
    "planned": partial(cases.Tensors, tp_plan=WHOLE),
    "gathered": partial(cases.Tensors, tp_plan=GATHERED),
    "planned_zero3": partial(cases.Hybrid, tp_size=2, zero_stage=3, tp_plan=WHOLE),
}
SGD = partial(torch.optim.SGD, lr=1.0)

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


class Heads(nn.Module):
    """A norm of single heads between split layers; the vocabulary divides by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8, padding_idx=0)
        self.up = nn.Linear(8, 12)
        self.norm = nn.RMSNorm(3)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embed(tokens)
        heads = self.norm(self.up(hidden).unflatten(-1, (-1, 3)))
        return self.head(hidden + self.down(heads.flatten(-2)).tanh())


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
    "heads": Heads,
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


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over everything but the last dimension of the outputs."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Loop:
    """A boosted model and its optimizer, with the calls of a training loop written by hand."""

    def __init__(
        self,
        plugin: str | Plugin | None,
        model: nn.Module,
        scale: float | None = 1024.0,
        skip: SkipRule | None = None,
        optimizer: Callable[..., Any] = SGD,
    ) -> None:
        named = PLUGINS[plugin]() if isinstance(plugin, str) else plugin
        self.plugin: Plugin = SinglePlugin() if named is None else named
        loss_scale = None if scale is None else LossScale(scale)
        self.booster = Booster(plugin=self.plugin, loss_scale=loss_scale, skip=skip)
        self.raw = model
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer(model.parameters()))
        self.layout = self.optimizer.layout

    def part(self, whole: Tensor) -> Tensor:
        """What this rank reads of a whole batch."""
        return whole.chunk(self.plugin.data_size)[self.plugin.data_rank]

    def backward(
        self, inputs: Tensor, targets: Tensor, share: float = 1.0, added: float = 0.0
    ) -> None:
        """Backward pass of the mean loss of a whole batch, times ``share``, plus a constant."""
        pair = self.part(inputs), self.part(targets)

        def loss(outputs: Tensor, wanted: Tensor) -> Tensor:
            return cross_entropy(outputs, wanted) * share + added

        if self.model.pipeline is not None:
            self.booster.execute_pipeline(iter([pair]), self.model, loss, self.optimizer)
        else:
            self.booster.backward(loss(self.model(pair[0]), pair[1]), self.optimizer)

    def gradients(self) -> dict[str, Tensor]:
        """Of the whole model, on the first rank."""
        return gathered(self.raw, self.model.renamed, lambda p: p.grad)

    def weights(self) -> dict[str, Tensor]:
        """Of the whole model, on the first rank."""
        return gathered(self.raw, self.model.renamed)

    def clip(self, clip: Clip, exclude: Any = "auto") -> Decision:
        """Clip by a mode that is bound to the layout."""
        name, threshold, norm_type = clip
        options = {"exclude": exclude} if name == "adaptive" else {}
        mode = build(name, threshold=threshold, norm_type=norm_type, **options)
        mode.bind(self.layout)
        return self.optimizer.clip(mode)

    def stepped(self, clip: Clip = NORM, exclude: Any = "auto") -> dict[str, Any]:
        """Clip and step; return metrics on every rank, whole gradients and weights on the first."""
        metrics = [float(metric) for metric in self.clip(clip, exclude).metrics]
        gradients = self.gradients()
        taken = self.optimizer.step()
        weights = self.weights()
        return {"metrics": metrics, "gradients": gradients, "taken": taken, "weights": weights}


def one_step(model: str, plugin: str | None, clip: Clip, exclude: Any = "auto") -> dict[str, Any]:
    """Take one step; return what :meth:`Loop.stepped` does, and about the layout of this rank."""
    loop = Loop(plugin, make(model))
    loop.backward(*batch_for(model))
    shards = loop.layout.shards
    return {
        **loop.stepped(clip, exclude),
        "names": sorted(loop.layout.names),
        "heads": loop.layout.heads,
        "cut": {shard.name for shard in shards if shard.shard_groups},
        "empty": any(shard.weight.numel() == 0 for shard in shards),
    }


def one_step_each(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [one_step(**step) for step in requests]


METRICS = ("norm", "norm_clipped", "coef", "clipped", "fraction", "peak", "threshold")
EXACT = ("clipped", "fraction", "threshold")


def unlike_one_process(ours: Sequence[dict[str, Any]], single: dict[str, Any]) -> list[str]:
    """Describe the differences between the ranks and one process; empty if there are none."""
    problems = []
    for rank, result in enumerate(ours):
        bits = [metric.hex() for metric in result["metrics"]]
        if bits != [metric.hex() for metric in ours[0]["metrics"]]:
            problems.append(f"rank {rank} has other metrics than rank 0")
        if result["taken"] != single["taken"]:
            problems.append(f"rank {rank}: step taken: {result['taken']}")
        for key, a, b in zip(METRICS, result["metrics"], single["metrics"], strict=True):
            same = a == b or (math.isnan(a) and math.isnan(b))
            close = key not in EXACT and abs(a - b) <= 1e-12 * abs(b)
            if not (same or close):
                problems.append(f"rank {rank}: {key} {a!r} instead of {b!r}")
    for what in ("gradients", "weights"):
        problems += unlike(what, ours[0][what], single[what], 1e-12)
    return problems


def assert_one_process(
    world: int, requests: Sequence[Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Assert that ranks take the steps ``asked`` for as one process does; return what each did."""
    ranks = run_ranks(one_step_each, world, list(requests))
    wrong = []
    for number, step in enumerate(requests):
        single = one_step(**{**step, "plugin": None})
        problems = unlike_one_process([rank[number] for rank in ranks], single)
        if problems:
            wrong.append(f"{dict(step)}: {problems[:6]}")
    assert not wrong, "\n".join(wrong)
    return ranks
