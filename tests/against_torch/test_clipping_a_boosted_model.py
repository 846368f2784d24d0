"""``apply_gradient_clipping`` of a boosted model is clipping in one process, or refused."""

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.booster import Booster, LossScale, StepOrderError
from runner.booster.plugin import MoeHybridParallelPlugin
from tests.against_torch import together
from tests.against_torch.plain import (
    PLUGINS,
    backward,
    batch,
    clip,
    mean_square,
    network,
    off,
    part,
)
from tests.ranks import run_ranks

STEPS = 3
THRESHOLD = 1.0
ASKED = {
    "boosted": lambda model, raw: model,
    "module": lambda model, raw: model.module,
    "raw": lambda model, raw: raw,
    "parameters": lambda model, raw: model.parameters(),
    "raw_parameters": lambda model, raw: list(raw.parameters()),
}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def in_plain_pytorch(by_value=False):
    model = network()
    optimizer = adamw(model)
    norms = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        mean_square(model(inputs), targets).backward()
        if by_value:
            nn.utils.clip_grad_value_(model.parameters(), THRESHOLD)
        else:
            norms.append(clip(model, THRESHOLD))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def train(plugin, asked, by_value=False):
    booster = Booster(plugin=PLUGINS[plugin](), loss_scale=LossScale(1024.0))
    raw = network()
    model, optimizer, *_ = booster.boost(raw, adamw(raw))
    norms = []
    for step in range(STEPS):
        backward(booster, model, optimizer, step)
        kind = "value" if by_value else "norm"
        norms.append(apply_gradient_clipping(ASKED[asked](model, raw), kind, THRESHOLD).norm)
        optimizer.step()
        optimizer.zero_grad()
    return booster.state_dict(model), norms


def message(call, *args):
    with pytest.raises((ValueError, StepOrderError)) as error:
        call(*args)
    return str(error.value)


def refused(plugin):
    """What is said of requests that one process alone could answer."""
    booster = Booster(plugin=PLUGINS[plugin]())
    raw = network()
    before = list(raw.parameters())
    model, optimizer, *_ = booster.boost(raw, adamw(raw))
    backward(booster, model, optimizer, 0)
    said = {}
    if plugin != "zero1":
        said["before"] = message(apply_gradient_clipping, before, "norm", 1.0)
    some = list(raw.parameters())[:1]
    said["some"] = message(apply_gradient_clipping, some, "norm", 1.0)
    other = nn.Parameter(torch.ones(2))
    mixed = [*raw.parameters(), other]
    said["mixed"] = message(apply_gradient_clipping, mixed, "norm", 1.0)
    with booster.no_sync(model):
        backward(booster, model, optimizer, 0)
    said["no_sync"] = message(apply_gradient_clipping, model, "norm", 1.0)
    backward(booster, model, optimizer, 0)
    apply_gradient_clipping(model, "norm", 1.0)
    said["twice"] = message(apply_gradient_clipping, model, "norm", 1.0)
    if plugin in ("zero1", "tensor_data"):
        alone = network()
        unstepped, *_ = Booster(plugin=PLUGINS[plugin]()).boost(alone)
        said["alone"] = message(apply_gradient_clipping, unstepped, "norm", 1.0)
    return said


def everything(plugins):
    trained = {
        (plugin, asked, by_value): train(plugin, asked, by_value)
        for plugin in plugins
        for asked in ASKED
        for by_value in ((False, True) if asked == "boosted" else (False,))
    }
    return trained, {plugin: refused(plugin) for plugin in plugins if plugin[:4] in REFUSING}


REFUSING = ("zero", "fsdp", "tens", "pipe", "hybr")


