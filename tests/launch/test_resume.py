"""Where a run starts: planted folders, without any training."""

import json
import os
import socket
from functools import cache

import pytest
import torch

from runner.checkpoint import folder as checkpoints
from runner.checkpoint.content import STATE_KEYS
from runner.compose.overrides import spelled_out
from runner.compose.request import request
from runner.config.identity import config_hash
from runner.config.problem import RequestError
from runner.launch import restarts, resume
from runner.launch.resume import ANEW, decide
from runner.run_folder import earlier

SMALL = ["tracker=none", "data.batch_size=8", "train.max_duration=60ba"]


@cache
def job(*words):
    [made] = request(spelled_out([*SMALL, *words]), writes=False).jobs
    return made


def save(run, step, made, world_size=1, **about):
    part = checkpoints.begin(run / "checkpoints", step)
    torch.save(dict.fromkeys(STATE_KEYS), part / "state.pt")
    about = {"config": made.plain, "world_size": world_size} | about
    return checkpoints.complete(part, {"step": step, **about})


def record(run, made, state="running", **more):
    run.mkdir(parents=True, exist_ok=True)
    status = {"state": state, "config_hash": config_hash(made.plain), "started": "before"}
    (run / "status.json").write_text(json.dumps(status | more))


def damage(checkpoint):
    (checkpoint / "state.pt").write_text("y")


def start(run, *words):
    made = job(*words)
    return decide(made.config, made.plain, run)


def refused(run, *words):
    before = {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()}
    with pytest.raises(RequestError) as error:
        start(run, *words)
    assert before == {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()}
    return str(error.value)


def test_a_new_folder_starts_anew(tmp_path):
    assert start(tmp_path / "run") == ANEW
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("state", ["running", "failed", "interrupted"])
def test_an_unfinished_run_is_continued_from_its_newest_checkpoint(tmp_path, state):
    run, made = tmp_path / "run", job()
    record(run, made, state, wandb_run_id="abc", wall_s=3.5, resumed=[10])
    save(run, 20, made)
    newest = save(run, 30, made)
    found = start(run)
    assert (found.checkpoint, found.step, found.warnings) == (newest, 30, ())
    assert found.former["wandb_run_id"] == "abc"
    assert found.seconds == 3.5
    assert found.status(37) == {
        "started": "before",
        "step": 30,
        "resumed": [10, 30],
        "wandb_step": 37,
        "wall_s": 3.5,
    }
    assert earlier.earlier_record(run) is None


def test_a_damaged_checkpoint_is_passed_over_with_one_warning(tmp_path):
    run, made = tmp_path / "run", job()
    record(run, made)
    good, bad = save(run, 20, made), save(run, 30, made)
    damage(bad)
    found = start(run)
    assert (found.checkpoint, found.step) == (good, 20)
    [warning] = found.warnings
    assert str(bad / "state.pt") in warning
    assert warning.endswith("the run continues from step_000000020")
    damage(good)
    found = start(run)
    assert found.checkpoint is None
    assert found.former == {}
    [warning] = found.warnings
    assert warning.endswith("the run starts anew")
    assert str(good) in warning
    assert str(bad) in warning


def test_an_unfinished_run_without_a_checkpoint_starts_anew(tmp_path):
    record(tmp_path / "run", job())
    assert start(tmp_path / "run") == ANEW
    assert "another configuration" in refused(tmp_path / "run", "seed=1")


def test_a_run_that_finished_is_left_alone(tmp_path):
    run, made = tmp_path / "run", job()
    record(run, made, "finished")
    (run / "summary.json").write_text('{"steps": 60}')
    assert "holds the record of an earlier run" in refused(run)
    assert "status.json" in earlier.earlier_record(run)


def test_a_run_without_its_summary_did_not_finish(tmp_path):
    run, made = tmp_path / "run", job()
    record(run, made, "finished")
    last = save(run, 60, made)
    assert start(run).checkpoint == last
    assert earlier.earlier_record(run) is None


