"""Files that Booster writes: read by plain torch, and under any other layout."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.distributed.cases import MODELS, Case, trainer
from tests.ranks import run_ranks

CASE = Case("tied", "L2", accumulation=2, steps=3, optimizer="adamw")
PLUGINS = ("fsdp", "zero1", "tensor", "1f1b")


def trained(plugin: str | None) -> Any:
    made = trainer(CASE, plugin)
    made.fit()
    return made


def state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.unwrap().state_dict().items()}


def save_all(folder: Path) -> None:
    for plugin in PLUGINS:
        made, own = trained(plugin), folder / plugin
        made.booster.save_model(made.model, own / "model.pt")
        made.booster.save_model(made.model, own / "model.safetensors")
        made.booster.save_model(made.model, own / "model", shard=True)
        made.booster.save_optimizer(made.optimizer, own / "optimizer")


def load_each(folder: Path, others: dict[str, str | None]) -> dict[str, list[Any]]:
    """Weights as they are loaded from each kind of file, and after a step with the optimizer's."""
    found: dict[str, list[Any]] = {}
    for saved, plugin in others.items():
        found[saved] = []
        for model in ("model.pt", "model.safetensors", "model"):
            made = trainer(CASE, plugin)
            made.booster.load_model(made.model, folder / saved / model)
            made.booster.load_optimizer(made.optimizer, str(folder / saved / "optimizer"))
            made.state.progress = made.state.progress._replace(step=CASE.steps - 1)
            found[saved].append(made.booster.state_dict(made.model))
            made.fit()
            found[saved].append(made.booster.state_dict(made.model))
    return found


def test_plain_torch_reads_what_ranks_saved_and_other_ranks_go_on(tmp_path):
    run_ranks(save_all, 2, tmp_path)
    wanted, plain = state(trained(None).model), MODELS[CASE.model]().double()
    one = load_each(tmp_path, dict.fromkeys(PLUGINS))
    moved = dict(zip(PLUGINS, (*PLUGINS[1:], PLUGINS[0]), strict=True))
    others = run_ranks(load_each, 2, tmp_path, moved)[0]
    for plugin in PLUGINS:
        for name in ("model.pt", "model.safetensors"):
            read = torch.load if name.endswith(".pt") else safetensors.torch.load_file
            plain.load_state_dict(read(tmp_path / plugin / name))
            torch.testing.assert_close(dict(plain.state_dict()), wanted, rtol=1e-6, atol=1e-9)
        held = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        loaded, stepped = one[plugin][::2], one[plugin][1::2]
        torch.testing.assert_close(loaded, [held] * 3, rtol=0, atol=0)
        torch.testing.assert_close(stepped, [stepped[0]] * 3, rtol=0, atol=0)
        torch.testing.assert_close(others[plugin], one[plugin], rtol=1e-6, atol=1e-9)
        assert not torch.equal(stepped[0]["head.weight"], held["head.weight"])

    # Shards take the place of those of more ranks, and leave other files alone.
    made, later = trained(None), trainer(CASE)
    folder = tmp_path / "fsdp"
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(1.0)
    (folder / "model" / "config.json").write_text("{}")
    made.booster.save_model(made.model, folder / "model", shard=True)
    later.booster.load_model(later.model, folder / "model")
    torch.testing.assert_close(state(later.model), state(made.model), rtol=0, atol=0)
    assert sorted(one.suffix for one in (folder / "model").iterdir()) == [".json", ".safetensors"]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_write_that_is_interrupted_leaves_the_former_file_and_a_cut_one_is_refused(
    tmp_path, monkeypatch, name
):
    made, file = trainer(CASE), tmp_path / name
    made.booster.save_model(made.model, file)
    before = file.read_bytes()

    def torn(value: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    monkeypatch.setattr(safetensors.torch, "save_file", torn)
    with pytest.raises(KeyboardInterrupt):
        made.booster.save_model(made.model, file)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(name, before)]
    for length in (0, len(before) // 2, len(before) - 1):
        file.write_bytes(before[:length])
        with pytest.raises(ValueError, match="damaged, or no checkpoint"):
            made.booster.load_model(made.model, file)


class Ran:
    """Pickled, it would write a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_wrong_file_is_refused_and_changes_nothing(tmp_path):
    made = trainer(CASE)
    good = state(made.model)
    first, tensor = next(iter(good.items()))
    for content, message in (
        ({"a": Ran(tmp_path / "ran")}, "damaged, or no checkpoint"),
        ([1, 2], "damaged, or no checkpoint"),
        ({**good, "extra": torch.ones(1)}, "unexpected: extra"),
        ({k: v for k, v in good.items() if k != first}, first),
        ({**good, first: torch.ones(2, 2)}, "shape"),
    ):
        torch.save(content, tmp_path / "model.pt")
        with pytest.raises(ValueError, match=message):
            made.booster.load_model(made.model, tmp_path / "model.pt")
        torch.testing.assert_close(state(made.model), good, rtol=0, atol=0)
    assert not (tmp_path / "ran").exists()
    torch.save({first: tensor + 1, "extra": tensor}, tmp_path / "some.pt")
    made.booster.load_model(made.model, tmp_path / "some.pt", strict=False)
    after = state(made.model)
    changed = {key for key in after if not torch.equal(after[key], good[key])}
    assert first in changed <= {first, "head.weight"}
