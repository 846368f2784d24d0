import pytest

from runner.cli.main import main
from runner.compose.request import request
from runner.run_folder.sweep_record import SweepRecord
from runner.sweep.resume import plan_runs

SMALL = ["tracker=none", "train.max_duration=7ba"]
pytestmark = pytest.mark.usefixtures("outputs")


def test_every_run_is_listed_and_nothing_is_created(outputs, capsys):
    words = ["-m", "plugin=single,ddp", "clip=norm,adaptive", *SMALL]
    assert main(["plan", *words]) == 0
    header, *rows, summary = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["run", "also", "differs", "steps", "state"]
    assert rows == [
        ["0", "plugin=single", "clip=norm", "clip.threshold=1.0", "7", "to", "run"],
        ["1", "plugin=single", "clip=adaptive", "clip.threshold=0.01", "7", "to", "run"],
        ["2", "plugin=ddp", "clip=norm", "clip.threshold=1.0", "7", "to", "run"],
        ["3", "plugin=ddp", "clip=adaptive", "clip.threshold=0.01", "7", "to", "run"],
    ]
    assert " ".join(summary).startswith("4 of 4 to run, 28 steps, in")
    assert not outputs.exists()
    assert main(["plan", *SMALL]) == 0  # one run is a plan too
    assert capsys.readouterr().out.splitlines()[1].split() == ["0", "7", "to", "run"]


def test_what_is_done_is_said(outputs, capsys):
    words = ["-m", "seed=1,2", "sweep.name=mine", *SMALL]
    wanted = request(words[1:], multirun=True)
    record = SweepRecord(
        name="mine",
        words=words,
        request=wanted.sweep.identity,
        objective="eval/loss",
        maximizes=False,
        max_failures=None,
        keys=["seed"],
        total=2,
        entries=plan_runs(wanted),
    )
    folder = outputs / "sweeps" / "mine"
    (folder / "1").mkdir(parents=True)
    record.write(folder)
    status = f'{{"state": "finished", "config_hash": "{wanted.jobs[1].hash}"}}'
    (folder / "1" / "status.json").write_text(status)
    (folder / "1" / "summary.json").write_text('{"steps": 7}')
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "1    seed=2  7      done" in out
    assert "1 of 2 to run, 7 steps" in out
