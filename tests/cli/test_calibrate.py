"""``python -m runner calibrate`` from its words to its file."""

import shlex

import pytest

from runner.calibrate.calibrate import commands
from runner.cli.main import main
from runner.request.request import request
from tests.launch.ends import read, rows_of

SMALL = ["data=synthetic", "data.samples=256", "device=cpu", "train.max_duration=2ep"]
# 16 steps of 32 samples.


def calibrated(outputs, *words):
    assert main(["calibrate", *words, f"calibrate.output={outputs}"]) == 0
    return read(outputs, "calibrate.json")


@pytest.mark.parametrize(
    "mode", ["norm", pytest.param("value", marks=pytest.mark.slow), "adaptive"]
)
def test_predicted_shares_are_those_of_an_unclipped_run_to_the_bit(mode, outputs, capsys):
    calibration = calibrated(outputs / "found", *SMALL, f"clip={mode}", "calibrate.steps=12")
    said = capsys.readouterr().out
    assert (calibration["steps"], calibration["mode"], calibration["warmup_steps"]) == (12, mode, 1)
    assert said.strip().startswith("Whether clipping matters here, 11 steps are too few to tell.")
    for part in ("Next", "‖G‖", "only 11 steps measured after the warm-up"):
        assert part in said
    sweep = calibration["next"]["sweep"].rpartition("clip.threshold=")[2].split(",")
    assert {float(swept) for swept in sweep} <= {*map(float, calibration["would_clip"])}
    assert not (outputs / "runs").exists()
    # An unclipped run: a threshold that never binds keeps the units of the mode.
    thresholds = list(calibration["would_clip"])
    what_if = f"clip.what_if=[{','.join(thresholds)}]"
    assert main([*SMALL, f"clip={mode}", "clip.threshold=1e9", "tracker=none", what_if]) == 0
    [folder] = outputs.glob("runs/*")
    rows = rows_of(folder)
    row = next(row for row in rows if row["train/step"] == 12)
    assert {t: row[f"clip/what_if/{t}"] for t in thresholds} == calibration["would_clip"]
    start = str(calibration["suggested"]["start"])
    assert ("would_clip_parts" in calibration) == (mode != "norm")
    assert 0 < calibration.get("would_clip_parts", calibration["would_clip"])[start] < 0.5
    assert calibration["norms"] == [row["grad/norm"] for row in rows[:12]]
    key = f"clip/what_if/{thresholds[0]}"
    assert read(folder, "summary.json")[key] == rows[-1][key]


def test_two_ranks_measure_what_one_process_measures(outputs, capsys):
    words = [*SMALL, "clip=adaptive", "calibrate.steps=6"]
    single = calibrated(outputs / "one", *words)
    ranks = ["plugin=ddp", "plugin.nproc=2", "data.batch_size=16"]
    two = calibrated(outputs / "two", *words, *ranks)
    assert two["norms"] == pytest.approx(single["norms"], rel=1e-5)
    assert two["peaks"] == pytest.approx(single["peaks"], rel=1e-4)
    assert two["parts"] == pytest.approx(single["parts"], rel=1e-3)
    assert two["suggested"] == pytest.approx(single["suggested"], rel=0.01)
    # An earlier calibration is not written over.
    assert main(["calibrate", *words, f"calibrate.output={outputs / 'one'}"]) == 2
    assert "holds an earlier calibration" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=awd_lstm", "clip.threshold=3", "clip.norm_type=1", "data.batch_size=2"],
        ["+optimizer.foreach=false", "clip.what_if=[1]"],
    ],
)
def test_the_commands_to_run_next_cover_the_suggested_range(words):
    suggested = {"start": 0.37, "low": 0.1, "high": 2.0}
    run, sweep = commands(words, "norm", suggested).values()
    dropped = ("clip=", "calibrate.", "clip.w", "clip.threshold")
    kept = [word for word in words if not word.startswith(dropped)]
    typed = shlex.split(run)[3:]
    assert set(kept) < set(typed)
    [job] = request(typed).jobs
    assert (job.config.clip.mode, job.config.clip.threshold) == ("norm", 0.37)
    assert len(job.config.clip.what_if) == 4
    jobs = request(shlex.split(sweep)[4:], multirun=True).jobs
    assert [job.config.clip.threshold for job in jobs] == [0.1, 0.192, 0.37, 0.86, 2.0]
