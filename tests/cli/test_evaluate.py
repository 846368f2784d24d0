"""``evaluate`` gives the run's own evaluations, and ``export`` a file that a plain model loads."""

import shutil

import pytest
import safetensors.torch
import torch
import yaml
from torch.nn.functional import cross_entropy

from runner.cli.main import main
from runner.request.record import recorded_job
from runner.run_folder import files
from runner.train import build
from runner.train.maker import maker
from tests.launch.ends import rows_of
from tests.process import run_here
from tests.verify.requests import net

SHORT = [
    *("device=cpu", "tracker=none", "train.max_duration=7ba", "eval.interval=3ba"),
    *("data=synthetic", "data.samples=64", "data.test_samples=45", "data.batch_size=8"),
    *("clip.threshold=0.3", "seed=4"),
]
GPT = [
    *("model=gpt", "model.layers=2", "model.width=16", "model.heads=2", "model.context=16"),
    *("data.kind=tokens", "data.sequence_length=16", "data.vocabulary=256"),
]
OWN = "tests.verify.nets.Normed"
pytestmark = pytest.mark.xdist_group("evaluate")  # it trains once


def train(folder, *words):
    run_here(*SHORT, *words, f"hydra.run.dir={folder}")
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run of one process, with batch norm."""
    folder = tmp_path_factory.mktemp("runs") / "single"
    return train(folder, *net("Normed"), "checkpoint.interval=2ba")


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """A run of two local ranks that each hold a half of the model, whose embedding is tied."""
    folder = tmp_path_factory.mktemp("runs") / "fsdp"
    return train(folder, *GPT, "plugin=fsdp", "plugin.nproc=2", "checkpoint.interval=3ba")


def last(run):
    """Loss and accuracy of the last evaluation that a run logged."""
    return {key: value for key, value in rows_of(run)[-1].items() if key.startswith("eval/")}


def evaluated(capsys, *words):
    """What ``evaluate`` prints: values by key, and the line above them."""
    capsys.readouterr()
    assert main(["evaluate", *map(str, words), "trust=true"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    head, *lines = said.out.splitlines()
    values = dict(line.split() for line in lines if line.startswith("eval/"))
    return {key: float(value) for key, value in values.items()}, head


@pytest.mark.parametrize(
    ("trained", "about"),
    [("single", "step 7; plugin=single on 1 rank"), ("fsdp", "plugin=fsdp on 2 ranks")],
)
def test_it_gives_the_last_evaluation_to_the_bit(trained, about, request, capsys):
    run = request.getfixturevalue(trained)
    values, head = evaluated(capsys, run)
    assert values == last(run)
    assert head.startswith(str(run / "checkpoints/final"))
    assert head.endswith(about)


def test_it_writes_nothing(single, capsys, outputs):
    before = {path: path.is_file() and path.read_bytes() for path in single.rglob("*")}
    evaluated(capsys, single)
    assert {path: path.is_file() and path.read_bytes() for path in single.rglob("*")} == before
    assert not outputs.exists()


def test_one_process_evaluates_what_ranks_trained(fsdp, capsys):
    values, head = evaluated(capsys, fsdp, "plugin=single", "data.batch_size=5")
    assert values == pytest.approx(last(fsdp), rel=1e-6)
    assert head.endswith("plugin=single on 1 rank")


def test_another_checkpoint_is_evaluated_by_its_name(single, capsys):
    newest, head = evaluated(capsys, single, "--checkpoint", "last")
    assert head.split(", ")[1].startswith("step 6;")
    assert newest != last(single)


def test_other_data_may_be_evaluated_on(single, capsys):
    values, _ = evaluated(capsys, single, "data.seed=9")
    assert values.keys() == last(single).keys()
    assert values != last(single)


WRONG = [
    ("export sweep", "is a sweep; name one of its runs"),
    (
        "export {run} --checkpoint 5",
        "has no checkpoint 5: checkpoint.interval=2ba saves none at this step",
    ),
    ("export {run} --output no/model.pt", "must name a file in a folder"),
    ("evaluate {run} {run}", "KEY=VALUE"),
    ("evaluate bare", "holds no checkpoint"),
    ("evaluate {run} data.batch=4", "unknown key; did you mean data.batch_size?"),
    ("evaluate {run} data.seed=1,2", "must be one value"),
    ("evaluate {run} recipe=gpt", "the run is trained already"),
    ("evaluate {run} --checkpoint newest", "has no checkpoint newest  (there are:"),
    ("evaluate {run} data.shape=[3,8,8]", "does not take a sample of"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_requests_are_refused(single, words, message, outputs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bare", "sweep"):
        (tmp_path / name).mkdir()
    (tmp_path / "sweep" / files.SWEEP).write_text("{}")
    shutil.copy(single / files.CONFIG, tmp_path / "bare")
    trust = ["trust=true"] * words.startswith("evaluate")
    assert main([*words.format(run=single).split(), *trust]) == 2
    assert message in capsys.readouterr().err
    assert not outputs.exists()


@pytest.fixture
def copied(single, tmp_path):
    """A copy of that run, which a test may damage."""
    run = tmp_path / "run"
    shutil.copytree(single, run)
    return run


def test_another_model_than_the_checkpoints_is_refused(single, capsys):
    assert main(["evaluate", str(single), "model=cnn"]) == 1
    said = capsys.readouterr().err
    assert "does not hold" in said
    assert "Traceback" not in said


def test_an_evaluation_without_held_out_data_is_refused(single, capsys, outputs):
    stream = ["data=own", "data.train._target_=tests.verify.nets.Images"]
    assert main(["evaluate", str(single), *stream, "trust=true", "sweep.objective=train/loss"]) == 1
    assert "there is no held-out data to evaluate on" in capsys.readouterr().err


def test_damaged_weights_are_refused(copied, capsys):
    shard = next((copied / "checkpoints/final").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-7])
    assert main(["evaluate", str(copied), "trust=true"]) == 1
    assert "is damaged: its sha256 is not that of the manifest" in capsys.readouterr().err
    assert main(["export", str(copied)]) == 1
    assert not list(copied.glob("model*"))
    # Another checkpoint of the same run is whole.
    assert main(["evaluate", str(copied), "--checkpoint", "last", "trust=true"]) == 0


STRANGE = [
    # Nothing of these is imported.
    {
        "model._target_": "own.Net",
        "data._target_": "torch.load",
        "loss._target_": "builtins.open",
        "clip._target_": "torch.nn.ReLU",
        "callbacks.0._target_": "pathlib.Path.write_text",
        "eval.metrics.0._target_": "os.system",
        "optimizer.nested.0.deep._target_": "runner.run_folder.strict_json.write_text",
    },
    # These have names like what is called, and are something else.
    {
        "model._target_": "torch.nn.utils.clip_grad_norm_",
        "data._target_": "torch.utils.data.DataLoader",
        "scheduler._target_": "transformers.Trainer",
        "optimizer.hook._target_": "torch.utils.data.random_split",
        "model.width._target_": "torch.nn.functional.torch.from_file",
        "optimizer.other._target_": "torch.nn.functional.mse_loss",  # an argument is no loss
        "loss._target_": "timm.create_model",  # with arguments by which it loads pickles
    },
]


@pytest.mark.parametrize("targets", STRANGE)
def test_a_record_calls_what_it_names_only_if_that_is_known_or_trusted(
    single, targets, tmp_path, capsys
):
    run = tmp_path / "run"
    shutil.copytree(single, run)
    file = run / files.CONFIG
    config = yaml.safe_load(file.read_text())
    nested = {"model_kwargs": [{"checkpoint_path": "x"}]}
    config |= {"trust": True, "callbacks": [{}], "loss": nested}
    config["eval"]["metrics"] = [{"_target_": "torchmetrics.F1Score"}]
    config["optimizer"] |= {"nested": [{"deep": {"file": "x"}}], "hook": {}, "other": {}}
    config["model"] |= {"_target_": "runner.models.cnn.DigitsCNN", "width": {}}
    config["callbacks"][0] = {"_target_": "runner.train.callbacks.EarlyStopping"}
    for key, target in targets.items():
        section = config
        for part in key.split(".")[:-1]:
            section = section[int(part) if isinstance(section, list) else part]
        section["_target_"] = target
    file.write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 + len(targets)
    for key, target in targets.items():
        [line] = [line for line in said if line.startswith(f"  {key}={target} ")]
        assert "add trust=true, or type" in line
    assert main(["export", str(run)]) == 0  # it calls nothing


def test_a_run_of_ones_own_class_is_evaluated_once_it_is_typed_again(single, tmp_path, capsys):
    assert main(["evaluate", str(single)]) == 2
    assert f"add trust=true, or type model._target_={OWN}" in capsys.readouterr().err
    options = tmp_path / "conf" / "model"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text(f"_target_: {OWN}\n")
    for words in ([f"model={OWN}"], ["--config-dir", str(tmp_path / "conf")]):
        assert main(["evaluate", str(single), *words]) == 0


def loss_of(file, run):
    """The held-out loss of an exported file, by a plain model."""
    config = recorded_job(run / files.CONFIG, []).config
    model = maker(config.model)().eval()
    read = safetensors.torch.load_file if file.suffix == ".safetensors" else torch.load
    model.load_state_dict(read(file), strict=True)
    held_out = build.make_data(config.data).test
    inputs, targets = held_out.__getitems__(range(len(held_out)))
    with torch.no_grad():
        return cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()


@pytest.mark.parametrize(
    ("asked", "step", "name"),
    [
        ("", 7, "model.safetensors"),
        ("--checkpoint last", 6, "model.pt"),
        ("--checkpoint best", None, "model.safetensors"),
        ("--checkpoint 000003", 3, "model.pt"),
    ],
)
def test_a_plain_model_loads_the_exported_file(fsdp, asked, step, name, tmp_path, capsys):
    losses = {row["train/step"]: row["eval/loss"] for row in rows_of(fsdp) if "eval/loss" in row}
    step = step or min((3, 6), key=losses.__getitem__)
    file = tmp_path / name
    assert main(["export", str(fsdp), "--output", str(file), *asked.split()]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == str(file)
    assert f"step {step}" in said.out
    assert not list(tmp_path.glob(".*")), "a part of a file is left"
    assert loss_of(file, fsdp) == pytest.approx(losses[step], rel=1e-6)
    if name == "model.safetensors":
        with safetensors.safe_open(file, "pt") as opened:
            assert {"format": "pt", "run": "fsdp", "step": str(step)}.items() <= (
                opened.metadata().items()
            )


def test_a_file_that_exists_is_kept_unless_forced(single, tmp_path, capsys, monkeypatch):
    def full(*args):
        raise safetensors.SafetensorError("I/O error: No space left on device")

    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    words = ["export", str(single), "--output", str(file)]
    assert main(words) == 2
    assert "exists; --force replaces it" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", full)
        assert main([*words, "--force"]) == 1
    assert f"{file} cannot be written" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert main([*words, "--force"]) == 0
    assert str(file) in capsys.readouterr().out
