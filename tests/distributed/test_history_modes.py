"""Modes that follow earlier norms, or a schedule, decide under every plugin as in one process."""

from functools import cache

import pytest

from tests.distributed.cases import FAMILIES, Case, trainer, uneven
from tests.distributed.training import Rows
from tests.ranks import run_ranks

MODES = {
    "percentile": {"threshold": 40.0, "min_steps": 2, "window": 5},
    "zscore": {"threshold": 0.2, "warmup_steps": 3, "history": "raw"},
    "schedule": {"threshold": 0.02, "of": "value", "warmup_steps": 4, "warmup": "linear"},
}
KEYS = ("grad/norm", "grad/norm_clipped", "clip/threshold", "clip/fraction")
ALWAYS = {("ddp", 2), ("fsdp", 2)}


def rows_of(model: str, plugin: str | None) -> dict[str, dict]:
    from runner.clip import build

    found = {}
    for name, options in MODES.items():
        rows = Rows()
        made = trainer(Case(model, "none", 3, steps=12), plugin, sinks=[rows])
        made.state.mode = build(name, **options)
        made.state.mode.bind(made.optimizer.layout)
        made.fit()
        found[name] = {"rows": rows.rows, "state": made.state.mode.state_dict()}
    return found


@cache
def alone(model: str) -> dict[str, dict]:
    return rows_of(model, None)


@pytest.mark.parametrize("model", ["tied", "gpt", "moe"])
def test_every_mode_clips_some_steps(model):
    for name, one in alone(model).items():
        assert {row["clip/clipped"] for row in one["rows"]} == {0, 1}, name


@pytest.mark.parametrize(
    ("plugin", "world"),
    [pytest.param(*row, marks=[] if row in ALWAYS else pytest.mark.slow) for row in FAMILIES],
)
def test_ranks_decide_as_one_process(plugin, world):
    model = FAMILIES[plugin, world]
    ranks = run_ranks(rows_of, world, model, plugin)
    for name, wanted in alone(model).items():
        mine = [rank[name] for rank in ranks]
        assert not uneven(mine), name
        assert len({repr(one["state"]) for one in mine}) == 1, name
        for row, expected in zip(mine[0]["rows"], wanted["rows"], strict=True):
            assert row["clip/clipped"] == expected["clip/clipped"], name
            assert ("clip/threshold" in row) == ("clip/threshold" in expected)
            for key in KEYS:
                if key in expected:
                    assert row[key] == pytest.approx(expected[key], rel=1e-9), (name, key)
