"""Ranks that hold the same part of a model hold the same bits, for as long as they train."""

import hashlib
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.cases import MODELS, Case, trainer, uneven
from tests.distributed.training import Rows
from tests.ranks import run_ranks

STEPS = 50

# Every way to replicate parameters: whole models, replicas of shards, partitioned optimizer steps,
# norms beside split weights, tied copies on several stages, shared layers beside spread experts.
DRIFTS = {
    ("ddp", 2): ("conv", "adaptive"),
    ("hsdp", 4): ("conv", "L2"),
    ("zero1", 4): ("tied", "value"),
    ("zero3", 2): ("gpt", "adaptive"),
    ("tensor_dp", 4): ("gpt", "L2"),
    ("sequence", 2): ("tied", "adaptive"),
    ("pipeline_dp", 4): ("tied", "adaptive"),
    ("zero_bubble", 2): ("tied", "L3"),
    ("moe_zero1", 4): ("moe", "adaptive"),
    ("hybrid_ep_tp", 4): ("moe", "L2"),
    ("hybrid_zero1", 8): ("tied", "adaptive"),
}

ALONE = {"zero3"}
"""Plugins under which no element lies on two ranks."""

Part = tuple[str, tuple[tuple[int, int], ...]]
"""A parameter's name, and along each axis that shards it how many parts there are and which."""


def part_of(name: str, tensor: torch.Tensor) -> Part:
    if not isinstance(tensor, DTensor):
        return name, ()
    where = tensor.device_mesh.get_coordinate()
    assert where is not None
    sizes = tensor.device_mesh.shape
    placed = zip(tensor.placements, sizes, where, strict=True)
    return name, tuple((size, at) for p, size, at in placed if p.is_shard() and size > 1)


def bits(tensor: torch.Tensor) -> tuple[int, str]:
    """Elements on this rank, and what stands for their bits."""
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return here.numel(), hashlib.sha256(here.detach().contiguous().numpy().tobytes()).hexdigest()


def drift(plugin: str, model: str, mode: str) -> dict[str, Any]:
    """Train; the rows, and each part of the model on this rank with its bits."""
    rows = Rows()
    made = trainer(Case(model, mode, steps=STEPS, double=False, rate=0.1), plugin, sinks=[rows])
    made.fit()
    renamed = made.model.renamed
    named = made.model.unwrap().named_parameters()
    return {
        "rows": rows.rows,
        "parts": [(part_of(renamed.get(own, own), p), bits(p)) for own, p in named],
    }


@pytest.mark.parametrize(("plugin", "world"), DRIFTS)
@pytest.mark.product(every=3)
def test_replicas_are_equal_to_the_bit_after_50_steps(plugin, world):
    model, mode = DRIFTS[plugin, world]
    ranks = run_ranks(drift, world, plugin, model, mode, timeout=150)
    # Norms, coefficients, counts.
    assert len(ranks[0]["rows"]) == STEPS
    assert not uneven(ranks)
    assert sum(row["clip/clipped"] for row in ranks[0]["rows"]) > STEPS / 2

    seen: dict[Part, set[tuple[int, str]]] = {}
    for rank in ranks:
        for part, held in rank["parts"]:
            seen.setdefault(part, set()).add(held)
    assert not [part for part, held in seen.items() if len(held) > 1]
    # Each part was found once under its own name: together they are the model.
    whole = MODELS[model]()
    assert sum(n for held in seen.values() for n, _ in held) == sum(
        parameter.numel() for parameter in whole.parameters()
    )
    repeated = sum(len(rank["parts"]) for rank in ranks) > len(seen)
    assert repeated == (plugin not in ALONE)
