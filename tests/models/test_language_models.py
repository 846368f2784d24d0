"""Promises that hold for every model that turns tokens into logits, and those of each model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.models.cnn import GatedConvLanguageModel
from runner.models.gpt import GPT, MaskedLanguageModel
from runner.models.mixture import MixtureGPT
from runner.models.recurrent import AWDLSTM, LSTMLanguageModel, RNNLanguageModel, WeightDroppedLSTM

V, T = 13, 10


def maker(kind, **sizes):
    """Return a function that makes a small model; its keywords replace ``sizes``."""
    return lambda **changes: kind(**{"vocabulary": V, "dropout": 0.0, **sizes, **changes})


SIZES = {"context": T, "layers": 2, "heads": 2, "width": 8}
gpt = maker(GPT, **SIZES, tied=False, bias=True)
moe = maker(MixtureGPT, **SIZES, tied=False, bias=True, experts=4, top_k=2)
lstm = maker(LSTMLanguageModel, embedding=8, hidden=8, layers=2, tied=False)
gated_conv = maker(GatedConvLanguageModel, channels=8, layers=3, kernel=3, weight_norm=False)
masked = maker(MaskedLanguageModel, **SIZES)
DROPPED = ("dropout", "dropout_hidden", "dropout_input", "dropout_embedding", "weight_dropout")


def awd_lstm(dropout=0.0):
    return AWDLSTM(V, embedding=8, hidden=10, layers=2, **dict.fromkeys(DROPPED, dropout))


MODELS = {
    "awd_lstm": awd_lstm,
    "gpt": gpt,
    "gpt_tied": maker(gpt, tied=True, bias=False),
    "lstm": lstm,
    "masked": masked,
    "lstm_tied": maker(lstm, tied=True),
    "gated_conv": gated_conv,
    "gated_conv_weight_norm": maker(gated_conv, weight_norm=True),
    "moe": moe,
    "moe_tied": maker(moe, tied=True, bias=False),
    "rnn": lambda **changes: RNNLanguageModel(V, hidden=8),
}


@pytest.fixture(params=MODELS)
def make(request):
    torch.manual_seed(0)
    return MODELS[request.param]


def tokens(batch=3, length=T):
    return torch.randint(V, (batch, length))


def changed(model, position):
    """Return by position how much the logits depend on the token at ``position``."""
    before = tokens()
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % V
    return (model(before) - model(after)).abs().amax(dim=(0, 2))


def test_logits_depend_on_their_own_sequence_up_to_their_position(make):
    model = make()
    batch = tokens()
    for length in (1, 2, T):
        logits = model(batch[:, :length])
        assert (logits.shape, logits.dtype) == ((3, length, V), torch.float32)
    for position in range(T):
        difference = changed(model, position)
        if isinstance(model, MaskedLanguageModel):
            assert (difference > 0).all()
            continue
        assert difference[:position].sum() == 0
        assert difference[position] > 0
    assert changed(model, 0)[2] > 0
    torch.testing.assert_close(model(batch)[:1], model(batch[:1]))


def test_a_gradient_reaches_every_parameter(make):
    model = make()
    loss = F.cross_entropy(model(tokens(50)).flatten(0, 1), tokens(50).flatten())
    assert abs(loss - torch.tensor(float(V)).log()) < 0.5
    loss.backward()
    for name, parameter in model.named_parameters():
        # A bias added to every key shifts all scores of a query alike: softmax takes no notice.
        assert parameter.grad.abs().sum() > 0 or name.endswith("key.bias"), name


def test_evaluation_has_no_dropout(make):
    model = make(dropout=0.5)
    batch = tokens()
    assert isinstance(model, RNNLanguageModel) or not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_sizes_that_do_not_fit_are_refused():
    for wrong, message in [
        (lambda: gpt(heads=3), "3 heads do not divide a width of 8"),
        (lambda: gpt()(tokens(length=T + 1)), "11 tokens do not fit a context of 10"),
        (lambda: lstm(hidden=6, tied=True), "embedding 8 and hidden 6"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()


def test_attention_is_softmax_over_the_past():
    torch.manual_seed(0)
    attention = gpt(bias=False).blocks[0].attention.double()
    hidden = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = []
    for head in (slice(0, 4), slice(4, 8)):
        query, key, value = (
            layer(hidden)[..., head] for layer in (attention.query, attention.key, attention.value)
        )
        scores = query @ key.transpose(1, 2) / 4**0.5
        future = torch.ones(5, 5).triu(1).bool()
        expected.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
    torch.testing.assert_close(attention(hidden), attention.out(torch.cat(expected, dim=-1)))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_layer_is_torchs_lstm_whose_recurrent_weights_are_dropped_once(share):
    torch.manual_seed(0)
    layer = WeightDroppedLSTM(5, 7, share)
    twin = nn.LSTM(5, 7, batch_first=True)
    before = layer.recurrent_weight.detach().clone()
    sequence = torch.randn(3, 11, 5)
    torch.manual_seed(1)
    dropped = F.dropout(layer.recurrent_weight, share)
    with torch.no_grad():
        twin.weight_ih_l0.copy_(layer.input_weight)
        twin.weight_hh_l0.copy_(dropped)
        twin.bias_ih_l0.copy_(layer.bias)
        twin.bias_hh_l0.zero_()
    torch.manual_seed(1)
    outputs = layer(sequence)
    torch.testing.assert_close(outputs, twin(sequence)[0])
    outputs.sum().backward()
    assert torch.equal(layer.recurrent_weight.grad == 0, dropped == 0)
    assert torch.equal(layer.recurrent_weight, before)