def test_a_run_whose_status_is_lost_continues(tmp_path):
    run, made = tmp_path / "run", job()
    checkpoint = save(run, 30, made, config_hash=config_hash(made.plain), wandb_run_id="abc")
    for content in (None, "", "{", "[]"):  # a power cut may empty a file
        if content is not None:
            (run / "status.json").write_text(content)
        assert earlier.earlier_record(run) is None
        found = start(run)
        assert (found.checkpoint, found.step) == (checkpoint, 30)
        assert found.former["wandb_run_id"] == "abc"
        assert found.status(37)["wandb_step"] == 37
    assert "optimizer.lr=0.2" in refused(run, "optimizer.lr=0.2")
    assert "resume=never" in refused(run, "resume=never")
    damage(checkpoint)
    assert "whose status and checkpoints are damaged" in refused(run)


def test_a_state_of_another_program_is_a_damaged_checkpoint(tmp_path):
    run, made = tmp_path / "run", job()
    record(run, made)
    good = save(run, 20, made)
    for foreign in (b"x", b"PK", None):
        part = checkpoints.begin(run / "checkpoints", 30)
        if foreign is None:
            torch.save({"epoch": 3}, part / "state.pt")
        else:
            (part / "state.pt").write_bytes(foreign)
        bad = checkpoints.complete(part, {"step": 30, "config": made.plain, "world_size": 1})
        found = start(run)
        assert found.checkpoint == good
        assert "state.pt is no state of a training" in found.warnings[0]
        assert "is no state of a training" in refused(tmp_path / "new", f"resume={bad}")


def test_another_optimizer_is_refused_even_by_force(tmp_path):
    old = tmp_path / "old"
    save(old, 30, job())
    words = [f"resume={old}", "resume.force=true", "optimizer=adamw", "optimizer.lr=0.2"]
    said = refused(tmp_path / "new", *words)
    assert "optimizer._target_=" in said
    assert "its state cannot be used" in said
    assert "optimizer.lr" not in said


def test_never_leaves_an_unfinished_run_alone(tmp_path):
    record(tmp_path / "run", job())
    assert "resume=never" in refused(tmp_path / "run", "resume=never")
    assert start(tmp_path / "other", "resume=never") == ANEW


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/step_000000030"])
def test_a_path_is_a_run_or_its_checkpoints_or_one_of_them(tmp_path, part):
    old, made = tmp_path / "old", job()
    record(old, made, "finished")
    save(old, 20, made)
    newest = save(old, 30, made)
    found = start(tmp_path / "new", f"resume={old / part}")
    assert (found.checkpoint, found.step, found.former) == (newest, 30, {})
    assert found.status(0) == {"resumed_from": str(newest), "step": 30}
    older = start(tmp_path / "new", f"resume={old}/checkpoints/step_000000020")
    assert older.step == 20


def test_a_path_that_holds_nothing_is_refused(tmp_path):
    run, made = tmp_path / "new", job()
    assert "must be auto, never, or the path" in refused(run, f"resume={tmp_path}/nowhere")
    assert "must be auto, never, or the path" in refused(run, "resume=atuo")
    assert "holds no checkpoint" in refused(run, f"resume={tmp_path}")
    bad = save(tmp_path / "old", 30, made)
    damage(bad)
    for path in (bad, tmp_path / "old"):
        assert "state.pt is damaged" in refused(run, f"resume={path}")
    part = checkpoints.begin(tmp_path / "weights", 30)
    (part / "shard.safetensors").write_text("w")
    final = checkpoints.complete(part, {"step": 30, "config": made.plain})
    assert "holds weights alone" in refused(run, f"resume={final}")


