"""A plain ``loss.backward()`` is as right as ``booster.backward``, or refused."""

import pytest
import torch

from runner.booster import Booster, StepOrderError
from tests.against_torch.plain import PLUGINS, batch, clip, mean_square, network, off, part
from tests.ranks import run_ranks

STEPS = 3


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def in_plain_pytorch():
    """Two microbatches a step, whose gradients are added up."""
    model = network()
    optimizer = adamw(model)
    norms = []
    for step in range(STEPS):
        for half in (2 * step, 2 * step + 1):
            inputs, targets = batch(half)
            mean_square(model(inputs), targets).backward()
        norms.append(clip(model, 2.0))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


class Tried:
    def __init__(self, plugin, precision=None):
        self.booster = Booster(precision, plugin=PLUGINS[plugin]())
        self.raw = network()
        self.model, self.optimizer, *_ = self.booster.boost(self.raw, adamw(self.raw))

    def loss(self, step, model=None):
        inputs, targets = (part(self.booster.plugin, whole) for whole in batch(step))
        return mean_square((model or self.model)(inputs), targets)

    def held(self):
        return self.booster.no_sync(self.model)


def refused(call, *args):
    with pytest.raises(StepOrderError) as error:
        call(*args)
    return str(error.value)


def tried(plugin):
    """Return the right norms, and the error of each wrong order."""
    right = Tried(plugin)
    norms = []
    for step in range(STEPS):
        with right.held():
            right.loss(2 * step).backward()
        right.loss(2 * step + 1).backward()
        norms.append(right.optimizer.clip_grad_by_norm(2.0).item())
        right.optimizer.step()
        right.optimizer.zero_grad()
    said = {}
    wrong = Tried(plugin)
    with wrong.held():
        wrong.loss(0).backward()
    said["clip"] = refused(wrong.optimizer.clip_grad_by_norm, 1.0)
    said["value"] = refused(wrong.optimizer.clip_grad_by_value, 1.0)
    said["step"] = refused(wrong.optimizer.step)
    # The next backward pass outside makes them final.
    wrong.loss(1).backward()
    wrong.optimizer.clip_grad_by_norm(1.0)
    wrong.optimizer.step()
    wrong.optimizer.zero_grad()
    if plugin not in ("ddp", "fsdp", "zero2"):
        # The user's own model, that was boosted in place.
        with wrong.held():
            wrong.loss(0, wrong.raw).backward()
        said["raw"] = refused(wrong.optimizer.clip_grad_by_norm, 1.0)
        wrong.optimizer.zero_grad()
    if plugin == "ddp":
        # DDP decides by the forward pass.
        with wrong.held():
            loss = wrong.loss(0)
        wrong.booster.backward(loss, wrong.optimizer)
        said["forward"] = refused(wrong.optimizer.clip_grad_by_norm, 1.0)
    return right.booster.state_dict(right.model), norms, said


def tried_all(plugins):
    return {plugin: tried(plugin) for plugin in plugins}


def check(results, plugins):
    weights, norms = in_plain_pytorch()
    for plugin in plugins:
        for rank, result in enumerate(results):
            _, found, said = result[plugin]
            assert found == pytest.approx(norms, rel=1e-6), (plugin, rank)
            assert all("ran under no_sync" in text for text in said.values()), (plugin, said)
            assert said["clip"] == (
                "cannot clip now: the last backward pass ran under no_sync, so its gradients are "
                "not final: run the last microbatch of a step outside of no_sync, forward and "
                "backward pass"
            )
        assert off(results[0][plugin][0], weights) < 1e-9, plugin


def test_in_one_process():
    check([tried_all(["single"])], ["single"])


def test_over_two_ranks():
    plugins = ["ddp", "fsdp", "zero1", "zero2", "tensor"]
    check(run_ranks(tried_all, 2, plugins), plugins)


def test_fp16_needs_the_scaled_loss():
    tried = Tried("single", "fp16")
    tried.model.unwrap().float()
    loss = tried.model(torch.ones(2, 4)).square().mean()
    loss.backward()
    told = "the loss was not scaled, as fp16 needs it: call booster.backward"
    assert told in refused(tried.optimizer.clip_grad_by_norm, 1.0)
    assert told in refused(tried.optimizer.step)
    tried.optimizer.zero_grad()
    loss = tried.model(torch.ones(2, 4)).square().mean()
    tried.booster.backward(loss, tried.optimizer)
    assert tried.optimizer.clip_grad_by_norm(1.0) > 0


def test_parameters_that_a_model_returns_keep_no_hooks():
    tried = Tried("single")
    tried.raw.forward = lambda inputs: tried.raw[0].weight
    for _ in range(2):
        tried.model(None)
    assert not tried.raw[0].weight._backward_hooks
