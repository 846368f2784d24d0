"""Every file of recipes/ says what it is, is what was published, and runs."""

import json
import math
import re
import shlex
from collections import Counter

import pytest

from runner.compose import recipes
from runner.compose.answers import help_text
from runner.compose.request import request
from runner.config.folders import find
from tests.mode_names import NAMES
from tests.process import python

RECIPES = {recipe.name: recipe for recipe in recipes.read_all()}
SWEEPS = sorted(name for name, recipe in RECIPES.items() if "hydra" in recipe.content)
RUNS = sorted(set(RECIPES) - set(SWEEPS))
FIELDS = ["source", "clipped", "command", "small", "differs"]
FIRST = ["accumulate_4", "cifar10_resnet34"]
"""These follow an example step by step, so there is nothing in which they would differ."""

# What the literature clipped, how, and with which optimizer.
PUBLISHED = {
    "awd_lstm": ("norm", 0.25, "SGD", {"lr": 30, "momentum": 0, "weight_decay": 1.2e-6}),
    "cifar10_resnet34": ("norm", 0.1, "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
    "compressive_transformer": ("norm", 0.1, "Adam", {"lr": 3e-4}),
    "ctrl": ("norm", 0.25, "Adagrad", {"lr": 0.05}),
    "gated_conv": (
        "norm",
        0.1,
        "SGD",
        {"lr": 1.0, "momentum": 0.99, "nesterov": True, "weight_decay": 5e-6},
    ),
    "gpt": ("norm", 1.0, "AdamW", {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}),
    "inception": ("norm", 2.0, "RMSprop", {"lr": 0.045, "alpha": 0.9, "eps": 1.0}),
    "nf_resnet_brock": (
        "adaptive",
        0.01,
        "SGD",
        {"momentum": 0.9, "nesterov": True, "weight_decay": 2e-5},
    ),
    "nf_resnet_thakur": ("adaptive", 0.16, "SGD", {}),
    "rnn_value": ("value", 15, "SGD", {"lr": 0.1, "momentum": 0, "weight_decay": 1e-7}),
    "tabert": ("norm", 1.0, "Adam", {"lr": 2e-5, "eps": 1e-8, "weight_decay": 0}),
}
SWEPT = {
    "sweep_lr_and_threshold": ("norm", [0.25, 1.0, 100.0] * 4),
    "sweep_adaptive": ("adaptive", [0.01, 0.02, 0.04, 0.08, 0.16] * 2),
    "sweep_norm": ("norm", [0.1, 0.25, 1.0, 2.0]),
    "sweep_value": ("value", [0.01, 0.03, 0.1, 0.3]),
}


def header(name):
    """The fields of a recipe's header; indented lines belong to the field before them."""
    fields = {}
    for line in (find("recipes") / f"{name}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            return fields
        if found := re.match(r"# (\w+): (.+)", line):
            field, fields[found[1]] = found[1], found[2]
        elif line.startswith("#   "):
            fields[field] += line.removeprefix("#  ")
    return fields


def words_of(command):
    assert command.startswith("python -m runner ")
    return shlex.split(command)[3:]


def config(*words):
    [only] = request(words, writes=False).jobs
    return only.config


@pytest.mark.parametrize("name", RECIPES)
def test_a_header_says_what_it_is_where_it_is_from_and_how_to_run_it(name):
    fields = header(name)
    assert next(iter(fields)) == name
    wanted = ["source", "command", "small"] if name in FIRST else FIELDS
    assert set(wanted) <= set(fields)
    for field in ("command", "small", "paper"):
        if field in fields:
            assert f"recipe={name}" in words_of(fields[field])
    if name in PUBLISHED:
        assert re.search(r"20[01]\d|202\d|docs/", fields["source"]), "no year"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.product(every=2)
def test_the_words_of_the_header_compose(name):
    for field in ("command", "small", "paper"):
        if command := header(name).get(field):
            jobs = request(words_of(command), writes=False).jobs
            assert {job.config.recipe for job in jobs} == {name}


def test_help_lists_each_with_its_purpose():
    text = help_text([])
    for name, recipe in RECIPES.items():
        assert recipe.purpose
        assert re.search(rf"^  {name} +{re.escape(recipe.purpose)}$", text, re.MULTILINE)


def test_every_recipe_that_clips_as_published_is_held_to_it():
    assert sorted(set(RUNS) - {"accumulate_4"}) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_threshold_mode_and_optimizer_are_the_published_ones(name):
    mode, threshold, optimizer, arguments = PUBLISHED[name]
    found = config(f"recipe={name}")
    assert (found.clip.mode, found.clip.threshold, found.clip.norm_type) == (mode, threshold, 2)
    assert found.optimizer.target == f"torch.optim.{optimizer}"
    assert arguments.items() <= found.optimizer.arguments.items()
    # What a published command trains at full size is clipped alike.
    if paper := header(name).get("paper"):
        assert config(*words_of(paper)).clip == found.clip


@pytest.mark.parametrize("name", ["nf_resnet_brock", "nf_resnet_thakur"])
def test_adaptive_recipes_leave_the_last_linear_weight_out(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("timm")
    from runner.clip import Layout
    from runner.train import build

    found = config(f"recipe={name}")
    assert (found.clip.exclude, found.clip.eps) == ("auto", 1e-3)
    with torch.device("meta"):
        model = build.maker(found.model)()
    assert Layout.of_model(model).heads == ("head.fc.weight",)


@pytest.mark.parametrize(
    ("name", "batch"), [("nf_resnet_brock", 1024), ("nf_resnet_thakur", 128), ("gated_conv", 8)]
)
def test_the_batch_is_one_that_the_threshold_was_studied_at(name, batch):
    found = config(f"recipe={name}")
    assert found.data.batch_size * found.accumulation.steps == batch


def test_rates_follow_the_published_schedules():
    compressive = config("recipe=compressive_transformer")
    assert compressive.accumulation.steps == 4
    assert compressive.scheduler.arguments == {"warmup_fraction": 4_000 / 100_000, "eta_min": 1e-6}
    ctrl = config("recipe=ctrl").scheduler.arguments
    assert ctrl == {"warmup_fraction": 25_000 / 800_000, "power": 0.0}
    gpt = config("recipe=gpt")
    assert gpt.scheduler.arguments["eta_min"] == pytest.approx(0.1 * gpt.optimizer.arguments["lr"])
    brock = config("recipe=nf_resnet_brock")
    assert brock.optimizer.arguments["lr"] == pytest.approx(0.1 * 1024 / 256)
    inception = config("recipe=inception").scheduler.arguments
    assert inception == {"stairs": 100 // 2, "factor": 0.94}


def test_the_header_of_the_value_recipe_says_what_15_was():
    assert "hidden units" in header("rnn_value")["clipped"]


@pytest.mark.parametrize("name", SWEPT)
def test_a_sweep_runs_the_thresholds_of_the_literature(name):
    mode, thresholds = SWEPT[name]
    found = request([f"recipe={name}"], writes=False)
    assert found.sweep is not None
    assert [job.config.clip.threshold for job in found.jobs] == thresholds
    assert {job.config.clip.mode for job in found.jobs} == {mode}


def test_nanochats_thresholds_run_with_three_seeds_each():
    jobs = request(["recipe=nanochat_thresholds"], writes=False).jobs
    clips = [(job.config.clip.mode, job.config.clip.threshold) for job in jobs]
    norms = [("norm", threshold) for threshold in (0.25, 0.5, 1.0, 2.0)]
    assert clips == [clip for clip in (*norms, ("value", 0.01), ("none", None)) for _ in range(3)]
    assert [job.config.seed for job in jobs] == [0, 1, 2] * 6


def test_the_adaptive_sweep_is_by_batch_size():
    jobs = request(["recipe=sweep_adaptive"], writes=False).jobs
    assert [job.config.data.batch_size for job in jobs] == [32] * 5 + [256] * 5


def test_the_accumulation_sweep_keeps_the_effective_batch():
    jobs = request(["recipe=sweep_accumulation"], writes=False).jobs
    assert [job.config.accumulation.steps for job in jobs] == [1, 2, 4, 8]
    assert {job.config.accumulation.steps * job.config.data.batch_size for job in jobs} == {64}


COMPARED = {
    "sweep_methods": set(NAMES) - {"chain", "groups"},
    "sweep_methods_resnet": set(NAMES) - {"chain", "groups", "update", "spike"},
}


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.product(every=2)
def test_methods_are_compared_with_equal_budgets(name):
    jobs = request([f"recipe={name}"], writes=False).jobs
    settings = Counter((job.config.clip.mode, job.config.optimizer.arguments["lr"]) for job in jobs)
    assert {mode for mode, _ in settings} == COMPARED[name]
    rates = sorted({rate for _, rate in settings})
    assert rates[1] == 2 * rates[0]
    assert set(settings.values()) == {3}
    assert len({job.config.train.max_duration for job in jobs}) == 1


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.slow
def test_every_method_of_a_comparison_runs(name, outputs):
    if name.endswith("resnet"):
        pytest.importorskip("timm")
    words = [f"recipe={name}", "seed=0", "train.max_duration=3ba", "tracker=none", "device=cpu"]
    rate = min(
        job.config.optimizer.arguments["lr"]
        for job in request([f"recipe={name}"], writes=False).jobs
    )
    done = python(
        *("-m", "runner", *words, f"optimizer.lr={rate}"),
        cwd=find("recipes").parent,
        timeout=240,
    )
    files = list((outputs / "sweeps").glob("*/*/metrics.jsonl"))
    last = [json.loads(file.read_text().splitlines()[-1]) for file in files]
    assert len(last) == len(COMPARED[name]), done.stderr
    assert all(row["train/step"] == 3 and math.isfinite(row["eval/loss"]) for row in last)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.product(every=6)
def test_it_runs_twenty_steps_to_the_end(name, outputs):
    if name.startswith("nf_"):
        pytest.importorskip("timm")
    words = words_of(header(name)["small"])
    assert "train.max_duration=20ba" in words
    home = find("recipes").parent
    words += ["tracker=none", "device=cpu"]
    python("-m", "runner", *words, cwd=home)
    [folder] = (outputs / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/step"] for row in rows] == list(range(1, 21))
    assert all(math.isfinite(row["train/loss"]) for row in rows)
    assert all(math.isfinite(row["grad/norm"]) for row in rows)
    assert math.isfinite(rows[-1]["eval/loss"])
