"""Whatever a configuration holds: it is the typed configuration, or one message says why not."""

import contextlib
import copy
import pickle

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runner.compose.request import request
from runner.config.check import parse
from runner.config.identity import config_hash
from runner.config.problem import RequestError
from runner.config.yaml_text import load_yaml
from tests.generated.damage import ODD as ODD_JSON
from tests.generated.damage import TEXT, replaced
from tests.generated.limits import examples
from tests.generated.overrides import ODD as ODD_TEXT

STARTS = [
    [],
    ["clip=adaptive", "model=gpt", "data=text"],
    ["plugin=hybrid", "plugin.tp_size=2", "plugin.pp_size=2", "precision=bf16"],
    ["plugin=zero", "plugin.nproc=2", "optimizer=adam", "scheduler=linear_warmup_cosine"],
]

SCALAR = st.one_of(
    st.sampled_from(ODD_JSON),
    st.sampled_from(ODD_TEXT),
    st.integers(),
    st.floats(),
    st.text(max_size=9),
)
KEY = st.one_of(st.text(max_size=9), st.integers(-2, 9), st.booleans(), st.floats(), st.none())
VALUE = st.recursive(
    SCALAR,
    lambda inside: st.one_of(
        st.lists(inside, max_size=4), st.dictionaries(KEY, inside, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def starts():
    return [request(words, writes=False).jobs[0].plain for words in STARTS]


@pytest.mark.timeout(0)
@examples()
@given(
    start=st.integers(0, len(STARTS) - 1),
    changes=st.lists(st.tuples(st.integers(0, 10**9), VALUE), min_size=1, max_size=3),
    removed=st.lists(st.integers(0, 10**9), max_size=1),
)
def test_a_configuration_is_parsed_or_refused_in_one_message(starts, start, changes, removed):
    plain = copy.deepcopy(starts[start])
    for at, value in changes:
        plain = replaced(plain, at, copy.deepcopy(value))
    for at in removed:
        section = plain[list(plain)[at % len(plain)]]
        if isinstance(section, dict) and section:
            del section[list(section)[at // 7 % len(section)]]
    try:
        config = parse(plain)
    except RequestError as error:
        config, refused = None, error
    if config is None:
        assert len(str(refused).splitlines()) == 1 + len(refused.problems)
    else:
        assert pickle.loads(pickle.dumps(config)) == config
        assert len(config_hash(plain)) == 16


SIGNS = st.text("[]{}:,-&*!|>'\"#%@`? \nab1<", max_size=40)


@pytest.mark.timeout(0)
@examples()
@given(text=st.one_of(TEXT, st.text(max_size=30), SIGNS))
def test_text_is_yaml_or_refused(text):
    with contextlib.suppress(yaml.YAMLError):
        load_yaml(text)
