"""How many ranks a run has, and what of its section a plugin is given."""

import sys
from types import ModuleType

import pytest

from runner.booster.plugin.single import SinglePlugin
from runner.compose.request import request
from runner.train import build


@pytest.fixture
def config(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda words: request(words.split(), writes=False).jobs[0].config


@pytest.mark.parametrize(
    ("words", "without", "with_eight", "with_six"),
    [
        ("plugin=single", 1, 1, 1),
        ("plugin=ddp", 1, 8, 6),
        ("plugin=fsdp plugin.nproc=3", 3, 3, 3),
        ("plugin=tensor plugin.tp_size=4", 4, 8, 4),
        ("plugin=pipeline plugin.pp_size=2 plugin.dp_size=2", 4, 4, 4),
        ("plugin=moe plugin.ep_size=2", 2, 8, 6),
        ("plugin=hybrid plugin.tp_size=2 plugin.pp_size=2", 4, 8, 4),
        ("plugin=hybrid plugin.tp_size=2 device=cpu", 2, 2, 2),
        ("plugin=hybrid plugin.tp_size=2 plugin.nproc=4", 4, 4, 4),
    ],
)
def test_an_open_size_takes_idle_gpus(config, monkeypatch, words, without, with_eight, with_six):
    made = config(words)
    for count, ranks in ((0, without), (8, with_eight), (6, with_six)):
        monkeypatch.setattr(build.torch.cuda, "device_count", lambda count=count: count)
        assert build.ranks_of(made) == ranks
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert build.ranks_of(made) == (5 if "single" not in words else build.ranks_of(made))


def test_a_plugin_is_given_the_keys_that_it_knows(config, monkeypatch):
    given = {}

    class Recorded(SinglePlugin):
        def __init__(self, tp_size, dp_size=7, tp_plan=None, further="its own"):
            given.update(tp_size=tp_size, dp_size=dp_size, tp_plan=tp_plan, further=further)

    module = ModuleType("runner.booster.plugin.tensor")
    module.PLUGIN = Recorded
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert isinstance(
        build.make_plugin(config("plugin=tensor plugin.tp_plan={head:colwise}")), Recorded
    )
    # A size that is left open is None, whatever the plugin's own default.
    plan = {"head": "colwise"}
    assert given == {"tp_size": None, "dp_size": None, "tp_plan": plan, "further": "its own"}
    build.make_plugin(config("plugin=tensor plugin.dp_size=2"))
    assert given["dp_size"] == 2
