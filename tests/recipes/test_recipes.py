"""Every file of recipes/ says what it is, is what was published, and runs."""

import math
import re
import shlex
from collections import Counter

import pytest

from runner.config.folders import find
from runner.config.modes import NAMES
from runner.request import recipes
from runner.request.answers import help_text
from runner.request.request import request
from tests.launch.ends import rows_of
from tests.process import run_here

FILES = recipes.files_of()
RECIPES = {name: recipes.read(file) for name, file in FILES.items()}
RUNS = sorted(name for name, recipe in RECIPES.items() if "hydra" not in recipe.content)
FIRST = ["accumulate_4", "cifar10_resnet34"]
"""These follow an example step by step, so there is nothing in which they would differ."""

NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 2e-5}
GATED = {"lr": 1.0, "momentum": 0.99, "nesterov": True, "weight_decay": 5e-6}
# What the literature clipped, how, with which optimizer, and what else.
PUBLISHED = {
    "awd_lstm": ("norm", 0.25, "SGD", {"lr": 30, "momentum": 0, "weight_decay": 1.2e-6}),
    "cifar10_resnet34": ("norm", 0.1, "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
    "compressive_transformer": ("norm", 0.1, "Adam", {"lr": 3e-4}),
    "ctrl": ("norm", 0.25, "Adagrad", {"lr": 0.05}),
    "gated_conv": ("norm", 0.1, "SGD", GATED),
    "gpt": ("norm", 1.0, "AdamW", {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}),
    "inception": ("norm", 2.0, "RMSprop", {"lr": 0.045, "alpha": 0.9, "eps": 1.0}),
    "nf_resnet_brock": ("adaptive", 0.01, "SGD", NESTEROV | {"lr": 0.1 * 1024 / 256}),
    "nf_resnet_thakur": ("adaptive", 0.16, "SGD", {}),
    "rnn_value": ("value", 15, "SGD", {"lr": 0.1, "momentum": 0, "weight_decay": 1e-7}),
    "tabert": ("norm", 1.0, "Adam", {"lr": 2e-5, "eps": 1e-8, "weight_decay": 0}),
}
SCHEDULES = {
    "compressive_transformer": {"warmup_fraction": 4_000 / 100_000, "eta_min": 1e-6},
    "ctrl": {"warmup_fraction": 25_000 / 800_000, "power": 0.0},
    "inception": {"stairs": 100 // 2, "factor": 0.94},
}
BATCHES = {"nf_resnet_brock": 1024, "nf_resnet_thakur": 128, "gated_conv": 8}


def header(name):
    """The fields of a recipe's header; indented lines belong to the field before them."""
    fields = {}
    for line in (find("recipes") / f"{name}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            return fields
        if match := re.match(r"# (\w+): (.+)", line):
            field = match[1]
            fields[match[1]] = match[2]
        elif line.startswith("#   "):
            fields[field] += line.removeprefix("#  ")
    return fields


def words_of(command):
    assert command.startswith("python -m runner ")
    return shlex.split(command)[3:]


def jobs(*words):
    return [job.config for job in request(words).jobs]


def test_help_lists_each_recipe_with_its_purpose():
    text = help_text(request([]), ["recipe"])
    for name, file in FILES.items():
        purpose = recipes.purpose(file)
        assert purpose, name
        assert re.search(rf"^  {name} +{re.escape(purpose)}$", text, re.MULTILINE), name


def test_the_header_of_a_recipe_begins_with_its_name():
    for name in FILES:
        assert next(iter(header(name))) == name


def test_a_header_says_where_a_recipe_is_from():
    for name in FILES:
        fields = header(name)
        assert "source" in fields, name
        if name in PUBLISHED:
            assert re.search(r"20[012]\d|docs/", fields["source"]), f"no year: {name}"


def test_a_header_says_what_differs_from_the_source():
    for name in FILES:
        assert name in FIRST or header(name).keys() >= {"clipped", "differs"}, name
    assert "hidden units" in header("rnn_value")["clipped"]


def test_a_header_says_how_to_run_a_recipe():
    for name in FILES:
        fields = header(name)
        assert fields.keys() >= {"command", "small"}, name
        for field in fields.keys() & {"command", "small", "paper"}:
            assert f"recipe={name}" in words_of(fields[field])
        assert {config.recipe for config in jobs(*words_of(fields["small"]))} == {name}, name


def test_each_recipe_of_one_run_has_its_published_values_here():
    assert sorted(set(RUNS) - {"accumulate_4"}) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_what_was_published(name):
    [config] = jobs(f"recipe={name}")
    mode, threshold, optimizer, arguments = PUBLISHED[name]
    assert (config.clip.mode, config.clip.threshold, config.clip.norm_type) == (mode, threshold, 2)
    assert config.optimizer.target == f"torch.optim.{optimizer}"
    assert arguments.items() <= config.optimizer.arguments.items()
    assert SCHEDULES.get(name, {}).items() <= config.scheduler.arguments.items()
    batch = config.data.batch_size * config.accumulation.steps
    assert batch == BATCHES.get(name, batch)  # that which the threshold was studied at
    # What a published command trains at full size is clipped alike.
    if paper := header(name).get("paper"):
        assert jobs(*words_of(paper))[0].clip == config.clip


def test_the_schedule_of_gpt_ends_at_a_tenth_of_its_rate():
    [config] = jobs("recipe=gpt")
    rate = config.optimizer.arguments["lr"]
    assert config.scheduler.arguments["eta_min"] == pytest.approx(0.1 * rate)


def test_cifar10_is_trained_as_published():
    [config] = jobs("recipe=cifar10_resnet34")
    assert (config.model.target, config.data.batch_size) == ("torchvision.models.resnet34", 128)
    assert (str(config.train.max_duration), config.precision.name) == ("200ep", "fp32")
    assert config.data.arguments["augment"] is True


def test_accumulate_4_measures_microbatches():
    [config] = jobs("recipe=accumulate_4")
    assert config.accumulation.steps == 4
    assert (config.telemetry.probe, config.data.batch_size) == (10, 8)


def test_methods_are_compared_with_equal_budgets():
    configs = jobs("recipe=sweep_methods", "seed=0")
    settings = Counter((config.clip.mode, config.optimizer.arguments["lr"]) for config in configs)
    assert {mode for mode, _ in settings} == set(NAMES) - {"chain", "groups"}
    rates = sorted({rate for _, rate in settings})
    assert rates[1] == 2 * rates[0]
    assert set(settings.values()) == {1}
    assert RECIPES["sweep_methods"].content["hydra"]["sweeper"]["params"]["seed"] == "0,1,2"
    assert len({config.train.max_duration for config in configs}) == 1


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.product(every=12)
def test_it_runs_twenty_steps_to_the_end(name, outputs, monkeypatch):
    words = words_of(header(name)["small"])
    assert "train.max_duration=20ba" in words
    monkeypatch.chdir(find("recipes").parent)
    run_here(*words, "tracker=none", "device=cpu")
    [file] = outputs.glob("runs/*/metrics.jsonl")
    rows = rows_of(file.parent)
    assert [row["train/step"] for row in rows] == list(range(1, 21))
    assert all(math.isfinite(row[key]) for row in rows for key in ("train/loss", "grad/norm"))
    assert math.isfinite(rows[-1]["eval/loss"])
