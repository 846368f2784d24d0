"""A profile of some steps: its trace, and the table of where the time goes."""

import json

import pytest
import torch
from torch import nn

from runner import GradientClipping, Log, Trainer
from runner.cli.main import main
from runner.telemetry.profile import PARTS, Profile


def batches(number):
    torch.manual_seed(0)
    return [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(number)]


def profiled(folder, first, last, microbatches):
    profile = Profile(first, last, folder)
    trainer = Trainer(
        nn.Linear(3, 2),
        batches(6 * microbatches),
        "6ba",
        GradientClipping("norm", 0.1),
        accumulation_steps=microbatches,
        log=Log(profile=profile, bar=False),
    )
    trainer.fit()
    return trainer


def regions(folder):
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return [name.removeprefix("step: ") for name in names if name.startswith("step: ")]


def test_the_trace_has_each_part_of_each_step_that_was_asked_for(tmp_path):
    profiled(tmp_path, 2, 4, microbatches=2)
    names = regions(tmp_path)
    assert {part: names.count(part) for part in PARTS} == {
        "data": 3,
        "forward": 6,
        "backward": 6,
        "clipping": 3,
        "optimizer": 3,
        "record": 3,
    }


def test_the_shares_of_the_table_add_up_to_one(tmp_path):
    profiled(tmp_path, 1, 2, microbatches=1)
    lines = (tmp_path / "steps.txt").read_text().splitlines()
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[1 : 1 + len(PARTS)]]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_a_training_that_ends_in_the_range_leaves_the_profile_of_its_last_steps(tmp_path):
    profiled(tmp_path, 6, 9, microbatches=1)
    assert regions(tmp_path).count("optimizer") == 1


def test_profiled_steps_are_those_without_a_profile(tmp_path):
    torch.manual_seed(3)
    model = profiled(tmp_path, 2, 3, microbatches=2).model
    torch.manual_seed(3)
    plain = profiled(tmp_path, 9, 9, microbatches=2).model
    for name, weight in model.named_parameters():
        assert torch.equal(weight, dict(plain.named_parameters())[name]), name


@pytest.mark.usefixtures("outputs")
def test_the_command_writes_the_profile_into_the_folder_of_the_run(tmp_path):
    words = ["telemetry.profile=2:3", "train.max_duration=4ba", "tracker=none", "device=cpu"]
    assert main([*words, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "profile" / "trace.json").is_file()


def test_a_range_that_is_none_is_refused(capsys):
    assert main(["telemetry.profile=13:10"]) == 2
    assert "such as 10:13" in capsys.readouterr().err
