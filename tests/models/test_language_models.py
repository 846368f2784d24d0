"""Promises that hold for every model that turns tokens into logits of the next token."""

import copy
import fnmatch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.models import (
    AWDLSTM,
    GPT,
    CompressiveTransformer,
    GatedConvLanguageModel,
    LSTMLanguageModel,
    MixtureGPT,
    RNNLanguageModel,
)

V, T = 13, 10


def gpt(**changes):
    sizes = {"context": T, "layers": 2, "heads": 2, "width": 8, "tied": False, "bias": True}
    return GPT(**{"vocabulary": V, "dropout": 0.0, **sizes, **changes})


def moe(**changes):
    sizes = {"context": T, "layers": 2, "heads": 2, "width": 8, "tied": False, "bias": True}
    mixture = {"experts": 4, "top_k": 2}
    return MixtureGPT(**{"vocabulary": V, "dropout": 0.0, **sizes, **mixture, **changes})


def lstm(**changes):
    sizes = {"embedding": 8, "hidden": 8, "layers": 2, "tied": False}
    return LSTMLanguageModel(**{"vocabulary": V, "dropout": 0.0, **sizes, **changes})


def gated_conv(**changes):
    sizes = {"channels": 8, "layers": 3, "kernel": 3, "weight_norm": False}
    return GatedConvLanguageModel(**{"vocabulary": V, "dropout": 0.0, **sizes, **changes})


def rnn():
    return RNNLanguageModel(V, hidden=8)


def awd_lstm(dropout=0.0, **changes):
    names = ("dropout", "dropout_hidden", "dropout_input", "dropout_embedding", "weight_dropout")
    sizes = {"vocabulary": V, "embedding": 8, "hidden": 10, "layers": 2}
    return AWDLSTM(**{**sizes, **dict.fromkeys(names, dropout), **changes})


def compressive(**changes):
    sizes = {"segment": 2, "memory": 2, "compressed": 2, "rate": 2, "layers": 2}
    widths = {"vocabulary": V, "heads": 2, "width": 8, "dropout": 0.0}
    return CompressiveTransformer(**{**sizes, **widths, **changes})


MODELS = {
    "awd_lstm": awd_lstm,
    "compressive": compressive,
    "compressive_one_layer": lambda **changes: compressive(layers=1, **changes),
    "gpt": gpt,
    "gpt_tied": lambda **changes: gpt(tied=True, bias=False, **changes),
    "lstm": lstm,
    "lstm_tied": lambda **changes: lstm(tied=True, **changes),
    "lstm_one_layer": lambda **changes: lstm(layers=1, hidden=6, **changes),
    "gated_conv": gated_conv,
    "gated_conv_weight_norm": lambda **changes: gated_conv(weight_norm=True, **changes),
    "moe": moe,
    "moe_tied": lambda **changes: moe(tied=True, bias=False, **changes),
    "rnn": rnn,
}
TRANSFORMERS = {name: MODELS[name] for name in ("gpt", "gpt_tied", "moe", "moe_tied")}


@pytest.fixture(params=MODELS)
def make(request):
    torch.manual_seed(0)
    return MODELS[request.param]


def tokens(batch=3, length=T):
    return torch.randint(V, (batch, length))


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("length", [1, 2, T])
def test_every_position_gets_logits_of_the_vocabulary(make, length):
    logits = make()(tokens(length=length))
    assert logits.shape == (3, length, V)
    assert logits.dtype == torch.float32


def test_no_logit_depends_on_a_later_token(make):
    model = make()
    before = tokens()
    for position in range(T):
        after = before.clone()
        after[:, position] = (after[:, position] + 1) % V
        difference = (model(before) - model(after)).abs().amax(dim=(0, 2))
        assert difference[:position].sum() == 0
        assert difference[position] > 0


def test_a_logit_depends_on_earlier_tokens(make):
    model = make()
    before = tokens()
    after = before.clone()
    after[:, 0] = (after[:, 0] + 1) % V
    assert ((model(before) - model(after))[:, 2].abs() > 0).any()


def test_sequences_of_a_batch_do_not_touch_each_other(make):
    model = make()
    batch = tokens()
    torch.testing.assert_close(model(batch)[:1], model(batch[:1]))


def test_the_gradient_reaches_every_parameter(make):
    model = make()
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # A bias added to every key shifts all scores of a query alike: softmax takes no notice.
        assert parameter.grad.abs().sum() > 0 or name.endswith("key.bias"), name


