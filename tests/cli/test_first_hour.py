"""The mistakes of a first hour: one line names the key, or the value, to type instead."""

import pytest

from runner.cli.main import main

LINEAR = "model=torch.nn.Linear"
MISTAKES = [
    ("clip.treshold=1", ["clip.treshold=1", "did you mean clip.threshold?"]),
    ("clip=0.25", ["did you mean clip.threshold=0.25?"]),
    ("norm=clip", ["did you mean clip=norm?"]),
    ("accumulation=4", ["did you mean accumulation.steps=4?"]),
    ("clip.threshold=abc", ["clip.threshold=abc", "number"]),
    ("lr=0.1", ["did you mean optimizer.lr?"]),
    ("batch_size=64", ["did you mean data.batch_size?"]),
    ("epochs=3", ["did you mean train.max_duration?"]),
    ("gpus=4", ["did you mean plugin.nproc?"]),
    ("precision=16", ["did you mean fp16?"]),
    ("precision=amp", ["did you mean fp16?"]),
    ("model=resnet50", ["did you mean resnet34?", "model=package.name"]),
    ("model=nomodule.Net", ["model._target_=nomodule.Net", "No module named 'nomodule'"]),
    ("model=torch.nn.Linaer", ["torch.nn has no Linaer; did you mean Linear?"]),
    (LINEAR, ["model.in_features", "model.out_features", "(2 problems)", "no value given"]),
    (
        f"{LINEAR} model.in_features=8 model.out_feature=10",
        ["model.out_feature=10", "did you mean model.out_features?"],
    ),
    (f"{LINEAR} model.in_features=3 model.out_features=2", ["does not take a sample of"]),
    ("loss=torch.nn.MSELoss", ["loss._target_=torch.nn.MSELoss", "does not take"]),
    ("plugin=tensor plugin.tp_size=2 plugin.nproc=3", ["plugin.nproc=3", "tp_size 2"]),
    ("resume=/nope", ["resume=/nope", "there is no", "auto, never, or the path of a run"]),
    ("data=datasets", ["data.train.path", "no value given"]),
    (
        "data=own data.train._target_=tests.own_code.Flow data.train.samples=2000 "
        f"{LINEAR} model.in_features=20 model.out_features=2",
        ["give train.max_duration in ba or sp", "a stream"],
    ),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_named_with_what_to_type(outputs, capsys, words, expected):
    assert main(["device=cpu", "tracker=none", *words.split()]) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in expected), printed
    assert not outputs.exists()


def test_a_folder_without_runs_and_one_of_another_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "status.json").write_text("{}")
    assert main(["tracker=none", f"hydra.run.dir={tmp_path}"]) == 2
    printed = capsys.readouterr().err
    assert "holds the record of an earlier run" in printed
    assert "choose another or remove it" in printed


def test_help_of_a_group_has_the_keys_of_the_chosen_option(capsys):
    assert main(["--help", "~report", "~loss"]) == 0
    every = capsys.readouterr().out
    assert main(["--help", "optimizer", "optimizer=adamw"]) == 0
    printed = capsys.readouterr().out
    for text in ("optimizer.lr=0.05", "optimizer.momentum=0.9", "model.width=32"):
        assert f"  {text}" in every
    assert "optimizer=" in printed
    assert "optimizer.betas=[0.9,0.999]" in printed.replace(" ", "")
    assert "model.width" not in printed


def test_a_batch_larger_than_the_data_is_said(outputs, capsys):
    words = ["device=cpu", "tracker=none", "data.batch_size=100000", "train.max_duration=1ba"]
    assert main(words) == 0
    printed = capsys.readouterr().err
    assert "a step has all 1,437 samples of the data, not 100,000" in printed
    assert "cpu, 1 rank (plugin=single), 1,437 samples, " in printed
    (folder,) = (outputs / "runs").iterdir()
    assert str(folder) in printed
