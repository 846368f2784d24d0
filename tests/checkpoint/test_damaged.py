"""A checkpoint that is damaged, or another program's, is refused: nothing is loaded, or run."""

import hashlib
import json
import os
import pickle
import random
import shutil

import pytest
import safetensors.torch
import torch
from torch import nn

from runner import Trainer
from runner.booster import SinglePlugin
from runner.checkpoint.folder import DamagedCheckpoint
from runner.data.dataset import TensorPairs


def trainer(width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    data = TensorPairs(torch.randn(12, 6), torch.randint(3, (12,)))
    loader = SinglePlugin().prepare_dataloader(data, 4, shuffle=True)
    return Trainer(model, loader, "2ba", optimizers=torch.optim.Adam(model.parameters()))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    training = trainer()
    training.fit()
    return training.save(tmp_path_factory.mktemp("made"))


@pytest.fixture
def checkpoint(made, tmp_path):
    return shutil.copytree(made, tmp_path / made.name)


def content(folder):
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def refused(checkpoint, kind=DamagedCheckpoint, training=None):
    """Return the message of the refusal; nothing was loaded, and nothing written."""
    training = training or trainer()
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    files = content(checkpoint)
    with pytest.raises(kind) as error:
        training.load(checkpoint)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert content(checkpoint) == files
    training.fit()  # it was not changed, so it can still train
    return str(error.value)


def signed(checkpoint):
    """Write a manifest that fits the files, as somebody who makes a checkpoint by hand can."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content(checkpoint).items()
        if name != "manifest.json"
    }
    path.write_text(json.dumps(manifest))


def shard(checkpoint):
    [found] = checkpoint.glob("*.safetensors")
    return found


def test_the_whole_one_loads(checkpoint):
    training = trainer()
    training.load(checkpoint)
    assert training.state.progress.step == 2


@pytest.mark.parametrize("seed", range(12))
def test_one_bit_is_noticed(checkpoint, seed):
    draw = random.Random(seed)
    path = draw.choice([shard(checkpoint), checkpoint / "state.pt"])
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    assert "its sha256 is not that of the manifest" in refused(checkpoint)


@pytest.mark.parametrize("name", ["state.pt", "manifest.json", "*.safetensors"])
@pytest.mark.parametrize("kept", [0, 7, -1])
def test_a_file_that_is_cut_off_is_noticed(checkpoint, name, kept):
    [path] = checkpoint.glob(name)
    path.write_bytes(path.read_bytes()[:kept])
    if name == "manifest.json" and kept == -1:  # its last newline
        trainer().load(checkpoint)
    else:
        assert str(path) in refused(checkpoint)


@pytest.mark.parametrize("name", ["state.pt", "manifest.json", "*.safetensors"])
def test_a_folder_in_place_of_a_file_is_noticed(checkpoint, name):
    [path] = checkpoint.glob(name)
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedCheckpoint, match=str(path.name).replace(".", r"\.")):
        trainer().load(checkpoint)


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))]
)
def test_no_code_is_run(checkpoint, tmp_path, write):
    write({"progress": Code(tmp_path / "ran")}, checkpoint / "state.pt")
    signed(checkpoint)
    message = refused(checkpoint)
    assert "state.pt is no state of a training (UnpicklingError)" in message
    assert "weights_only" not in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("state", [[1, 2], {"epoch": 3}, torch.ones(2)])
def test_a_state_of_something_else_is_refused(checkpoint, state):
    torch.save(state, checkpoint / "state.pt")
    signed(checkpoint)
    assert "state.pt is no state of a training" in refused(checkpoint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("progress", value) for value in (None, 3, {"odd": 1})),
        *(("schedulers", value) for value in (None, 3)),
        *(("random", value) for value in (None, 3)),
        *(("optimizers", value) for value in (None, 3, {})),
    ],
)
def test_a_part_of_something_else_is_refused(checkpoint, key, value):
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    torch.save(state | {key: value}, checkpoint / "state.pt")
    signed(checkpoint)
    assert "holds no state of a training" in refused(checkpoint)


def test_tensors_of_another_program_are_refused(checkpoint):
    safetensors.torch.save_file({"transformer.h.0.attn": torch.ones(3)}, shard(checkpoint))
    signed(checkpoint)
    assert "does not hold" in refused(checkpoint, ValueError)


def test_tensors_of_another_shape_are_refused(checkpoint):
    message = refused(checkpoint, ValueError, trainer(width=9))
    assert "has shape [8, 6] where it is stored, but [9, 6] here" in message


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b'\x08\0\0\0\0\0\0\0{"a": 1}', b"{}"])
def test_what_are_no_safetensors_is_refused(checkpoint, data):
    shard(checkpoint).write_bytes(data)
    signed(checkpoint)
    assert "holds no safetensors that can be read" in refused(checkpoint, ValueError)


def test_tensors_that_the_manifest_does_not_name_are_refused(checkpoint):
    shutil.copy(shard(checkpoint), checkpoint / "more.safetensors")
    assert "holds more.safetensors, which its manifest does not" in refused(checkpoint)


@pytest.mark.parametrize("name", ["../state.pt", "/etc/hostname", "sub/state.pt", ".."])
def test_files_outside_of_the_checkpoint_are_not_read(checkpoint, name):
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = manifest["files"]["state.pt"]
    path.write_text(json.dumps(manifest))
    assert f"names '{name}', which is no file of the checkpoint" in refused(checkpoint)
