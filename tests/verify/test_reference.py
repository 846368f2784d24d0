from itertools import islice

import pytest
import torch

from runner.booster import NonFiniteGradient
from runner.booster.plugin import SinglePlugin
from runner.config.check import parse
from runner.data import PartitionedBatches
from runner.train import build
from runner.verify.reference import Reference, Windows
from runner.verify.setting import make_mode
from tests.verify.requests import IMAGES, net, plain_of


def config_of(*words):
    return parse(plain_of(*IMAGES, *words))


def test_its_batches_are_those_that_data_parts_read():
    config = config_of("data.batch_size=4", "accumulation.steps=2", "data.samples=29")
    dataset = build.make_data(config.data).train
    windows = list(islice(Windows(config, parts=3), 4))
    orders = [PartitionedBatches(29, 4, rank, 3, True, False, config.seed) for rank in range(3)]
    expected = []
    for epoch in (0, 1):
        for order in orders:
            order.set_epoch(epoch)
        ranks = [list(order) for order in orders]
        # 29 samples are microbatches of 12, 12 and 5: two windows.
        for numbers in ((0, 1), (2,)):
            expected.append([rank[number] for number in numbers for rank in ranks])
    for window, batches in zip(windows, expected, strict=True):
        assert [len(inputs) for inputs, _ in window] == [len(batch) for batch in batches]
        for (inputs, targets), indices in zip(window, batches, strict=True):
            wanted, labels = dataset.__getitems__(indices)
            assert torch.equal(inputs, wanted.double())
            assert torch.equal(targets, labels)


@pytest.mark.parametrize(("size", "chunks", "uneven"), [(6, 3, False), (5, 2, True), (4, 1, False)])
def test_it_reads_a_part_in_the_chunks_of_the_pipeline(size, chunks, uneven):
    config = config_of(f"data.batch_size={size}", "data.samples=60")
    windows = Windows(config, 1, chunks)
    window = next(iter(windows))
    assert [len(inputs) for inputs, _ in window] == [
        len(part) for part in torch.arange(size).chunk(chunks)
    ]
    assert windows.uneven == uneven


def test_a_data_set_that_draws_when_it_is_read_is_noticed():
    steady = Windows(config_of(), 2)
    next(iter(steady))
    assert not steady.drew
    drawing = Windows(config_of("data._target_=tests.verify.nets.noisy"), 2)
    next(iter(drawing))
    assert drawing.drew


def test_it_is_a_plain_training_of_one_process():
    config = config_of("clip=norm", "clip.threshold=0.5", "verify.lr=0.3")
    reference = Reference(Windows(config, 2), make_mode(config, "norm")[0])
    torch.manual_seed(config.seed)
    model = build.maker(config.model)().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    order = SinglePlugin().prepare_dataloader(
        build.make_data(config.data).train, 16, shuffle=True, seed=config.seed
    )
    for inputs, targets in islice(order, 3):
        loss = torch.nn.functional.cross_entropy(model(inputs.double()), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        metrics, mean, theirs = reference.step()
        # torch adds 1e-6 to the norm it divides by.
        assert mean == pytest.approx(loss.item(), rel=1e-6)
        assert metrics.norm == pytest.approx(norm.item(), rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-5, atol=1e-9)
        optimizer.step()
        optimizer.zero_grad()


def test_what_it_raises_says_where_that_was_and_why_it_may_be():
    config = config_of(*net("Chain"), "data.batch_size=7", "data.samples=60")
    reference = Reference(Windows(config, 1, 3), make_mode(config, "norm")[0])
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        reference.step()
    where, cause = raised.value.__notes__
    assert "one process" in where
    assert "fills a short microbatch up" in cause


def test_no_threshold_comes_from_a_gradient_that_is_not_finite():
    config = config_of("clip=none", *net("Broken"))
    mode = make_mode(config, "value")[0]
    with pytest.raises(NonFiniteGradient, match="the gradient of step 1 is not finite"):
        Reference(Windows(config, 1), mode).peak()


def test_no_threshold_comes_from_a_gradient_of_zero():
    config = config_of("clip=none", *net("Constant"))
    mode = make_mode(config, "value")[0]
    with pytest.raises(ValueError, match="no threshold can be derived"):
        Reference(Windows(config, 1), mode).peak()
