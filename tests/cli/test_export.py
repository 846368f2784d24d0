"""``python -m runner export``: the weights of a run as one file, which a plain model loads."""

import shutil

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader

from runner import Trainer
from runner.cli.main import main
from runner.data import collate_pairs
from runner.run_folder import files
from tests.distributed.training import network, tokens

STEPS = {2: 3.0, 4: 1.0, 6: 2.0}
"""Steps of the checkpoints, with their held-out losses."""
OBJECTIVE = "sweep: {objective: eval/loss, direction: null}\n"


class Weighted(nn.Module):
    """Cross entropy with a trainable temperature."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1) * self.scale, targets.flatten())


def trained_for(steps):
    # Embedding and head are one tensor.
    loader = DataLoader(tokens(8), 4, collate_fn=collate_pairs)
    training = Trainer(network("tokens"), loader, f"{steps}ba", criterion=Weighted())
    training.fit()
    return training


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with three checkpoints, and the weights of each step."""
    run = tmp_path_factory.mktemp("runs") / "run"
    weights = {}
    for step, loss in STEPS.items():
        training = trained_for(step)
        about = {"metrics": {"eval/loss": loss}, "config_hash": "0123456789abcdef"}
        training.save(run / "checkpoints", about)
        state = training.model.unwrap().state_dict()
        weights[step] = {name: tensor.clone() for name, tensor in state.items()}
    (run / files.CONFIG).write_text(OBJECTIVE)
    return run, weights


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run"


def loaded(file):
    read = safetensors.torch.load_file if file.suffix == ".safetensors" else torch.load
    model = network("tokens")
    model.load_state_dict(read(file), strict=True)
    assert model.head.weight is model.embed.weight
    return model.state_dict()


def equal(file, weights):
    torch.testing.assert_close(loaded(file), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("asked", "step", "name"),
    [
        (None, 6, "model.safetensors"),
        ("last", 6, "model.pt"),
        ("best", 4, "model.safetensors"),
        ("2", 2, "model.pt"),
        ("000004", 4, "model.safetensors"),
    ],
)
def test_a_plain_model_loads_the_file(trained, run, name, asked, step, tmp_path, capsys):
    which = [] if asked is None else ["--checkpoint", asked]
    file = tmp_path / name
    assert main(["export", str(run), "--output", str(file), *which]) == 0
    equal(file, trained[1][step])
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == str(file)
    assert f"step {step}" in said.out
    assert "without 1 tensor of the criterion" in said.out
    assert said.err == ""
    assert not list(tmp_path.glob(".*")), "a part of a file is left"
    if name == "model.safetensors":
        with safetensors.safe_open(file, "pt") as opened:
            about = {"format": "pt", "run": "run", "config": "0123456789abcdef"}
            assert opened.metadata() == about | {"step": str(step)}


def test_final_weights_come_first_and_torchs_format_keeps_tied_tensors_tied(trained, run):
    shutil.copytree(run / "checkpoints/step_000000002", run / "checkpoints/final")
    for which in ([], ["--checkpoint", "final"]):
        assert main(["export", str(run), "--force", "--format", "torch", *which]) == 0
        equal(run / "model.pt", trained[1][2])
    held = torch.load(run / "model.pt", weights_only=True)
    assert held["head.weight"].data_ptr() == held["embed.weight"].data_ptr()


def test_a_file_that_exists_is_kept_unless_forced_and_on_a_full_disk(run, capsys, monkeypatch):
    def full(*args):
        raise safetensors.SafetensorError("I/O error: No space left on device")

    file = run / "model.safetensors"
    file.write_text("mine")
    assert main(["export", str(run)]) == 2
    assert "exists; --force replaces it" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", full)
        assert main(["export", str(run), "--force"]) == 1
    assert f"{file} cannot be written" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert not list(run.glob(".*"))
    assert main(["export", str(run), "--force"]) == 0
    loaded(file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("missing", "there is no such folder"),
        ("empty", "holds no checkpoint"),
        ("sweep", "is a sweep; name one of its runs"),
        ("run --checkpoint 5", "has no checkpoint 5  (there are: 2, 4, 6)"),
        ("run --output no/model.pt", "there is no folder"),
        ("run --output empty", "is a folder; name a file"),
        ("run --format onnx", "invalid choice"),
        ("other --checkpoint best", "no checkpoint best with eval/accuracy"),
        ("bare --checkpoint best", files.CONFIG),
    ],
)
def test_what_cannot_be_exported_is_refused(run, words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / files.SWEEP).write_text("{}")
    for name in ("other", "bare"):
        shutil.copytree(run, tmp_path / name)
    (tmp_path / "other" / files.CONFIG).write_text(OBJECTIVE.replace("loss", "accuracy"))
    (tmp_path / "bare" / files.CONFIG).unlink()
    assert main(["export", *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("model*"))


def test_a_damaged_checkpoint_is_named(trained, run, capsys):
    def damage(step):
        shard = next((run / f"checkpoints/step_00000000{step}").glob("*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-10] ^= 1
        shard.write_bytes(content)

    damage(6)
    assert main(["export", str(run), "--checkpoint", "6"]) == 1
    assert "sha256 is not that of the manifest" in capsys.readouterr().err
    assert not list(run.glob("model*"))
    # Without a name, the newest whole one is exported.
    assert main(["export", str(run)]) == 0
    equal(run / "model.safetensors", trained[1][4])
    damage(2)
    damage(4)
    assert main(["export", str(run), "--force"]) == 1
