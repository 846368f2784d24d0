"""Single optimizer steps in a loop of one's own, under any plugin, and how far two of them differ.

The loss is scaled by 1024 unless a test says otherwise, and a step is plain SGD at a rate of 1: so
no wrong factor goes unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.booster import Booster, LossScale, Plugin, SinglePlugin
from runner.booster.parallel.gathering import gathered
from runner.booster.plugin import HybridParallelPlugin, TensorParallelPlugin
from runner.clip import Outcome, build
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from tests.distributed.cases import PLUGINS as CASE_PLUGINS
from tests.distributed.training import network
from tests.ranks import run_ranks

BATCH = 12
SHAPE = {"vocabulary": 17, "context": 12, "layers": 4, "heads": 4, "width": 12, "dropout": 0.0}
Clip = tuple[str, float | None, float]
"""A mode, its threshold and its norm type."""

NORM: Clip = ("norm", 0.05, 2.0)


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


class Forked(nn.Module):
    """Which of two branches is used depends on the batch; the rest is used always."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        branch = self.left if float(inputs[0, 0].detach()) > 0 else self.right
        logits: Tensor = self.head(branch(self.enter(inputs)).tanh())
        return logits


def frozen(but: Callable[[str], bool]) -> nn.Module:
    """A transformer of which only some parameters are trained."""
    model = GPT(**SHAPE, tied=False, bias=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(but(name))
    return model


def mixture() -> MixtureGPT:
    """Two layers of five experts each, which ranks share unevenly."""
    return MixtureGPT(**(SHAPE | {"layers": 2}), tied=False, bias=True, experts=5, top_k=2)


def unrouted() -> nn.Module:
    """A mixture whose last expert no token ever chooses."""
    model = mixture()
    with torch.no_grad():
        for block in model.blocks:
            # The router's first input is the same for every token, and speaks against one expert.
            block.mlp_norm.weight[0], block.mlp_norm.bias[0] = 0.0, 100.0
            block.mlp.router.weight[:, 0] = 0.0
            block.mlp.router.weight[4, 0] = -1.0
    return model


PLUGINS: dict[str, Callable[[], Plugin]] = {
    **CASE_PLUGINS,
    "data": HybridParallelPlugin,
    "some_split": lambda: TensorParallelPlugin(
        tp_plan={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
    ),
}
SECOND_HALF = ("blocks.2", "blocks.3", "norm", "head")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(**SHAPE, tied=False, bias=True),
    "tied": lambda: GPT(**SHAPE, tied=True, bias=False),
    "moe": mixture,
    "conv": lambda: network("images"),
    "few_words": lambda: GPT(**(SHAPE | {"vocabulary": 3}), tied=False, bias=True),
    "few_words_tied": lambda: GPT(**(SHAPE | {"vocabulary": 3}), tied=True, bias=True),
    "odd": Odd,
    "forked": Forked,
    "unrouted": unrouted,
    "first_frozen": lambda: frozen(lambda name: name.startswith(SECOND_HALF)),
    "second_frozen": lambda: frozen(lambda name: not name.startswith(SECOND_HALF)),
    "adapter": lambda: frozen(lambda name: name.startswith("blocks.1.mlp.up")),
}
NOT_OF_TOKENS = ("conv", "odd", "forked")


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
    if model == "forked":
        # Of two data parts, the first takes the left branch and the second the right one.
        inputs[:, 0] = inputs[:, 0].abs()
        inputs[BATCH // 2 :, 0] *= -1
    return inputs, torch.randint(10, (BATCH,), generator=generator)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over everything but the last dimension of the outputs."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Loop:
    """A boosted model and its optimizer, and what a loop written by hand calls of them.

    Args:
        plugin: one of PLUGINS, a plugin, or None for one process.
        model: the user's model.
        scale: of the loss; None for none.
        nonfinite: policy of the optimizer.
    """

    def __init__(
        self,
        plugin: str | Plugin | None,
        model: nn.Module,
        scale: float | None = 1024.0,
        nonfinite: Any = "skip",
    ) -> None:
        named = PLUGINS[plugin]() if isinstance(plugin, str) else plugin
        self.plugin: Plugin = SinglePlugin() if named is None else named
        loss_scale = None if scale is None else LossScale(scale)
        self.booster = Booster(plugin=self.plugin, loss_scale=loss_scale, nonfinite=nonfinite)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.raw = model
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.layout = self.optimizer.layout

    def part(self, whole: Tensor) -> Tensor:
        """What this rank reads of a whole batch."""
        return whole.chunk(self.plugin.data_size)[self.plugin.data_rank]

    def backward(self, inputs: Tensor, targets: Tensor, share: float = 1.0) -> None:
        """Backward pass of the mean loss of a whole batch, times ``share``."""
        pair = self.part(inputs), self.part(targets)

        def loss(outputs: Tensor, wanted: Tensor) -> Tensor:
            return cross_entropy(outputs, wanted) * share

        if self.model.pipeline is not None:
            self.booster.execute_pipeline(iter([pair]), self.model, loss, self.optimizer)
        else:
            self.booster.backward(loss(self.model(pair[0]), pair[1]), self.optimizer)

    def gradients(self) -> dict[str, Tensor]:
        """Of the whole model, on the first rank."""
        return gathered(self.raw, self.booster.renamed, lambda p: p.grad)

    def weights(self) -> dict[str, Tensor]:
        """Of the whole model, on the first rank."""
        return gathered(self.raw, self.booster.renamed)

    def own_gradients(self) -> list[Tensor]:
        """Copies of the parts that lie on this rank."""
        return [gradient.clone() for gradient in self.layout.gradients()[1]]

    def clip(self, clip: Clip, exclude: Any = "auto") -> Outcome:
        """Clip by a mode that is bound to the layout."""
        name, threshold, norm_type = clip
        mode = build(name, threshold=threshold, norm_type=norm_type, exclude=exclude)
        mode.bind(self.layout)
        return self.optimizer.clip(mode)


def one_step(
    model: str,
    plugin: str | None,
    clip: Clip,
    exclude: Any = "auto",
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """What a step did: figures on every rank, gradients and weights of the whole on the first."""
    loop = Loop(plugin, make(model, dtype))
    inputs, targets = batch_for(model, dtype)
    if plugin is None and model == "forked":
        # One process sees the parts one after the other, each with the branch that it takes.
        for half in (slice(None, BATCH // 2), slice(BATCH // 2, None)):
            loop.backward(inputs[half], targets[half], 0.5)
    else:
        loop.backward(inputs, targets)
    figures = [float(figure) for figure in loop.clip(clip, exclude)]
    gradients = loop.gradients()
    present = sum(piece.param.grad is not None for piece in loop.layout.pieces)
    taken = loop.optimizer.step()
    return {
        "figures": figures,
        "present": present,
        "taken": taken,
        "gradients": gradients,
        "weights": loop.weights(),
        "names": sorted(loop.layout.names),
        "head": loop.layout.head,
        "cut": sorted(p.name for p in loop.layout.pieces if p.cut is not None or p.scattered),
    }


def steps(asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Several steps on the same ranks, each with its own arguments of :func:`one_step`."""
    return [one_step(**each) for each in asked]


FIGURES = ("norm", "norm_clipped", "coef", "clipped", "fraction", "peak", "threshold")
EXACT = ("clipped", "fraction", "threshold")


def unlike_one_process(
    ours: Sequence[dict[str, Any]], one: dict[str, Any], rel: float = 1e-9
) -> list[str]:
    """Where what the ranks did differs from what one process did; empty if nowhere."""
    found = []
    for rank, result in enumerate(ours):
        bits = [figure.hex() for figure in result["figures"]]
        if bits != [figure.hex() for figure in ours[0]["figures"]]:
            found.append(f"rank {rank} has other figures than rank 0")
        if result["taken"] != one["taken"]:
            found.append(f"rank {rank}: step taken: {result['taken']}")
        pairs = zip(FIGURES, result["figures"], one["figures"], strict=True)
        for key, a, b in pairs:
            same = a == b or (math.isnan(a) and math.isnan(b))
            close = key not in EXACT and abs(a - b) <= rel * abs(b)
            if not (same or close):
                found.append(f"rank {rank}: {key} {a!r} instead of {b!r}")
    for what in ("gradients", "weights"):
        found += [f"{what}: {line}" for line in unlike(ours[0][what], one[what], rel)]
    return found


def assert_one_process(
    world: int, asked: Sequence[Mapping[str, Any]], rel: float = 1e-9
) -> list[list[dict[str, Any]]]:
    """Assert that ranks take the steps ``asked`` for as one process does.

    Returns:
        What each rank did, step by step, for further questions.
    """
    torch.set_num_threads(1)
    ranks = run_ranks(steps, world, list(asked))
    wrong = []
    for number, each in enumerate(asked):
        one = one_step(**{**each, "plugin": None})
        found = unlike_one_process([rank[number] for rank in ranks], one, rel)
        if found:
            wrong.append(f"{dict(each)}: {found[:6]}")
    assert not wrong, "\n".join(wrong)
    return ranks


def unlike(got: dict[str, Tensor], wanted: dict[str, Tensor], rel: float) -> list[str]:
    """Names of tensors that differ by more than ``rel``, relative to the largest element of all.

    A gradient that one side does not have is one of zeros.
    """
    largest = max(float(t.abs().max()) for t in wanted.values())
    found = []
    for name in sorted(got.keys() | wanted.keys()):
        a, b = got.get(name), wanted.get(name)
        if a is None or b is None:
            present = b if a is None else a
            assert present is not None
            off = float(present.abs().max())
        else:
            off = float((a - b).abs().max())
        size = largest if b is None else max(float(b.abs().max()), 1e-3 * largest)
        if not off <= rel * size:
            found.append(f"{name} is off by {off / size:.1e}")
    return found
