"""Adaptive clipping of layers that keep their outputs elsewhere than in dimension 0.

Beside each such layer is the same one stored as :class:`torch.nn.Linear`, whose rows are its units,
trained in plain PyTorch, in one process, in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from runner import GradientClipping
from runner.booster import Booster
from tests.distributed.cases import PLUGINS
from tests.ranks import run_ranks

THRESHOLD, EPS, STEPS = 0.01, 1e-3, 4
EXPERTS, WIDTH, INNER = 3, 6, 5
UNITS = {"batched.*": (0, 2), "up.weight": 1, "mix": (), "down.bias": 0}


class Conv1D(nn.Module):
    """A linear layer with its weight [in, out], by the name that transformers gives it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight + self.bias


class Experts(nn.Module):
    """Gated experts, each weight [experts, out, in], or [experts, in, out] if ``turned``."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        gate_up, down = torch.randn(EXPERTS, 2 * INNER, WIDTH), torch.randn(EXPERTS, WIDTH, INNER)
        # A different size of each expert, so that one unit for an expert would be another limit.
        gate_up, down = (w * torch.linspace(0.1, 0.9, w.shape[1])[:, None] for w in (gate_up, down))
        self.gate_up_proj = nn.Parameter(gate_up.mT.contiguous() if turned else gate_up)
        self.down_proj = nn.Parameter(down.mT.contiguous() if turned else down)

    def forward(self, hidden: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        if self.turned:
            gate_up, down = gate_up.mT, down.mT
        gate, up = torch.einsum("bth,eoh->ebto", hidden, gate_up).chunk(2, -1)
        return torch.einsum("ebti,ehi->bth", F.silu(gate) * up, down)


class Batched(nn.Module):
    """One matrix for each expert, [experts, in, out]; nothing about it says which is which."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * torch.linspace(0.1, 0.6, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.einsum("bti,eio->bto", hidden, self.w)


class Stored(nn.Module):
    """Tokens to classes, by way of one layer of each kind."""

    tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.c_fc = Conv1D(INNER, WIDTH)
        self.c_proj = Conv1D(WIDTH, INNER)
        self.c_one = Conv1D(WIDTH, 1)
        self.experts = Experts(turned=False)
        self.turned = Experts(turned=True)
        self.batched = Batched()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.mix = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.c_proj(self.c_fc(hidden).tanh())
        hidden = hidden + self.c_one(hidden.mean(-1, keepdim=True))
        hidden = hidden + self.experts(hidden) + self.turned(hidden) + self.batched(hidden)
        hidden = self.rnn(self.depthwise(hidden.mT).mT)[0] * self.mix[0] + self.mix[1]
        logits: Tensor = self.head(self.down(self.up(hidden).tanh()).mean(1))
        return logits


