"""A run that is killed at random moments and continued ends as an uninterrupted one, bit for bit.

python -m pytest -m slow tests/test_kills.py  # more kills, and several ranks
"""

import random
import shutil
import subprocess
import sys

import pytest

from tests.kept import assert_alike
from tests.process import python, run_here, wait_for

STEPS = 60
COMMAND = [
    *["-m", "runner", "device=cpu", "tracker=none", "data=text", "data.sequence_length=32"],
    *["data.max_bytes=60000", "data.batch_size=4", "accumulation=x2", "model=gpt"],
    *["model.context=32", "model.width=32", "model.dropout=0.1", "optimizer=adamw", "seed=3"],
    *[f"train.max_duration={STEPS}ba", "eval.interval=20ba", "checkpoint.interval=3ba"],
    *["checkpoint.keep_best=false", "log.flush=1"],
]
DDP, FSDP = (["plugin=" + name, "plugin.nproc=2"] for name in ("ddp", "fsdp"))
ALL = [
    *["plugin=fsdp", "plugin.nproc=2", "compile=blocks", "compile.backend=aot_eager"],
    *[
        "activation_checkpointing=blocks",
        "precision=bf16",
        "optimizer.no_decay=auto",
        "telemetry.per_layer=true",
    ],
]
PIPELINE = ["plugin=pipeline", "plugin.pp_size=2", "plugin.nproc=2"]


def killed(run, command, environment, moment):
    """Start a run, and kill it once ``moment()``; return False if it came to its end before."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command], env=environment, **pipes) as started:
        wait_for(lambda: moment() or started.poll() is not None, pause=0.0005)
        started.kill()
        said = started.stderr.read()
    assert "Traceback" not in said, said
    assert started.returncode in (0, -9), said
    return started.returncode == -9


@pytest.mark.parametrize(
    ("words", "count", "seed"),
    [
        ([], 3, 29),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (([], 20, 1), (DDP, 10, 2), (FSDP, 10, 3), (PIPELINE, 10, 4), (ALL, 3, 5))
        ),
    ],
)
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_ends_as_one_that_was_not(environment, tmp_path, words, count, seed):
    draw = random.Random(seed)
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    command = [*COMMAND, *words, f"hydra.run.dir={run}"]
    run_here(*COMMAND[2:], *words, f"hydra.run.dir={whole}")

    def rows():
        file = run / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def begun():
        file = run / "status.json"
        return file.stat().st_mtime_ns if file.exists() else 0

    for number in range(count):
        before = (rows(), begun())
        reached = rows() + draw.randint(1, 12)
        moments = [
            lambda reached=reached: rows() >= reached,  # in a step
            lambda b=before: rows() > b[0] and any((run / "checkpoints").glob(".step_*")),
            lambda b=before: begun() != b[1],  # before it trains
        ]
        if not killed(run, command, environment, moments[number % 3]):
            assert_alike(run, whole)
            shutil.rmtree(run)
    if not (run / "summary.json").exists():
        python(*command, env=environment)
    assert_alike(run, whole)
