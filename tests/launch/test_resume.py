"""Where a run starts: planted folders, without any training."""

import json
import re
from functools import cache

import pytest
import torch

from runner.checkpoint import folder as checkpoints
from runner.checkpoint.content import STATE_KEYS
from runner.config.identity import config_hash
from runner.config.problem import RequestError
from runner.launch.resume import ANEW, decide
from runner.request.request import request
from runner.run_folder.status import earlier_run
from tests.process import overriding

SMALL = ["tracker=none", "data.batch_size=8", "train.max_duration=60ba"]


@cache
def job(*words):
    [planned] = request(overriding(SMALL, words)).jobs
    return planned


def save(run, step, made=None, world_size=1, state=STATE_KEYS, **about):
    part = checkpoints.begin(run / "checkpoints", step)
    torch.save(dict.fromkeys(state), part / "state.pt")
    about = {"config": (made or job()).plain, "world_size": world_size} | about
    return checkpoints.complete(part, {"step": step, **about})


def record(run, made=None, state="running", **more):
    run.mkdir(parents=True, exist_ok=True)
    status = {"state": state, "config_hash": config_hash((made or job()).plain)}
    (run / "status.json").write_text(json.dumps(status | {"started": "before"} | more))


def start(run, *words):
    planned = job(*words)
    return decide(planned.config, planned.plain, run)


def refused(run, *words):
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(RequestError) as error:
        start(run, *words)
    assert before == sorted(run.parent.rglob("*"))
    return str(error.value)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def old(tmp_path):
    """Another run, with a checkpoint."""
    return save(tmp_path / "old", 30).parents[1]


def test_a_run_in_a_new_folder_starts_anew(run):
    assert start(run) == start(run, "resume=never") == ANEW
    assert not run.exists()


def test_a_run_without_a_checkpoint_starts_anew(run):
    record(run)
    assert start(run) == ANEW
    assert "another configuration" in refused(run, "seed=1")
    assert "resume=never" in refused(run, "resume=never")


def test_an_unfinished_run_is_continued_from_its_newest_checkpoint(run):
    record(run, None, "failed", wandb_run_id="abc", wall_s=3.5, resumed=[10])
    save(run, 20)
    newest = save(run, 30)
    decision = start(run)
    assert (decision.checkpoint, decision.step, decision.warnings) == (newest, 30, ())
    assert decision.former["wandb_run_id"] == "abc"
    entries = {"started": "before", "step": 30, "resumed": [10, 30]}
    assert decision.status() == {**entries, "wall_s": 3.5}
    assert earlier_run(run) is None


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, run):
    record(run)
    good = save(run, 20)
    for content, state in (("y", STATE_KEYS), ("", ["epoch"])):  # or that of another program
        bad = save(run, 30, state=state)
        with (bad / "state.pt").open("a") as file:
            file.write(content)
        decision = start(run)
        assert (decision.checkpoint, decision.step) == (good, 20)
        [warning] = decision.warnings
        assert str(bad / "state.pt") in warning
        assert "state.pt is" in refused(tmp_path / "new", f"resume={bad}")
    (good / "state.pt").write_bytes(b"y")
    decision = start(run)
    assert (decision.checkpoint, decision.former) == (None, {})
    assert str(good) in decision.warnings[-1]


def test_a_run_is_finished_once_its_summary_is_there(run):
    record(run, None, "finished")
    last = save(run, 60)
    assert start(run).checkpoint == last
    assert earlier_run(run) is None
    (run / "summary.json").write_text('{"steps": 60}')
    assert "holds the record of an earlier run" in refused(run)
    assert "status.json" in earlier_run(run)


def test_a_run_whose_status_is_lost_is_refused(run):
    save(run, 30, config_hash=config_hash(job().plain))
    for content in (None, "", "{"):  # a power cut may empty a file
        if content is not None:
            (run / "status.json").write_text(content)
        assert "a damaged run (status.json)" in refused(run)


