"""An encoder sees both sides, and reads a mask that it never predicts."""

import pytest
import torch
from torch.nn import functional as F

from runner.data import IGNORED
from runner.models import MaskedLanguageModel

V, T = 13, 10


def model(**changes):
    sizes = {"vocabulary": V, "context": T, "layers": 2, "heads": 2, "width": 8, "dropout": 0.0}
    torch.manual_seed(0)
    return MaskedLanguageModel(**{**sizes, **changes})


@pytest.mark.parametrize("length", [1, T])
def test_every_position_gets_logits_of_the_tokens_without_the_mask(length):
    tokens = torch.randint(V + 1, (3, length))
    tokens[0, 0] = V
    assert model()(tokens).shape == (3, length, V)


def test_a_logit_depends_on_both_sides():
    network = model()
    before = torch.randint(V, (2, T))
    for position in (0, T - 1):
        after = before.clone()
        after[:, position] = (after[:, position] + 1) % V
        difference = (network(before) - network(after)).abs().amax(dim=(0, 2))
        assert (difference > 0).all()


def test_evaluation_gives_what_training_gives_without_dropout():
    network, tokens = model(), torch.randint(V + 1, (2, T))
    expected = network(tokens)
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(tokens), expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_random_in_training_and_absent_in_evaluation():
    network, tokens = model(dropout=0.5), torch.randint(V, (2, T))
    assert not torch.equal(network(tokens), network(tokens))
    network.eval()
    assert torch.equal(network(tokens), network(tokens))


def test_the_gradient_reaches_every_parameter():
    network = model()
    tokens = torch.randint(V + 1, (8, T))
    F.cross_entropy(network(tokens).flatten(0, 1), tokens.clamp(max=V - 1).flatten()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_it_learns_to_fill_in_by_what_surrounds_the_mask():
    """Each text repeats one token, so that masked tokens can be predicted from the others."""
    network = model(width=16)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(150):
        tokens = torch.randint(V, (32, 1)).expand(32, T)
        chosen = torch.rand(32, T) < 0.2
        logits = network(tokens.masked_fill(chosen, V))
        targets = tokens.masked_fill(~chosen, IGNORED)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.6  # log(13) = 2.6 without looking


def test_the_head_is_the_embedding_and_counts_once():
    network = model()
    assert network.head.weight is network.embed.weight
    layer = 4 * 8 * 8 + 4 * 8 + 2 * 4 * 8 * 8 + 5 * 8 + 4 * 8
    rest = (V + 1) * 8 + T * 8 + 16 + (8 * 8 + 8) + 16 + (V + 1)
    assert sum(p.numel() for p in network.parameters()) == 2 * layer + rest


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 heads do not divide a width of 8"):
        model(heads=3)
    with pytest.raises(ValueError, match="11 tokens do not fit a context of 10"):
        model()(torch.randint(V, (1, T + 1)))
