"""Folders of runs and sweeps as they are found: finished, lost, torn, damaged, resumed."""

import json
import math
import os
import shutil

import numpy as np
import pytest

from runner.report import NoRunError, read, read_run
from runner.report.findings import find
from runner.report.run import flat, read_series
from runner.report.sections.clipping import would_clip
from tests.report.examples import NO_SUCH_PROCESS, NORM, config, rows, sweep, write_run


def changed(folder, **status):
    file = folder / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **status}))
    return folder


@pytest.fixture
def running(tmp_path):
    """A run whose record says that it goes on, in a process that there is not."""
    return write_run(tmp_path / "run", rows(steps=20), config(), state="running")


def test_a_run_without_its_process_was_killed(running):
    assert read_run(running).state == "killed"


def test_a_run_goes_on_while_its_process_lives(running):
    assert read_run(changed(running, pid=os.getpid())).state == "running"


def test_a_run_on_another_host_is_taken_to_go_on(running):
    assert read_run(changed(running, pid=NO_SUCH_PROCESS, host="elsewhere")).state == "running"


@pytest.mark.parametrize("state", ["finished", "failed", "interrupted"])
def test_a_run_that_ended_has_the_state_of_its_record(state, running):
    assert read_run(changed(running, state=state)).state == state


@pytest.mark.parametrize("name", ["status.json", "summary.json", "config.yaml", "metrics.jsonl"])
def test_a_missing_or_damaged_file_is_done_without(tmp_path, name):
    folder = write_run(tmp_path / "run", rows(steps=20), config())
    for damage in ("", '{"a": ', "\x00\x01", None):
        (folder / name).unlink() if damage is None else (folder / name).write_text(damage)
        run = read_run(folder)
        expected = "unknown" if name == "status.json" else "finished"
        assert (run.steps, run.state) == (20, expected)


def test_the_configuration_is_hydras_or_what_the_overrides_say(tmp_path):
    single = read(write_run(tmp_path / "run", [], config(), overrides=("seed=3", "a=b c")))
    assert (single.single, single.command) == (True, "python -m runner seed=3 'a=b c'")
    with pytest.raises(NoRunError, match="nowhere"):
        read(tmp_path / "nowhere")
    folder = write_run(tmp_path / "a", [], config(clip__threshold=0.25))
    (folder / "config.yaml").rename(folder / ".hydra" / "config.yaml")
    overrides = ("clip=adaptive", "clip.threshold=0.01")
    bare = write_run(tmp_path / "b", [], {}, overrides=overrides)
    clipping = [(run.mode, run.threshold) for run in (read_run(folder), read_run(bare))]
    assert clipping == [("norm", 0.25), ("adaptive", 0.01)]
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def loss_of(folder, *lines):
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(lines))
    return read_series(file)["train/loss"]


def test_without_a_file_there_is_no_series(tmp_path):
    assert read_series(tmp_path / "metrics.jsonl") == {}


def test_a_row_that_a_resume_wrote_replaces_the_row_of_the_same_step(tmp_path):
    steps = (1, 2, 3, 2, 3)
    lines = [f'{{"train/step": {step}, "train/loss": {i}}}' for i, step in enumerate(steps)]
    loss = loss_of(tmp_path, *lines)
    assert loss.steps.tolist() == [1, 2, 3]
    assert loss.values.tolist() == [0, 3, 4]


def test_lines_that_are_no_rows_of_a_step_are_passed_over(tmp_path):
    loss = loss_of(
        tmp_path,
        '{"train/step": 3, "train/loss": 4}',
        "not json",
        "[1, 2]",
        '{"train/loss": 9}',
        '{"train/step": 4, "train/loss": "high"}',
        '{"train/step": 7, "train/loss": 6, "eval/loss": 7, "mine": 3, "other": 4}',
        '{"train/step": 8, "train/lo',
    )
    assert loss.steps.tolist() == [3, 7]
    assert loss.values.tolist() == [4, 6]


def test_values_that_json_has_no_number_for_are_read(tmp_path):
    loss = loss_of(
        tmp_path,
        '{"train/step": 4, "train/loss": 6}',
        '{"train/step": 5, "train/loss": "NaN"}',
        '{"train/step": 6, "train/loss": "-Infinity"}',
    )
    assert loss.values == pytest.approx([6, math.nan, -math.inf], nan_ok=True)
    assert loss.finite.tolist() == [6]


def test_each_key_of_the_rows_is_a_series(tmp_path):
    line = '{"train/step": 7, "eval/loss": 7, "mine": 3}'
    (tmp_path / "metrics.jsonl").write_text(line)
    series = read_series(tmp_path / "metrics.jsonl")
    assert series["eval/loss"].steps.tolist() == [7]
    assert series["mine"].values.tolist() == [3]


