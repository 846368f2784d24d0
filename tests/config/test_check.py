import copy
import math
import pickle

import pytest
from pydantic import ValidationError

from runner.compose.request import request
from runner.config.check import examine, keys_of, owned_keys, parse
from runner.config.duration import Duration
from runner.config.problem import RequestError, unknown_key
from tests.process import python


@pytest.fixture(scope="module")
def whole():
    return request([], writes=False).jobs[0].plain


@pytest.fixture
def plain(whole):
    return copy.deepcopy(whole)


@pytest.fixture(scope="module")
def adaptive():
    """Section ``clip`` of a mode with options of its own."""
    return request(["clip=adaptive"], writes=False).jobs[0].plain["clip"]


def problems(plain):
    with pytest.raises(RequestError) as error:
        parse(plain)
    return {problem.key: problem.message for problem in error.value.problems}


def test_the_default_configuration_becomes_typed(plain):
    config = parse(plain)
    assert config.clip.mode == "norm"
    assert config.clip.threshold == 1.0
    assert config.train.max_duration == Duration(15, "ep")
    assert config.plugin.nproc is None
    assert config.recipe == "none"


def test_it_is_frozen_and_travels_between_processes(plain):
    config = parse(plain)
    with pytest.raises(ValidationError, match="frozen"):
        config.clip.threshold = 2.0
    assert pickle.loads(pickle.dumps(config)) == config


def test_targets_keep_every_key_of_theirs(plain):
    plain["optimizer"] = {"_target_": "torch.optim.SGD", "lr": 0.1, "deep": {"er": [1, 2]}}
    optimizer = parse(plain).optimizer
    assert optimizer.target == "torch.optim.SGD"
    assert optimizer.arguments == {"lr": 0.1, "deep": {"er": [1, 2]}}
    assert optimizer.mapping() == plain["optimizer"]


def test_the_runners_own_data_keys_stand_apart_from_the_targets(plain):
    data = parse(plain).data
    assert data.batch_size == plain["data"]["batch_size"]
    assert not {"batch_size", "num_workers", "drop_last", "_target_"} & data.arguments.keys()
    assert "test_fraction" in data.arguments


def test_integers_are_taken_where_numbers_are_asked_for(plain):
    plain["clip"]["threshold"] = 1
    threshold = parse(plain).clip.threshold
    assert isinstance(threshold, float)
    assert threshold == 1.0


@pytest.mark.parametrize("value", [math.inf, "inf"])
def test_infinity_may_be_a_word_or_a_number(plain, value):
    plain["clip"]["norm_type"] = value
    assert parse(plain).clip.norm_type == math.inf


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("clip", "threshold", 0),
        ("clip", "threshold", -0.5),
        ("clip", "threshold", math.nan),
        ("clip", "threshold", math.inf),
        ("clip", "threshold", "1.0"),
        ("clip", "threshold", True),
        ("clip", "threshold", [1.0]),
        ("clip", "threshold", 10**400),
        ("clip", "mode", "nrom"),
        ("clip", "norm_type", 3),
        ("clip", "norm_type", None),
        ("clip", "exclude", "head"),
        ("clip", "exclude", [1]),
        ("clip", "units", "w"),
        ("clip", "units", {}),
        ("clip", "units", {1: 0}),
        ("clip", "units", {"w": [0, 0]}),
        ("clip", "eps", 0),
        ("clip", "nonfinite", "raise"),
        ("accumulation", "steps", 0),
        ("accumulation", "steps", 1.0),
        ("accumulation", "steps", True),
        ("accumulation", "steps", "4"),
        ("precision", "name", "fp8"),
        ("precision", "initial_scale", -1),
        ("plugin", "name", "dpp"),
        ("plugin", "nproc", 0),
        ("plugin", "find_unused_parameters", 1),
        ("data", "batch_size", 0),
        ("data", "num_workers", -1),
        ("data", "drop_last", "yes"),
        ("data", "_target_", "digits"),
        ("model", "_target_", "torchvision.models."),
        ("tracker", "mode", "on"),
        ("tracker", "tags", "a"),
        ("tracker", "project", " "),
        ("train", "max_duration", 3),
        ("train", "max_duration", "3 epochs"),
        ("eval", "interval", "0ep"),
        ("log", "interval", 0),
        ("log", "flush", 0),
        ("telemetry", "per_layer", "on"),
        ("telemetry", "probe", -1),
        ("launch", "timeout", 0),
        ("sweep", "name", "a/b"),
        ("sweep", "name", ".."),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(plain, adaptive, section, key, value):
    if section == "clip" and key in ("exclude", "units", "eps"):
        plain["clip"] = dict(adaptive)
    plain[section][key] = value
    found = problems(plain)
    assert list(found) == [f"{section}.{key}"]
    assert "must be " in found[f"{section}.{key}"]