def test_a_path_is_a_run_or_its_checkpoints_or_one_of_them(run, old):
    save(old, 20)
    newest = old / "checkpoints" / "step_000000030"
    for path in (old, old / "checkpoints", newest):
        decision = start(run, f"resume={path}")
        assert (decision.checkpoint, decision.step, decision.former) == (newest, 30, {})
        assert decision.status() == {"resumed_from": str(newest), "step": 30}
    assert start(run, f"resume={old}/checkpoints/step_000000020").step == 20


def test_a_path_that_holds_nothing_is_refused(tmp_path, run, old):
    part = checkpoints.begin(tmp_path / "weights", 30)
    (part / "shard.safetensors").write_text("w")
    final = checkpoints.complete(part, {"step": 30, "config": job().plain})
    (old / "checkpoints" / "step_000000030" / "state.pt").write_bytes(b"y")
    for path in (tmp_path / "nowhere", "atuo"):
        assert "must be auto, never, or the path" in refused(run, f"resume={path}")
    assert "holds no checkpoint" in refused(run, f"resume={tmp_path}")
    assert "state.pt is damaged" in refused(run, f"resume={old}")
    assert "holds weights alone" in refused(run, f"resume={final}")


def test_another_configuration_is_refused_with_both_values(run, old):
    words = ["optimizer.lr=0.2", "clip=value", "train.max_duration=40ba"]
    said = refused(run, f"resume={old}", *words)
    for word, before in [
        ("optimizer.lr=0.2", "is 0.05 in the checkpoint old/step_000000030"),
        ("clip.mode=value", "is norm in"),
        ("train.max_duration=40ba", "is 60ba in"),
    ]:
        assert re.search(rf"^ *{word} .*{before}.*resume\.force=true", said, re.M)
    assert start(run, f"resume={old}", *words, "resume.force=true").step == 30
    said = refused(run, f"resume={old}", "resume.force=true", "optimizer=adamw", "optimizer.lr=0.2")
    assert "its state cannot be used" in said
    assert "optimizer.lr" not in said
    record(old)
    assert "optimizer.lr=0.2" in refused(old, "optimizer.lr=0.2")


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("log.flush=7 launch.timeout=9 tracker=wandb device=cpu train.max_duration=80ba", ""),
        ("accumulation.steps=2 data.batch_size=4", ""),
        ("plugin=ddp plugin.nproc=2 data.batch_size=4", ""),
        ("plugin=tensor plugin.nproc=2", "model=gpt data=text"),
    ],
)
def test_what_does_not_change_the_steps_does_not_count(tmp_path, run, words, same):
    save(tmp_path / "other", 30, job(*same.split()))
    assert start(run, f"resume={tmp_path / 'other'}", *words.split(), *same.split()).step == 30


def test_another_number_of_samples_in_a_step_counts(tmp_path, run, old):
    said = refused(run, f"resume={old}", "plugin=ddp", "plugin.nproc=2")
    assert "a step would have 16 samples over all ranks, and 8 in the checkpoint" in said
    assert "is 8 in the checkpoint" in refused(run, f"resume={old}", "data.batch_size=4")
    two = job("plugin=ddp", "plugin.nproc=2", "data.batch_size=4")
    save(tmp_path / "two", 30, two, world_size=2)
    assert start(run, f"resume={tmp_path / 'two'}", "plugin=single").step == 30


def test_a_path_beside_own_checkpoints(tmp_path, run, old):
    record(run, resumed_from="there")
    decision = start(run, f"resume={old}")
    assert decision.status()["resumed_from"].endswith("old/checkpoints/step_000000030")
    older = save(run, 40)
    newer = save(run, 50)
    decision = start(run, f"resume={old}")  # the run has come further since
    assert (decision.checkpoint, decision.status()["resumed_from"]) == (newer, "there")
    (tmp_path / "link").symlink_to(older.parent)
    for path in (older, tmp_path / "link" / older.name):
        assert "step_000000050 is newer" in refused(run, f"resume={path}")
    for path in (newer, tmp_path / "link"):
        assert start(run, f"resume={path}").former
    assert start(tmp_path / "new", f"resume={older}").step == 40