def test_keys_of_parameters_are_read_without_their_prefix(tmp_path):
    line = '{"train/step": 1, "grad/norm": 2, "grad/norm/a.weight": 4, "clip/what_if/2.0": 0.1, '
    (tmp_path / "metrics.jsonl").write_text(line + '"clip/what_if/0.25": 0.8}')
    run = read_run(tmp_path)
    assert list(run.by_suffix("grad/norm/")) == ["a.weight"]
    assert list(would_clip(run).items()) == [(0.25, 0.8), (2.0, 0.1)]


def test_metrics_are_the_summarys_or_the_same_from_rows(tmp_path):
    folder = write_run(tmp_path / "run", rows(steps=200), config())
    whole = find(read(folder)).measured["run"]
    (folder / "summary.json").unlink()
    from_rows = find(read(folder)).measured["run"]
    assert (whole.pop("seconds"), from_rows.pop("seconds")) == pytest.approx((6.2, 12.5))
    assert from_rows == pytest.approx(whole)


GOOD = [*np.linspace(2.0, 1.0, 60)]


@pytest.mark.parametrize(
    ("losses", "state", "step"),
    [
        (GOOD, "finished", None),
        ([*GOOD[:30], math.nan, *GOOD[30:]], "finished", None),
        ([*GOOD[:30], 9.0, *GOOD[30:]], "finished", None),
        ([*GOOD[:-1], math.nan], "failed", 60),
        ([*GOOD[:-1], math.nan], "finished", None),  # one lost last batch
        ([*GOOD[:40], *[math.nan] * 20], "finished", 41),
        ([*GOOD[:40], *[2.1] * 20], "finished", 41),  # above its start, and finite
        ([*GOOD[:40], *[1.7] * 20], "finished", None),
        ([2.0, 1.9, 2.1], "finished", None),  # too few losses to tell
        ([math.nan, math.nan], "finished", 1),
    ],
)
def test_a_training_diverged_if_its_last_losses_are_lost(tmp_path, losses, state, step):
    lines = rows(steps=len(losses), evaluations=0)
    for row, loss in zip(lines, losses, strict=True):
        row["train/loss"] = loss
    folder = write_run(tmp_path / "run", lines, config(), state=state)
    [measured] = find(read(folder)).measured.values()
    assert measured["diverged_at"] == step
    assert math.isnan(measured["best/train/loss"]) == all(math.isnan(loss) for loss in losses)


def test_whether_a_run_diverged_is_what_its_summary_says(tmp_path):
    folder = write_run(tmp_path / "run", rows(steps=30), config())
    file = folder / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"diverged": 17}))
    assert read_run(folder).diverged_at == 17


def test_run_folders_are_the_truth_where_the_record_is_stale(tmp_path):
    folder = sweep(tmp_path / "s", NORM, steps=10)
    record = json.loads((folder / "sweep.json").read_text())
    for entry in record["runs"]:
        entry |= {"state": "running", "error": "old"}
    shutil.rmtree(folder / "1")
    (folder / "1").mkdir()  # a run that recorded nothing has its cause from the sweep
    record["runs"][1] |= {"state": "failed", "error": "out of memory"}
    (folder / "sweep.json").write_text(json.dumps(record))
    read_sweep = read(folder)
    runs = read_sweep.runs
    assert [run.state for run in runs] == ["finished", "failed", "finished", "finished"]
    assert [run.error for run in runs] == [None, "out of memory", None, None]
    assert runs[1].overrides == ("clip=norm", "clip.threshold=0.25")
    assert read_sweep.command == "python -m runner -m clip=norm clip.threshold=0.1,0.25,1.0,2.0"
    (folder / "sweep.json").write_text("{torn")
    (folder / "2").rename(folder / "10")
    torn = read(folder)
    assert [run.number for run in torn.runs if run.steps] == ["0", "3", "10"]
    assert torn.command is None


def test_rows_of_somebody_elses_loop_tell_how_it_clipped(tmp_path):
    for mode, threshold in (("norm", 0.5), ("value", 0.1), ("none", None)):
        lines = rows(mode, threshold, 20)
        lines[9] |= {"grad/norm": math.inf, "grad/norm_clipped": math.nan}
        folder = write_run(tmp_path / f"with {mode}", lines, {})
        for name in ("status.json", "summary.json", ".hydra/overrides.yaml"):
            (folder / name).unlink()
    findings = find(read(tmp_path))
    labels = [setting.label for setting in findings.settings]
    assert labels == ["norm 0.5", "own 0.1", "none"]
    assert findings.best is not None
    (folder / "config.yaml").write_text("{seed: 7, clip: {mode: mine}}")
    assert (read_run(folder).mode, read_run(folder).seed) == ("mine", "7")
