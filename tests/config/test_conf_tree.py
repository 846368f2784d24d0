"""Every file of ``conf/`` can be chosen, says what it is, and has values that are checked."""

import inspect
import math
import re
import shlex
from importlib import import_module

import pytest
import yaml
from omegaconf import OmegaConf

from runner.compose.request import request
from runner.config.check import examine, misfit, usual
from runner.config.folders import find, options, read_yaml
from runner.config.modes import NAMES, built_in, options_of
from tests.config.composed import changed, plain

FILES = sorted(find("conf").glob("*/*.yaml"))
OPEN = ["model", "data", "optimizer", "scheduler"]
OWNED = ["plugin", "clip", "accumulation", "precision", "tracker", "checkpoint"]
OWN = {"_target_", "batch_size", "num_workers", "drop_last"}
CHOICES = [(group, option) for group in OPEN for option in options(group)]
NEEDED = {"clip=groups": ["clip.groups={*:1.0}"], "data=datasets": ["data.train.path=x"]}
"""Keys without a default."""


def chosen(group, option):
    choice = f"{group}={option}"
    return plain(choice, *NEEDED.get(choice, []))[group]


def written(group, option):
    return yaml.safe_load((find("conf") / group / f"{option}.yaml").read_text())


@pytest.mark.parametrize("group", [*OWNED, *OPEN])
def test_every_option_of_a_group_gives_what_its_file_says(group):
    keys = set()
    for option in options(group):
        content = OmegaConf.to_container(OmegaConf.load(find("conf") / group / f"{option}.yaml"))
        content.pop("defaults", None)
        referring = re.compile(r"\$\{|\?\?\?")
        fixed = {key: value for key, value in content.items() if not referring.search(str(value))}
        found = chosen(group, option)
        assert fixed.items() <= found.items()
        # A clipping mode has its own options besides, and no others.
        own = options_of(built_in(option)) if group == "clip" else {}
        assert set(own) <= set(found)
        keys.add(tuple(key for key in found if key not in own))
        if group in ("clip", "plugin", "precision", "tracker"):
            assert content.get("name", content.get("mode")) == option
    assert len(keys) == 1 or group in OPEN
    assert options("clip") == NAMES


def commands():
    for file in [*FILES, *sorted(find("recipes").glob("*.yaml"))]:
        for line in file.read_text().splitlines():
            if found := re.match(r"#.*?python -m runner (.*)", line):
                yield pytest.param(found[1], id=f"{file.parent.name}/{file.stem}")


@pytest.mark.parametrize("command", list(commands()))
@pytest.mark.product(every=9)
def test_the_command_that_a_file_shows_is_right(command):
    words = shlex.split(command)
    given = [word for word in words if word != "-m"]
    assert request(given, multirun="-m" in words, writes=False).jobs


def test_files_open_with_their_purpose_and_are_read_as_hydra_reads_them():
    for file in FILES:
        text = file.read_text()
        assert re.match("# .+", text), file
        assert file.parent.name == "hydra" or "\n# python -m runner" in text, file
    for file in [*FILES, *sorted(find("recipes").glob("*.yaml"))]:
        assert read_yaml(file) == OmegaConf.to_container(OmegaConf.load(file)), file


def wrong_values(example):
    """Values of which no option can make use where its file has ``example``."""
    anything = ["abc", "1e-3x", None, {"a": 1}]
    match example:
        case bool():
            return [*anything, 2, 0.5]
        case int() | float():
            numbers = [-1, -0.5, math.inf, -math.inf, math.nan, True, [1]]
            return [*anything, *numbers, *([] if isinstance(example, float) else [1.5])]
        case str():
            return [None, 5, "", [1]]
        case list():
            return [*anything, 0.5, ["abc"], [-1], [math.nan]]
    return []


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_arguments_of_a_target_are_judged_by_the_values_of_its_file(group, option):
    choice = f"{group}={option}"
    found = plain(choice, *NEEDED.get(choice, []))
    target = found[group]["_target_"]
    known = usual(group, target)
    for key, value in written(group, option).items():
        if "${" not in str(value):
            assert key in known
            if value is not None and not isinstance(value, dict):
                assert misfit(known[key], found[group][key]) is None, key
                assert misfit(known[key], object()), key
    module, _, name = target.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    wrong = {key: wrong_values(example) for key, example in known.items() if key not in OWN}
    wrong = {key: values for key, values in wrong.items() if values}
    for turn in range(max(map(len, wrong.values()), default=0)):  # a wrong value of each key
        found[group] |= {key: values[turn % len(values)] for key, values in wrong.items()}
        problems = {problem.key: problem.message for problem in examine(found)[1]}
        assert problems.keys() == {f"{group}.{key}" for key in wrong}, found[group]
        assert all(message.startswith("must be ") for message in problems.values())
    for key in known.keys() - OWN:
        example = known[key]
        # The kinds of a file are those of the signature, else a right value would be refused.
        annotation = str(getattr(parameters.get(key), "annotation", ""))
        assert type(example) is not int or "float" not in annotation, key
        if module.startswith("runner.") and isinstance(example, int | float | str):
            assert "None" not in annotation, key


def test_what_no_file_has_is_left_to_the_target():
    assert usual("optimizer", "my.Optimizer") == {}
    foreign = {"_target_": "my.Optimizer", "lr": "auto"}
    assert examine(changed(plain(), "optimizer", foreign))[1] == []
    assert examine(changed(plain(), "optimizer.maximize", "perhaps"))[1] == []
    assert misfit(0.5, 1) is None
    assert misfit([1, 8, 8], [3]) is None
    for example in (None, -1, []):
        assert misfit(example, object()) is None
