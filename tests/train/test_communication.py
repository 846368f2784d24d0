"""A plan and a run say how often ranks send gradients, and how many bytes."""

import pytest

from runner.config.check import parse
from runner.train.communication import gradients_sent
from tests.config.composed import plain

ONCE, IN_EACH = "gradients are sent once a step", "gradients are sent in each microbatch"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        # A ring over 4 ranks: all-reduce sends 2 x 3/4 of the gradients, reduce-scatter 3/4.
        (["plugin=ddp"], f"{ONCE}, about 6 MB a rank"),
        (["plugin=zero"], f"{ONCE}, about 6 MB a rank"),
        (["plugin=fsdp"], f"{ONCE}, about 3 MB a rank"),
        (["plugin=ddp", "accumulation=x4"], f"{ONCE} of 4 microbatches, about 6 MB a rank"),
        (["plugin=fsdp", "accumulation=x4"], f"{ONCE} of 4 microbatches, about 3 MB a rank"),
        (
            ["plugin=fsdp", "accumulation=x4", "plugin.no_sync=false"],
            f"{IN_EACH} of 4 microbatches, about 12 MB a rank",
        ),
        (["plugin=hybrid", "plugin.tp_size=2"], f"{ONCE}, about 2 MB a rank"),
        (
            ["plugin=hybrid", "plugin.pp_size=2", "plugin.zero_stage=2"],
            f"{IN_EACH}, about 1 MB a rank",
        ),
        (["plugin=moe"], ONCE),
        (["plugin=tensor"], ""),
    ],
)
def test_how_often_gradients_of_4_MB_are_sent_by_4_ranks(overrides, sentence):
    config = parse(plain(*overrides, "plugin.nproc=4"))
    assert gradients_sent(config, 4_000_000) == sentence
