"""``clip_grad_norm_`` of torchtitan's signature: over meshes, stages, and in one process."""

import gc
import inspect
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from runner.integrations import torchtitan
from tests.check.models import mesh_of, net, two_dimensions
from tests.ranks import run_ranks


def whole_gradients(model):
    """Gradients in float64, gathered over their meshes."""
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        gradients.append(gradient.double().flatten().clone())
    return gradients


def norm_over(gradients, p, group=None):
    """The norm of gradients that lie on the ranks of a group, which hold different ones."""
    flat = torch.cat(gradients).abs()
    if math.isinf(p):
        total = flat.max()
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group) if group else None
        return float(total)
    total = flat.pow(p).sum()
    dist.all_reduce(total, group=group) if group else None
    return float(total) ** (1 / p)


def one_stage():
    """The model of one of two pipeline stages, sharded over two ranks, and the mesh of stages."""
    mesh = mesh_of(2, 2, names=("stages", "shards"))
    stage = mesh.get_local_rank("stages")
    model = nn.Sequential(*net()[: 3 + 2 * stage])
    fully_shard(model, mesh=mesh["shards"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(1 + stage):
        model(torch.randn(5, 6, generator=generator)).square().sum().backward()
    return model, mesh["stages"]


def titan_on_ranks():
    """What was wrong: of norms that were returned, and of gradients that were clipped."""
    wrong = []
    for p in (2.0, math.inf):
        for make in (lambda: (two_dimensions(), None), one_stage):
            model, stages = make()
            group = None if stages is None else stages.get_group()
            before = whole_gradients(model)
            norm = norm_over(before, p, group)
            for limit in (1e9, 0.3 * norm):
                parameters = (parameter for parameter in model.parameters())
                returned = torchtitan.clip_grad_norm_(parameters, limit, p, pp_mesh=stages)
                wrong.append(abs(float(returned) / norm - 1))
                after = whole_gradients(model)
                for old, new in zip(before, after, strict=True):
                    wrong.append(float((new - old * min(1, limit / norm)).abs().max()) / norm)
    return wrong


def test_torchtitans_function_has_the_norm_of_two_meshes_and_of_stages():
    for wrong in run_ranks(titan_on_ranks, 4):
        assert len(wrong) > 40
        assert max(wrong) < 1e-5


def test_torchtitans_function_has_its_signature():
    signature = inspect.signature(torchtitan.clip_grad_norm_)
    assert {name: p.default for name, p in signature.parameters.items()} == {
        "parameters": inspect.Parameter.empty,
        "max_norm": inspect.Parameter.empty,
        "norm_type": 2.0,
        "error_if_nonfinite": False,
        "foreach": None,
        "pp_mesh": None,
        "ep_enabled": False,
    }


def net_with_gradients():
    model = net()
    model(torch.ones(2, 6)).sum().backward()
    return model


def test_torchtitans_function_returns_the_norm_of_torchs():
    model = net_with_gradients()
    expected = torch.nn.utils.clip_grad_norm_(make_copy(model).parameters(), 0.1)
    assert torchtitan.clip_grad_norm_(model.parameters(), 0.1) == pytest.approx(float(expected))


def test_torchtitans_function_raises_where_it_is_asked_to():
    model = net_with_gradients()
    model[0].bias.grad[0] = math.nan
    with pytest.raises(RuntimeError, match="is nan, so it cannot be clipped"):
        torchtitan.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)


def test_torchtitans_function_refuses_a_generator_that_was_used():
    with pytest.raises(ValueError, match="was a generator of parameters used before"):
        torchtitan.clip_grad_norm_(iter(()), 0.1)


def test_torchtitans_function_keeps_no_model():
    model = net_with_gradients()
    torchtitan.clip_grad_norm_(model.parameters(), 0.1)
    reference = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert reference() is None


def make_copy(model):
    """A model with the same gradients."""
    copy = net()
    for parameter, original in zip(copy.parameters(), model.parameters(), strict=True):
        parameter.grad = original.grad.clone()
    return copy
