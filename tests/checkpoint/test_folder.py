"""A checkpoint is whole or it is not there; of several the newest whole one is found."""

import ctypes
import json
import sys
from pathlib import Path

import pytest

from runner.checkpoint import folder as checkpoints
from runner.checkpoint.folder import DamagedCheckpoint


def save(folder, step, content="x" * 100, **about):
    part = checkpoints.begin(folder, step)
    (part / "a.safetensors").write_text(content)
    (part / "state.pt").write_text("state")
    return checkpoints.complete(part, {"step": step} | about)


def test_a_checkpoint_is_found_and_whole(tmp_path):
    first, second = save(tmp_path, 9), save(tmp_path, 10)
    assert (first.name, second.name) == ("step_000000009", "step_000000010")
    assert checkpoints.found(tmp_path) == [second, first]
    assert [(one, about["step"]) for one, about in checkpoints.whole(tmp_path)] == [
        (second, 10),
        (first, 9),
    ]
    assert {one.name for one in tmp_path.iterdir()} == {first.name, second.name}


def test_there_may_be_none(tmp_path):
    assert checkpoints.found(tmp_path / "nowhere") == []
    assert list(checkpoints.whole(tmp_path)) == []


def test_an_unfinished_write_leaves_the_former_one(tmp_path):
    former = save(tmp_path, 1)
    part = checkpoints.begin(tmp_path, 2)
    (part / "a.safetensors").write_text("half")
    assert checkpoints.found(tmp_path) == [former]
    again = checkpoints.begin(tmp_path, 2)
    assert list(again.iterdir()) == []
    checkpoints.prune(tmp_path, keep=3, best=None, maximizes=False)
    assert list(tmp_path.iterdir()) == [former]


def test_the_same_step_may_be_written_again(tmp_path):
    save(tmp_path, 1, "old")
    again = save(tmp_path, 1, "new")
    assert list(tmp_path.iterdir()) == [again]
    assert (again / "a.safetensors").read_text() == "new"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems rename twice")
def test_there_is_no_moment_without_the_checkpoint(tmp_path, monkeypatch):
    held = save(tmp_path, 1, "old")
    rename = Path.rename

    def watched(path, target):
        moved = rename(path, target)
        assert list(checkpoints.whole(tmp_path)), f"{path.name} was renamed"
        return moved

    monkeypatch.setattr(Path, "rename", watched)
    assert save(tmp_path, 1, "new") == held
    assert (held / "a.safetensors").read_text() == "new"


def test_where_folders_cannot_be_exchanged_they_are_renamed(tmp_path, monkeypatch):
    save(tmp_path, 1, "old")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    again = save(tmp_path, 1, "new")
    assert list(tmp_path.iterdir()) == [again]
    assert (again / "a.safetensors").read_text() == "new"


def truncate(one):
    one.write_text(one.read_text()[:-1])


def flip(one):
    one.write_text("y" + one.read_text()[1:])


def remove(one):
    one.unlink()


@pytest.mark.parametrize(
    ("damage", "what"), [(truncate, "size"), (flip, "sha256"), (remove, "cannot be read")]
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(tmp_path, damage, what):
    former, newest = save(tmp_path, 1), save(tmp_path, 2)
    damage(newest / "a.safetensors")
    with pytest.raises(DamagedCheckpoint, match=rf"a\.safetensors.*{what}"):
        checkpoints.require_whole(newest)
    assert [one for one, _ in checkpoints.whole(tmp_path)] == [former]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON object"),
        ("[]", "no JSON object"),
        ("{}", "no manifest of a checkpoint"),
        ('{"version": 1, "files": []}', "no manifest of a checkpoint"),
        ('{"version": 2, "files": {}}', "later version"),
        ('{"version": 1, "files": {"a.safetensors": 3}}', "damaged"),
        ('{"version": 1, "files": {"../../etc/passwd": {}}}', "passwd', which is no file of"),
        ('{"version": 1, "files": {"..": {}}}', "'..', which is no file of"),
        ('{"version": 1, "files": {"state.pt": {}}}', "holds a.safetensors, which its manifest"),
        ('{"version": 1, "files": ' + "[" * 5000, "no JSON object"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path, text, message):
    checkpoint = save(tmp_path, 1)
    (checkpoint / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match=message):
        checkpoints.require_whole(checkpoint)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    (tmp_path / "step_000000001").mkdir()
    with pytest.raises(DamagedCheckpoint, match=r"is no checkpoint: manifest\.json"):
        checkpoints.manifest_of(tmp_path / "step_000000001")


def test_the_newest_and_the_best_are_kept(tmp_path):
    losses = [0.5, 0.2, 0.9, 0.4, 0.3]
    for step, loss in enumerate(losses, 1):
        save(tmp_path, step, metrics={"eval/loss": loss})
    checkpoints.prune(tmp_path, keep=2, best="eval/loss", maximizes=False)
    steps = [json.loads((one / "manifest.json").read_text())["step"] for one in found(tmp_path)]
    assert steps == [5, 4, 2]
    checkpoints.prune(tmp_path, keep=1, best="eval/loss", maximizes=True)
    assert [one.name for one in found(tmp_path)] == ["step_000000005", "step_000000004"]


def found(folder):
    return checkpoints.found(folder)
