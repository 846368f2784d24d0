"""Clipping in the backward pass, and stepping there, equals clipping after it in one process."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.booster import Booster, LowLevelZeroPlugin, SinglePlugin, TorchFSDPPlugin
from runner.clip import build
from tests.ranks import run_ranks

STEPS, SAMPLES, LENGTH, TOKENS, WIDTH = 6, 8, 3, 9, 6
PLUGINS = {
    "single": SinglePlugin,
    "fsdp": TorchFSDPPlugin,
    "hsdp": lambda: TorchFSDPPlugin(dp_replicate=2),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
}
MODES = {
    "none": (None, {}),
    "value": (0.01, {}),
    "adaptive": (0.02, {"exclude": ["blocks.1.norm.*"]}),
    "per_parameter": (0.05, {}),
    "adagc": (1.02, {"warmup_steps": 2, "absolute": 0.2, "beta": 0.9}),
    "update": (0.9, {}),
}
"""Threshold and options of each mode that decides tensor by tensor."""
WAYS = [(mode, True, 1) for mode in MODES]
WAYS += [(mode, False, 2) for mode in MODES if mode != "update"]
"""Mode, whether the optimizer steps in the backward pass, and microbatches of a step."""
FEW = [("value", True, 1), ("adaptive", False, 2), ("adagc", True, 1)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, inputs):
        return inputs + self.norm(self.linear(inputs).tanh())


class Net(nn.Module):
    """A tied embedding, a vector used twice, branches by the batch, frozen and unused layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.left, self.right, self.never, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        branch = self.left if int(tokens[0, 0]) % 2 else self.right
        hidden = branch(hidden) * self.scale + self.frozen(hidden) * self.scale
        return self.head(hidden.mean(1))


def made():
    """The same weights each time, with a hook of a user, and two optimizers."""
    torch.manual_seed(0)
    net = Net().double()
    net.blocks[0].linear.weight.register_hook(lambda gradient: gradient * 2.0)
    decayed = [*net.blocks.parameters(), *net.never.parameters(), net.scale]
    ids = {id(parameter) for parameter in decayed}
    others = [p for p in net.parameters() if id(p) not in ids]
    return net, [
        torch.optim.AdamW(decayed, lr=0.02, weight_decay=0.3, fused=True),
        torch.optim.Adam(others, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
    ]


def batch(step, micro):
    """Tokens and targets of both ranks; each half chooses a branch."""
    generator = torch.Generator().manual_seed(10 * step + micro)
    tokens = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=generator)
    if step % 3 == 2:
        tokens[:, 0] = 2
    return tokens, torch.randint(0, TOKENS, (SAMPLES,), generator=generator)


def train(plugin, mode, step, micros, early=True):
    """Rows, weights and history; not ``early``: by clipping after the backward pass."""
    booster = Booster(plugin=plugin, nonfinite="error")
    raw, optimizers = made()
    model, optimizer, *_ = booster.boost(raw, optimizers)
    threshold, options = MODES[mode]
    clipping = build(mode, threshold=threshold, **options)
    optimizer.clip_in_backward(clipping, step=step) if early else optimizer.bind(clipping)
    rows = []
    for number in range(STEPS):
        for micro in range(micros):
            halves = zip(*(x.chunk(2) for x in batch(number, micro)), strict=True)
            mine = [*halves][plugin.data_rank :: plugin.data_size]
            with booster.no_sync(model) if micro < micros - 1 else nullcontext():
                losses = [F.cross_entropy(model(x), y) for x, y in mine]
                booster.backward(sum(losses) / len(losses) / micros, optimizer)
        kept = [p for p in raw.parameters() if p.grad is not None]
        freed = step and (mode != "adagc" or number >= options["warmup_steps"])
        assert bool(kept) != (early and freed)
        rows.append(optimizer.clip(clipping))
        optimizer.step()
        optimizer.zero_grad()
    rows = [(float(row.norm), float(row.norm_clipped), float(row.fraction)) for row in rows]
    return rows, {n: v.clone() for n, v in booster.state_dict(model).items()}, clipping.state_dict()


def all_ways(name, ways):
    return [train(PLUGINS[name](), *way) for way in ways]


@pytest.mark.parametrize("name", PLUGINS)
def test_steps_are_those_of_clipping_after_the_backward_pass(name):
    ways = FEW if name in ("hsdp", "zero2") else WAYS
    ranks = [all_ways(name, ways)] if name == "single" else run_ranks(all_ways, 2, name, ways)
    for number, way in enumerate(ways):
        wanted, weights, _ = train(SinglePlugin(), *way, early=False)
        rows, found, history = ranks[0][number]
        assert [*zip(*rows, strict=True)] == [
            pytest.approx(each, rel=1e-9, abs=1e-12) for each in zip(*wanted, strict=True)
        ], way
        assert any(row[2] for row in wanted) == (way[0] != "none")
        for key, weight in weights.items():
            torch.testing.assert_close(found[key], weight, rtol=1e-8, atol=1e-10, msg=f"{way}")
        for others in ranks[1:]:
            assert (others[number][0], str(others[number][2])) == (rows, str(history)), way
