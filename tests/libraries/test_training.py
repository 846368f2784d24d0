"""Models of torchvision, timm and transformers train as under plain PyTorch, without a wrapper."""

import pytest

from tests.libraries.cases import MODELS
from tests.libraries.training import plain_of, trained
from tests.ranks import run_ranks

PLUGINS = {
    "single": ("plugin=single", 1),
    **{name: (f"plugin={name} plugin.nproc=2", 2) for name in ("ddp", "fsdp", "zero")},
}
SPLIT = {name: (f"plugin={name} plugin.nproc=2", 1) for name in ("tensor", "pipeline")}
"""Plugins that split the model, with their data-parallel sizes."""


def plugins_of(name):
    """The plugins that can train a model."""
    if name in ("llama", "qwen3", "mixtral"):
        return PLUGINS | SPLIT
    return PLUGINS | ({"pipeline": SPLIT["pipeline"]} if name == "nf_resnet" else {})


@pytest.mark.sampled
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_those_of_plain_pytorch(name):
    plugins = plugins_of(name)
    plains = [plain_of(name, words, ranks) for words, ranks in plugins.values()]
    found = run_ranks(trained, 2, plains, timeout=560)[0]
    for plugin, off in zip(plugins, found, strict=True):
        assert len(off) > 10
        assert {key: each for key, each in off.items() if not each <= 1e-9} == {}, plugin
