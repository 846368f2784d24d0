"""Files that Booster writes: read by plain torch, and under any other layout."""

import shutil
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
    training = trainer(CASE, plugin)
    training.fit()
    return training


def state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.unwrap().state_dict().items()}


def save_all(folder: Path) -> None:
    for plugin in PLUGINS:
        training = trained(plugin)
        files = folder / plugin
        training.booster.save_model(training.model, files / "model.pt")
        training.booster.save_model(training.model, files / "model.safetensors")
        training.booster.save_model(training.model, files / "model", shard=True)
        training.booster.save_optimizer(training.optimizer, files / "optimizer")


def load_each(folder: Path, others: dict[str, str | None]) -> dict[str, list[Any]]:
    """Weights as they are loaded from each kind of file, and after a step with the optimizer's."""
    weights: dict[str, list[Any]] = {}
    for saved, plugin in others.items():
        weights[saved] = []
        for model in ("model.pt", "model.safetensors", "model"):
            training = trainer(CASE, plugin)
            training.booster.load_model(training.model, folder / saved / model)
            training.booster.load_optimizer(training.optimizer, str(folder / saved / "optimizer"))
            training.state.progress = training.state.progress._replace(step=CASE.steps - 1)
            weights[saved].append(training.booster.state_dict(training.model))
            training.fit()
            weights[saved].append(training.booster.state_dict(training.model))
    return weights


once = pytest.mark.xdist_group("booster files")  # ranks save and load once


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of what two ranks saved under each plugin."""
    folder = tmp_path_factory.mktemp("booster")
    run_ranks(save_all, 2, folder)
    return folder


@pytest.fixture(scope="module")
def loaded(saved):
    """What one process loads, and what two ranks do under the plugin after it in the list."""
    moved = dict(zip(PLUGINS, (*PLUGINS[1:], PLUGINS[0]), strict=True))
    return load_each(saved, dict.fromkeys(PLUGINS)), run_ranks(load_each, 2, saved, moved)[0]


def read_by_torch(file):
    """The weights of a file as they lie in a plain model."""
    plain = MODELS[CASE.model]().double()
    read = torch.load if file.suffix == ".pt" else safetensors.torch.load_file
    plain.load_state_dict(read(file))
    return dict(plain.state_dict())


@once
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_plain_torch_reads_what_ranks_saved(saved, plugin, name):
    expected = state(trained(None).model)
    weights = read_by_torch(saved / plugin / name)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-9)


@once
@pytest.mark.parametrize("plugin", PLUGINS)
def test_each_kind_of_file_holds_the_same_bits(saved, loaded, plugin):
    weights = read_by_torch(saved / plugin / "model.safetensors")
    torch.testing.assert_close(loaded[0][plugin][::2], [weights] * 3, rtol=0, atol=0)


@once
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_training_goes_on_from_each_kind_of_file(saved, loaded, plugin):
    stepped = loaded[0][plugin][1::2]
    torch.testing.assert_close(stepped, [stepped[0]] * 3, rtol=0, atol=0)
    weights = read_by_torch(saved / plugin / "model.safetensors")
    assert not torch.equal(stepped[0]["head.weight"], weights["head.weight"])


@once
@pytest.mark.parametrize("plugin", PLUGINS)
def test_ranks_under_another_plugin_go_on_as_one_process_does(loaded, plugin):
    single, on_ranks = loaded
    torch.testing.assert_close(on_ranks[plugin], single[plugin], rtol=1e-6, atol=1e-9)


@once
def test_shards_take_the_place_of_those_of_more_ranks(saved, tmp_path):
    """Other files of the folder are left alone."""
    folder = shutil.copytree(saved / "fsdp" / "model", tmp_path / "model")
    (folder / "config.json").write_text("{}")
    training = trained(None)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.add_(1.0)
    training.booster.save_model(training.model, folder, shard=True)
    later = trainer(CASE)
    later.booster.load_model(later.model, folder)
    torch.testing.assert_close(state(later.model), state(training.model), rtol=0, atol=0)
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_write_that_is_interrupted_leaves_the_former_file(tmp_path, monkeypatch, name):
    training = trainer(CASE)
    file = tmp_path / name
    training.booster.save_model(training.model, file)
    before = file.read_bytes()

    def torn(value: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    monkeypatch.setattr(safetensors.torch, "save_file", torn)
    with pytest.raises(KeyboardInterrupt):
        training.booster.save_model(training.model, file)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, before)]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_file_that_is_cut_is_refused(tmp_path, name):
    training = trainer(CASE)
    file = tmp_path / name
    training.booster.save_model(training.model, file)
    whole = file.read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged, or no checkpoint"):
            training.booster.load_model(training.model, file)


class Ran:
    """Pickled, it would write a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_wrong_file_is_refused_before_it_changes_anything(tmp_path):
    training = trainer(CASE)
    good = state(training.model)
    first = next(iter(good))
    for content, message in (
        ({"a": Ran(tmp_path / "ran")}, "damaged, or no checkpoint"),
        ([1, 2], "damaged, or no checkpoint"),
        ({**good, "extra": torch.ones(1)}, "unexpected: extra"),
        ({k: v for k, v in good.items() if k != first}, first),
        ({**good, first: torch.ones(2, 2)}, "shape"),
    ):
        torch.save(content, tmp_path / "model.pt")
        with pytest.raises(ValueError, match=message):
            training.booster.load_model(training.model, tmp_path / "model.pt")
        torch.testing.assert_close(state(training.model), good, rtol=0, atol=0)
    assert not (tmp_path / "ran").exists()


def test_a_file_of_some_parameters_is_loaded_where_that_is_asked_for(tmp_path):
    training = trainer(CASE)
    before = state(training.model)
    first, tensor = next(iter(before.items()))
    torch.save({first: tensor + 1, "extra": tensor}, tmp_path / "some.pt")
    training.booster.load_model(training.model, tmp_path / "some.pt", strict=False)
    after = state(training.model)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert first in changed <= {first, "head.weight"}
