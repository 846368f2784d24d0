"""Tensors of a model and its optimizer that ranks wrote can be read under any other layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.booster import saved
from runner.parallel import sharded_files
from runner.parallel.sharded_files import Folder
from tests.distributed.cases import FAMILIES, Case, trainer
from tests.ranks import run_ranks

STEPS = 3


def case_of(model: str) -> Case:
    return Case(model, "L2", accumulation=2, steps=STEPS)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def write(made: Any, folder: Path) -> Any:
    tensors = saved.model_tensors(made.model, made.plugin.data_rank == 0)
    tensors |= saved.optimizer_tensors(made.optimizer)
    values = saved.optimizer_values(made.optimizer)
    sharded_files.write(tensors, folder)
    return values


def train_and_write(model: str, plugin: str, folder: Path) -> Any:
    made = trainer(case_of(model), plugin, optimizer=adam)
    made.fit()
    return write(made, folder)


def read_and_write(model: str, plugin: str, old: Path, values: Any, new: Path) -> Any:
    made = trainer(case_of(model), plugin, optimizer=adam)
    saved.load_model(made.model, Folder(old))
    saved.load_optimizer(made.optimizer, Folder(old), values)
    return write(made, new)


def whole(folder: Path) -> dict[str, Tensor]:
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in Folder(folder).stored.items()
    }
    Folder(folder).read({name: [tensor] for name, tensor in tensors.items()})
    return tensors


def reference(model: str) -> dict[str, Tensor]:
    """What one process holds, as torch itself names it."""
    made = trainer(case_of(model), None, optimizer=adam)
    made.fit()
    net = made.model.unwrap()
    held = dict(net.named_parameters()) | dict(net.named_buffers())
    tensors = {name: t.detach() for name, t in held.items() if name in net.state_dict()}
    [optimizer] = made.optimizer.optimizers
    for name, parameter in net.named_parameters():
        for field, value in optimizer.state[parameter].items():
            tensors[f"optimizer/0/{name}/{field}"] = value
    return tensors


@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=2)
def test_what_ranks_wrote_is_the_state_of_one_process(plugin, world, tmp_path):
    model = FAMILIES[plugin, world]
    run_ranks(train_and_write, world, model, plugin, tmp_path)
    wanted, held = reference(model), whole(tmp_path)
    assert held.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(held[name], tensor, rtol=1e-6, atol=1e-9, msg=name)


PAIRS = [
    ("fsdp", 4, "ddp", 2, "tied"),
    ("ddp", 2, "fsdp", 4, "tied"),
    ("hybrid", 4, "fsdp", 2, "gpt"),
    ("zero1", 2, "hybrid_zero1", 4, "tied"),
    ("moe_zero3", 4, "moe", 2, "moe"),
]


@pytest.mark.parametrize(("first", "ranks", "second", "others", "model"), PAIRS)
def test_another_layout_reads_it(first, ranks, second, others, model, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    values = run_ranks(train_and_write, ranks, model, first, old)[0]
    again = run_ranks(read_and_write, others, model, second, old, values, new)[0]
    assert again == values
    before, after = whole(old), whole(new)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
