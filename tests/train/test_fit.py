"""What a run logs is known before it starts, and is what it logs."""

import pytest
import torch

from runner.compose.request import request
from runner.run_folder.status import objective_of
from runner.train import build, fit, preflight
from runner.train.job import execute
from tests.distributed.training import Rows

ALWAYS = {
    *("eval/loss", "train/loss", "train/lr", "train/samples"),
    *("grad/norm", "grad/norm_clipped", "grad/norm_mean", "grad/norm_max", "grad/nonfinite"),
    *("clip/coef", "clip/clipped", "clip/fraction", "clip/ratio", "clip/ratio_total"),
    *("time/step_s", "throughput/samples_per_s", "wall_s"),
}
"""Metrics of every run."""

SMALL = ["train.max_duration=1ba", "tracker=none", "device=cpu"]


def config(*overrides):
    (job,) = request([*SMALL, *overrides], writes=False).jobs
    return job.config


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (["clip=none"], {"eval/accuracy"}),
        (
            ["clip.what_if=[0.5]", "telemetry.per_layer=true"],
            {"eval/accuracy", "clip/threshold", "clip/what_if/0.5"},
        ),
        (
            ["model=lstm", "data=synthetic", "data.kind=tokens", "data.samples=8"],
            {"eval/accuracy", "clip/threshold", "train/tokens"},
        ),
    ],
)
def test_the_metrics_that_an_objective_may_name_are_those_of_a_run(overrides, more):
    rows = Rows()
    asked = config(*overrides)
    summary = execute(asked, [rows])
    logged = {key for key in rows.rows[-1] if not key.startswith("grad/norm/")} - {"train/step"}
    assert logged | {"wall_s"} == ALWAYS | more
    names = fit.logged(asked, build.make_data(asked.data), graded=True)
    assert sorted(names) == sorted(ALWAYS | more)
    for key in names:
        assert objective_of(summary, key) is not None, key


@pytest.mark.parametrize(
    "call",
    [
        lambda meta: meta.sum().item(),
        lambda meta: meta.numpy(),
        lambda meta: meta.tolist(),
        lambda meta: meta.nonzero(),
        lambda meta: meta.unique(),
        lambda meta: bool(meta.any()),
    ],
)
def test_what_the_meta_device_lacks_is_no_fault_of_a_model(call):
    with pytest.raises((RuntimeError, TypeError)) as caught:
        call(torch.ones(3, device="meta"))
    assert fit.about_meta(caught.value)
    assert not fit.about_meta(RuntimeError("there is no metadata"))


def test_a_model_that_the_meta_device_cannot_make_is_left_to_the_run():
    asked = config("model._target_=tests.refusing.Ramp", "~model.width", "~model.num_classes")
    preflight.check(asked)


def test_a_run_whose_evaluation_lacks_the_objective_ends_there():
    asked = config("data.batch_size=8", "eval.interval=1ba", "train.max_duration=3ba")
    sweep = asked.sweep.model_copy(update={"objective": "eval/f1"})
    asked = asked.model_copy(update={"sweep": sweep})
    rows = Rows()
    with pytest.raises(ValueError, match=r"sweep.objective=eval/f1 .* eval/loss or eval/accuracy"):
        execute(asked, [rows])
    assert len(rows.rows) <= 1