def test_another_configuration_is_refused_with_both_values(tmp_path):
    old = tmp_path / "old"
    save(old, 30, job())
    words = ["optimizer.lr=0.2", "clip=value", "clip.threshold=0.5", "train.max_duration=40ba"]
    said = refused(tmp_path / "new", f"resume={old}", *words)
    for key, now, before in [
        ("optimizer.lr", "0.2", "is 0.05 in the checkpoint old/step_000000030"),
        ("clip.mode", "value", "is norm in"),
        ("clip.threshold", "0.5", "is 1.0 in"),
        ("train.max_duration", "40ba", "is 60ba in"),
    ]:
        [line] = [line for line in said.splitlines() if line.strip().startswith(key)]
        assert f"{key}={now} " in line
        assert before in line
        assert "resume.force=true" in line
    assert start(tmp_path / "new", f"resume={old}", *words, "resume.force=true").step == 30
    record(old, job())
    assert "optimizer.lr=0.2" in refused(old, "optimizer.lr=0.2")
    assert start(old, "optimizer.lr=0.2", "resume.force=true").step == 30


@pytest.mark.parametrize(
    "words",
    [
        ["log.interval=5", "log.flush=7", "telemetry.per_layer=true", "launch.timeout=9"],
        ["tracker=wandb", "sweep.direction=maximize", "device=cpu", "data.num_workers=2"],
        ["train.max_duration=80ba"],
        ["accumulation.steps=2", "data.batch_size=4"],
        ["plugin=ddp", "plugin.nproc=2", "data.batch_size=4"],
        ["plugin=tensor", "plugin.nproc=2", "model=gpt", "data=text"],
    ],
    ids=lambda words: words[0],
)
def test_what_does_not_change_the_steps_does_not_count(tmp_path, words):
    old = tmp_path / "old"
    same = [word for word in words if word.startswith(("model", "data="))]
    save(old, 30, job(*same))
    assert start(tmp_path / "new", f"resume={old}", *words).step == 30


def test_another_number_of_samples_in_a_step_counts(tmp_path):
    old, path = tmp_path / "old", f"resume={tmp_path / 'old'}"
    save(old, 30, job())
    said = refused(tmp_path / "new", path, "plugin=ddp", "plugin.nproc=2")
    assert "data.batch_size=8" in said
    assert "a step would have 16 samples over all ranks, and 8 in the checkpoint" in said
    assert "is 8 in the checkpoint" in refused(tmp_path / "new", path, "data.batch_size=4")
    two = job("plugin=ddp", "plugin.nproc=2", "data.batch_size=4")
    save(tmp_path / "two", 30, two, world_size=2)
    assert start(tmp_path / "new", f"resume={tmp_path / 'two'}").step == 30


def test_a_checkpoint_that_does_not_say_its_configuration_needs_force(tmp_path):
    old, made = tmp_path / "old", job()
    save(old, 30, made, config=None)
    assert "does not say its configuration" in refused(tmp_path / "new", f"resume={old}")
    assert start(tmp_path / "new", f"resume={old}", "resume.force=true").step == 30


def test_an_older_checkpoint_of_the_same_folder_is_not_continued_beside_a_newer_one(tmp_path):
    run, made = tmp_path / "run", job()
    record(run, made)
    older, newer = save(run, 20, made), save(run, 30, made)
    assert "step_000000030 is newer" in refused(run, f"resume={older}")
    assert start(run, f"resume={newer}").former
    (tmp_path / "link").symlink_to(older.parent)
    assert "step_000000030 is newer" in refused(run, f"resume={tmp_path}/link/{older.name}")
    assert start(run, f"resume={tmp_path}/link").former
    assert start(tmp_path / "new", f"resume={older}").step == 20


def test_a_run_that_came_from_elsewhere_continues_its_own_checkpoints(tmp_path):
    run, made = tmp_path / "run", job()
    save(tmp_path / "old", 30, made)
    record(run, made, resumed_from="there")
    path = f"resume={tmp_path / 'old'}"
    assert start(run, path).status(0)["resumed_from"].endswith("old/checkpoints/step_000000030")
    own = save(run, 40, made)
    found = start(run, path)
    assert found.checkpoint == own
    assert found.status(40)["resumed_from"] == "there"


