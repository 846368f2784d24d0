"""What is dropped where, and the layer against torch's own."""

import pytest
import torch
from torch import nn

from runner.models.awd_lstm import AWDLSTM, WeightDroppedLSTM, locked_dropout

V = 13


def model(**changes):
    names = ("dropout", "dropout_hidden", "dropout_input", "dropout_embedding", "weight_dropout")
    sizes = {"vocabulary": V, "embedding": 6, "hidden": 10, "layers": 3}
    return AWDLSTM(**{**sizes, **dict.fromkeys(names, 0.0), **changes})


def as_torch(layer, recurrent):
    hidden, inputs = recurrent.shape[1], layer.input_weight.shape[1]
    twin = nn.LSTM(inputs, hidden, batch_first=True)
    with torch.no_grad():
        twin.weight_ih_l0.copy_(layer.input_weight)
        twin.weight_hh_l0.copy_(recurrent)
        twin.bias_ih_l0.copy_(layer.bias)
        twin.bias_hh_l0.zero_()
    return twin


def test_a_layer_without_dropout_is_torchs_lstm():
    torch.manual_seed(0)
    layer = WeightDroppedLSTM(5, 7, 0.0)
    sequence = torch.randn(3, 11, 5)
    twin = as_torch(layer, layer.recurrent_weight)
    torch.testing.assert_close(layer(sequence), twin(sequence)[0])


def test_recurrent_weights_are_dropped_once_for_all_times_and_samples():
    torch.manual_seed(0)
    layer = WeightDroppedLSTM(5, 7, 0.5)
    sequence = torch.randn(3, 11, 5)
    torch.manual_seed(1)
    found = layer(sequence)
    torch.manual_seed(1)
    dropped = nn.functional.dropout(layer.recurrent_weight, 0.5)
    assert 0 < int((dropped == 0).sum()) < dropped.numel()
    torch.testing.assert_close(found, as_torch(layer, dropped)(sequence)[0])


def test_a_dropped_weight_gets_no_gradient_and_none_is_lost_for_good():
    torch.manual_seed(0)
    layer = WeightDroppedLSTM(5, 7, 0.5)
    before = layer.recurrent_weight.detach().clone()
    layer(torch.randn(3, 11, 5)).sum().backward()
    share = float((layer.recurrent_weight.grad == 0).float().mean())
    assert 0.3 < share < 0.7
    assert torch.equal(layer.recurrent_weight, before)


def test_locked_dropout_drops_the_same_elements_at_every_time():
    torch.manual_seed(0)
    hidden = locked_dropout(torch.ones(4, 9, 50), 0.4, training=True)
    assert torch.equal(hidden, hidden[:, :1].expand_as(hidden))
    assert hidden.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert not torch.equal(hidden[0], hidden[1])
    assert torch.equal(locked_dropout(hidden, 0.4, training=False), hidden)


def test_a_dropped_token_is_dropped_everywhere_in_the_batch():
    torch.manual_seed(0)
    network = model(dropout_embedding=0.5)
    tokens = torch.arange(V).repeat(2, 3)
    embedded = network._embedded(tokens)
    gone = (embedded == 0).all(-1)
    assert torch.equal(gone[0], gone[1])
    assert torch.equal(gone[0, :V], gone[0, V : 2 * V])
    assert 0 < int(gone[0, :V].sum()) < V


def test_the_last_layer_is_as_wide_as_the_tied_embedding():
    network = model()
    assert network.head.weight is network.embed.weight
    widths = [layer.recurrent_weight.shape[1] for layer in network.layers]
    assert widths == [10, 10, 6]
    gates = [4 * (6 * 10 + 10 * 10 + 10), 4 * (10 * 10 + 10 * 10 + 10), 4 * (10 * 6 + 6 * 6 + 6)]
    assert sum(p.numel() for p in network.parameters()) == V * 6 + sum(gates) + V


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="layers 0"):
        model(layers=0)
