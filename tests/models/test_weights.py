"""Weights to start from: files of safetensors and torch, folders of shards, what does not fit."""

import pickle

import pytest
import safetensors.torch
import torch
from torch import nn

from runner.models.weights import WeightsError, load_weights
from tests.clip.reference import refused


class Tied(nn.Module):
    """A model whose head is its embedding, as language models have it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def net(seed, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


def equal(model, state):
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def saved(state, path):
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth", "w.bin"])
def test_a_file_gives_every_parameter_and_buffer(tmp_path, name):
    source = net(1)
    model = net(2)
    assert load_weights(model, saved(source.state_dict(), tmp_path / name)).difference == ""
    assert equal(model, source.state_dict())


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_a_checkpoint_of_another_trainer_gives_its_state_dict(tmp_path, key):
    source = net(1)
    model = net(2)
    load_weights(model, saved({key: source.state_dict(), "epoch": 3}, tmp_path / "w.pt"))
    assert equal(model, source.state_dict())


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_folder_gives_what_its_shards_hold_together(tmp_path, suffix):
    source = net(1)
    model = net(2)
    items = [*source.state_dict().items()]
    saved(dict(items[:3]), tmp_path / f"model-00001-of-00002{suffix}")
    saved(dict(items[3:]), tmp_path / f"model-00002-of-00002{suffix}")
    load_weights(model, tmp_path)
    assert equal(model, source.state_dict())


def test_a_tied_parameter_needs_one_of_its_names(tmp_path):
    source = Tied()
    state = {name: tensor for name, tensor in source.state_dict().items() if name != "head.weight"}
    model = Tied()
    assert load_weights(model, saved(state, tmp_path / "w.safetensors")).difference == ""
    assert torch.equal(model.head.weight, source.embed.weight)


def test_another_head_starts_from_its_own_values(tmp_path):
    source = net(1)
    model = net(2, classes=7)
    head = model[2].weight.clone()
    path = saved(source.state_dict(), tmp_path / "w.pt")
    loaded = load_weights(model, path, leave_out=["2.*"])
    assert str(loaded).startswith(f"7 of 9 tensors of the model come from {path}; left out by ")
    assert loaded.left_out == ("2.weight", "2.bias")
    assert torch.equal(model[0].weight, source[0].weight)
    assert torch.equal(model[2].weight, head)


def weights_of_another_model(tmp_path):
    state = net(1).state_dict()
    state["old.weight"] = state.pop("0.bias")
    return saved(state, tmp_path / "w.pt")


def test_the_difference_names_tensors_of_either_side(tmp_path):
    path = weights_of_another_model(tmp_path)
    told = load_weights(net(2), path, strict=False).difference
    lacking = f"{path} lacks 1 tensor of the model: 0.bias"
    assert told == f"{lacking}; the model lacks 1 tensor of {path}: old.weight"


def test_weights_of_another_model_are_refused(tmp_path):
    path = weights_of_another_model(tmp_path)
    refused(WeightsError, "model.strict=false", load_weights, net(2), path)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_another_shape_is_refused(tmp_path, device):
    path = saved(net(1).state_dict(), tmp_path / "w.safetensors")
    with torch.device(device):
        model = net(2, classes=7)
    refused(WeightsError, "2.weight [3, 5] for [7, 5]", load_weights, model, path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("w.safetensors", b"no weights", "cannot be read as weights"),
        ("w.pt", b"no weights", "cannot be read as weights"),
        ("w.pt", pickle.dumps(print), "cannot be read as weights"),
        ("missing.pt", None, "there is no file or folder"),
    ],
)
def test_what_is_no_file_of_weights_is_refused(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    refused(WeightsError, words, load_weights, net(1), path)


def test_a_file_of_another_model_is_refused(tmp_path):
    path = saved({"other.weight": torch.zeros(2)}, tmp_path / "w.pt")
    refused(WeightsError, "no tensor of this model", load_weights, net(1), path, strict=False)