def test_a_job_that_slurm_queues_again_finds_its_folder(tmp_path, monkeypatch):
    runs, made = tmp_path / "runs", job()
    record(runs / "2026-01-01", made, slurm_job_id="7")
    record(runs / "2026-01-02", made, slurm_job_id="8")
    record(runs / "2026-01-03", job("seed=1"), slurm_job_id="7")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert resume.requeued(made.plain, runs / "2026-01-04") is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert resume.requeued(made.plain, runs / "2026-01-04") == runs / "2026-01-01"
    record(runs / "2026-01-01", made, "finished", slurm_job_id="7")
    (runs / "2026-01-01" / "summary.json").write_text('{"steps": 1}')
    assert resume.requeued(made.plain, runs / "2026-01-04") is None


@pytest.fixture
def torchrun(monkeypatch):
    """Describe this process as a rank of a torchrun that counted so many failures of its own."""

    def describe(failures, agent=None, store="False"):
        about = {"RUN_ID": "job", "RESTART_COUNT": str(failures), "MAX_RESTARTS": "3"}
        for name, value in (about | {"USE_AGENT_STORE": store}).items():
            monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
        monkeypatch.setattr(os, "getppid", lambda: agent)

    return describe


def test_ranks_that_torchrun_starts_again_find_their_folder(tmp_path, torchrun):
    runs, made, host = tmp_path / "runs", job(), socket.gethostname()
    about = {"torchelastic_run_id": "job", "torchelastic_agent": f"{host}-11"}
    record(runs / "2026-01-01", made, "failed", **about)
    torchrun(failures=0, agent=12)  # a new one, under the name of the old one
    assert resume.requeued(made.plain, runs / "2026-01-02") is None
    torchrun(failures=1, agent=12)  # on another machine
    assert resume.requeued(made.plain, runs / "2026-01-02") == runs / "2026-01-01"
    torchrun(failures=0, agent=11)  # it was a rank of another machine that failed
    assert resume.requeued(made.plain, runs / "2026-01-02") == runs / "2026-01-01"
    former = about | {"error": "planted", "rank": 1, "step": 7}
    found = restarts.elastic_failures(resume.Start(former=former))
    assert found == [{"rank": 1, "error": "planted", "reached": 7, "step": 0}]
    torchrun(failures=0, agent=12)
    assert restarts.elastic_failures(resume.Start(former=former)) == []


def test_a_store_that_torchrun_keeps_over_restarts_is_warned_of(torchrun):
    torchrun(failures=0, store="False")
    assert [*restarts.elastic_warnings()] == []
    torchrun(failures=0, store="True")
    [warning] = restarts.elastic_warnings()
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in warning


def test_a_new_run_hears_of_an_unfinished_one(outputs):
    runs, made = outputs / "runs", job()
    assert list(resume.unfinished(made.plain, runs / "5")) == []
    record(runs / "1", made, "interrupted", step=37)
    assert list(resume.unfinished(made.plain, runs / "5")) == []  # nothing to continue from
    save(runs / "1", 30, made)
    [note] = resume.unfinished(made.plain, runs / "5")
    assert f"at step 37: hydra.run.dir={runs / '1'} continues it" in note
    assert list(resume.unfinished(job("seed=1").plain, runs / "5")) == []
    here = {"pid": os.getpid(), "host": socket.gethostname()}
    record(runs / "1", made, "running", **here)
    assert list(resume.unfinished(made.plain, runs / "5")) == []
    record(runs / "1", made, "running", **(here | {"pid": 2**22 + 1}))
    assert len(list(resume.unfinished(made.plain, runs / "5"))) == 1
    for name in "234":
        record(runs / name, job("seed=1"))
    assert list(resume.unfinished(made.plain, runs / "5")) == []


def test_resume_may_be_typed_short():
    words = ["resume=auto", "+resume=never", "resume.force=true", "resume={from:a}", "a=resume=b"]
    assert spelled_out(words) == [
        "resume.from=auto",
        "+resume.from=never",
        "resume.force=true",
        "resume={from:a}",
        "a=resume=b",
    ]
