"""How many ranks a run has, and what of its section a plugin is handed."""

import sys
from types import ModuleType

import pytest

from runner.booster.plugin.single import SinglePlugin
from runner.compose.request import request
from runner.train import build


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def config(*words):
    [job] = request(words, writes=False).jobs
    return job.config


def gpus(monkeypatch, count):
    monkeypatch.setattr(build.torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("words", "without", "with_eight", "with_six"),
    [
        ("plugin=single", 1, 1, 1),
        ("plugin=ddp", 1, 8, 6),
        ("plugin=ddp device=cpu", 1, 1, 1),
        ("plugin=fsdp plugin.nproc=3", 3, 3, 3),
        ("plugin=tensor", 1, 8, 6),
        ("plugin=tensor plugin.tp_size=4", 4, 8, 4),
        ("plugin=tensor plugin.tp_size=4 plugin.dp_size=1", 4, 4, 4),
        ("plugin=pipeline plugin.pp_size=2 plugin.dp_size=2", 4, 4, 4),
        ("plugin=moe plugin.ep_size=2", 2, 8, 6),
        ("plugin=moe plugin.ep_size=2 plugin.dp_size=4", 4, 4, 4),
        ("plugin=hybrid plugin.dp_size=2 plugin.tp_size=2 plugin.pp_size=2", 8, 8, 8),
        ("plugin=hybrid plugin.tp_size=2 plugin.pp_size=2", 4, 8, 4),
        ("plugin=hybrid plugin.tp_size=2 plugin.pp_size=2 device=cpu", 4, 4, 4),
        ("plugin=hybrid plugin.tp_size=2 plugin.nproc=4", 4, 4, 4),
    ],
)
def test_ranks_are_those_asked_for_and_an_open_size_takes_idle_gpus(
    monkeypatch, words, without, with_eight, with_six
):
    asked = config(*words.split())
    for count, ranks in ((0, without), (8, with_eight), (6, with_six)):
        gpus(monkeypatch, count)
        assert build.ranks_of(asked) == ranks


def test_ranks_that_stand_already_are_those(monkeypatch):
    gpus(monkeypatch, 8)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert build.ranks_of(config("plugin=hybrid", "plugin.tp_size=2")) == 5


@pytest.mark.parametrize("words", ["plugin=ddp plugin.nproc=2", "plugin=tensor plugin.tp_size=2"])
def test_the_fork_server_is_warmed_for_local_ranks(monkeypatch, words):
    from runner.launch import fork_server, local_ranks

    warmed = []
    monkeypatch.setattr(fork_server.multiprocessing, "set_forkserver_preload", warmed.append)
    monkeypatch.setattr(fork_server.forkserver, "ensure_running", lambda: None)
    local_ranks.prepare(config("plugin=ddp"))
    assert warmed == []
    local_ranks.prepare(config(*words.split()))
    assert len(warmed) == 1


def test_a_plugin_is_handed_the_keys_that_it_knows(monkeypatch):
    handed = {}

    class Recorded(SinglePlugin):
        def __init__(self, tp_size, dp_size=7, tp_plan=None, further="its own"):
            handed.update(tp_size=tp_size, dp_size=dp_size, tp_plan=tp_plan, further=further)

    module = ModuleType("runner.booster.plugin.tensor")
    module.PLUGIN = Recorded
    monkeypatch.setitem(sys.modules, module.__name__, module)
    asked = config("plugin=tensor", "plugin.tp_plan={head:colwise}")
    assert isinstance(build.make_plugin(asked), Recorded)
    plan = {"head": "colwise"}
    # A size that is left open is None, whatever the plugin's own default.
    assert handed == {"tp_size": None, "dp_size": None, "tp_plan": plan, "further": "its own"}
    wider = asked.plugin.model_copy(update={"dp_size": 2})
    build.make_plugin(asked.model_copy(update={"plugin": wider}))
    assert handed["dp_size"] == 2