def test_a_fresh_model_is_close_to_knowing_nothing(make):
    loss = F.cross_entropy(make()(tokens(50)).flatten(0, 1), tokens(50).flatten())
    assert abs(loss - torch.tensor(float(V)).log()) < 0.5


def test_steps_on_one_sequence_learn_it_by_heart(make):
    model = make()
    sequence = tokens(batch=1, length=T + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for _ in range(200):
        loss = F.cross_entropy(model(sequence[:, :-1])[0], sequence[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3


@pytest.mark.parametrize("name", [name for name in MODELS if name != "rnn"])
def test_dropout_is_random_in_training_and_absent_in_evaluation(name):
    torch.manual_seed(0)
    model = MODELS[name](dropout=0.5)
    batch = tokens()
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


@pytest.mark.parametrize("make_tied", [gpt, lstm], ids=["gpt", "lstm"])
def test_a_tied_head_is_the_embedding_and_counts_once(make_tied):
    model = make_tied(tied=True)
    assert model.head.weight is model.embed.weight
    assert count(make_tied()) - count(model) == V * 8
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        (False, 2 * (12 * 64 + 2 * 8) + 8 + (2 * V + T) * 8),
        (True, 2 * (12 * 64 + 9 * 8 + 4 * 8) + 2 * 8 + (2 * V + T) * 8),
    ],
)
def test_gpt_has_the_parameters_of_its_sizes(bias, expected):
    assert count(gpt(bias=bias)) == expected


def test_moe_has_the_parameters_of_its_sizes():
    router, expert = 3 * 8, 8 * 64 + 5 * 8
    assert count(moe(experts=3)) == count(gpt()) + 2 * (router + 2 * expert)


def test_lstm_has_the_parameters_of_its_sizes():
    gates = 2 * 4 * (8 * 8 + 8 * 8 + 8 + 8)
    assert count(lstm()) == V * 8 + gates + 8 * V + V


def test_gated_conv_has_the_parameters_of_its_sizes():
    layers = 3 * (8 * 16 * 3 + 16)
    assert count(gated_conv()) == V * 8 + layers + 8 * V + V
    # Weight normalisation adds the length of each filter along the dimension it keeps.
    assert count(gated_conv(weight_norm=True)) == count(gated_conv()) + 3 * 16


def test_weight_normalisation_starts_from_the_same_function():
    torch.manual_seed(1)
    plain = gated_conv()
    torch.manual_seed(1)
    normalised = gated_conv(weight_norm=True)
    batch = tokens()
    torch.testing.assert_close(plain(batch), normalised(batch))


def test_gated_conv_sees_as_far_back_as_its_kernels_reach():
    model = gated_conv()
    before = tokens()
    after = before.clone()
    after[:, 0] = (after[:, 0] + 1) % V
    changed = (model(before) - model(after)).abs().amax(dim=(0, 2)) > 0
    assert changed.tolist() == [position <= 3 * 2 for position in range(T)]


def test_a_gated_layer_adds_one_half_gated_by_the_other():
    torch.manual_seed(0)
    layer = gated_conv().blocks[0].double()
    hidden = torch.randn(1, 8, 5, dtype=torch.float64)
    weight, bias = layer.conv.weight, layer.conv.bias
    for position in range(5):
        mapped = bias.clone()
        for tap in range(3):
            seen = position - 2 + tap
            if seen >= 0:
                mapped = mapped + weight[:, :, tap] @ hidden[0, :, seen]
        expected = hidden[0, :, position] + mapped[:8] * mapped[8:].sigmoid()
        torch.testing.assert_close(layer(hidden)[0, :, position], expected)


def test_gpt_mlp_has_the_gelu_of_its_source():
    torch.manual_seed(0)
    mlp = gpt().blocks[0].mlp.double()
    hidden = 50 * torch.randn(2, 5, 8, dtype=torch.float64)
    inner = mlp.up(hidden)
    gelu = 0.5 * inner * (1 + ((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)).tanh())
    torch.testing.assert_close(mlp(hidden), mlp.down(gelu), rtol=1e-7, atol=1e-9)


def test_gpt_scales_down_what_it_adds_to_the_residual_stream():
    torch.manual_seed(0)
    model = gpt(layers=8, width=64)
    for block in model.blocks:
        for scaled in (block.attention.out, block.mlp.down):
            assert abs(scaled.weight.std() / (0.02 / 16**0.5) - 1) < 0.1
        for plain in (block.attention.query, block.mlp.up):
            assert abs(plain.weight.std() / 0.02 - 1) < 0.1
            assert plain.bias.abs().sum() == 0


def test_every_expert_starts_as_the_mlp_of_gpt():
    torch.manual_seed(0)
    for block in moe(layers=8, width=64).blocks:
        assert abs(block.mlp.router.weight.std() / 0.02 - 1) < 0.2
        for expert in block.mlp.experts:
            assert abs(expert.down.weight.std() / (0.02 / 16**0.5) - 1) < 0.1
            assert abs(expert.up.weight.std() / 0.02 - 1) < 0.1
            assert expert.up.bias.abs().sum() == expert.down.bias.abs().sum() == 0


def lacking(model, parts):
    """The model on a rank that holds ``parts`` alone: parameters of others are gone."""
    for name, module in model.named_modules():
        if not any(name == part or name.startswith(f"{part}.") for part in parts):
            module._parameters.update(dict.fromkeys(module._parameters))
    return model


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_parts_of_a_pipeline_are_the_model_and_need_their_own_modules_alone(name):
    torch.manual_seed(0)
    model = TRANSFORMERS[name]()
    chain = model.pipeline()
    assert [names for names, _ in chain] == [
        ("embed", "positions", "dropout"),
        ("blocks.0",),
        ("blocks.1",),
        ("norm",),
        ("head",),
    ]
    batch = tokens()
    hidden = batch
    for i, (names, _) in enumerate(chain):
        hidden = lacking(copy.deepcopy(model), names).pipeline()[i][1](hidden)
    assert torch.equal(hidden, model(batch))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_plan_of_tensor_parallelism_names_modules_and_splits_every_matrix(name):
    model = TRANSFORMERS[name]()
    plan = model.tp_plan
    modules = dict(model.named_modules())
    planned = {
        pattern: [module for module in modules if fnmatch.fnmatchcase(module, pattern)]
        for pattern in plan
    }
    assert all(planned.values())
    split = {
        module
        for pattern, way in plan.items()
        if way in ("colwise", "rowwise", "colwise_rep", "embedding_rowwise")
        for module in planned[pattern]
    }
    whole = {"positions", *(f"blocks.{i}.mlp.router" for i in range(2))}
    matrices = {n for n, module in modules.items() if isinstance(module, nn.Linear | nn.Embedding)}
    assert split == matrices - whole
    assert all(block.attention.heads == 2 for block in model.blocks)


def test_gpt_attention_is_softmax_over_the_past():
    torch.manual_seed(0)
    attention = gpt().blocks[0].attention.double()
    hidden = torch.randn(2, 5, 8, dtype=torch.float64)
    parts = []
    for head in (slice(0, 4), slice(4, 8)):
        query, key, value = (
            layer(hidden)[..., head] for layer in (attention.query, attention.key, attention.value)
        )
        scores = query @ key.transpose(1, 2) / 4**0.5
        future = torch.ones(5, 5).triu(1).bool()
        parts.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
    torch.testing.assert_close(attention(hidden), attention.out(torch.cat(parts, dim=-1)))


def test_gpt_attention_works_on_whole_heads_of_a_split_projection():
    """A rank that holds one of two heads adds its part: together they are the whole output."""
    torch.manual_seed(0)
    whole = gpt(bias=False).blocks[0].attention
    hidden = torch.randn(2, 5, 8)
    total = torch.zeros(2, 5, 8)
    for head in (slice(0, 4), slice(4, 8)):
        part = gpt(bias=False).blocks[0].attention
        for name in ("query", "key", "value"):
            getattr(part, name).weight = torch.nn.Parameter(getattr(whole, name).weight[head])
        part.out.weight = torch.nn.Parameter(whole.out.weight[:, head])
        total += part(hidden)
    torch.testing.assert_close(total, whole(hidden))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 heads do not divide a width of 8"):
        gpt(heads=3)
    with pytest.raises(ValueError, match="11 tokens do not fit a context of 10"):
        gpt()(tokens(length=T + 1))
    with pytest.raises(ValueError, match="embedding 8 and hidden 6"):
        lstm(hidden=6, tied=True)
    with pytest.raises(ValueError, match="kernel 0"):
        gated_conv(kernel=0)
