"""Models of torchvision, timm and transformers train as under plain PyTorch, without a wrapper."""

import pytest

from tests.libraries.cases import MODELS
from tests.libraries.training import plain_of, trained
from tests.ranks import run_ranks
from tests.verify.requests import verify

PLUGINS = {
    "single": ("plugin=single", 1),
    **{name: (f"plugin={name} plugin.nproc=2", 2) for name in ("ddp", "fsdp", "zero")},
}
SPLIT = {name: (f"plugin={name} plugin.nproc=2", 1) for name in ("tensor", "pipeline")}


def plugins_of(name):
    """The plugins that can train a model, with their data-parallel sizes."""
    if name == "llama":
        return PLUGINS | SPLIT
    return PLUGINS | ({"tensor": SPLIT["tensor"]} if name == "qwen3" else {})


def limit(plugin):
    """The loss of transformers is in float32; a pipeline computes it outside of the model."""
    return 1e-6 if plugin == "pipeline" else 1e-9


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_ten_steps_are_those_of_plain_pytorch(name):
    plugins = plugins_of(name)
    plains = [plain_of(name, words, ranks) for words, ranks in plugins.values()]
    found = run_ranks(trained, 2, plains, timeout=560)[0]
    for plugin, off in zip(plugins, found, strict=True):
        assert len(off) > 10
        assert {key: each for key, each in off.items() if not each <= limit(plugin)} == {}, plugin


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_verify_passes_in_every_mode(name):
    plugins = {key: each for key, each in plugins_of(name).items() if key not in PLUGINS}
    plugins["fsdp"] = PLUGINS["fsdp"]
    asked = ["verify.modes=[norm,value,adaptive]", "verify.steps=2"]
    plains = [
        plain_of(name, words, ranks, *asked, f"verify.tolerance={limit(plugin)}")
        for plugin, (words, ranks) in plugins.items()
    ]
    for plugin, found in zip(plugins, run_ranks(verified, 2, plains, timeout=560)[0], strict=True):
        assert found["ok"], (plugin, [mode["failures"] for mode in found["modes"]])
        assert [mode["mode"] for mode in found["modes"]] == ["norm", "value", "adaptive"]


def verified(plains):
    return [verify(plain)["found"] for plain in plains]
