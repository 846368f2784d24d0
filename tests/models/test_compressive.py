"""What a layer remembers, how far that reaches, and what learns from it."""

import pytest
import torch
from torch.nn import functional as F

from runner.models.compressive import CompressiveTransformer, LayerMemory, MemoryBlock

V = 13


def model(**changes):
    sizes = {"segment": 2, "memory": 2, "compressed": 1, "rate": 2, "layers": 1}
    widths = {"vocabulary": V, "heads": 2, "width": 8, "dropout": 0.0}
    torch.manual_seed(0)
    return CompressiveTransformer(**{**sizes, **widths, **changes})


def test_the_latest_inputs_stay_and_older_ones_are_compressed_in_order():
    torch.manual_seed(0)
    memory = LayerMemory(width=3, memory=4, compressed=2, rate=2)
    inputs = torch.randn(5, 20, 3)
    past = (inputs.new_zeros(5, 0, 3), inputs.new_zeros(5, 0, 3))
    for end in range(4, 21, 4):
        past = memory(past, inputs[:, end - 4 : end])
        old, recent = past
        assert torch.equal(recent, inputs[:, max(0, end - 4) : end])
        pairs = inputs[:, max(0, end - 8) : end - 4].unflatten(1, (-1, 2))
        weight, bias = memory.compress.weight, memory.compress.bias
        torch.testing.assert_close(old, torch.einsum("bnti,oit->bno", pairs, weight) + bias)


def test_a_memory_that_is_not_full_is_not_padded():
    memory = LayerMemory(width=3, memory=4, compressed=2, rate=2)
    nothing = torch.zeros(1, 0, 3)
    old, recent = memory((nothing, nothing), torch.ones(1, 2, 3))
    assert (old.shape[1], recent.shape[1]) == (0, 2)


def test_a_token_is_seen_until_it_leaves_the_compressed_memory():
    """One layer, segments of 2: a token lives in its own, one of memory, and one compressed."""
    network = model()
    before = torch.randint(V, (1, 10))
    after = before.clone()
    after[0, 0] = (after[0, 0] + 1) % V
    changed = (network(before) - network(after)).abs().amax(dim=2)[0] > 1e-7
    assert changed.tolist() == [True] * 6 + [False] * 4


def test_each_layer_reaches_as_far_again():
    network = model(layers=2)
    before = torch.randint(V, (1, 14))
    after = before.clone()
    after[0, 0] = (after[0, 0] + 1) % V
    changed = (network(before) - network(after)).abs().amax(dim=2)[0] > 1e-9
    assert changed.tolist() == [True] * 10 + [False] * 4


def test_no_gradient_goes_back_through_what_is_remembered():
    network = model()
    embedded = []
    network.embed.register_forward_hook(
        lambda *args: args[2].retain_grad() or embedded.append(args[2])
    )
    network(torch.randint(V, (1, 8)))[:, -2:].sum().backward()
    assert [bool(part.grad.any()) for part in embedded] == [False, False, False, True]


def test_the_compression_learns_from_the_loss_of_later_segments():
    network = model()
    compress = network.memories[0].compress
    tokens = torch.randint(V, (2, 8))
    F.cross_entropy(network(tokens)[:, :4].flatten(0, 1), tokens[:, :4].flatten()).backward()
    assert compress.weight.grad is None or compress.weight.grad.abs().sum() == 0
    F.cross_entropy(network(tokens)[:, 4:].flatten(0, 1), tokens[:, 4:].flatten()).backward()
    assert compress.weight.grad.abs().sum() > 0


def test_attention_is_softmax_over_memory_and_past_with_a_bias_by_distance():
    torch.manual_seed(0)
    block = MemoryBlock(8, 2, 7, dropout=0.0).double()
    with torch.no_grad():
        block.by_distance.normal_()
    past = (torch.randn(1, 2, 8).double(), torch.randn(1, 2, 8).double())
    hidden = torch.randn(1, 3, 8).double()
    found = block(hidden, past)

    keys = block.attention_norm(torch.cat([*past, hidden], dim=1))[0]
    expected = []
    for place in range(4, 7):
        heads = []
        for head, part in enumerate((slice(0, 4), slice(4, 8))):
            query = block.query(keys[place])[part]
            seen = range(place + 1)
            scores = [
                block.key(keys[other])[part] @ query / 2 + block.by_distance[head, place - other]
                for other in seen
            ]
            weights = torch.stack(scores).softmax(0)
            values = torch.stack([block.value(keys[other])[part] for other in seen])
            heads.append(weights @ values)
        expected.append(block.out(torch.cat(heads)))
    attended = hidden[0] + torch.stack(expected)
    torch.testing.assert_close(found[0], attended + block.mlp(block.mlp_norm(attended)))


def test_a_sequence_may_end_inside_a_segment():
    network = model(layers=2)
    tokens = torch.randint(V, (2, 9))
    torch.testing.assert_close(network(tokens)[:, :5], network(tokens[:, :5]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 3}, "3 heads do not divide a width of 8"),
        ({"memory": 3}, "memory 3 must be a multiple of segment 2"),
        ({"rate": 3}, "rate 3"),
        ({"compressed": 0}, "compressed 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        model(**change)
