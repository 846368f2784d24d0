"""Stages on real ranks: balance, what each keeps, any schedule, batches that split unevenly."""

import itertools

import pytest
import torch
from torch import nn

from runner.booster import Booster
from runner.booster.plugin import HybridParallelPlugin, PipelineParallelPlugin
from runner.clip import apply_gradient_clipping
from runner.parallel.full_state_dict import gathered
from runner.parallel.own_stages import keep, untie
from runner.parallel.stages import CutError, cut
from tests.distributed.by_hand import unlike
from tests.distributed.odd_models import make
from tests.ranks import run_ranks


def chain(*widths):
    """Linear layers, each of width² parameters and no bias."""
    layers = itertools.pairwise(widths)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in layers))


def size_of(model, stage):
    modules = {name for part in stage for name in part.modules}
    return sum(p.numel() for name in modules for p in model.get_submodule(name).parameters())


@pytest.mark.parametrize(
    "widths", [(2,) * 8, (1, 9, 1, 9, 2, 3, 4), (20, 1, 1, 1, 1, 1), (3, 3, 3)]
)
@pytest.mark.parametrize("stages", [1, 2])
def test_by_default_the_largest_stage_is_as_small_as_can_be(widths, stages):
    model = chain(*widths)
    for count in (stages, len(widths) - 1):
        found = cut(model, count)
        assert [part.modules[0] for stage in found for part in stage] == [
            name for name, _ in model.named_children()
        ]
        assert len(found) == count
        assert all(found), "every stage has a part"
        numbers = [p.numel() for p in model.parameters()]
        best = min(
            max(sum(numbers[a:b]) for a, b in itertools.pairwise((0, *bounds, len(numbers))))
            for bounds in itertools.combinations(range(1, len(numbers)), count - 1)
        )
        # A part counts one more than its parameters, so that parts without any are balanced too.
        assert max(size_of(model, stage) for stage in found) <= best + len(numbers)


class Scaled(nn.Module):
    """A parameter of its own, beside those of its parts."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def pipeline(self):
        return [(("first",), lambda x: self.first(x) * self.scale), (("last",), self.last)]


def test_a_parameter_of_no_part_is_refused():
    told = (
        "Scaled cannot be cut into stages: scale is in no module of a part, so no stage would hold "
        "it: move it into a module, and let the part of pipeline() that uses it name that module"
    )
    with pytest.raises(CutError) as error:
        cut(Scaled(), 2)
    assert str(error.value) == told
    # The command line asks before any rank starts.
    assert told in [text for *_, text in PipelineParallelPlugin.problems(Scaled(), 2, {})]


def test_layers_without_parameters_are_parts():
    model = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Tanh(), nn.Sigmoid())
    assert [len(stage) for stage in cut(model, 2)] == [2, 2]


@pytest.mark.parametrize("model_name", ["gpt", "tied", "moe"])
def test_stages_hold_every_parameter_between_them(model_name):
    whole = {name for name, _ in make(model_name).named_parameters()}
    held = []
    for number in range(3):
        model = make(model_name)
        stages = cut(model, 3)
        renamed = untie(model, stages)
        keep(model, stages, [number])
        held.append({renamed.get(name, name) for name, _ in model.named_parameters()})
    assert set.union(*held) == whole
    shared = {"embed.weight"} if model_name == "tied" else set()
    assert set.intersection(held[0], held[2]) == shared


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


def data(samples):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (samples,), generator=generator)


RUNS = [
    # Microbatches and samples: fewer samples than microbatches, a short last one, none short.
    ({"num_microbatches": 4}, 10),
    ({"num_microbatches": 4}, 3),
    ({"num_microbatches": 1, "schedule": "gpipe"}, 5),
    ({"num_microbatches": 8, "schedule": "gpipe"}, 9),
    ({"num_microbatches": 3, "split": ["4"]}, 6),
    ({"num_microbatches": 4, "schedule": "interleaved_1f1b"}, 7),
    ({"num_microbatches": 4, "schedule": "zero_bubble"}, 6),
    ({}, 2),
]


def run_all():
    """A step of each of RUNS: loss and outputs where they are, gradients on the first rank."""
    results = []
    for options, samples in RUNS:
        model = layers()
        booster = Booster(plugin=PipelineParallelPlugin(**options))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        criterion = nn.CrossEntropyLoss()
        wrapped, optimizer, *_ = booster.boost(model, optimizer)
        told = booster.execute_pipeline(
            iter([data(samples)]), wrapped, criterion, optimizer, return_outputs=True
        )
        optimizer.clip_grad_by_norm(max_norm=0.1)
        gradients = gathered(model, wrapped.renamed, lambda p: p.grad)
        results.append((told["loss"], told["outputs"], gradients))
    for options, said in (
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag': use gpipe, 1f1b"),
        (
            {"num_microbatches": 1},
            "num_microbatches=1: pp_size=2 with schedule=1f1b is 2 stages, each of which needs a "
            "microbatch: give 2 or more, or schedule=gpipe",
        ),
        ({"pp_size": 3}, "2 ranks are no multiple of pp_size 3: start 3 ranks by torchrun"),
    ):
        with pytest.raises(ValueError, match=said):
            PipelineParallelPlugin(**options)
    return results


def test_a_sequential_under_any_schedule_and_uneven_batches_is_one_process():
    ranks = run_ranks(run_all, 2)
    for number, (options, samples) in enumerate(RUNS):
        model = layers()
        inputs, targets = data(samples)
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        apply_gradient_clipping(model, "norm", 0.1)
        wanted = {name: p.grad for name, p in model.named_parameters()}
        assert unlike(ranks[0][number][2], wanted, 1e-9) == [], (options, samples)
        told = [rank[number][:2] for rank in ranks if rank[number][0] is not None]
        assert len(told) == 1, "the loss is on the last stage alone"
        assert float(told[0][0]) == pytest.approx(loss.item(), rel=1e-12), (options, samples)
        torch.testing.assert_close(told[0][1], outputs.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({"pp_size": 8}, "pp_size", "8 stages, but GPT has only 7 parts"),
        ({"pp_size": 4, "schedule": "zero_bubble"}, "pp_size", "8 stages, but GPT has only 7"),
        ({"pp_size": 2, "split": ["nowhere"]}, "split", "no part begins with nowhere"),
    ],
)
def test_what_cannot_be_cut_is_known_before_any_rank_starts(options, key, said):
    problems = HybridParallelPlugin.problems(make("gpt"), options["pp_size"], options)
    assert [(found[0], said in found[2]) for found in problems] == [(key, True)]
