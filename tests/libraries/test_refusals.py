"""What plugins cannot do with models of libraries is said before a rank starts."""

import pytest

from runner.config.check import parse
from runner.config.problem import RequestError
from runner.train.preflight import check
from tests.libraries.training import plain_of


@pytest.mark.parametrize(
    ("name", "plugin", "says"),
    [
        ("mixtral", "moe", "model.layers.0.mlp.experts, model.layers.1.mlp.experts"),
        ("gpt2", "tensor", "GPT2LMHeadModel has no plan for tensor parallelism"),
        ("bert", "pipeline", "BertForSequenceClassification cannot be cut into stages"),
        ("vit_b_16", "pipeline", "class_token is in no module of a part"),
    ],
)
def test_a_model_that_a_plugin_cannot_split(name, plugin, says):
    config = parse(plain_of(name, f"plugin={plugin} plugin.nproc=2", 1))
    with pytest.raises(RequestError) as raised:
        check(config)
    assert says in str(raised.value)


def test_more_ranks_than_heads():
    config = parse(plain_of("llama", "plugin=tensor plugin.nproc=4", 1))
    with pytest.raises(RequestError, match=r"model\.layers\.0\.self_attn has 2 heads"):
        check(config)
