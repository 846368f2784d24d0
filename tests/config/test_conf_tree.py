"""Every file of ``conf/`` can be chosen, says what it is, and has values that are checked."""

import math
import re
import shlex

import pytest
from omegaconf import OmegaConf

from runner.config.check import owned_keys, parse
from runner.config.folders import find, options, read_yaml
from runner.config.modes import MODES, NAMES, options_of
from runner.config.problem import leaves
from runner.request.request import request
from tests.config.composed import changed, plain, problems

FILES = sorted(find("conf").glob("*/*.yaml"))
OPEN = ["model", "data", "optimizer", "scheduler"]
OWNED = ["plugin", "clip", "accumulation", "precision", "tracker", "checkpoint"]
NEEDED = {"clip=groups": ["clip.groups={*:1.0}"], "data=csv": ["data.path=x", "data.target=y"]}
"""Keys without a default."""


def test_every_option_of_a_group_gives_what_its_file_says():
    keys = {group: set() for group in [*OWNED, *OPEN]}
    for turn in range(max(len(options(group)) for group in keys)):
        chosen = {group: options(group)[: turn + 1][-1] for group in keys}
        words = [f"{group}={option}" for group, option in chosen.items()]
        words += [word for choice in words.copy() for word in NEEDED.get(choice, [])]
        config = plain(*words)
        for group, option in chosen.items():
            content = read_yaml(find("conf") / group / f"{option}.yaml")
            content.pop("defaults", None)
            referring = re.compile(r"\$\{|\?\?\?")
            fixed = {
                key: value for key, value in content.items() if not referring.search(str(value))
            }
            assert fixed.items() <= config[group].items(), (group, option)
            # A clipping mode has its own options besides, and no others.
            mode_options = options_of(MODES[option]) if group == "clip" else {}
            assert set(mode_options) <= set(config[group]), (group, option)
            keys[group].add(tuple(key for key in config[group] if key not in mode_options))
            if group in ("clip", "plugin", "precision", "tracker"):
                assert content.get("name", content.get("mode")) == option
    assert all(len(kinds) == 1 for group, kinds in keys.items() if group not in OPEN)
    assert options("clip") == NAMES


def test_a_default_of_a_clipping_mode_stands_in_its_dataclass_alone():
    for name, mode in MODES.items():
        content = read_yaml(find("conf") / "clip" / f"{name}.yaml")
        for option in content.keys() & options_of(mode).keys() - {"threshold"}:
            default = options_of(mode)[option].get_default(call_default_factory=True)
            assert content[option] != default, (name, option)


def test_a_key_that_records_may_lack_has_its_default_of_conf_in_the_schema_too():
    composed = dict(leaves("", plain()))
    for name, field in owned_keys().items():
        if name in composed and name != "clip.threshold" and not field.is_required():
            assert field.get_default(call_default_factory=True) == composed[name], name


def commands():
    for file in [*FILES, *sorted(find("recipes").glob("*.yaml"))]:
        for line in file.read_text().splitlines():
            if shown := re.match(r"#.*?python -m runner (.*)", line):
                yield pytest.param(shown[1], id=f"{file.parent.name}/{file.stem}")


@pytest.mark.parametrize("command", list(commands()))
@pytest.mark.product(every=9)
def test_the_command_that_a_file_shows_is_right(command):
    words = shlex.split(command)
    typed = [word for word in words if word != "-m"]
    assert request(typed, multirun="-m" in words).jobs


def test_files_open_with_their_purpose():
    for file in FILES:
        text = file.read_text()
        assert re.match("# .+", text), file
        assert file.parent.name == "hydra" or "\n# python -m runner" in text, file


def test_files_are_read_as_hydra_reads_them():
    for file in [*FILES, *sorted(find("recipes").glob("*.yaml"))]:
        assert read_yaml(file) == OmegaConf.to_container(OmegaConf.load(file)), file


def test_an_argument_that_is_no_finite_number_is_refused_before_the_target_sees_it():
    for value in (math.nan, 10**400):
        named = problems(changed(plain(), "optimizer.momentum", value))
        assert named == {"optimizer.momentum": "must be a finite number"}
    assert problems(changed(plain(), "model.width", "???")) == {"model.width": "no value given"}
    foreign = {"_target_": "my.Optimizer", "lr": "auto"}
    assert parse(changed(plain(), "optimizer", foreign)).optimizer.mapping() == foreign
