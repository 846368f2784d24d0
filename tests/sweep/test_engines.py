"""Several runs of a sweep at once: what each may use, and what is refused."""

import pytest
import torch

from runner.cli.main import main
from runner.compose.request import request
from runner.sweep.share import divided

pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


@pytest.mark.parametrize(
    ("available", "ranks", "runs", "asked", "expected"),
    [
        (8, 1, 4, 2, (2, 4)),
        (8, 2, 9, -1, (4, 2)),
        (8, 3, 9, -1, (2, 4)),
        (2, 4, 1, 4, (1, 2)),
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
    assert bool(share.note(min(asked, runs))) == (share.at_once < min(asked, runs))


def test_runs_on_gpus_follow_one_another(monkeypatch, outputs):
    monkeypatch.setenv("RUNNER_CORES", "16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    share = divided(request(["seed=0,1,2"], multirun=True).jobs, -1)
    assert (share.at_once, share.cores, bool(share.note(3))) == (1, 16, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hydra/launcher=ray", ["hydra/launcher=ray", "cloudpickle below 3", "joblib"]),
        ("hydra/launcher=joblib hydra.launcher.n_job=2", ["hydra.launcher.n_job=2"]),
        ("hydra/launcher=submitit_slurm hydra.launcher.nodes=2", ["nodes=2", "plugin.nproc"]),
        ("hydra/launcher=submitit_slurm", ["hydra/launcher=submitit_slurm", "no sbatch here"]),
    ],
)
def test_a_wrong_launcher_is_refused(outputs, tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["-m", "seed=1,2", *words.split()]) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in expected), printed
    assert not outputs.exists()
