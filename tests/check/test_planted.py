"""Planted faults are found by name, and what is right is called right, with real ranks."""

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad_norm_

import runner
from runner import Booster
from runner.check import ClippingError, check_clipping
from runner.check.reference import total_norm
from runner.verify import reference as of_verify
from tests.check import calls, corpus, public, right, windows
from tests.check.models import backward, ddp, fsdp, net
from tests.ranks import run_ranks

WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
FOLDERS = {
    "clipping": corpus.FAULTS,
    "accumulation": windows.WINDOWS,
    "public": public.FAULTS,
    "calls": {body.__name__: body for body in calls.TORCH},
}


def all_reports():
    """What every script of this folder reports on rank 0, and other answers of each rank."""
    texts = {("right", name): (body(), "") for name, body in right.RIGHT.items()}
    for folder, bodies in FOLDERS.items():
        texts |= {(folder, name): body() for name, body in bodies.items()}
    return texts, strict(), same_weights()


on_ranks = pytest.mark.xdist_group("planted faults")  # the ranks run once


@cache
def reports(world):
    return run_ranks(all_reports, world)


@on_ranks
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("folder", "name"), [(folder, name) for folder in FOLDERS for name in FOLDERS[folder]]
)
def test_a_planted_fault_is_named(folder, name, world):
    text, words = reports(world)[0][0][folder, name]
    assert not [word for word in words.split("|") if word not in text], text
    for answers in reports(world)[1:]:
        assert answers[0][folder, name][0] == ""


@on_ranks
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", right.RIGHT)
def test_right_clipping_is_called_right(name, world):
    text, _ = reports(world)[0][0]["right", name]
    assert "check_clipping: right" in text
    assert "fault" not in text, text


def strict():
    """What a right and a wrong clipping raise on this rank."""
    said = []
    for groups in (1, dist.get_world_size()):
        model = fsdp()
        with check_clipping(model, 0.5) as check:
            norm = clip_grad_norm_(model.parameters(), 0.5).full_tensor() * groups
        try:
            check.strict(norm)
            said.append("")
        except ClippingError as error:
            said.append(str(error))
    return said


@on_ranks
def test_strict_raises_on_every_rank():
    for _, (first, second), _ in reports(2):
        assert first == ""
        assert second.startswith("check_clipping: 1 fault\n  1. 2 of the true norm: ")


def same_weights():
    """Weights after steps with a check and without one."""
    weights = []
    for checked in (False, True):
        model = ddp()
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(3):
            optimizer.zero_grad()
            backward(model, seed=number)
            if checked:
                with check_clipping(model, 0.5) as check:
                    norm = clip_grad_norm_(model.parameters(), 0.5)
                check.strict(norm)
            else:
                clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    return weights


@on_ranks
def test_a_check_leaves_the_weights_as_they_are_to_the_bit():
    for _, _, (without, checked) in reports(2):
        assert all(torch.equal(a, b) for a, b in zip(without, checked, strict=True))


def test_the_report_of_a_hang_names_where_each_rank_is():
    for text in run_ranks(corpus.hang, 2, timeout=100):
        assert "the clipping hangs" in text
        assert "rank 0 waits in all_reduce, called at " in text
        assert "models.py" in text
        assert "rank 1 has left the clipping" in text
        assert "rank 1 has no gradient of experts.1.bias" in text


def test_one_process_needs_no_process_group():
    model = backward_alone(net())
    with check_clipping(model, 0.1) as check:
        norm = clip_grad_norm_(model.parameters(), 0.1)
    assert check.report(norm, logged=round(float(norm), 4)).startswith("check_clipping: right")
    assert check.report(norm * 1.01).startswith("check_clipping: 1 fault")


def backward_alone(model):
    model(torch.randn(5, 6, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    return model


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_the_true_norm_is_that_of_float64(p):
    model = backward_alone(net())
    every = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
    with check_clipping(model, 1.0, norm_type=p) as check:
        pass
    assert check.norm == pytest.approx(float(torch.linalg.vector_norm(every, p)), rel=1e-12)
    assert "nothing was scaled" in check.report(check.norm)


def test_torchs_own_rounding_of_a_large_tensor_is_only_a_note():
    model = nn.Linear(1000, 2000, bias=False)
    model.weight.grad = torch.full_like(model.weight, 0.01)
    with check_clipping(model, 1.0) as check:
        norm = clip_grad_norm_(model.parameters(), 1.0)
    assert abs(float(norm) / check.norm - 1) > 1e-4
    text = check.report(norm)
    assert text.startswith("check_clipping: right")
    assert "note: torch's own sum in the type of the gradients is off by" in text


def test_what_cannot_be_checked_is_refused_by_one_sentence():
    model = net()
    with pytest.raises(ValueError, match="max_norm is 0: a threshold above 0"):
        check_clipping(model, 0)
    with pytest.raises(ValueError, match="mode is 'agc': norm, value or adaptive"):
        check_clipping(model, 1.0, mode="agc")
    with pytest.raises(TypeError, match="give the module whose gradients are clipped"):
        check_clipping(model.parameters(), 1.0)
    with pytest.raises(ValueError, match=r"groups needs torch\.distributed"):
        check_clipping(model, 1.0, groups={"*": None})
    wrapped = nn.Sequential(net())
    wrapped[0].__class__ = type("FullyShardedDataParallel", (nn.Sequential,), {})
    with pytest.raises(TypeError, match=r"wrapped by FSDP 1 .* use fully_shard"):
        check_clipping(wrapped, 1.0)
    assert FullyShardedDataParallel.__name__ == "FullyShardedDataParallel"
    boosted, *_ = Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"this model was boosted: .*runner verify"):
        check_clipping(boosted, 1.0)
    check = check_clipping(net(), 1.0)
    with pytest.raises(ValueError, match="the block of check_clipping was not run"):
        check.report()


def test_an_error_inside_of_the_block_is_the_users_own():
    with pytest.raises(KeyError), check_clipping(backward_alone(net()), 1.0):
        raise KeyError


def test_the_reference_of_verify_is_that_of_check():
    assert of_verify.total_norm is total_norm
    assert runner.check_clipping is check_clipping
