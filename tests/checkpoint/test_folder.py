"""A checkpoint is whole, or it is refused and nothing is loaded; the newest whole one is found."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from runner.checkpoint import folder as checkpoints
from runner.checkpoint.folder import DamagedCheckpoint
from tests.checkpoint.test_saver import half, trainer, weights
from tests.clip.reference import refused
from tests.trainers import fitted


def write(folder, step, content="x" * 100, **about):
    part = checkpoints.begin(folder, step)
    (part / "a.safetensors").write_text(content)
    (part / "state.pt").write_text("state")
    return checkpoints.complete(part, {"step": step} | about)


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert checkpoints.checkpoints_in(tmp_path / "nowhere") == []
    assert list(checkpoints.whole(tmp_path)) == []


def test_an_empty_folder_is_no_checkpoint(tmp_path):
    (empty := tmp_path / "step_000000007").mkdir()
    words = "is no checkpoint: manifest.json"
    refused(DamagedCheckpoint, words, checkpoints.manifest_of, empty)


def test_the_newest_whole_checkpoint_comes_first(tmp_path):
    (tmp_path / "step_000000007").mkdir()
    first = write(tmp_path, 9)
    second = write(tmp_path, 10)
    assert (first.name, second.name) == ("step_000000009", "step_000000010")
    whole = [(path, about["step"]) for path, about in checkpoints.whole(tmp_path)]
    assert whole == [(second, 10), (first, 9)]


def test_an_unfinished_write_leaves_the_former_one(tmp_path):
    former = write(tmp_path, 1)
    part = checkpoints.begin(tmp_path, 2)
    (part / "a.safetensors").write_text("half")
    assert checkpoints.checkpoints_in(tmp_path) == [former]
    assert list(checkpoints.begin(tmp_path, 2).iterdir()) == []
    checkpoints.prune(tmp_path, keep=3, best=None, maximizes=False)
    assert list(tmp_path.iterdir()) == [former]
    assert write(tmp_path, 1, "new") == former
    assert (former / "a.safetensors").read_text() == "new"


def test_a_checkpoint_that_is_removed_vanishes_at_once(tmp_path, monkeypatch):
    def killed(path, **options):
        if path.exists():
            raise KeyboardInterrupt

    for step in (1, 2):
        write(tmp_path, step)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", killed)
    refused(KeyboardInterrupt, "", checkpoints.prune, tmp_path, 1, None, False)
    assert [path.name for path in checkpoints.checkpoints_in(tmp_path)] == ["step_000000002"]
    monkeypatch.undo()
    checkpoints.prune(tmp_path, 1, None, False)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000002"]


def test_pruning_keeps_the_best_beside_the_newest(tmp_path):
    for step, loss in enumerate([0.5, 0.2, float("nan"), 0.4, 0.3], 1):
        write(tmp_path, step, metrics={"eval/loss": loss})
    for keep, maximizes, steps in [(2, False, [5, 4, 2]), (1, True, [5, 4])]:
        checkpoints.prune(tmp_path, keep=keep, best="eval/loss", maximizes=maximizes)
        assert list(map(checkpoints.step_of, checkpoints.checkpoints_in(tmp_path))) == steps


DAMAGE = [  # of a file, or the text of the manifest
    (lambda file: file.write_text(file.read_text()[:-1]), "a.safetensors|sha256"),
    (lambda file: file.write_text("y" + file.read_text()[1:]), "a.safetensors|sha256"),
    (Path.unlink, "a.safetensors|cannot be read"),
    (lambda file: (file.unlink(), file.mkdir()), "a.safetensors"),
    ("[]", "no JSON object"),
    ("{}", "no manifest of a checkpoint"),
    ('{"version": 4, "files": []}', "no manifest of a checkpoint"),
    ('{"version": 3, "files": {}}', "another version"),
    ('{"version": 4, "files": {"a.safetensors": 3}}', "damaged"),
    ('{"version": 4, "files": {"../../etc/passwd": {}}}', "passwd', which is no file of"),
    ('{"version": 4, "files": {"state.pt": {}}}', "holds a.safetensors, which its manifest"),
]


@pytest.fixture
def damaged(tmp_path, damage):
    """A checkpoint that is damaged, and the one before it."""
    former = write(tmp_path, 1)
    newest = write(tmp_path, 2)
    if isinstance(damage, str):
        (newest / "manifest.json").write_text(damage)
    else:
        damage(newest / "a.safetensors")
    return newest, former


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_checkpoint_is_refused(damaged, words):
    newest, _ = damaged
    refused(DamagedCheckpoint, words, checkpoints.require_whole, newest)


@pytest.mark.parametrize("damage", [damage for damage, _ in DAMAGE])
def test_the_checkpoint_before_a_damaged_one_is_used(damaged, tmp_path):
    _, former = damaged
    assert [path for path, _ in checkpoints.whole(tmp_path)] == [former]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return fitted(trainer(2)).save(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / saved.name)


def require_refusal(checkpoint, words, kind=DamagedCheckpoint, training=None):
    """Assert that a checkpoint is refused, that nothing was loaded, and nothing written."""
    training = training or trainer(2)
    before = weights(training)
    files = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    assert type(refused(kind, words, training.load, checkpoint)) is kind
    assert all(torch.equal(value, before[name]) for name, value in weights(training).items())
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == files
    training.fit()  # it was not changed, so it can still train


def sign(checkpoint):
    """Write a manifest that fits the files, as somebody who makes a checkpoint by hand can."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["state.pt", "*.safetensors"])
def test_one_bit_is_noticed(checkpoint, name):
    [path] = checkpoint.glob(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    require_refusal(checkpoint, f"{path} is damaged: its sha256")


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_is_run(checkpoint, tmp_path):
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        write({"progress": Code(tmp_path / "ran")}, checkpoint / "state.pt")
        sign(checkpoint)
        require_refusal(checkpoint, "state.pt is no state of a training")
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        *([1, 2], {"epoch": 3}, ("progress", {"odd": 1}), ("schedulers", 3), ("random", None)),
        ("optimizers", {}),
    ],
    ids=str,
)
def test_a_state_of_something_else_is_refused(checkpoint, content):
    if isinstance(content, tuple):
        state = torch.load(checkpoint / "state.pt", weights_only=True)
        content = state | {content[0]: content[1]}
    torch.save(content, checkpoint / "state.pt")
    sign(checkpoint)
    require_refusal(checkpoint, "no state of a training")


def test_another_model_optimizer_or_program_is_refused(checkpoint):
    for options, message in (
        ({"width": 9}, "shape [8, 6] where it is stored, but [9, 6]"),
        ({"kind": torch.optim.SGD}, "the state is that of AdamW, not of SGD"),
        ({"schedule": half}, "has 0 schedulers, this run has 1"),
    ):
        require_refusal(checkpoint, message, ValueError, trainer(2, **options))
    [shard] = checkpoint.glob("*.safetensors")
    safetensors.torch.save_file({"transformer.h.0.attn": torch.ones(3)}, shard)
    sign(checkpoint)
    require_refusal(checkpoint, "does not hold", ValueError)
    for data in (b"", b"\xff" * 64, b'\x08\0\0\0\0\0\0\0{"a": 1}'):
        shard.write_bytes(data)
        sign(checkpoint)
        require_refusal(checkpoint, "holds no safetensors that can be read", ValueError)