def check(ranks):
    for (plugin, asked, by_value), (weights, _) in ranks[0][0].items():
        wanted, norms = in_plain_pytorch(by_value)
        assert off(weights, wanted) < 1e-9, (plugin, asked, by_value)
        for trained, _ in ranks:
            found = trained[plugin, asked, by_value][1]
            assert by_value or found == pytest.approx(norms, rel=1e-6), (plugin, asked)
    for _, refusals in ranks:
        for said in refusals.values():
            assert "before" not in said or said["before"] == (
                "these parameters were replaced when the model was boosted: give the boosted "
                "model, or its parameters() of now"
            )
            assert said["some"] == (
                "these are some of the parameters that were boosted together, whose gradients lie "
                "on several ranks: clip all of them, by apply_gradient_clipping(boosted_model, ...)"
                " or by optimizer.clip_grad_by_norm(max_norm)"
            )
            assert said["mixed"].startswith("these parameters are not all of one boosted model")
            assert "under no_sync" in said["no_sync"]
            assert "alone" not in said or said["alone"] == (
                "this model was boosted without its optimizer, which synchronises gradients before "
                "they are clipped: booster.boost(model, optimizer)"
            )
            assert said["twice"] == "cannot clip now: gradients were clipped already in this step"


def test_over_two_ranks():
    check(run_ranks(everything, 2, ["ddp", "fsdp", "zero1", "zero2", "tensor", "pipeline"]))


def test_over_four_ranks():
    check(run_ranks(everything, 4, ["tensor_data", "pipeline_data", "hybrid"]))


def experts(plugin):
    """Norms and weights of a mixture of experts: in plain PyTorch without a plugin."""
    [raw] = together.models("moe")
    model, optimizer, booster = raw, adamw(raw), None
    if plugin is not None:
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(raw, optimizer)
    norms = []
    for pair in together.batches(STEPS):
        if booster is None:
            together.cross_entropy(raw(pair[0]), pair[1]).backward()
            norms.append(together.clip(list(raw.parameters())))
        else:
            inputs, targets = (part(booster.plugin, whole) for whole in pair)
            booster.backward(together.cross_entropy(model(inputs), targets), optimizer)
            norms.append(apply_gradient_clipping(model, "norm", together.THRESHOLD).norm)
        optimizer.step()
        optimizer.zero_grad()
    return (raw.state_dict() if booster is None else booster.state_dict(model)), norms


def experts_over_ranks():
    return [experts(MoeHybridParallelPlugin(zero_stage=stage)) for stage in (0, 1)]


def test_experts_over_two_ranks():
    wanted, norms = experts(None)
    ranks = run_ranks(experts_over_ranks, 2)
    for rank, trained in enumerate(ranks):
        for weights, found in trained:
            assert found == pytest.approx(norms, rel=1e-9)
            for name in wanted if rank == 0 else ():
                # Absolute: the bias of keys stays near zero.
                assert float((weights[name] - wanted[name]).abs().max()) < 1e-9, name


def test_in_one_process_parts_can_be_clipped():
    check([everything(["single"])])
    raw = network()
    booster = Booster(plugin=PLUGINS["single"](), loss_scale=LossScale(1024.0))
    model, optimizer, *_ = booster.boost(raw, adamw(raw))
    with booster.no_sync(model):
        backward(booster, model, optimizer, 0)
    assert "under no_sync" in message(apply_gradient_clipping, raw[0], "norm", 1.0)
    backward(booster, model, optimizer, 0)
    # Unscaled first: the norm of the first layer is that of twice the plain gradient.
    plain = network()
    mean_square(plain(batch(0)[0]), batch(0)[1]).backward()
    norm = 2 * float(torch.cat([p.grad.flatten() for p in plain[0].parameters()]).norm())
    assert apply_gradient_clipping(raw[0], "norm", 0.1).norm == pytest.approx(norm, rel=1e-9)
    others = list(raw[2:].parameters())
    assert apply_gradient_clipping(others, "norm", 0.1).norm > 0.1
    with pytest.raises(ValueError, match="no parameters to clip"):
        apply_gradient_clipping([], "norm", 1.0)
