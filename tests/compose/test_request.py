"""Overrides become jobs: what is composed is what Hydra composes, each job typed and checked."""

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import OmegaConf

from runner.compose.composer import Composer, Source
from runner.compose.request import request
from runner.config.problem import RequestError

pytestmark = pytest.mark.usefixtures("outputs")


def one(*words, **options):
    [job] = request(words, **options).jobs
    return job


def problems(*words, **options):
    with pytest.raises(RequestError) as error:
        request(words, **options)
    return error.value.problems


# Composed one after the other: what one sets must not remain in the next.
REQUESTS = [
    *("", "clip=value", "clip.threshold=3 seed=2 train.max_duration=5ba", "", "recipe=gpt"),
    *("recipe=gpt optimizer=sgd", "recipe=gpt", "~optimizer.nesterov", "model={width:7}"),
    *("+optimizer.maximize=true hydra.run.dir=/tmp/x", "++clip.more={a:1,b:[2,3]}"),
    "clip=adaptive clip.units={head.*:1} tracker.tags=[a,b]",
    *("plugin=hybrid plugin.tp_size=2 data=text", "clip=adaptive", "hydra.job.env_copy=[PATH]", ""),
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
            assert OmegaConf.is_struct(ours) == OmegaConf.is_struct(theirs)
    for group in ("", "clip", "clip.treshold", "hydra", "hydra/launcher", "recipe", "nowhere"):
        for _ in range(2):
            composer.loader.get_group_options(group).append("changed by its reader")
        assert composer.loader.get_group_options(group) == hydras.get_group_options(group)
        assert composer.loader.list_groups(group) == hydras.list_groups(group)


def test_a_job_is_typed_and_plain_and_its_references_are_resolved(tmp_path):
    job = one("clip=adaptive", "clip.threshold=0.02", "seed=7", "model.width=${seed}")
    assert job.config.clip.mode == job.plain["clip"]["mode"] == "adaptive"
    assert job.plain["model"]["width"] == 7
    assert type(job.plain["optimizer"]) is dict
    assert "hydra" not in job.plain
    assert one("tracker.group=${hydra:job.name}").config.tracker.group == "runner"
    assert one("+optimizer.maximize=true").config.optimizer.arguments["maximize"] is True
    assert "nesterov" not in one("~optimizer.nesterov").config.optimizer.arguments
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (
            "clip=none,norm seed=range(0,2) device=cpu",
            ["clip=none seed=0", "clip=none seed=1", "clip=norm seed=0", "clip=norm seed=1"],
        ),
        ("clip=glob(n*)", ["clip=none", "clip=norm"]),
        ("hydra.mode=MULTIRUN seed=1,2", ["seed=1", "seed=2"]),
        ("clip=none,norm seed=${hydra:job.num}", ["clip=none", "clip=norm"]),
        ("model=gpt,lstm model.layers=2 seed=1", ["model=gpt", "model=lstm"]),
        ("seed=range(0,3) clip.threshold=1 sweep.max_jobs=3", ["seed=0", "seed=1", "seed=2"]),
        # Lists that are zipped advance together; unset leaves a key out.
        (
            "clip.threshold=1,2 seed=1,2 log.flush=3,4 sweep.zip=[clip.threshold,log.flush]",
            [
                "clip.threshold=1 log.flush=3 seed=1",
                "clip.threshold=1 log.flush=3 seed=2",
                "clip.threshold=2 log.flush=4 seed=1",
                "clip.threshold=2 log.flush=4 seed=2",
            ],
        ),
        (
            "clip=norm,schedule clip.warmup_steps=unset,30 sweep.zip=[clip,clip.warmup_steps]",
            ["clip=norm", "clip=schedule clip.warmup_steps=30"],
        ),
    ],
)
def test_a_sweep_is_every_combination_in_hydras_order(words, labels):
    found = request(words.split(), multirun="MULTIRUN" not in words)
    assert [job.label for job in found.jobs] == labels
    assert len({job.hash for job in found.jobs}) == len(labels)
    if "job.num" in words:
        assert [job.config.seed for job in found.jobs] == [0, 1]
    if "layers" in words:
        assert [job.config.model.arguments["layers"] for job in found.jobs] == [2, 2]
        assert found.sweep.words[:3] == ("model=gpt,lstm", "++model.layers=2", "seed=1")
        assert found.jobs[0].words == ("model=gpt", "model.layers=2", "seed=1")
