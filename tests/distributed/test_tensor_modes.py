"""Modes that limit tensors, and modes inside of modes, decide under every plugin as in one process.

The metrics of links and groups are among those of each row, the same bits on every rank.
"""

import pytest

from tests.distributed.cases import FAMILIES, FURTHER_MODES, Case, alone, differences, train_all
from tests.ranks import run_ranks

ALWAYS = {("fsdp", 2), ("1f1b", 2)}


def cases_of(model):
    return [
        Case(model, mode, steps) for mode, steps in zip(FURTHER_MODES, (1, 3, 1, 3, 1), strict=True)
    ]


@pytest.mark.parametrize("model", ["tied", "gpt", "moe"])
def test_every_mode_clips(model):
    for case in cases_of(model):
        assert sum(row["clip/clipped"] for row in alone(case)["rows"]) > 0, case


@pytest.mark.parametrize(
    ("plugin", "world"),
    [pytest.param(*row, marks=[] if row in ALWAYS else pytest.mark.slow) for row in FAMILIES],
)
def test_float64_agrees_to_1e_12(plugin, world):
    cases = cases_of(FAMILIES[plugin, world])
    ranks = run_ranks(train_all, world, plugin, cases)
    wrong = {}
    for number, case in enumerate(cases):
        results = [rank[number] for rank in ranks]
        found = differences(results, case, 1e-12)
        for row, expected in zip(results[0]["rows"], alone(case)["rows"], strict=True):
            inner = {key for key in expected if key.startswith(("clip/link/", "clip/group/"))}
            assert bool(inner) == (case.mode in ("chain", "groups"))
            # The gradient of a key's bias is zero but for rounding: its ratio may be the largest.
            found += [
                f"step {row['train/step']}: {key}"
                for key in inner - {"clip/link/0/peak"}
                if row[key] != pytest.approx(expected[key], rel=1e-11, abs=1e-15)
            ]
        if found:
            wrong[case.mode] = (len(found), found[:4])
    assert not wrong
