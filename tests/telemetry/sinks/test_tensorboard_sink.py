"""TensorBoard's record of a run, as TensorBoard itself reads it."""

import errno
import json
import logging
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runner.cli.main import main
from runner.telemetry.sinks import tensorboard_sink
from runner.telemetry.sinks.tensorboard_sink import TensorboardSink


def read(folder):
    """Scalars by tag: (step, value) pairs."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def close_to(found, wanted):
    assert [step for step, _ in found] == [step for step, _ in wanted]
    values = [value for _, value in wanted]  # the file has them in float32
    assert [value for _, value in found] == pytest.approx(values, rel=1e-6, nan_ok=True)


def test_every_metric_of_every_row(tmp_path):
    sink = TensorboardSink(tmp_path)
    sink.write({"train/step": 1, "train/loss": 0.5, "grad/norm": math.inf})
    sink.write({"train/step": 3, "train/loss": math.nan})
    sink.close({}, 0)
    sink.close(None, 1)
    found = read(tmp_path)
    assert found.keys() == {"train/loss", "grad/norm"}
    close_to(found["train/loss"], [(1, 0.5), (3, math.nan)])
    close_to(found["grad/norm"], [(1, math.inf)])


def test_a_run_that_continues_takes_rows_back(tmp_path):
    first = TensorboardSink(tmp_path)
    for step in range(1, 6):
        first.write({"train/step": step, "train/loss": float(step)})
    first.close(None, 143)
    second = TensorboardSink(tmp_path, continued_after=3)
    second.write({"train/step": 4, "train/loss": 40.0})
    second.close({}, 0)
    close_to(read(tmp_path)["train/loss"], [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)])


def test_a_full_disk_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    sink = TensorboardSink(tmp_path)
    real = sink._writer

    def full(event):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(real, "add_event", full)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            sink.write({"train/step": step, "train/loss": 1.0})
        sink.close(None, 0)
    real.close()
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard's record of this run is not complete: [Errno 28] No space left on device"
    ]


SHORT = ["device=cpu", "train.max_duration=4ba", "eval.interval=2ba", "model.width=4"]


@pytest.mark.parametrize(
    "words", [["tracker=tensorboard"], ["tracker=wandb", "tracker.also=[tensorboard]"]]
)
@pytest.mark.slow
def test_a_run_has_the_rows_of_its_own_file(outputs, monkeypatch, words):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = outputs / "run"
    assert main([*SHORT, *words, f"hydra.run.dir={folder}"]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = read(folder)
    assert found.keys() == {key for row in rows for key in row} - {"train/step"}
    for tag, pairs in found.items():
        close_to(pairs, [(row["train/step"], row[tag]) for row in rows if tag in row])
    assert (folder / "wandb").exists() == ("tracker=wandb" in words)


def test_without_the_package_the_request_is_refused(outputs, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tensorboard_sink, "find_spec", lambda name: None)
    assert main([*SHORT, "tracker=none", "tracker.also=[tensorboard]"]) == 2
    message = capsys.readouterr().err
    assert 'tracker.also=tensorboard  is not installed: pip install "clip-runner[tensorboard]"' in (
        message
    )
    assert not outputs.exists()
    with pytest.raises(ImportError, match="needs TensorBoard: pip install"):
        TensorboardSink(tmp_path)


def test_an_unknown_tracker_is_refused(outputs, capsys):
    assert main([*SHORT, "tracker.also=[tensorbord]"]) == 2
    assert "a list of some of tensorboard, wandb" in capsys.readouterr().err
