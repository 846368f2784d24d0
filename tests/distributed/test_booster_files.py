"""Files that Booster writes: read by plain torch, and under any other layout."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from runner.optim.schedulers import CosineAnnealingLR
from tests.distributed.cases import MODELS, Case, trainer
from tests.ranks import run_ranks

CASE = Case("tied", "L2", accumulation=2, steps=3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(plugin: str | None) -> Any:
    made = trainer(CASE, plugin, optimizer=adam)
    made.fit()
    return made


def save_all(plugin: str | None, folder: Path) -> None:
    made = trained(plugin)
    booster = made.booster
    booster.save_model(made.model, folder / "model.pt")
    booster.save_model(made.model, folder / "model.safetensors")
    booster.save_model(made.model, folder / "model", shard=True)
    booster.save_optimizer(made.optimizer, folder / "optimizer.pt")
    booster.save_optimizer(made.optimizer, folder / "optimizer", shard=True)


def load_each(plugin: str | None, folder: Path) -> list[Any]:
    found = []
    for model, optimizer in (("model.pt", "optimizer.pt"), ("model.safetensors", "optimizer")):
        made = trainer(CASE, plugin, optimizer=adam)
        made.booster.load_model(made.model, folder / model)
        made.booster.load_optimizer(made.optimizer, str(folder / optimizer))
        made.state.progress = made.state.progress._replace(step=CASE.steps - 1)
        found.append(made.booster.state_dict(made.model))
        made.fit()
        found.append(made.booster.state_dict(made.model))
    made = trainer(CASE, plugin, optimizer=adam)
    made.booster.load_model(made.model, folder / "model")
    found.append(made.booster.state_dict(made.model))
    return found


@pytest.mark.parametrize("plugin", ["fsdp", "zero1", "tensor", "1f1b"])
def test_plain_torch_reads_what_ranks_saved_and_other_ranks_go_on(plugin, tmp_path):
    run_ranks(save_all, 2, plugin, tmp_path)
    plain = MODELS[CASE.model]().double()
    wanted = trained(None).model.unwrap().state_dict()
    for name in ("model.pt", "model.safetensors"):
        read = torch.load if name.endswith(".pt") else safetensors.torch.load_file
        plain.load_state_dict(read(tmp_path / name))
        for key, tensor in plain.state_dict().items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-6, atol=1e-9)
    held = plain.state_dict()
    one = load_each(None, tmp_path)
    others = run_ranks(load_each, 2, "fsdp" if plugin != "fsdp" else "tensor", tmp_path)[0]
    for loaded, later in zip(one, others, strict=True):
        for key, tensor in loaded.items():
            torch.testing.assert_close(later[key], tensor, rtol=1e-6, atol=1e-9)
    for loaded in (one[0], one[2], one[4]):
        assert all(torch.equal(loaded[key], held[key]) for key in held)
    assert not torch.equal(one[1]["head.weight"], one[0]["head.weight"])
    assert all(torch.equal(one[1][key], one[3][key]) for key in held)


def test_a_scheduler_is_saved(tmp_path):
    def made() -> Any:
        return CosineAnnealingLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 9)

    booster, scheduler, later = trainer(CASE).booster, made(), made()
    scheduler.optimizer.step()
    scheduler.step()
    booster.save_lr_scheduler(scheduler, tmp_path / "new" / "scheduler.pt")
    booster.load_lr_scheduler(later, tmp_path / "new" / "scheduler.pt")
    assert later.state_dict() == scheduler.state_dict()


def save_shards(plugin: str | None, folder: Path) -> None:
    made = trained(plugin)
    made.booster.save_model(made.model, folder / "model", shard=True)
    made.booster.save_optimizer(made.optimizer, folder / "optimizer", shard=True)


def test_shards_take_the_place_of_those_of_more_ranks(tmp_path: Path) -> None:
    run_ranks(save_shards, 2, "fsdp", tmp_path)
    made, later = trained(None), trainer(CASE, optimizer=adam)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(1.0)
    (tmp_path / "model" / "config.json").write_text("{}")
    made.booster.save_model(made.model, tmp_path / "model", shard=True)
    made.booster.save_optimizer(made.optimizer, tmp_path / "optimizer", shard=True)
    later.booster.load_model(later.model, tmp_path / "model")
    later.booster.load_optimizer(later.optimizer, tmp_path / "optimizer")
    assert all(
        torch.equal(tensor, state(made.model)[name]) for name, tensor in state(later.model).items()
    )
    assert sorted(one.suffix for one in (tmp_path / "model").iterdir()) == [".json", ".safetensors"]
    with pytest.raises(ValueError, match="holds a model, which would be replaced"):
        made.booster.save_optimizer(made.optimizer, tmp_path / "model", shard=True)
    with pytest.raises(ValueError, match="holds an optimizer, which would be replaced"):
        made.booster.save_model(made.model, tmp_path / "optimizer", shard=True)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_write_that_is_interrupted_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = trained(None)
    made.booster.save_model(made.model, tmp_path / name)
    before = (tmp_path / name).read_bytes()

    def torn(value: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    monkeypatch.setattr(safetensors.torch, "save_file", torn)
    with pytest.raises(KeyboardInterrupt):
        made.booster.save_model(made.model, tmp_path / name)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(name, before)]


class Ran:
    """Pickled, it would write a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.unwrap().state_dict().items()}


def broken(tmp_path: Path) -> dict[str, tuple[Any, str]]:
    """Files that are no checkpoint of this model, and what the error says."""
    good = trainer(CASE).model.unwrap().state_dict()
    first = next(iter(good))
    return {
        "code": ({"a": Ran(tmp_path / "ran")}, "damaged, or no checkpoint"),
        "list": ([1, 2], "holds a list"),
        "numbers": ({"a": 3}, "does not hold tensors by name"),
        "unknown": ({**good, "extra": torch.ones(1)}, "holds extra, which"),
        "missing": ({k: v for k, v in good.items() if k != first}, f"does not hold {first}"),
        "shape": ({**good, first: torch.ones(2, 2)}, rf"{first} has shape \[2, 2\]"),
    }


@pytest.mark.parametrize("kind", ["code", "list", "numbers", "unknown", "missing", "shape"])
def test_a_wrong_file_is_refused_and_changes_nothing(kind, tmp_path):
    content, message = broken(tmp_path)[kind]
    torch.save(content, tmp_path / "model.pt")
    made = trainer(CASE)
    before = state(made.model)
    with pytest.raises(ValueError, match=message):
        made.booster.load_model(made.model, tmp_path / "model.pt")
    assert all(torch.equal(tensor, before[key]) for key, tensor in state(made.model).items())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_truncated_file_is_refused(name, tmp_path):
    made = trainer(CASE)
    made.booster.save_model(made.model, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 1):
        (tmp_path / name).write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged, or no checkpoint"):
            made.booster.load_model(made.model, tmp_path / name)


def test_names_may_differ_where_that_is_allowed(tmp_path):
    made = trainer(CASE)
    name, tensor = next(iter(made.model.unwrap().named_parameters()))
    torch.save({name: tensor.detach() + 1, "extra": tensor}, tmp_path / "some.pt")
    before = state(made.model)
    made.booster.load_model(made.model, tmp_path / "some.pt", strict=False)
    after = state(made.model)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert name in changed
    assert changed <= {name, "head.weight"}