class Rows(Stored):
    """The same with a Linear for each Conv1D, and for each matrix of each expert."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("c_fc", "c_proj", "c_one"):
            stored = getattr(self, name)
            setattr(self, name, linear(stored.weight.mT))
            getattr(self, name).bias = stored.bias
        self.matrices = nn.ModuleDict()
        for name in ("experts", "turned"):
            for key in ("gate_up_proj", "down_proj"):
                turned = getattr(self, name).turned
                self._take(name, key, turned)
        self._take("batched", "w", turned=True)

    def _take(self, name: str, key: str, turned: bool) -> None:
        stacked = self._modules[name]._parameters.pop(key)
        self.matrices[f"{name}_{key}"] = nn.ModuleList(
            linear(matrix.mT if turned else matrix) for matrix in stacked
        )

    def _stack(self, name: str, key: str) -> Tensor:
        return torch.stack([layer.weight for layer in self.matrices[f"{name}_{key}"]])

    def forward(self, tokens: Tensor) -> Tensor:
        for name in ("experts", "turned"):
            module = self._modules[name]
            for key in ("gate_up_proj", "down_proj"):
                stacked = self._stack(name, key)
                setattr(module, key, stacked.mT if module.turned else stacked)
        self.batched.w = self._stack("batched", "w").mT
        return super().forward(tokens)

    def stored(self) -> dict[str, Tensor]:
        """The weights as :class:`Stored` keeps them."""
        found = {n: p.detach().clone() for n, p in self.named_parameters() if "matrices" not in n}
        for name in ("c_fc", "c_proj", "c_one"):
            found[f"{name}.weight"] = found[f"{name}.weight"].mT
        for each in self.matrices:
            name, key = each.split("_", 1)
            stacked = self._stack(name, key).detach()
            found[f"{name}.{key}"] = stacked if name == "experts" else stacked.mT
        return found


def linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.detach().clone())
    return made


def network(kind: type[Stored]) -> Stored:
    torch.manual_seed(0)
    return kind().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(17, (STEPS, 8, 5), generator=generator)
    targets = torch.randint(4, (STEPS, 8), generator=generator)
    return list(zip(inputs, targets, strict=True))


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def plain() -> dict[str, Any]:
    """PyTorch alone, on the model whose layers are stored as Linear."""
    model = network(Rows)
    assert isinstance(model, Rows)
    optimizer = optimizer_of(model)
    norms, fractions = [], []
    for inputs, targets in batches():
        F.cross_entropy(model(inputs), targets).backward()
        gradients = [p.grad for p in model.parameters()]
        norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())
        clipped = units = 0
        for name, parameter in model.named_parameters():
            if name == "head.weight":
                continue
            # Rows, but for what the user says: columns, the whole tensor, single elements.
            dims = list(range(parameter.ndim > 1, parameter.ndim))
            dims = {"up.weight": [0], "mix": [0, 1], "down.bias": None}.get(name, dims)
            weight, gradient = parameter.detach(), parameter.grad
            if dims is None:
                w, g = weight.abs(), gradient.abs()
            else:
                w, g = (t.pow(2).sum(dims, keepdim=True).sqrt() for t in (weight, gradient))
            most = THRESHOLD * w.clamp(min=EPS)
            clipped, units = clipped + int((g > most).sum()), units + g.numel()
            # Not in place: autograd may hand several parameters views of one gradient.
            parameter.grad = gradient * torch.where(g > most, most / g, 1.0)
        fractions.append(clipped / units)
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "fractions": fractions, "weights": model.stored()}


def boosted(plugin: str | None) -> dict[str, Any]:
    """The layers as they are stored, under a plugin, on this rank."""
    model = network(Stored)
    booster = Booster(plugin=PLUGINS[plugin]() if plugin else None)
    wrapped, optimizer, *_ = booster.boost(model, optimizer_of(model))
    mode = GradientClipping("adaptive", THRESHOLD, units=UNITS).mode()
    mode.bind(optimizer.layout)
    size, part = booster.plugin.data_size, booster.plugin.data_rank
    norms, fractions = [], []
    for inputs, targets in batches():
        outputs = wrapped(inputs.chunk(size)[part])
        booster.backward(F.cross_entropy(outputs, targets.chunk(size)[part]), optimizer)
        outcome = optimizer.clip(mode)
        norms.append(outcome.norm)
        fractions.append(outcome.fraction)
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "fractions": fractions, "weights": booster.state_dict(wrapped)}


def several(plugins: list[str]) -> list[dict[str, Any]]:
    return [boosted(plugin) for plugin in plugins]


def assert_same(ours: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert 0.1 < wanted["fractions"][0] < 0.9, "some units are clipped, and some are not"
    assert ours["fractions"] == pytest.approx(wanted["fractions"], rel=1e-12)
    assert ours["norms"] == pytest.approx(wanted["norms"], rel=1e-9)
    for name, weight in ours["weights"].items():
        torch.testing.assert_close(weight, wanted["weights"][name], rtol=1e-9, atol=1e-11)


def test_units_are_those_of_the_same_layer_stored_as_linear():
    assert_same(boosted(None), plain())


@pytest.mark.parametrize(
    ("world", "plugins"),
    [(2, ["ddp", "fsdp", "zero1", "zero3", "tensor"]), (4, ["hybrid_fsdp_tp"])],
)
def test_units_are_the_same_wherever_parameters_lie(world, plugins):
    wanted = plain()
    ranks = run_ranks(several, world, plugins)
    for number, plugin in enumerate(plugins):
        assert_same(ranks[0][number], wanted)
        for rank in ranks[1:]:
            for key in ("norms", "fractions"):
                assert rank[number][key] == ranks[0][number][key], f"{plugin}: ranks differ"
