"""Launchers of a sweep that are refused."""

import pytest

from runner.cli.main import main

pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hydra/launcher=ray", ["hydra/launcher=ray", "joblib"]),
        ("hydra/launcher=joblib hydra.launcher.n_job=2", ["hydra.launcher.n_job='2'"]),
        ("hydra/launcher=submitit_slurm", ["hydra/launcher=submitit_slurm", "no sbatch here"]),
    ],
)
def test_a_wrong_launcher_is_refused(outputs, tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["-m", "seed=1,2", *words.split()]) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in expected), printed
    assert not outputs.exists()
