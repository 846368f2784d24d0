"""A run that only skips steps fails, as a user sees it: terminal, log, status and exit code."""

import json
from pathlib import Path

import pytest

from tests.process import python


@pytest.mark.parametrize(
    ("words", "limit"),
    [([], 50), (["plugin=ddp", "plugin.nproc=2", "clip=value", "clip.max_skips=12"], 12)],
    ids=["one process", "local ranks"],
)
@pytest.mark.product(every=2)
def test_a_run_that_only_skips_steps_fails(environment, words, limit):
    asked = ["device=cpu", "tracker=none", "optimizer.lr=1e6", "train.max_duration=120ba", *words]
    done = python("-m", "runner", *asked, code=1, env=environment)
    [folder] = (Path(environment["RUNNER_OUTPUTS"]) / "runs").iterdir()
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["step"] < 120
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["grad/nonfinite"] == limit
    assert "train/loss" in json.loads(rows[-1])
    for text in (done.stderr, (folder / "runner.log").read_text()):
        assert text.count(" was skipped: the gradient's norm is") == 1
        assert "parameters" in text
        assert "Its samples: " in text
        assert text.count("10 steps in a row were skipped, up to step") == 1
        assert f"{limit} steps in a row were skipped" in text
        assert "try a lower learning rate (now" in text
    error = status["error"].splitlines()[-1]
    assert "the gradient's norm is" in error
    assert "Traceback" not in done.stderr
