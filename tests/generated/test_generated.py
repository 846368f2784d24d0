"""Whatever is typed, configured or left of a run: it is used, or one message says why not."""

import contextlib
import copy
import os
import pickle
import shutil

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.cli import run
from runner.compose.request import request
from runner.config.check import parse
from runner.config.identity import config_hash
from runner.config.problem import RequestError
from runner.config.yaml_text import load_yaml
from runner.report import NoRunError, read, write
from runner.run_folder.earlier import earlier_record
from runner.run_folder.sweep_record import SweepRecord
from runner.sweep import live
from runner.sweep.resume import load_status
from tests.generated import damage, overrides
from tests.report.examples import LAYERS, sweep

EXAMPLES = int(os.environ.get("RUNNER_TESTS_EXAMPLES", "24"))
"""Requests and configurations to generate; damaged folders are a tenth of this."""
pytestmark = pytest.mark.timeout(0)


def examples(share=1.0):
    """Settings for this share of the examples. A failure prints how to repeat it."""
    return settings(
        max_examples=max(1, round(EXAMPLES * share)),
        deadline=None,  # the clock of a busy machine tells nothing
        database=None,
        # The gate runs the same examples every day.
        derandomize="RUNNER_TESTS_EXAMPLES" not in os.environ,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def asked(words):
    """What the command does before it imports torch."""
    try:
        flags = run.read(words)
        given = {"multirun": flags.multirun, "source": run.source_of(flags)}
        return request(flags.overrides, earlier=earlier_record, **given)
    except RequestError as error:
        return error


@pytest.mark.usefixtures("outputs")
@examples()
@given(words=overrides.REQUEST)
def test_a_request_runs_or_is_refused_in_one_message(tmp_path, words):
    if {"-m", "--multirun"} & {*words} and not any("sweep" in word for word in words):
        words = [*words, "sweep.max_jobs=6"]  # so that an example does not take minutes
    before = list(tmp_path.rglob("*"))
    outcome = asked(words)
    if isinstance(outcome, RequestError):
        assert len(str(outcome).splitlines()) == 1 + len(outcome.problems)
        assert all(problem.message for problem in outcome.problems)
    else:
        assert outcome.jobs
        assert all(len(config_hash(job.plain)) == 16 for job in outcome.jobs)
    assert list(tmp_path.rglob("*")) == before


STARTS = [
    [],
    ["clip=adaptive", "model=gpt", "data=text"],
    ["plugin=hybrid", "plugin.tp_size=2", "plugin.pp_size=2", "precision=bf16"],
    ["plugin=zero", "plugin.nproc=2", "optimizer=adam", "scheduler=linear_warmup_cosine"],
]
SCALAR = st.one_of(damage.VALUE, st.sampled_from(overrides.ODD), st.text(max_size=9))
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


@examples()
@given(
    start=st.integers(0, len(STARTS) - 1),
    changes=st.lists(st.tuples(st.integers(0, 10**9), VALUE), min_size=1, max_size=3),
    removed=st.lists(st.integers(0, 10**9), max_size=1),
)
def test_a_configuration_is_parsed_or_refused_in_one_message(starts, start, changes, removed):
    plain = copy.deepcopy(starts[start])
    for at, value in changes:
        plain = damage.replaced(plain, at, copy.deepcopy(value))
    for at in removed:
        section = plain[list(plain)[at % len(plain)]]
        if isinstance(section, dict) and section:
            del section[list(section)[at // 7 % len(section)]]
    try:
        config = parse(plain)
    except RequestError as error:
        assert len(str(error).splitlines()) == 1 + len(error.problems)
    else:
        assert pickle.loads(pickle.dumps(config)) == config
        assert len(config_hash(plain)) == 16


SIGNS = st.text("[]{}:,-&*!|>'\"#%@`? \nab1<", max_size=40)


@examples()
@given(text=st.one_of(damage.TEXT, st.text(max_size=30), SIGNS))
def test_text_is_yaml_or_refused(text):
    with contextlib.suppress(yaml.YAMLError):
        load_yaml(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep of three runs that finished."""
    folder = tmp_path_factory.mktemp("made") / "mine"
    modes = [("norm", 0.25), ("adaptive", 0.04), ("none", None)]
    sweep(folder, modes, steps=30, layers=LAYERS[:3], what_if=(0.1, 1.0))
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": {"task": []}}}))
    return folder


@examples(0.1)
@given(found=st.lists(damage.DAMAGES, min_size=1, max_size=4))
def test_a_damaged_run_does_not_take_the_page_of_the_others(made, tmp_path, found):
    folder = tmp_path / "mine"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder)
    damage.damage(folder / "1", found)
    text = write(folder).read_text(encoding="utf-8")
    assert 'data-run="0"' in text
    assert 'data-run="2"' in text
    assert "unreadable" not in text  # the net below the page caught nothing
    try:
        write(folder / "1")  # a run alone
    except NoRunError:
        assert not (folder / "1" / "status.json").exists()
    assert [run.state for run in read(folder).runs if run.number in "02"] == ["finished"] * 2
    said = earlier_record(folder, "fedcba9876543210")
    try:
        record = SweepRecord.find(folder)
    except (OSError, ValueError):
        assert said is not None
        return
    if record:
        for entry in record.entries:
            load_status(entry, folder, record.objective)
        assert live.table(record)
        record.write(folder)
        assert SweepRecord.read(folder) is not None
