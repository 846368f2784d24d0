"""Training loops of one's own with several optimizers, models, or a criterion that learns.

Beside each loop is the same training in plain PyTorch, in one process, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Muon, Optimizer

from runner.booster import Booster
from runner.models.gpt import GPT
from runner.models.mixture import MixtureGPT
from tests.distributed.by_hand import cross_entropy
from tests.distributed.cases import PLUGINS, SHAPE
from tests.ranks import run_ranks

THRESHOLD = 0.05
"""Below the norm of most steps here."""


class Temperature(nn.Module):
    """Cross entropy of logits divided by a learned temperature, and shifted by a learned bias."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.7, dtype=torch.float64))
        self.bias = nn.Parameter(torch.linspace(-1, 1, 17, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.flatten(0, -2) / self.temperature + self.bias
        return F.cross_entropy(logits, targets.flatten())


class Body(nn.Module):
    """Embeds tokens."""

    tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.up(self.embed(tokens)).tanh())
        return hidden


class Head(nn.Module):
    """Predicts the next token from what :class:`Body` makes."""

    tp_plan = {"out": "colwise_rep"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.out = nn.Linear(6, 17)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(hidden * self.scale)
        return logits


def models(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    made: list[nn.Module]
    if kind == "two":
        made = [Body(), Head()]
    elif kind == "moe":
        made = [MixtureGPT(**SHAPE, tied=False, bias=True, experts=4, top_k=2)]
    else:
        made = [GPT(**SHAPE, tied=kind == "tied", bias=True)]
    return [model.double() for model in made]


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "blocks" in name


def _split(named: Iterable[tuple[str, nn.Parameter]]) -> tuple[list[Any], list[Any]]:
    matrices, rest = [], []
    for name, parameter in named:
        (matrices if is_matrix(name, parameter) else rest).append(parameter)
    return matrices, rest


def muon_and_adamw(named: Iterable[tuple[str, nn.Parameter]]) -> list[Optimizer]:
    matrices, rest = _split(named)
    return [Muon(matrices, lr=0.01, weight_decay=0.1), AdamW(rest, lr=0.01, weight_decay=0.1)]


def sgd_and_adamw(named: Iterable[tuple[str, nn.Parameter]]) -> list[Optimizer]:
    matrices, rest = _split(named)
    return [
        SGD(matrices, lr=0.5, momentum=0.9, weight_decay=0.01),
        AdamW(rest, lr=0.01, weight_decay=0.1),
    ]


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> list[Optimizer]:
    return [AdamW([parameter for _, parameter in named], lr=0.01, weight_decay=0.1)]


OPTIMIZERS: dict[str, Callable[[Iterable[tuple[str, nn.Parameter]]], list[Optimizer]]] = {
    "muon": muon_and_adamw,
    "sgd": sgd_and_adamw,
    "adamw": adamw,
}


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Windows of two microbatches of 8 sequences each."""
    generator = torch.Generator().manual_seed(7)
    shape = (2 * steps, 8, 12)
    inputs = torch.randint(17, shape, generator=generator)
    targets = torch.randint(17, shape, generator=generator)
    return list(zip(inputs, targets, strict=True))


def _named(made: Sequence[nn.Module], criterion: Any) -> list[tuple[str, nn.Parameter]]:
    parts = [*made, *([criterion] if isinstance(criterion, nn.Module) else [])]
    return [pair for part in parts for pair in part.named_parameters()]


def clip(parameters: Sequence[nn.Parameter], unscaled: Collection[nn.Parameter] = ()) -> float:
    """Clip the norm as it is defined. (PyTorch's function adds 1e-6 to the norm it divides by.)

    Args:
        parameters: all parameters.
        unscaled: those that are left as they are, and do not count in the norm that is limited.

    Returns:
        The norm of all gradients.
    """
    left_out = {id(p) for p in unscaled}
    gradients = [p.grad for p in parameters if p.grad is not None]
    scaled = [p.grad for p in parameters if p.grad is not None and id(p) not in left_out]
    norm, limited = _norm(gradients), _norm(scaled)
    for gradient in scaled:
        gradient.mul_(min(1.0, THRESHOLD / limited))
    return norm


def _norm(gradients: Iterable[Tensor]) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def plain(kind: str, optimizers: str, learns: bool, steps: int) -> dict[str, Any]:
    """PyTorch alone: norms of all steps, and weights at the end."""
    made, criterion = models(kind), Temperature() if learns else cross_entropy
    named = _named(made, criterion)
    stepped = OPTIMIZERS[optimizers](named)
    # Muon's matrices are not scaled.
    unscaled = [p for name, p in named if optimizers == "muon" and is_matrix(name, p)]
    norms, data = [], batches(steps)
    for first in range(0, len(data), 2):
        for inputs, targets in data[first : first + 2]:
            outputs = inputs
            for model in made:
                outputs = model(outputs)
            (criterion(outputs, targets) / 2).backward()
        norms.append(clip([p for _, p in named], unscaled))
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "norms": norms,
        "weights": [{k: v.clone() for k, v in m.state_dict().items()} for m in made],
        "criterion": [p.detach().clone() for p in criterion.parameters()] if learns else [],
    }


def boosted(
    plugin: str | None, kind: str, optimizers: str, learns: bool, steps: int
) -> dict[str, Any]:
    """The same under a plugin, on this rank."""
    made, criterion = models(kind), Temperature() if learns else cross_entropy
    spread = PLUGINS[plugin]() if plugin else None
    if spread is not None and spread.rank and isinstance(criterion, Temperature):
        criterion.temperature.data.fill_(99.0)  # Ranks are given the first one's.
    booster = Booster(plugin=spread)
    given = OPTIMIZERS[optimizers](_named(made, criterion))
    model, optimizer, criterion, *_ = booster.boost(
        made if len(made) > 1 else made[0], given if len(given) > 1 else given[0], criterion
    )
    wrapped = model if isinstance(model, list) else [model]
    norms, data = [], batches(steps)
    for first in range(0, len(data), 2):
        window = [tuple(_part(t, booster) for t in pair) for pair in data[first : first + 2]]
        with booster.no_sync(model, optimizer):
            _pass(booster, wrapped, criterion, optimizer, window[0])
        _pass(booster, wrapped, criterion, optimizer, window[1])
        norms.append(float(optimizer.clip_grad_by_norm(THRESHOLD).double()))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "norms": norms,
        "weights": [booster.state_dict(each) for each in wrapped],
        "criterion": [p.detach().clone() for p in criterion.parameters()] if learns else [],
    }


def _part(whole: Tensor, booster: Booster) -> Tensor:
    return whole.chunk(booster.plugin.data_size)[booster.plugin.data_rank]


def _pass(
    booster: Booster, wrapped: Sequence[Any], criterion: Any, optimizer: Any, pair: Any
) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        half: Tensor = criterion(outputs, targets) / 2
        return half

    if wrapped[0].pipeline is not None:
        booster.execute_pipeline(iter([pair]), wrapped[0], loss, optimizer)
        return
    outputs = pair[0]
    for model in wrapped:
        outputs = model(outputs)
    booster.backward(loss(outputs, pair[1]), optimizer)


def _several(asked: Sequence[tuple[Any, ...]], exact_muon: bool) -> list[dict[str, Any]]:
    """Several trainings on the same ranks, each with its own arguments of :func:`boosted`."""
    if exact_muon:
        # Muon's own cast to bfloat16 rounds away what is compared here.
        torch.Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    return [boosted(*each) for each in asked]


def _differences(
    found: dict[str, Any], expected: dict[str, Any], *, weights: bool
) -> dict[str, float]:
    """Largest relative difference of norms, and absolute ones of weights."""
    norms = zip(found["norms"], expected["norms"], strict=True)
    off = {"norm": max(abs(a - b) / b for a, b in norms), "weights": 0.0, "criterion": 0.0}
    for own, wanted in zip(found["weights"], expected["weights"], strict=True) if weights else ():
        assert own.keys() == wanted.keys()
        off["weights"] = max(
            off["weights"], *(float((own[k] - wanted[k]).abs().max()) for k in own)
        )
    for mine, right in zip(found["criterion"], expected["criterion"], strict=True):
        off["criterion"] = max(off["criterion"], float((mine - right).abs().max()))
    return off


def assert_plain_steps(
    plugins: Sequence[Any], ranks: int, *case: Any, exact_muon: bool = False
) -> None:
    """Fail where norms, weights or the criterion's parameters differ from plain PyTorch's.

    Args:
        plugins: names of PLUGINS; None for one process.
        ranks: ranks to start; 1 for this process.
        case: arguments of :func:`plain`.
        exact_muon: whether Muon computes in float64.
    """
    before = torch.Tensor.bfloat16
    try:
        everywhere = (
            run_ranks(_several, ranks, [(p, *case) for p in plugins], exact_muon)
            if ranks > 1
            else [[boosted(plugin, *case) for plugin in plugins]]
        )
        if exact_muon:
            torch.Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[method-assign, assignment]
        expected = plain(*case)
    finally:
        torch.Tensor.bfloat16 = before  # type: ignore[method-assign]
    assert min(expected["norms"]) > THRESHOLD
    for rank, each in enumerate(everywhere):
        for plugin, found in zip(plugins, each, strict=True):
            # The whole weights are on the first rank.
            off = _differences(found, expected, weights=rank == 0)
            # The norm that the optimizer returns is float32.
            assert off["norm"] < 1e-6, (plugin, rank, off)
            assert max(off["weights"], off["criterion"]) < 1e-9, (plugin, rank, off)
