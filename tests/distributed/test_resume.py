"""A run that is killed in step 13 and started again, by the command: under its own plugin it ends
as one that never stopped, bit for bit, and under another one with the same curve.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.distributed.halting import HALTED
from tests.kept import assert_alike, rows_of
from tests.process import ROOT, killed, python
from tests.test_every_plugin import EXPERTS, PLUGINS, TEXT

STEPS, KILLED, SAVED = 20, 13, 10
HISTORIES = {
    "zscore": "threshold:0.5,warmup_steps:5,history:raw",
    "percentile": "threshold:60,window:10,min_steps:5",
    "adagc": "threshold:1.05,warmup_steps:5",
    "schedule": f"threshold:0.05,warmup_steps:{STEPS},warmup:linear",
}
"""Modes whose limit follows from earlier steps, as links of a chain, with their options."""
LINKS = ",".join(f"{{mode:{mode},{options}}}" for mode, options in HISTORIES.items())
HALTS = "{_target_:tests.distributed.halting.HaltOnce,threshold:100}"
COMMON = [
    *["device=cpu", "tracker=none", "scheduler=cosine", "seed=3"],
    *["clip=chain", f"clip.links=[{HALTS},{LINKS}]", "accumulation=x2", "log.flush=1"],
    *[f"train.max_duration={STEPS}ba", "eval.interval=8ba", f"checkpoint.interval={SAVED}ba"],
    *["checkpoint.keep=1", "checkpoint.keep_best=false"],
]


def words_of(run: Path, plugin: str, *more: str) -> list[str]:
    request, parts = PLUGINS.get(plugin, ("", 1))
    model = EXPERTS if plugin == "moe" else TEXT
    own = [*model, *request.split(), f"data.batch_size={8 // parts}"]
    return ["-m", "runner", *COMMON, *own, *more, f"hydra.run.dir={run}"]


def environment(halted: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), HALTED: str(halted)}


def whole(folder: Path, plugin: str, *more: str) -> Path:
    """A run that is not killed."""
    (folder / "never").touch()
    words = words_of(folder / "whole", plugin, *more)
    python(*words, env=environment(folder / "never"), timeout=300)
    return folder / "whole"


def continued(folder: Path, first: str, second: str, *more: str) -> Path:
    """A run that is killed, and that another plugin or the same one continues."""
    run, halted = folder / "killed", folder / "halted"
    killed(*words_of(run, first, *more), when=halted.exists, env=environment(halted))
    assert [row["train/step"] for row in rows_of(run)] == list(range(1, KILLED))
    said = python(*words_of(run, second, *more), env=environment(halted), timeout=300).stderr
    assert f"continuing after step {SAVED} from" in said
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["resumed"], status["step"]) == ("finished", [SAVED], STEPS)
    return run


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plugin",
    [pytest.param(name, marks=() if name == "zero" else pytest.mark.slow) for name in PLUGINS],
)
def test_a_run_continues_to_the_bit(tmp_path, plugin):
    drops = "model.dropout=0.1"
    run = continued(tmp_path, plugin, plugin, drops)
    assert_alike(run, whole(tmp_path, plugin, drops))
    # What each history made of a step is in the rows; most links clip after the resume.
    later = rows_of(run)[SAVED:]
    links = range(1, len(HISTORIES) + 1)
    assert sum(any(row[f"clip/link/{link}/clipped"] for row in later) for link in links) > 2


def test_a_run_continues_in_its_folder_under_another_plugin(tmp_path):
    run, wanted = continued(tmp_path, "single", "fsdp"), whole(tmp_path, "single")
    [line] = [one for one in (run / "runner.log").read_text().splitlines() if "was saved" in one]
    assert line.index("plugin=single") < line.index("plugin=fsdp")
    for row, other in zip(rows_of(run), rows_of(wanted), strict=True):
        for key in ("train/step", "train/samples", "train/tokens", "train/lr"):
            assert row[key] == other[key]
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
