"""A job that Slurm pre-empts and starts again goes on where it was: a real Slurm of one node."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import wait_for
from tests.slurm import running

pytestmark = pytest.mark.slow

JOB = """#!/bin/sh
#SBATCH --requeue --open-mode=append --output={home}/printed -n1 --mem=1000
srun {command}
"""


@pytest.fixture
def slurm(tmp_path, environment):
    with running(tmp_path / "slurm", environment, nodes=("n1",)) as slurm:
        yield slurm


@pytest.mark.parametrize("plugin", [["plugin=single"], ["plugin=ddp", "plugin.nproc=2"]])
def test_a_job_that_is_pre_empted_goes_on_in_its_folder(slurm, environment, tmp_path, plugin):
    words = ["device=cpu", "tracker=none", "train.max_duration=200ba", "log.flush=5", *plugin]
    command = [sys.executable, "-m", "runner", *words]
    whole = environment | {"RUNNER_OUTPUTS": str(tmp_path / "whole")}
    subprocess.run(command, env=whole, check=True, timeout=200)
    script, printed = tmp_path / "job.sh", tmp_path / "printed"
    script.write_text(JOB.format(home=tmp_path, command=" ".join(command)))

    def rows(outputs):
        found = [*outputs.glob("runs/*/metrics.jsonl")]
        lines = found[0].read_text().split("\n")[:-1] if len(found) == 1 else []
        timed = ("time/", "throughput/")
        return [
            {key: value for key, value in json.loads(line).items() if not key.startswith(timed)}
            for line in lines
        ]

    def shown():
        return printed.read_text() if printed.exists() else "nothing"

    outputs = Path(environment["RUNNER_OUTPUTS"])
    job = slurm("sbatch", "--parsable", str(script))
    wait_for(lambda: len(rows(outputs)) > 20, shown=shown)
    slurm("scancel", "--signal=USR1", job)
    wait_for(lambda: "Restarts=1" in slurm.job(job), shown=shown)
    slurm.restart(job)
    [status] = outputs.glob("runs/*/status.json")
    wait_for(lambda: json.loads(status.read_text())["state"] == "finished", shown=shown)
    assert len(json.loads(status.read_text())["resumed"]) == 1
    assert rows(outputs) == rows(tmp_path / "whole")
