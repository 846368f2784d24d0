"""A run that is killed in step 37 and started again ends as one that never stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.distributed.halting import HALTED, SEEN
from tests.kept import assert_alike, rows_of
from tests.process import killed, python
from tests.test_every_plugin import EXPERTS, PLUGINS, TEXT

STEPS, KILLED, SAVED = 60, 37, 30
HALTS = "_target_:tests.distributed.halting.HaltOnce,threshold:100"
HISTORIES = {
    "zscore": "threshold:0.5,warmup_steps:5,history:raw",
    "percentile": "threshold:60,window:20,min_steps:5",
    "adagc": "threshold:1.05,warmup_steps:10",
    "schedule": f"threshold:0.05,warmup_steps:{STEPS},warmup:linear",
}
"""Modes whose limit follows from earlier steps, as links of a chain, with their options."""
MODE = ["clip._target_=tests.distributed.halting.HaltOnce", "clip.threshold=0.5"]
LINKS = ",".join(f"{{mode:{mode},{options}}}" for mode, options in HISTORIES.items())
CHAIN = ["clip=chain", f"clip.links=[{{{HALTS}}},{LINKS}]"]
COMMON = [
    *["device=cpu", "tracker=none", "scheduler=cosine", "optimizer=adamw", "seed=3"],
    *[f"train.max_duration={STEPS}ba", "eval.interval=20ba", "checkpoint.interval=10ba"],
    *["log.flush=1", "checkpoint.keep=1", "checkpoint.keep_best=false"],
]
WITNESS = ["model._target_=tests.distributed.halting.Witness", "~model.num_classes"]
WITNESS += ["~model.width", "accumulation=x2", "data.num_workers=1"]


def run_words(folder: Path, words: list[str]) -> list[str]:
    return ["-m", "runner", *COMMON, *words, f"hydra.run.dir={folder}"]


def killed_and_continued(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    given = run_words(folder, words)
    killed(*given, when=Path(environment[HALTED]).exists, env=environment)
    assert [row["train/step"] for row in rows_of(folder)] == list(range(1, KILLED))
    said = python(*given, env=environment, timeout=200).stderr
    assert f"continuing after step {SAVED} from" in said
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["resumed"], status["step"]) == ("finished", [SAVED], STEPS)


@pytest.fixture
def folders(tmp_path):
    """Environment of a command for an uninterrupted run, and for one that is killed."""
    made = {}
    for name in ("whole", "killed"):
        seen = tmp_path / f"{name}_seen"
        seen.mkdir()
        halted = tmp_path / f"{name}_halted"
        made[name] = {**os.environ, HALTED: str(halted), SEEN: str(seen)}
        made[name]["PYTHONPATH"] = str(Path(__file__).parents[2])
    Path(made["whole"][HALTED]).touch()
    return made


def seen_by(rank: int, environment: dict[str, str]) -> list[tuple[int, list[str]]]:
    lines = Path(environment[SEEN], f"{rank}.jsonl").read_text().splitlines()
    return [(entry[0], entry[1:]) for entry in map(json.loads, lines)]


def assert_continues(tmp_path: Path, words: list[str], folders: dict[str, dict[str, str]]) -> None:
    python(*run_words(tmp_path / "whole", words), env=folders["whole"], timeout=200)
    killed_and_continued(tmp_path / "killed", words, folders["killed"])
    assert len(rows_of(tmp_path / "killed")) == STEPS
    assert_alike(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(1, ["data.batch_size=16"]), (2, ["plugin=ddp", "plugin.nproc=2", "data.batch_size=8"])],
    ids=["single", "ddp"],
)
@pytest.mark.slow
def test_each_microbatch_is_that_of_an_uninterrupted_run(tmp_path, folders, ranks, words):
    """Samples, random state and weights before each forward pass, the first after resume too."""
    assert_continues(tmp_path, [*MODE, *WITNESS, *words], folders)
    for rank in range(ranks):
        wanted = [seen for _, seen in seen_by(rank, folders["whole"])]
        assert len(wanted) == 2 * STEPS
        found = seen_by(rank, folders["killed"])
        processes = list(dict.fromkeys(process for process, _ in found))
        before, after = ([seen for who, seen in found if who == one] for one in processes)
        assert before == wanted[: 2 * KILLED]
        assert after == wanted[2 * SAVED :]


@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "ddp"])
@pytest.mark.slow
def test_every_plugin(tmp_path, folders, name):
    """Each history goes on where it was: after the resume each link clips some steps."""
    request, parts = PLUGINS[name]
    model = EXPERTS if name == "moe" else TEXT
    words = [*model, "model.dropout=0.1", *request.split(), f"data.batch_size={8 // parts}"]
    assert_continues(tmp_path, [*CHAIN, *words], folders)
    later = rows_of(tmp_path / "killed")[SAVED:]
    for link, mode in enumerate(HISTORIES, start=1):
        clipped = sum(row[f"clip/link/{link}/clipped"] for row in later)
        assert 0 < clipped <= STEPS - SAVED, (mode, clipped)
