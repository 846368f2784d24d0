"""Several runs of a sweep at once: what each may use, what is refused, and that results agree."""

import json
import os
import re

import pytest

from runner.cli.main import main
from runner.compose.request import request
from runner.config.cores import cores
from runner.sweep.share import divided

pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
pytest.importorskip("hydra_plugins.hydra_submitit_launcher")

SWEEP = ["clip.threshold=0.1,0.25,1.0,2.0", "train.max_duration=12ba", "tracker=none", "device=cpu"]
TIMED = ("time/", "throughput/")


def rows(folder):
    """The rows of a run without times, which differ."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: one for key, one in json.loads(line).items() if not key.startswith(TIMED)}
        for line in lines
    ]


def results(folder):
    """What a sweep came to: for each run its overrides, its state, its values and its rows."""
    record = json.loads((folder / "sweep.json").read_text())
    assert record["state"] == "finished"
    kept = ("number", "folder", "overrides", "config_hash", "state", "exit_code")
    return [
        [run[key] for key in (*kept, "objective", "clip_ratio")] + rows(folder / run["folder"])
        for run in record["runs"]
    ]


@pytest.mark.parametrize(
    ("available", "ranks", "runs", "asked", "expected"),
    [
        (8, 1, 4, 2, (2, 4)),
        (8, 2, 4, 2, (2, 4)),
        (8, 2, 9, -1, (4, 2)),
        (8, 3, 9, -1, (2, 4)),
        (2, 2, 4, 2, (1, 2)),
        (2, 4, 4, 2, (1, 2)),
        (1, 1, 4, 2, (1, 1)),
        (8, 1, 1, 4, (1, 8)),
    ],
)
def test_cores_are_divided_among_runs_and_ranks(
    monkeypatch, outputs, available, ranks, runs, asked, expected
):
    monkeypatch.setenv("RUNNER_CORES", str(available))
    plugin = [f"plugin.nproc={ranks}", "plugin=ddp"] if ranks > 1 else []
    seeds = ",".join(map(str, range(runs)))
    jobs = request([f"seed={seeds}", *plugin, "device=cpu"], multirun=True).jobs
    share = divided(jobs, asked)
    assert (share.at_once, share.cores) == expected
    assert share.at_once * max(1, share.cores // ranks) * ranks <= max(available, ranks)
    assert bool(share.note(min(asked, runs))) == (share.at_once < min(asked, runs))


def test_runs_on_gpus_follow_one_another(monkeypatch, outputs):
    import torch

    monkeypatch.setenv("RUNNER_CORES", "16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    share = divided(request(["seed=0,1,2"], multirun=True).jobs, -1)
    assert (share.at_once, share.cores) == (1, 16)
    assert "1 instead of 3 runs at once" in share.note(3)


def test_a_job_of_slurm_uses_the_cores_it_has(monkeypatch):
    usable = len(os.sched_getaffinity(0))
    for name in ("RUNNER_CORES", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert cores() == usable
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert cores() == 1
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1000")
    assert cores() == usable
    monkeypatch.setenv("RUNNER_CORES", "7")
    assert cores() == 7


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hydra/launcher=ray", ["hydra/launcher=ray", "cloudpickle below 3", "joblib"]),
        ("hydra/launcher=jobllib", ["hydra/launcher=jobllib", "did you mean joblib?"]),
        ("hydra/launcher=joblib hydra.launcher.n_jobs=0", ["n_jobs=0", "positive integer"]),
        ("hydra/launcher=joblib hydra.launcher.n_job=2", ["hydra.launcher.n_job=2", "no such key"]),
        (
            "hydra/launcher=submitit_slurm hydra.launcher.nodes=2 hydra.launcher.tasks_per_node=2",
            ["(2 problems)", "hydra.launcher.nodes=2", "plugin.nproc"],
        ),
        ("hydra/launcher=mine --config-dir conf", ["hydra/launcher=mine", "my.Own is not known"]),
        ("hydra/launcher=submitit_slurm", ["hydra/launcher=submitit_slurm", "no sbatch here"]),
    ],
)
def test_a_wrong_launcher_is_refused(outputs, tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "conf" / "hydra" / "launcher" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: my.Own\n")
    assert main(["-m", "seed=1,2", *words.split()]) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in expected), printed
    assert not outputs.exists()


@pytest.mark.parametrize(
    ("launcher", "extra"), [("joblib", "joblib"), ("submitit_local", "submitit")]
)
def test_a_missing_package_names_its_extra(outputs, monkeypatch, capsys, launcher, extra):
    monkeypatch.setattr("runner.compose.launchers.find_spec", lambda name: None)
    assert main(["-m", "seed=1,2", f"hydra/launcher={launcher}"]) == 2
    printed = capsys.readouterr().err
    assert f"hydra/launcher={launcher}" in printed
    assert f"pip install 'clip-runner[{extra}]'" in printed
    assert not outputs.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_joblib_runs_ranks_at_once_without_more_threads_than_cores(command, tmp_path):
    words = [*SWEEP, "plugin=ddp", "plugin.nproc=2", "data.batch_size=8"]
    model = ["model._target_=tests.sweep.counted.CNN", f"+model.notes={tmp_path}/notes"]
    command("-m", *words, *model, "sweep.name=plain")
    (tmp_path / "notes").unlink()
    command.environment["RUNNER_CORES"] = "4"
    at_once = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    _, printed = command("-m", *words, *model, "sweep.name=joblib", *at_once, limit=400)
    assert results(command.sweeps / "joblib") == results(command.sweeps / "plain")
    assert (command.sweeps / "joblib" / "report.html").exists()
    for number in range(4):
        assert re.search(rf"^run {number} \(", printed, re.M)
        assert re.search(rf"^run {number}: finished after 12 steps", printed, re.M)
    notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    begins, threads = {}, {}
    for moment, pid, count in notes:
        begins.setdefault(pid, []).append(float(moment))
        threads[pid] = int(count)
    assert len(begins) == 8
    events = [(min(each), threads[pid]) for pid, each in begins.items()]
    events += [(max(each), -threads[pid]) for pid, each in begins.items()]
    used, most = 0, 0
    for _, change in sorted(events):
        used += change
        most = max(most, used)
    assert 2 < most <= 4  # two runs of two ranks, with one thread each
    _, printed = command("-m", *words, *model, "sweep.name=joblib", *at_once, limit=400)
    assert "4 of 4 runs are done already: nothing to run" in printed
