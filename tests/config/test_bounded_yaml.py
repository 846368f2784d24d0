"""YAML that is made to do harm is refused at once; any other reads as OmegaConf reads it."""

import os
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import runner
from runner.config.bounded_file import LARGEST, read_bounded
from runner.config.bounded_yaml import DEEPEST, load_yaml
from runner.config.values import Refusal
from runner.config.yaml_file import read_yaml

ROOT = Path(runner.__file__).parents[1]

DOUBLING = "a0: &a0 [1, 1]\n" + "".join(
    f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)
)
"""60 lines that stand for 2**60 values."""

HARMFUL = {
    "lists": ("[" * 100_000, "levels deep"),
    "dicts": ('{"a":' * 100_000, "levels deep"),
    "closed": ("[" * 100_000 + "]" * 100_000, "levels deep"),
    "block": ("".join(f"{' ' * n}a:\n" for n in range(2_000)), "levels deep"),
    "dashes": ("- " * 100_000, "levels deep"),
    "doubling": (DOUBLING, "more than 200,000 values"),
    "merging": (DOUBLING.replace("[", "{<<: [").replace("]", "]}"), "more than 200,000 values"),
    "itself": ("a: &a {b: *a}", "stands for nothing yet"),
    "unknown": ("a: *b", "stands for nothing yet"),
    "many": ("[" + "1," * 300_000 + "]", "more than 200,000 values"),
    "number": ("a: " + "9" * 5_000, "a number of 5,000 characters"),
    "hexadecimal": ("a: 0x" + "f" * 1_000_000, "a number of 1,000,002 characters"),
    "sexagesimal": ("a: 1" + ":1" * 500_000, "a number of 1,000,001 characters"),
    "twice": ("a: 1\na: 2", "duplicate key a"),
    "bool": ("a: !!bool maybe", "KeyError"),
    "timestamp": ("a: !!timestamp soon", "AttributeError"),
    "object": ("a: !!python/object/apply:os.system [false]", "could not determine a constructor"),
    "control": ("a: \x00", "not allowed"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_what_does_harm_is_refused_at_once(name):
    text, message = HARMFUL[name]
    with pytest.raises(yaml.YAMLError, match=message):
        load_yaml(text)


def test_a_document_may_be_as_deep_as_the_bound():
    assert load_yaml("[" * DEEPEST + "]" * DEEPEST) != []
    with pytest.raises(yaml.YAMLError):
        load_yaml("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))


def test_anchors_and_merges_are_read():
    text = "a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: [*a, *a]"
    one = {"x": 1, "y": [2]}
    assert load_yaml(text) == {"a": one, "b": {"x": 3, "y": [2]}, "c": [one, one]}


SCALARS = """
1 -1 +1 1_000 0x1f 0b11 017 0o17 1.5 -.5 1e3 1e-3 1E5 1.e3 .5e5 1_0e1 1.5e+3 1:30
1:30.5 .inf -.inf .nan inf nan ~ null Null yes no on off true True y n 2001-01-01
2001-01-01T00:00:00Z
1.2.3 1e 1e+ -e3 e3 _1 1_ 0 -0 00 08 1__0 0.0 1.0_1 '1' "1e3" ${seed} ??? a=b
"""


@pytest.mark.parametrize("text", SCALARS.split())
def test_a_value_is_what_omegaconf_reads(text):
    read, wanted = load_yaml(f"a: {text}")["a"], OmegaConf.create(f"a: {text}")
    wanted = OmegaConf.to_container(wanted)["a"]
    assert repr(read) == repr(wanted)


FILES = sorted([*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "recipes").glob("*.yaml")])


def test_every_file_of_ours_reads_as_omegaconf_reads_it():
    assert len(FILES) > 60
    for file in FILES:
        assert read_yaml(file) == OmegaConf.to_container(OmegaConf.load(file)), file


@pytest.mark.parametrize("name", HARMFUL)
def test_a_file_that_does_harm_is_named(tmp_path, name):
    file = tmp_path / "plan.yaml"
    file.write_text(HARMFUL[name][0])
    with pytest.raises(Refusal, match=r"plan\.yaml cannot be read: "):
        read_yaml(file)


def test_only_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", LARGEST + 1)
    for name, message in (("pipe", "not a file"), ("large", "more than"), ("", "directory")):
        with pytest.raises(OSError, match=message):
            read_bounded(tmp_path / name)
    with pytest.raises(OSError, match="not a file"):
        read_bounded(Path("/dev/zero"))
    os.truncate(tmp_path / "large", 3)
    assert read_bounded(tmp_path / "large") == b"\0\0\0"
