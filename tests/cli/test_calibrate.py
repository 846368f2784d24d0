"""``python -m runner calibrate`` from its words to its file."""

import json
import shlex

import pytest

from runner.cli.calibrate import commands
from runner.cli.main import main
from runner.compose.request import request
from tests.process import python

SMALL = ["data=synthetic", "data.samples=256", "device=cpu", "train.max_duration=2ep"]
# 16 steps of 32 samples.


def written(outputs):
    [file] = outputs.glob("calibrations/*/calibrate.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
@pytest.mark.product(every=3)
def test_predicted_shares_are_those_of_an_unclipped_run_to_the_bit(mode, outputs):
    words = [*SMALL, f"clip={mode}", "calibrate.steps=12"]
    said = python("-m", "runner", "calibrate", *words).stdout
    found = written(outputs)
    assert found["steps"] == 12
    assert (found["mode"], found["warmup_steps"]) == (mode, 1)
    assert "Next" in said
    assert "‖G‖" in said
    assert not (outputs / "runs").exists()
    # An unclipped run: a threshold that never binds keeps the units of the mode.
    thresholds = list(found["would_clip"])
    asked = f"clip.what_if=[{','.join(thresholds)}]"
    same = [word for word in words if not word.startswith("calibrate.")]
    unclipped = ["clip.threshold=1e9", "tracker=none", asked]
    python("-m", "runner", *same, *unclipped)
    [folder] = outputs.glob("runs/*")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["train/step"] == 12)
    observed = {t: row[f"clip/what_if/{t}"] for t in thresholds}
    assert observed == found["would_clip"]
    start = str(found["suggested"]["start"])
    assert ("would_clip_parts" in found) == (mode != "norm")
    assert 0 < found.get("would_clip_parts", found["would_clip"])[start] < 0.5
    assert "only 11 steps were measured after the warm-up" in said
    assert found["norms"] == [row["grad/norm"] for row in rows[:12]]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["clip/what_if/" + thresholds[0]] == rows[-1]["clip/what_if/" + thresholds[0]]


def test_two_ranks_measure_what_one_process_measures(outputs):
    words = [*SMALL, "clip=adaptive", "calibrate.steps=6"]
    python("-m", "runner", "calibrate", *words, "calibrate.output=" + str(outputs / "one"))
    ranks = ["plugin=ddp", "plugin.nproc=2", "data.batch_size=16"]
    python("-m", "runner", "calibrate", *words, *ranks, "calibrate.output=" + str(outputs / "two"))
    one, two = (
        json.loads((outputs / name / "calibrate.json").read_text()) for name in ("one", "two")
    )
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert two["peaks"] == pytest.approx(one["peaks"], rel=1e-4)
    assert two["parts"] == pytest.approx(one["parts"], rel=1e-3)
    assert two["suggested"] == pytest.approx(one["suggested"], rel=0.01)


def test_an_ordinary_model_is_given_a_threshold_that_publications_study(outputs):
    """The largest unit of a step is no measure: one near zero exceeds its weight many times."""
    words = ["data=digits", "device=cpu", "clip=adaptive", "calibrate.steps=100"]
    said = python("-m", "runner", "calibrate", *words).stdout
    found = written(outputs)
    assert 0.01 <= found["suggested"]["start"] <= 0.16
    assert found["peak"]["after_warm_up"]["p90"] > 0.5
    assert "(clips 20 % of these units)" in said
    assert "share of the steps it would have clipped, and of their units" in said
    assert "only" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clip.treshold=1"], "did you mean clip.threshold?"),
        (["-m", "seed=1,2"], "--multirun  does not go with a calibration"),
        (["recipe=sweep_norm"], "a calibration is of one run"),
        (["calibrate.steps=10", "calibrate.warmup_steps=10"], "must leave some"),
        (["clip.what_if=[0.1,-1]"], "must be a list of finite numbers greater than 0"),
        (["clip.what_if=0.1"], "must be a list of finite numbers greater than 0"),
    ],
)
def test_a_wrong_request_creates_nothing(words, said, outputs, capsys):
    assert main(["calibrate", *words]) == 2
    assert said in capsys.readouterr().err
    assert not outputs.exists()


def test_an_earlier_calibration_is_not_written_over(outputs, capsys):
    outputs.mkdir()
    (outputs / "calibrate.json").write_text("{}")
    assert main(["calibrate", f"calibrate.output={outputs}"]) == 2
    assert "holds an earlier calibration" in capsys.readouterr().err


def test_its_help_names_its_keys(capsys):
    assert main(["calibrate", "--help"]) == 0
    assert "calibrate.warmup_steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["clip=none", "calibrate.steps=5"],
        ["recipe=awd_lstm", "clip.threshold=3", "clip.norm_type=1", "data.batch_size=2"],
        ["+optimizer.foreach=false", "clip.what_if=[1]"],
    ],
)
def test_the_commands_to_run_next_are_right(words):
    run, sweep = commands(words, "norm", 0.37).values()
    kept = [word for word in words if not word.startswith(("clip=", "calibrate.", "clip.w"))]
    kept = [word for word in kept if not word.startswith("clip.threshold")]
    typed = shlex.split(run)[3:]
    assert set(kept) < set(typed)
    [job] = request(typed, writes=False).jobs
    assert (job.config.clip.mode, job.config.clip.threshold) == ("norm", 0.37)
    assert len(job.config.clip.what_if) == 4
    assert shlex.split(sweep)[3] == "-m"
    jobs = request(shlex.split(sweep)[4:], multirun=True, writes=False).jobs
    assert [job.config.clip.threshold for job in jobs] == [0.0925, 0.185, 0.37, 0.74, 1.48]
