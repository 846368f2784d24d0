"""Stages and batches of any size: schedules, uneven microbatches."""

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.booster.plugin import HybridParallelPlugin, PipelineParallelPlugin
from tests.distributed.by_hand import NORM, Loop, batch_for, cross_entropy, make
from tests.distributed.cases import MODELS, unlike
from tests.ranks import run_ranks


def layers():
    torch.manual_seed(0)
    modules = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 10)]
    return nn.Sequential(*modules).double()


def gpt():
    return make("gpt")


RUNS = [
    # Microbatches and samples: fewer samples than microbatches, a short last one, none short.
    (layers, {"num_microbatches": 4}, 10),
    (layers, {"num_microbatches": 4}, 3),
    (layers, {"num_microbatches": 1, "schedule": "gpipe"}, 5),
    (layers, {"num_microbatches": 8, "schedule": "gpipe"}, 9),
    (layers, {"num_microbatches": 3, "split": ["4"]}, 6),
    (layers, {"num_microbatches": 4, "schedule": "interleaved_1f1b"}, 7),
    (layers, {}, 2),
    (gpt, {"num_microbatches": 3, "schedule": "1f1b"}, 12),
    (gpt, {"num_microbatches": 3, "schedule": "zero_bubble"}, 7),
]


def rows(samples):
    inputs = torch.randn(samples, 5, generator=torch.Generator().manual_seed(2)).double()
    return inputs, torch.arange(samples) % 10


def batch_of(make_model, samples):
    pair = rows(samples) if make_model is layers else batch_for("gpt")
    return tuple(part[:samples] for part in pair)


def by_stages(make_model, options, samples):
    """A step by execute_pipeline, then a forward pass alone."""
    batch = batch_of(make_model, samples)
    loop = Loop(PipelineParallelPlugin(**options), make_model(), scale=None)
    data = iter([batch] * 2)

    def executed(given, *optimizer, **asked):
        return loop.booster.execute_pipeline(given, loop.model, cross_entropy, *optimizer, **asked)

    trained = executed(data, loop.optimizer, return_outputs=True)
    norm = loop.optimizer.clip_grad_by_norm(max_norm=0.05).item()
    gradients = loop.gradients()
    loop.optimizer.step()
    seen = executed(data, return_outputs=True)
    with pytest.raises(StopIteration):
        executed(data)
    assert executed(iter([batch]), return_loss=False) == {"loss": None, "outputs": None}
    nothing = executed(iter([tuple(part[:0] for part in batch)]), loop.optimizer)
    assert nothing["loss"] in (None, 0.0)
    with pytest.raises(TypeError, match=r"a dict with the keys 'x', 'y'.*collate_fn"):
        executed(iter([dict(zip("xy", batch, strict=True))]), loop.optimizer)
    return trained, norm, gradients, seen


def all_by_stages():
    for options in ({"schedule": "zigzag"}, {"num_microbatches": 1}, {"pp_size": 3}):
        with pytest.raises(ValueError, match=next(iter(options))):
            PipelineParallelPlugin(**options)
    return [by_stages(*run) for run in RUNS]


def test_a_pipeline_of_any_schedule_with_any_batch_is_one_process():
    ranks = run_ranks(all_by_stages, 2)
    for number, (make_model, options, samples) in enumerate(RUNS):
        case = f"{options} {samples}"
        model = make_model()
        (inputs, targets) = batch_of(make_model, samples)
        outputs = model(inputs)
        cross_entropy(outputs, targets).backward()
        outcome = apply_gradient_clipping(model, "norm", 0.05)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
            after = model(inputs)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        assert unlike(case, ranks[0][number][2], gradients, 1e-9) == []
        # In the V of zero bubble the last stage is on the first rank.
        last = 0 if options.get("schedule") == "zero_bubble" else 1
        for rank, results in enumerate(ranks):
            trained, norm, _, seen = results[number]
            assert norm == pytest.approx(float(outcome.norm), rel=1e-6)
            if rank != last:
                assert trained == seen == {"loss": None, "outputs": None}
                continue
            for told, expected in ((trained, outputs.detach()), (seen, after)):
                torch.testing.assert_close(told["outputs"], expected, rtol=1e-9, atol=1e-12)
                loss = float(cross_entropy(expected, targets))
                assert float(told["loss"]) == pytest.approx(loss, rel=1e-9), case


# -- data parts that wait for each other

WAITING = [("moe", {"pp_size": 2, "ep_size": 2}), ("tied", {"pp_size": 2, "zero_stage": 2})]
WINDOWS = [
    # Samples and tokens that each of the two data parts reads, batch by batch.
    [((4, 12), (1, 12)), ((3, 12), (8, 8))],
    [((12, 8), (3, 12))],
]


def reads(part, samples, tokens):
    """What a data part reads: the first one from the front, the second one from the end."""
    chosen = slice(12 - samples, None) if part else slice(samples)
    inputs, targets = batch_for("gpt")
    return inputs[chosen, :tokens], targets[chosen, :tokens]


def windows(name, options):
    """Norms of each window, outputs of each batch by data part, weights of the whole."""
    torch.manual_seed(0)
    loop = Loop(options and HybridParallelPlugin(**options), MODELS[name]().double())
    norms = []
    outputs = ([], [])
    for window in WINDOWS:
        for sizes in window:
            for part in (0, 1) if options is None else (loop.plugin.data_rank,):
                pair = reads(part, *sizes[part])
                if options is None:
                    outputs[part].append(loop.raw(pair[0]).detach())
                    loop.backward(*pair, 0.5)
                    continue
                told = loop.booster.execute_pipeline(
                    iter([pair]), loop.model, cross_entropy, loop.optimizer, return_outputs=True
                )
                outputs[part].append(told["outputs"])
        norms.append(float(loop.clip(NORM).norm))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return norms, outputs, loop.weights()


def on_four_ranks():
    return [windows(*case) for case in WAITING]


def test_data_parts_that_wait_for_each_other():
    ranks = run_ranks(on_four_ranks, 4)
    for number, (name, options) in enumerate(WAITING):
        norms, outputs, weights = windows(name, None)
        assert unlike(name, ranks[0][number][2], weights, 1e-9) == [], options
        spoke = 0
        for rank in ranks:
            measured, seen, _ = rank[number]
            assert measured == pytest.approx(norms, rel=1e-9), options
            for got, expected in zip(seen, outputs, strict=True):
                if got and got[0] is not None:
                    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
                    spoke += 1
        assert spoke == 2, "one rank of each pipeline"
