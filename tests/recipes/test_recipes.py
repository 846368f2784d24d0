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
        if found := re.match(r"# (\w+): (.+)", line):
            field, fields[found[1]] = found[1], found[2]
        elif line.startswith("#   "):
            fields[field] += line.removeprefix("#  ")
    return fields


def words_of(command):
    assert command.startswith("python -m runner ")
    return shlex.split(command)[3:]


def jobs(*words):
    return [job.config for job in request(words).jobs]


def test_headers_say_what_a_recipe_is_where_it_is_from_and_how_to_run_it():
    text = help_text(request([]), [])
    for name, file in FILES.items():
        fields, purpose = header(name), recipes.purpose(file)
        assert next(iter(fields)) == name
        assert set(fields) >= {"source", "command", "small"}
        assert name in FIRST or set(fields) >= {"clipped", "differs"}, name
        for field in fields.keys() & {"command", "small", "paper"}:
            assert f"recipe={name}" in words_of(fields[field])
        assert {one.recipe for one in jobs(*words_of(fields["small"]))} == {name}
        if name in PUBLISHED:
            assert re.search(r"20[012]\d|docs/", fields["source"]), "no year"
        assert purpose
        assert re.search(rf"^  {name} +{re.escape(purpose)}$", text, re.MULTILINE)
    assert "hidden units" in header("rnn_value")["clipped"]
    assert sorted(set(RUNS) - {"accumulate_4"}) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_is_what_was_published(name):
    [found] = jobs(f"recipe={name}")
    if name == "accumulate_4":
        probed = (found.accumulation.steps, found.telemetry.probe, found.data.batch_size)
        assert probed == (4, 10, 8)
        return
    mode, threshold, optimizer, arguments = PUBLISHED[name]
    assert (found.clip.mode, found.clip.threshold, found.clip.norm_type) == (mode, threshold, 2)
    assert found.optimizer.target == f"torch.optim.{optimizer}"
    assert arguments.items() <= found.optimizer.arguments.items()
    assert SCHEDULES.get(name, {}).items() <= found.scheduler.arguments.items()
    batch = found.data.batch_size * found.accumulation.steps
    assert batch == BATCHES.get(name, batch)  # that which the threshold was studied at
    # What a published command trains at full size is clipped alike.
    if paper := header(name).get("paper"):
        assert jobs(*words_of(paper))[0].clip == found.clip
    if name == "gpt":
        rate = found.optimizer.arguments["lr"]
        assert found.scheduler.arguments["eta_min"] == pytest.approx(0.1 * rate)
    if name == "cifar10_resnet34":
        assert (found.model.target, found.data.batch_size) == ("torchvision.models.resnet34", 128)
        assert (str(found.train.max_duration), found.precision.name) == ("200ep", "fp32")
        assert found.data.arguments["augment"] is True


def test_methods_are_compared_with_equal_budgets():
    found = jobs("recipe=sweep_methods", "seed=0")
    settings = Counter((one.clip.mode, one.optimizer.arguments["lr"]) for one in found)
    assert {mode for mode, _ in settings} == set(NAMES) - {"chain", "groups"}
    rates = sorted({rate for _, rate in settings})
    assert rates[1] == 2 * rates[0]
    assert set(settings.values()) == {1}
    assert RECIPES["sweep_methods"].content["hydra"]["sweeper"]["params"]["seed"] == "0,1,2"
    assert len({one.train.max_duration for one in found}) == 1


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
