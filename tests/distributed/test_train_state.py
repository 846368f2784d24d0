"""Ranks that continue from their training states take the same steps, to the bit."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.distributed.cases import PLUGINS
from tests.distributed.training import Rows
from tests.ranks import run_ranks
from tests.train.test_state import BATCH, Jittered, Saving, timeless, trainer

AFTER = 8
"""Inside the second epoch, between two windows of several microbatches."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(plugin: str, rows: Rows) -> Saving:
    """A training whose ranks drop different activations and jitter different samples."""
    spread = PLUGINS[plugin]()

    def loader() -> Any:
        return spread.prepare_dataloader(Jittered(), BATCH // 2, shuffle=True, seed=3)

    training = trainer(rows, loader, plugin=spread, eval_dataloader=loader())
    torch.manual_seed(100 + dist.get_rank())
    return training


def differences(plugin: str) -> list[str]:
    """What differs between a training and one that goes on from its state."""
    rows, later = Rows(), Rows()
    first = made(plugin, rows)
    first.saves_after = AFTER
    summary = first.fit()
    weights, state = first.saved
    assert list(state["random"]) == [f"rank{dist.get_rank()}"]

    second = made(plugin, later)
    torch.manual_seed(0)
    second.model.unwrap().load_state_dict(weights)
    second.state.load_state_dict(state)
    found = [] if timeless(second.fit()) == timeless(summary) else ["summary"]
    wanted = [row for row in rows.rows if row["train/step"] > AFTER]
    if list(map(timeless, later.rows)) != list(map(timeless, wanted)) or not wanted:
        found.append("rows")
    parameters = zip(
        first.model.unwrap().named_parameters(), second.model.unwrap().parameters(), strict=True
    )
    found += [name for (name, a), b in parameters if not torch.equal(whole(a), whole(b))]
    return [f"{plugin}: {what}" for what in found]


def all_differences(plugins: list[str]) -> list[str]:
    return [found for plugin in plugins for found in differences(plugin)]


def test_two_ranks_go_on():
    assert run_ranks(all_differences, 2, ["ddp", "zero1", "fsdp"]) == [[], []]


def states_of_two_ranks() -> dict[str, Any]:
    training = made("ddp", Rows())
    training.saves_after = AFTER
    training.fit()
    return copy.deepcopy(training.saved[1])


def test_ranks_differ_in_their_random_states_alone():
    first, second = run_ranks(states_of_two_ranks, 2)
    [one], [other] = first.pop("random").values(), second.pop("random").values()
    assert not torch.equal(one["now"]["cpu"], other["now"]["cpu"])
    for state in (first, second):
        del state["meter"]["window"]["seconds"]
    assert timeless(first) == timeless(second)
