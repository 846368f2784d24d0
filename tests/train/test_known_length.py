"""A run whose length is known without torch starts, and is as long as torch says."""

import pytest

from runner.compose.request import request
from runner.config.folders import options
from runner.train import build, preflight, progress
from runner.train.known_length import known_length
from tests.train.test_preflight import WRONG

pytestmark = pytest.mark.usefixtures("outputs")

NOT_TORCH = ("lion", "muon")  # an extra may be missing; the model may have no hidden matrix
TWICE = "linear_warmup_polynomial"  # two files name its class, with other arguments

KNOWN = [
    "clip=none tracker=none checkpoint=none telemetry.per_layer=true",
    "data.test_fraction=0.37 data.seed=9 train.max_duration=500sp accumulation=x4",
    "data.test_fraction=0.9 data.batch_size=7 data.drop_last=true",
    "scheduler=linear_warmup_cosine scheduler.eta_min=7 optimizer.lr=1e6",
    *(f"optimizer={one}" for one in options("optimizer") if one not in NOT_TORCH),
    *(f"scheduler={one}" for one in options("scheduler") if one != TWICE),
]

UNKNOWN = [
    *(f"optimizer={one}" for one in NOT_TORCH),
    *(f"scheduler={TWICE}", "model.width=64", "~data.seed", "data.seed=4294967296"),
    *("data.test_fraction=0.005", "data.test_fraction=0.999", "optimizer.lr=0"),
    *("data.drop_last=true data.batch_size=1438", "optimizer.momentum=0", "~optimizer.nesterov"),
    *("+optimizer.maximize=true", "plugin=ddp", "device=cuda", "precision=bf16"),
    *("data.num_workers=1", "train.max_duration=10tok scheduler=constant"),
    *(words for words, _ in WRONG),
]


def jobs(words):
    rest = [word for word in words.split() if word != "-m"]
    return request(rest, multirun="-m" in words, writes=False).jobs


@pytest.mark.parametrize("words", KNOWN)
def test_a_known_length_is_that_of_the_data(words):
    [job] = jobs(words)
    samples = known_length(job.config)
    preflight.check(job.config)
    data = build.make_data(job.config.data)
    assert samples == len(data.train)
    assert progress.steps_of(job.config, samples, 1) == build.steps_of(job.config, data)


def test_nothing_is_known_of_any_other_run_or_of_one_that_torch_refuses(monkeypatch):
    for words in UNKNOWN:
        assert None in [known_length(job.config) for job in jobs(words)], words
    [job] = jobs("")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert known_length(job.config) is None
