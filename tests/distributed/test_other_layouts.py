"""A run that was saved under one plugin continues under another, by the command."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.distributed.halting import HALTED
from tests.distributed.saves_first import SAVED
from tests.kept import rows_of, same
from tests.process import ROOT, killed, python

AT, STEPS = 10, 20
SAMPLES = 8
"""Samples of a microbatch, over all data-parallel ranks."""

LAYOUTS = {
    "single": ([], 1),
    "ddp": (["plugin=ddp", "plugin.nproc=2"], 2),
    "fsdp": (["plugin=fsdp", "plugin.nproc=4"], 4),
    "hybrid": (["plugin=hybrid", "plugin.nproc=4", "plugin.tp_size=2", "plugin.pp_size=2"], 1),
}
"""Overrides and number of data-parallel ranks."""

DIRECTIONS = [
    *(("fsdp", "ddp"), ("fsdp", "single"), ("hybrid", "fsdp")),
    *(("ddp", "fsdp"), ("single", "fsdp"), ("fsdp", "hybrid")),
]
COMMON = [
    *["model=gpt", "model._target_=tests.distributed.saves_first.GPT", "data=text", "seed=3"],
    *["model.context=32", "model.width=32", "data.sequence_length=32", "data.max_bytes=60000"],
    *["optimizer=adamw", "accumulation=x2", "clip.threshold=0.5", "device=cpu", "tracker=none"],
    *[f"train.max_duration={STEPS}ba", f"checkpoint.interval={AT}ba", "checkpoint.keep=2"],
]


def command(run: Path, layout: str, *words: str) -> list[str]:
    overrides, parts = LAYOUTS[layout]
    batch = f"data.batch_size={SAMPLES // parts}"
    return ["-m", "runner", *COMMON, *overrides, batch, *words, f"hydra.run.dir={run}"]


def environment(run: Path) -> dict[str, str]:
    own = {SAVED: str(run / "loaded"), HALTED: str(run / "halted")}
    return {**os.environ, "PYTHONPATH": str(ROOT), **own}


def train(run: Path, layout: str, *words: str) -> str:
    """Train a run to its end by the command, and return what it printed."""
    given = command(run, layout, *words)
    said: str = python(*given, env=environment(run), timeout=200).stderr
    return said


def assert_named(run: Path, first: str, second: str) -> None:
    """Assert that one line of the log names both layouts."""
    [line] = [one for one in (run / "runner.log").read_text().splitlines() if "was saved" in one]
    assert f"saved under plugin={first} on " in line
    assert f"this run is plugin={second} on " in line


def assert_same_curve(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Assert that two runs took the same steps, up to the rounding of sums."""
    for row, other in zip(rows, wanted, strict=True):
        for key in ("train/step", "train/samples", "train/tokens", "train/lr"):
            assert row[key] == other[key]
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)


def checkpoint(folder: Path) -> Path:
    return folder / f"step_{AT:09d}"


def whole(folder: Path) -> dict[str, Tensor]:
    """Put the tensors of a checkpoint together, with no code of the runner."""
    parts: dict[str, list[tuple[list[int], Tensor]]] = defaultdict(list)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata().get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                offsets = places.get(name, {}).get("saved_offsets", [0] * tensor.dim())
                parts[name].append((offsets, tensor))
    return {name: _joined(each) for name, each in parts.items()}


def _joined(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    ends = [[at + n for at, n in zip(o, t.shape, strict=True)] for o, t in parts]
    tensor = torch.full([max(each) for each in zip(*ends, strict=True)], torch.nan)
    for (offsets, part), end in zip(parts, ends, strict=True):
        tensor[tuple(map(slice, offsets, end))] = part
    assert not tensor.isnan().any()
    return tensor


def rest(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors, and is the same under every layout."""
    held = torch.load(folder / "state.pt", weights_only=True)
    return {key: held[key] for key in ("meter", "clip", "schedulers", "optimizers")}


@cache
def uninterrupted(home: Path, layout: str) -> Path:
    train(home / layout, layout)
    return home / layout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.parametrize(("first", "second"), DIRECTIONS)
@pytest.mark.product(every=6)
def test_another_layout_continues(home, tmp_path, first, second):
    old, new = uninterrupted(home, first), tmp_path / "new"
    saved, loaded = checkpoint(old / "checkpoints"), checkpoint(new / "loaded")
    said = train(new, second, f"resume={saved}")
    assert f"continuing after step {AT} from {saved}" in said
    assert_named(new, first, second)

    before, after = whole(saved), whole(loaded)
    moments = {name.rpartition("/")[2] for name in before if name.startswith("optimizer/")}
    assert moments == {"exp_avg", "exp_avg_sq", "step"}
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    same(rest(loaded), rest(saved))

    rows = rows_of(new)
    assert [row["train/step"] for row in rows] == list(range(AT + 1, STEPS + 1))
    assert_same_curve(rows, rows_of(old)[AT:])


def test_a_run_that_was_killed_continues_in_its_folder_under_another_plugin(home, tmp_path):
    halts = ["clip._target_=tests.distributed.halting.HaltOnce", "clip.at=13", "log.flush=1"]
    run = tmp_path / "run"
    given = command(run, "single", *halts)
    killed(*given, when=(run / "halted").exists, env=environment(run))
    assert [row["train/step"] for row in rows_of(run)] == list(range(1, 13))
    train(run, "ddp", *halts)
    assert_named(run, "single", "ddp")
    assert_same_curve(rows_of(run), rows_of(uninterrupted(home, "single")))
