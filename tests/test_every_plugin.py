"""Every plugin trains the same model on the same samples to the same loss curve, by the command."""

import json
from functools import cache

import pytest

from tests.process import run_here

STEPS = 30
# (request, data parts): the batch of all data parts together is 8 samples.
PLUGINS = {
    "ddp": ("plugin=ddp plugin.nproc=2", 2),
    "fsdp": ("plugin=fsdp plugin.nproc=2", 2),
    "zero": ("plugin=zero plugin.nproc=2", 2),
    "zero3": ("plugin=zero plugin.zero_stage=3 plugin.nproc=2", 2),
    "tensor": ("plugin=tensor plugin.nproc=2", 1),
    "sequence": ("plugin=tensor plugin.nproc=2 plugin.sequence_parallel=true", 1),
    "pipeline": ("plugin=pipeline plugin.nproc=2", 1),
    "zero_bubble": ("plugin=pipeline plugin.nproc=2 plugin.schedule=zero_bubble", 1),
    "moe": ("plugin=moe plugin.nproc=2", 2),
    "hybrid": ("plugin=hybrid plugin.dp_size=2 plugin.tp_size=2 plugin.pp_size=2", 2),
}
# Small in every direction: what counts is that thirty steps come out the same.
SMALL = ["data=text", "data.sequence_length=32", "data.max_bytes=60000", "optimizer=adamw"]
SMALL += ["model.context=32", "model.width=32"]
MODELS = {"text": ["model=gpt", *SMALL], "experts": ["model=moe", *SMALL]}
MODELS["digits"] = ["data=digits", "model=cnn"]
DAILY = [("text", "fsdp"), ("experts", "moe")]
# No plugin is left out but moe, which a model without experts cannot have.
TEXT = [("text", name) for name in PLUGINS if name not in ("fsdp", "moe")]
CURVES = [*DAILY, *TEXT, ("experts", "fsdp")]
CURVES += [("digits", name) for name in ("ddp", "fsdp", "zero", "zero3")]


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory):
    """Gives the rows of a run of 30 steps by the command ``python -m runner``."""

    @cache
    def rows_of(model, request):
        common = [f"train.max_duration={STEPS}ba", "eval.interval=1000ba", "tracker=none", "seed=3"]
        folder = tmp_path_factory.mktemp(model)
        words = [*MODELS[model], *request.split(), *common, f"hydra.run.dir={folder}"]
        run_here("device=cpu", *words)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["train/step"] for row in rows] == list(range(1, STEPS + 1))
        return rows

    return rows_of


@pytest.mark.xdist_group("curves")
@pytest.mark.parametrize(
    ("model", "name"),
    [pytest.param(*curve, marks=() if curve in DAILY else pytest.mark.slow) for curve in CURVES],
)
def test_the_curve_is_that_of_one_process(rows_of, model, name):
    request, parts = PLUGINS[name]
    ours = rows_of(model, f"{request} data.batch_size={8 // parts}")
    for row, expected in zip(ours, rows_of(model, "data.batch_size=8"), strict=True):
        assert row["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4), row[
            "train/step"
        ]
        # In float32 the norm of a late step feels the rounding of all steps before.
        assert row["grad/norm"] == pytest.approx(expected["grad/norm"], rel=2e-3), row["train/step"]
        for key in ("train/samples", "train/lr", "clip/threshold"):
            assert row[key] == expected[key], key
