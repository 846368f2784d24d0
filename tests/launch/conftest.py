"""Runs that have finished, each of which serves many tests."""

from types import SimpleNamespace

import pytest
import wandb

from tests.launch.ends import faulty, only_run
from tests.launch.test_secrets import Planted
from tests.process import environment_at, python, run_here

WORDS = ["device=cpu", "train.max_duration=12ba", "eval.interval=4ba", "clip.threshold=0.25"]
WORDS += ["log.flush=1", "checkpoint.interval=5ba", "checkpoint.asynchronous=false"]
DDP = [*WORDS, "plugin=ddp", "accumulation=x2", "data.batch_size=8", "tracker=none"]


@pytest.fixture(scope="session")
def single(tmp_path_factory):
    """One process, with secrets, recorded by wandb: its folder, its output and the secrets."""
    home = tmp_path_factory.mktemp("single")
    planted = Planted()
    words = [*WORDS, *planted.words, "data.batch_size=32", "tracker.mode=offline"]
    out, err = run_here(*words, env=environment_at(home) | planted.variables)
    wandb.teardown()  # other tests have another home
    folder = only_run(home / "outputs")
    return SimpleNamespace(folder=folder, printed=out, planted=planted, warned=err)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two local ranks that take the same samples; the second is killed, and all start again."""
    home = tmp_path_factory.mktemp("ranks")
    words = [*DDP, "plugin.nproc=2", *faulty("kill", 15), "launch.max_restarts=1"]
    secrets = {"WANDB_API_KEY": "5" * 40, "MY_TOKEN": "hush-hush"}
    python("-m", "runner", *words, env=environment_at(home) | secrets)
    return only_run(home / "outputs")