def test_units_are_dimensions(plain, adaptive):
    plain["clip"] = dict(adaptive)
    for given in (None, {"w": 1}, {"*.w": [0, 1], "b": [], "v": -1}):
        plain["clip"]["units"] = given
        assert parse(plain).clip.units == given
    for wrong in ("a", 1.0, True, None):
        plain["clip"]["units"] = {"w": 0, "experts.*": [0, wrong]}
        found = problems(plain)
        assert list(found) == ["clip.units"]
        assert f"experts.*: {wrong!r} is no dimension" in found["clip.units"]
        assert "such as [0,1]" in found["clip.units"]


@pytest.mark.parametrize("value", [-1, 1.5, True, 2**32, "0", None])
def test_a_seed_is_an_integer_that_every_generator_takes(plain, value):
    plain["seed"] = value
    assert "at least 0" in problems(plain)["seed"]


def test_every_problem_is_reported_at_once(plain):
    plain["clip"]["treshold"] = 1
    plain["accumulation"]["steps"] = 0
    plain["sed"] = 1
    del plain["device"]
    found = problems(plain)
    assert found.keys() == {"clip.treshold", "accumulation.steps", "sed", "device"}
    assert "did you mean clip.threshold?" in found["clip.treshold"]
    assert "keys of clip: absolute, beta, by, decay, end_factor, eps," in found["clip.treshold"]
    assert "did you mean seed?" in found["sed"]
    assert "no value given" in found["device"]


def test_question_marks_are_a_missing_value_wherever_they_stand(plain, adaptive):
    plain["clip"] = dict(adaptive)
    plain["clip"]["eps"] = "???"
    plain["model"]["deep"] = {"width": "???"}
    plain["train"] = "???"
    found = problems(plain)
    assert found.keys() == {"clip.eps", "model.deep.width", "train"}
    assert "no value given" in found["model.deep.width"]
    assert "max_duration" in found["train"]


@pytest.mark.parametrize("value", [None, 5, "x", [], "absent"])
def test_a_section_must_be_one(plain, value):
    if value == "absent":
        del plain["clip"]
    else:
        plain["clip"] = value
    assert "mode, threshold, norm_type" in problems(plain)["clip"]


def test_an_unknown_section_names_its_keys(plain):
    plain["cilp"] = {"threshold": 1}
    assert "did you mean clip.threshold?" in problems(plain)["cilp.threshold"]


@pytest.mark.parametrize(
    ("mode", "threshold", "fits"),
    [("none", None, True), ("none", 1.0, False), ("norm", None, False), ("adaptive", 0.1, True)],
)
def test_a_threshold_belongs_to_a_mode_that_clips(plain, adaptive, mode, threshold, fits):
    plain["clip"] = dict(adaptive) if mode == "adaptive" else plain["clip"]
    plain["clip"] |= {"mode": mode, "threshold": threshold}
    if fits:
        assert parse(plain).clip.threshold == threshold
    else:
        assert "clip=none" in problems(plain)["clip.threshold"]


@pytest.mark.parametrize(
    ("name", "nproc", "fits"),
    [
        ("single", None, True),
        ("single", 1, True),
        ("single", 2, False),
        ("ddp", 2, True),
    ],
)
def test_one_process_is_not_several(plain, name, nproc, fits):
    plain["plugin"] |= {"name": name, "nproc": nproc}
    if fits:
        assert parse(plain).plugin.nproc == nproc
    else:
        assert "plugin=ddp" in problems(plain)["plugin.nproc"]


def test_an_unsettled_section_is_checked_value_by_value_alone(plain):
    plain["plugin"]["nproc"] = 2
    assert examine(plain)[0] is None
    config, found = examine(plain, unsettled={"plugin"})
    assert found == []
    assert config is not None
    plain["plugin"]["nproc"] = 0
    assert examine(plain, unsettled={"plugin"})[1]


def test_every_owned_key_says_what_it_means():
    for name, key in owned_keys().items():
        assert key.name == name
        assert key.meaning
        assert key.allowed.text


def test_an_option_of_another_mode_is_named_with_its_mode(plain):
    plain["clip"]["eps"] = 1e-3
    assert problems(plain) == {
        "clip.eps": "is an option of clip=adaptive, clip=update or clip=zscore"
    }


def test_keys_of_targets_are_known_where_they_exist():
    assert "optimizer.lr" in keys_of({"optimizer": {"lr": 1}})
    assert "optimizer.lr" not in keys_of({})


def test_an_unknown_group_leads_to_its_section():
    assert "did you mean clip?" in unknown_key("clipp", keys_of({}), "norm").message


def test_a_rank_can_check_without_hydra_or_torch():
    code = (
        "import sys, runner.config.check\n"
        "print({'hydra', 'omegaconf', 'torch'} & sys.modules.keys())"
    )
    assert python("-c", code).stdout == "set()\n"
