"""Files are read and merged once; what is composed is what Hydra composes."""

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import OmegaConf

from runner.compose.composer import Composer
from runner.compose.request import Source, request
from runner.config.problem import RequestError

pytestmark = pytest.mark.usefixtures("outputs")

# Composed one after the other: what one sets must not remain in the next.
REQUESTS = [
    "",
    "clip=value",
    "clip.threshold=3 seed=2 train.max_duration=5ba",
    "",
    "recipe=gpt",
    "recipe=gpt optimizer=sgd",
    "recipe=gpt",
    "~optimizer.nesterov",
    "+optimizer.maximize=true hydra.run.dir=/tmp/x",
    "++clip.more={a:1,b:[2,3]}",
    "clip=adaptive clip.units={head.*:1} tracker.tags=[a,b]",
    "model={width:7}",
    "plugin=hybrid plugin.tp_size=2 data=text",
    "clip=adaptive",
    "hydra.job.env_copy=[PATH]",
    "",
]


def test_what_is_composed_is_what_hydra_composes():
    composer = Composer(Source())
    hydras = ConfigLoaderImpl(composer.loader.config_search_path)
    with composer.active():
        for words in REQUESTS:
            ours, theirs = (
                loader.load_configuration("config", words.split(), RunMode.RUN)
                for loader in (composer.loader, hydras)
            )
            assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(theirs), words
            for flag in ("struct", "readonly"):
                assert OmegaConf.is_struct(ours) == OmegaConf.is_struct(theirs)
                assert ours.hydra._get_flag(flag) == theirs.hydra._get_flag(flag)


def test_groups_have_the_options_that_hydra_finds():
    composer = Composer(Source())
    hydras = ConfigLoaderImpl(composer.loader.config_search_path)
    for group in ("", "clip", "clip.treshold", "hydra", "hydra/launcher", "recipe", "nowhere"):
        for _ in range(2):
            composer.loader.get_group_options(group).append("changed by its reader")
        assert composer.loader.get_group_options(group) == hydras.get_group_options(group)
        assert composer.loader.list_groups(group) == hydras.list_groups(group)


@pytest.fixture
def merged(monkeypatch):
    """A list that gets an item whenever Hydra merges files."""
    found = []
    merge = ConfigLoaderImpl._compose_config_from_defaults_list

    def count(self, defaults, repo):
        found.append(defaults)
        return merge(self, defaults, repo)

    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", count)
    return found


@pytest.mark.parametrize(
    "words",
    [
        "clip.treshold=1",
        "clip=nrom",
        "clip=nrom seed=2 clip.treshold=1 accumulation.steps=0 log.flush=7",
        "clip=value plugin=dpp plugin.nproc=2 optimizer=adam optimizer.lrr=1 seed=1",
        "recipe=gpt clip.treshold=1 seed=3",
        "-m clip.treshold=1,2 seed=3 log.flush=7 train.max_duration=3ba",
        "-m clip.threshold=1,2 sed=3 log.flush=7 train.max_duration=3ba",
        "-m seed=range(0,12) clip.threshold=-1",
    ],
)
def test_a_wrong_request_is_merged_once(words, merged):
    rest = words.split()
    multirun = rest[0] == "-m"
    with pytest.raises(RequestError):
        request(rest[multirun:], multirun=multirun)
    assert len(merged) == 1


def test_jobs_that_choose_the_same_options_are_merged_once(merged):
    request(["seed=range(0,20)", "clip=norm,value"], multirun=True)
    assert len(merged) == 2  # the default is one of the listed options
