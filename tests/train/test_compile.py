"""What ``compile`` and ``activation_checkpointing`` leave as it is, under every plugin."""

import pytest

from runner.cli.main import main
from tests.launch.ends import rows_of
from tests.process import overriding

MODEL = ["model=gpt", "model.layers=4", "model.width=32", "model.heads=2", "model.dropout=0"]
DATA = ["data=text", "data.sequence_length=16", "data.batch_size=4", "device=cpu"]
SHORT = ["train.max_duration=3ba", "eval.interval=3ba", "tracker=none", "log.flush=1"]
COMPARED = ("train/loss", "grad/norm", "eval/loss")
PLUGINS = {
    "single": [],
    "ddp": ["plugin=ddp", "plugin.nproc=2"],
    "fsdp": ["plugin=fsdp", "plugin.nproc=2"],
    "zero 1": ["plugin=zero", "plugin.nproc=2"],
    "zero 3": ["plugin=zero", "plugin.nproc=2", "plugin.zero_stage=3"],
    "tensor": ["plugin=tensor", "plugin.nproc=2"],
    "pipeline": ["plugin=pipeline", "plugin.nproc=2"],
    "zero bubble": ["plugin=pipeline", "plugin.nproc=2", "plugin.schedule=zero_bubble"],
    "moe": ["plugin=moe", "plugin.nproc=2", "plugin.ep_size=2", "model=moe"],
}
SWITCHES = {
    "blocks": ["compile=blocks"],
    "model": ["compile=model"],
    "blocks, checkpointed": ["compile=blocks", "activation_checkpointing=blocks"],
}


def steps_of(home, words):
    defaults = [*MODEL, *DATA, *SHORT, f"hydra.run.dir={home}"]
    assert main(overriding(defaults, words)) == 0
    return [[row.get(key) for key in COMPARED] for row in rows_of(home)]


def assert_same_steps(outputs, plugin, switch):
    words = PLUGINS[plugin]
    expected = steps_of(outputs / "plain", words)
    found = steps_of(outputs / "compiled", [*words, *SWITCHES[switch]])
    assert len(expected) == 3
    for row, row_expected in zip(found, expected, strict=True):
        assert row == pytest.approx(row_expected, rel=1e-6)


# Dynamo looks at the .grad of any tensor, and takes a warning that is an error for one of the code.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_steps_are_those_without_a_compiler(outputs, plugin, switch):
    if switch == "model" and plugin in ("pipeline", "zero bubble"):
        pytest.skip("refused")
    assert_same_steps(outputs, plugin, switch)
