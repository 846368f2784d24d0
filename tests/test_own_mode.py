"""A user's own clipping mode, in a module outside of the package, by ``clip._target_``."""

import json
import sys
from unittest.mock import patch

import pytest

from runner.cli.main import main
from tests.process import run_here

MODULE = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from runner.clip import Decision, FactorMode, ModeInfo, Norms, limit_norm
from runner.gradients import Layout


@dataclass
class RunningMean(FactorMode):
    """Limit the norm to threshold times its running mean, this step included."""

    info = ModeInfo(stat="‖G‖ ÷ its running mean", unit="mean", note="The threshold is a factor.")
    by_norm_alone = True
    initial_memory = {"total": 0.0, "weight": 0.0}

    decay: Annotated[float, Field(ge=0, lt=1, description="weigh the steps before")] = 0.9

    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        for name, value in (("total", norms.total), ("weight", 1.0)):
            self.memory[name] = self.decay * self.memory[name] + (1 - self.decay) * value
        mean = self.memory["total"] / self.memory["weight"]
        return limit_norm(
            norms.total, self.limit * mean, max_stat=norms.total / mean, threshold=self.limit
        )


class Unfinished(FactorMode):
    pass


class Undeclared(RunningMean):
    power: float = 2.0


@dataclass
class Untyped(RunningMean):
    power: Nowhere = 2.0
'''
TARGET = "clip._target_=own_clipping.RunningMean"
SMALL = "model=gpt model.context=32 model.width=32 data=text data.sequence_length=32"
SMALL += " data.max_bytes=60000 train.max_duration=5ba eval.interval=1000ba tracker=none device=cpu"
PLUGINS = {"single": "data.batch_size=8"}
PLUGINS["fsdp"] = "plugin=fsdp plugin.nproc=2 data.batch_size=4"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_clipping.py").write_text(MODULE, encoding="utf-8")
    return folder


@pytest.fixture
def importable(home, monkeypatch):
    monkeypatch.syspath_prepend(str(home))


def rows_of(home, plugin):
    folder = home / plugin
    words = [TARGET, "clip.decay=0.5", "clip.threshold=0.9", *SMALL.split()]
    words += [*PLUGINS[plugin].split(), f"hydra.run.dir={folder}"]
    run_here(*words)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(home):
    """The rows of a run in one process."""
    with patch.object(sys, "path", [str(home), *sys.path]):
        return rows_of(home, "single")


once = pytest.mark.xdist_group("own mode")  # one process trains once


@once
def test_it_clips_by_its_own_rule(single):
    total = weight = 0.0
    for row in single:
        total = (total + row["grad/norm"]) / 2
        weight = (weight + 1.0) / 2
        limit = 0.9 * total / weight
        assert row["grad/norm_clipped"] == pytest.approx(min(row["grad/norm"], limit), rel=1e-9)
        assert row["clip/threshold"] == 0.9
    assert {row["clip/clipped"] for row in single} == {0, 1}


@once
def test_it_clips_alike_on_ranks(home, importable, single):
    for row, expected in zip(rows_of(home, "fsdp"), single, strict=True):
        assert row["clip/clipped"] == expected["clip/clipped"], row
        for key in ("grad/norm", "grad/norm_clipped", "clip/coef"):
            assert row[key] == pytest.approx(expected[key], rel=2e-3), row


@once
@pytest.mark.usefixtures("single")
def test_the_page_shows_its_threshold(home):
    page = (home / "single" / "report.html").read_text()
    assert "RunningMean 0.9" in page
    assert "The threshold is a factor." in page


def test_its_options_are_in_the_help(importable, capsys):
    for words, shown in ((), "clip.decay=0.9 "), (("+clip.decay=0.5",), "clip.decay=0.5 "):
        assert main([TARGET, *words, "--help", "clip"]) == 0
        text = capsys.readouterr().out
        [line] = [line for line in text.splitlines() if line.strip().startswith("clip.decay")]
        assert line.strip().startswith(shown)
        assert line.endswith("weigh the steps before")


WRONG = {
    f"{TARGET} clip.decay=1": "clip.decay=1 |less than 1",
    f"{TARGET} clip.decai=0.5": "clip.decai=0.5|unknown key|clip.decay?",
    f"{TARGET} +clip.decai=0.5": "clip.decai=0.5|unknown key|clip.decay?",
    "clip._target_=own_cliping.RunningMean": "own_cliping",
    "clip._target_=own_clipping.RuningMean": "AttributeError|RuningMean",
    "clip._target_=json.JSONDecoder": "is no clipping mode|runner.clip.FactorMode",
    "clip._target_=own_clipping.Unfinished": "abstract|decide_finite",
    "clip._target_=own_clipping.Undeclared": "@dataclass|power",
    "clip._target_=own_clipping.Untyped": "types of its options cannot be|Nowhere",
    "clip._target_=own": "clip._target_=own|the full name of a class",
}


def test_what_is_wrong_is_one_message(importable, capsys):
    for overrides, parts in WRONG.items():
        assert main(overrides.split()) == 2
        message = capsys.readouterr().err
        assert [part for part in ("(1 problem)", *parts.split("|")) if part not in message] == []
