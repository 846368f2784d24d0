"""Gradients that share a buffer: each step is that of plain PyTorch, whatever happens to ``.grad``.

Weights are those of a loop in plain PyTorch, to the bit where nothing is clipped, because only the
norm is summed in another order.
"""

import math
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner import Booster, Trainer
from runner.booster import LossScale, flat_gradients
from runner.booster.plugin import SinglePlugin
from runner.clip import Layout, build, total_norm
from tests.against_torch.plain import off

STEPS = 20
BINDING, FREE = 0.05, 1e6


class Many(nn.Module):
    """Small layers, of which two take turns and one is never used; tied weights; large layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.conv = nn.Conv2d(2, 8, 2).to(memory_format=torch.channels_last)
        self.turns = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.never = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.wide, self.narrow = nn.Linear(8, 1100), nn.Linear(1100, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.turn = 0

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        hidden = hidden + self.conv(hidden.view(-1, 2, 2, 2)).flatten(1)
        hidden = self.frozen(self.turns[self.turn](hidden)).tanh() * self.scale
        hidden = hidden + self.narrow(self.wide(hidden).relu()) + self.empty.sum()
        return self.tied(hidden)


def make():
    torch.manual_seed(0)
    return Many()


def batch(step, micro):
    generator = torch.Generator().manual_seed(100 * step + micro)
    drawn = torch.randn(6, 16, generator=generator)
    return drawn[:, :8], drawn[:, 8:]


OPTIMIZERS = {
    # torch's fused SGD raises an error if some parameters have a momentum buffer, and others not.
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, fused=True),
    # With a small eps, AdamW would amplify rounding in gradients that are nearly zero.
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-5, weight_decay=0.5, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, 0.1, foreach=True),
    "loop": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=False),
}


class Plain:
    """A loop in plain PyTorch."""

    def __init__(self, optimizer, max_norm, model=None):
        self.model = make() if model is None else model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.max_norm = max_norm
        self.seen = []  # names with a gradient, after each backward pass and each clipping
        self.norms = []
        self.kept = []

    def loss(self, step, micro=0):
        inputs, targets = batch(step, micro)
        return F.mse_loss(self.model(inputs), targets)

    def backward(self, loss):
        loss.backward()
        self.look()

    def held(self):
        return nullcontext()

    def look(self):
        named = self.model.named_parameters()
        self.seen.append([name for name, p in named if p.grad is not None and p.numel()])

    def clip(self):
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.detach().double().square().sum()) for g in gradients))
        self.norms.append(norm)
        with torch.no_grad():
            for gradient in gradients if self.max_norm < norm < math.inf else ():
                gradient.mul_(self.max_norm / norm)
        self.look()

    def step(self):
        if not self.norms or math.isfinite(self.norms[-1]):
            self.optimizer.step()

    def zero(self, set_to_none=True):
        for parameter in self.model.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def finish(self):
        self.clip()
        self.step()
        self.zero()


class Boosted(Plain):
    """The same through the booster, with gradients in a buffer."""

    def __init__(self, optimizer, max_norm, model=None, **options):
        super().__init__(optimizer, max_norm, model)
        self.booster = Booster(**{"flat_gradients": True, **options})
        self.wrapper, self.boosted, *_ = self.booster.boost(self.model, self.optimizer)
        self.flat = []  # for each clipping, whether gradients shared memory

    def loss(self, step, micro=0):
        inputs, targets = batch(step, micro)
        return F.mse_loss(self.wrapper(inputs), targets)

    def backward(self, loss):
        self.booster.backward(loss, self.boosted)
        self.look()

    def held(self):
        return self.booster.no_sync(self.wrapper)

    def clip(self):
        storages = [
            p.grad.untyped_storage().data_ptr()
            for p in self.model.parameters()
            if p.grad is not None and 0 < p.numel() <= flat_gradients.SMALL
        ]
        self.flat.append(len(storages) > 1 and len(set(storages)) == 1)
        self.norms.append(float(self.boosted.clip_grad_by_norm(self.max_norm)))
        self.look()

    def step(self):
        self.boosted.step()

    def zero(self, set_to_none=True):
        self.boosted.zero_grad(set_to_none)

    def finish(self):
        """Clip and step at once, as a training does."""
        if len(self.norms) % 2:
            super().finish()
            return
        self.flat.append(True)
        mode = build("norm", threshold=self.max_norm)
        self.norms.append(float(self.boosted.clip_and_step(mode).norm))
        self.look()
        self.zero()


def ordinary(side, step):
    side.backward(side.loss(step))
    side.finish()


def accumulation(side, step):
    for micro in range(3):
        with nullcontext() if micro == 2 else side.held():
            side.backward(side.loss(step, micro) / 3)
    side.finish()


def in_turn(side, step):
    for micro in range(2):
        side.model.turn = (step // 3 + micro * (step % 2)) % 2
        side.backward(side.loss(step, micro) / 2)
    side.finish()


def zeros_that_stay(side, step):
    side.model.turn = step // 7 % 2
    side.backward(side.loss(step))
    side.clip()
    side.step()
    side.zero(set_to_none=False)


def a_used_parameter_with_a_zero_gradient(side, step):
    side.backward(side.loss(step) + 0.0 * side.model.never.weight.sum())
    side.finish()


def reset_by_the_model(side, step):
    side.backward(side.loss(step))
    side.clip()
    side.step()
    side.model.zero_grad()


def reset_by_the_optimizer(side, step):
    side.optimizer.zero_grad(set_to_none=step % 2 == 0)
    side.model.turn = step % 2
    side.backward(side.loss(step))
    side.clip()
    side.step()


def not_clipped(side, step):
    side.backward(side.loss(step))
    side.step()
    side.zero()


def by_plain_backward_passes(side, step):
    if step % 3 == 1:
        side.loss(step).backward()
    else:
        side.backward(side.loss(step))
    if step % 3 == 2:
        side.model.turn = step // 3 % 2
        side.loss(step, 1).backward()
    side.finish()


def double_backward(side, step):
    loss = side.loss(step)
    held = list(side.model.turns[0].parameters())
    gradients = torch.autograd.grad(loss, held, create_graph=True)
    side.backward(loss + 0.1 * sum(g.square().sum() for g in gradients))
    if step % 2:
        side.loss(step, 1).backward(create_graph=True)
    side.clip()
    side.step()
    side.zero()


def replaced_by_the_user(side, step):
    model = side.model
    if step % 4 == 3:
        model.first.bias.grad = torch.ones(8)
    side.backward(side.loss(step))
    with torch.no_grad():
        if step % 2:
            model.first.weight.grad = 2 * model.first.weight.grad
            model.scale.grad = None
            model.never.weight.grad = torch.ones(8, 8)
        model.tied.bias.grad.add_(0.01)
        model.turns[0].bias.grad[2:4] = 0.5
    side.clip()
    if step % 4 == 1:
        model.turns[0].weight.grad = model.turns[0].weight.grad * 0.5
    side.step()
    side.zero()


def added_up_by_the_user(side, step):
    """Keep the gradients of a first loss, and add them to those of a second one."""
    few = [side.model.first.weight, side.model.turns[0].weight, side.model.scale]
    some = few if step % 2 else [p for p in side.model.parameters() if p.requires_grad]
    side.backward(side.loss(step))
    first = [p.grad for p in some]
    for parameter in some:
        parameter.grad = None
    side.backward(side.loss(step, 1))
    for parameter, gradient in zip(some, first, strict=True):
        if gradient is not None:
            parameter.grad = parameter.grad + gradient
    side.finish()


def kept_by_the_user(side, step):
    side.backward(side.loss(step))
    side.clip()
    side.step()
    gradient = [side.model.first.weight.grad, side.model.conv.weight.grad][step // 2 % 2]
    side.kept.append([gradient, gradient[0], gradient.detach()][step % 3])
    side.zero()


def after_a_failed_backward_pass(side, step):
    side.model.turn = 1
    loss = side.loss(step)

    def fail(gradient):
        raise ZeroDivisionError

    handle = side.model.turns[1].weight.register_hook(fail)
    with suppress(ZeroDivisionError):
        side.backward(loss)
    handle.remove()
    side.look()
    if step % 2:
        side.zero()
    side.model.turn = 0
    side.backward(side.loss(step))
    side.clip()
    side.step()
    side.zero()


def frozen_for_some_steps(side, step):
    side.model.first.bias.requires_grad_(not 5 <= step < 10)
    side.model.frozen.bias.requires_grad_(step >= 8)
    side.backward(side.loss(step))
    side.finish()


def in_another_memory_format(side, step):
    weight = side.model.conv.weight
    if step == 4:
        weight.data = weight.data.contiguous()
    side.backward(side.loss(step))
    if step == 8:
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    side.clip()
    side.step()
    side.zero()


def in_another_type(side, step):
    if step == 4:
        side.model.double()
    if step == 8:
        side.model.float()
    inputs, targets = (each.to(side.model.scale.dtype) for each in batch(step, 0))
    side.backward(F.mse_loss(side.model(inputs), targets))
    side.clip()
    side.step()
    side.zero()


def with_skipped_steps(side, step):
    side.backward(side.loss(step) * (math.inf if step % 4 == 2 else 1.0))
    side.clip()
    side.step()
    side.zero()


EVERYWHERE = [
    ordinary,
    accumulation,
    in_turn,
    zeros_that_stay,
    a_used_parameter_with_a_zero_gradient,
    reset_by_the_model,
    reset_by_the_optimizer,
    not_clipped,
    by_plain_backward_passes,
    replaced_by_the_user,
    added_up_by_the_user,
    kept_by_the_user,
    after_a_failed_backward_pass,
    frozen_for_some_steps,
    with_skipped_steps,
]


def compare(boosted, plain, step):
    for number in range(STEPS):
        for side in (boosted, plain):
            step(side, number)
    assert boosted.seen == plain.seen
    assert boosted.norms == pytest.approx(plain.norms, rel=1e-6, nan_ok=True)
    for got, wanted in zip(boosted.kept, plain.kept, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8)
    weights = dict(plain.model.state_dict())
    del weights["empty"]
    got = {name: boosted.model.state_dict()[name] for name in weights}
    if plain.max_norm == FREE:
        assert all(torch.equal(got[name], weights[name]) for name in weights)
    assert off(got, weights) < 1e-6


@pytest.mark.parametrize(("optimizer", "max_norm"), [("sgd", FREE), ("adamw", BINDING)])
@pytest.mark.parametrize("step", EVERYWHERE)
def test_steps_are_those_of_plain_pytorch(step, optimizer, max_norm):
    boosted = Boosted(optimizer, max_norm)
    compare(boosted, Plain(optimizer, max_norm), step)
    if step in (ordinary, accumulation, in_turn):
        assert all(boosted.flat)


@pytest.mark.parametrize("optimizer", ["fused sgd", "loop"])
@pytest.mark.parametrize("step", [ordinary, accumulation])
def test_other_optimizers(step, optimizer):
    compare(Boosted(optimizer, BINDING), Plain(optimizer, BINDING), step)


@pytest.mark.parametrize("max_norm", [BINDING, FREE])
def test_parameters_that_change_their_type(max_norm):
    compare(Boosted("plain sgd", max_norm), Plain("plain sgd", max_norm), in_another_type)


def test_parameters_that_change_their_memory_format():
    # torch's fused step would ignore the strides.
    compare(Boosted("plain sgd", BINDING), Plain("foreach", BINDING), in_another_memory_format)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_double_backward():
    compare(Boosted("sgd", BINDING), Plain("sgd", BINDING), double_backward)


@pytest.mark.parametrize("step", [ordinary, accumulation, in_turn])
def test_the_fp16_scale(step):
    boosted = Boosted("sgd", FREE, loss_scale=LossScale(1024.0))
    compare(boosted, Plain("sgd", FREE), step)
    assert all(boosted.flat)


def halve(parameter):
    parameter.grad.mul_(0.5)


def hooked(side):
    model = side.model
    model.first.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model.turns[0].bias.register_post_accumulate_grad_hook(halve)

    def step_alone(parameter):
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    model.conv.bias.register_post_accumulate_grad_hook(step_alone)
    return side


@pytest.mark.parametrize("step", [ordinary, accumulation, in_turn])
def test_hooks_of_the_user(step):
    compare(hooked(Boosted("sgd", BINDING)), hooked(Plain("sgd", BINDING)), step)


class Two(Plain):
    """Two optimizers that step together; a parameter that neither of them holds."""

    def __init__(self, max_norm):
        super().__init__("sgd", max_norm)
        self.optimizers = self.made()

    def made(self):
        first = [*self.model.first.parameters(), *self.model.turns.parameters()]
        return [OPTIMIZERS["sgd"](first), OPTIMIZERS["adamw"]([*self.model.wide.parameters()])]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


class TwoBoosted(Boosted):
    def __init__(self, max_norm):
        Plain.__init__(self, "sgd", max_norm)
        self.booster = Booster(flat_gradients=True)
        optimizers = Two.made(self)
        self.wrapper, self.boosted, *_ = self.booster.boost(self.model, optimizers)
        self.flat = []


@pytest.mark.parametrize("max_norm", [BINDING, FREE])
def test_several_optimizers(max_norm):
    compare(TwoBoosted(max_norm), Two(max_norm), in_turn)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, words):
        return self.layers(self.words(words)).square().mean()


def test_sparse_gradients_stay_sparse():
    models = []
    for flat in (True, None):
        torch.manual_seed(0)
        raw = Words()
        optimizers = [
            torch.optim.SparseAdam(raw.words.parameters(), 0.1),
            torch.optim.AdamW(raw.layers.parameters(), 0.1, fused=True),
        ]
        if flat:
            booster = Booster(flat_gradients=True)
            model, boosted, *_ = booster.boost(raw, optimizers)
        for step in range(STEPS):
            words = torch.tensor([step % 10, 3])
            if not flat:
                raw(words).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            booster.backward(model(words), boosted)
            assert raw.words.weight.grad.is_sparse
            boosted.step()
            boosted.zero_grad()
        models.append(raw)
    for got, wanted in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(got, wanted)
    booster.backward(model(torch.tensor([1])), boosted)
    with pytest.raises(TypeError, match=r"words\.weight has a sparse gradient"):
        boosted.clip_grad_by_norm(1.0)


def test_the_other_modes():
    for name, threshold in (("value", 1e-3), ("adaptive", 1e-3), ("none", None)):
        weights = []
        for flat in (True, False):
            boosted = Boosted("adamw", BINDING, flat_gradients=flat)
            mode = build(name, threshold=threshold)
            mode.bind(boosted.boosted.layout)
            for step in range(6):
                boosted.model.turn = step % 2
                boosted.backward(boosted.loss(step))
                boosted.boosted.clip_and_step(mode)
                boosted.zero()
            weights.append(boosted.model.state_dict())
        got, wanted = weights
        assert all(torch.equal(got[key], wanted[key]) for key in wanted), name


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25, 0.0])
def test_every_norm(norm_type, scale):
    boosted = Boosted("sgd", FREE)
    for _ in range(2):
        boosted.zero()
        boosted.backward(boosted.loss(0))
        for shard in boosted.boosted.layout.shards:
            if shard.param.grad is not None:
                shard.param.grad.mul_(scale)
    layout = boosted.boosted.layout
    gradients = [p.grad for p in boosted.model.parameters() if p.grad is not None]
    wanted = torch.cat([gradient.double().flatten() for gradient in gradients])
    with layout.flat.settled():
        buffer, *_ = layout.flat.parts()
        norm = float(total_norm(layout, norm_type))
    assert norm == pytest.approx(float(torch.linalg.vector_norm(wanted, norm_type)), rel=1e-6)
    # Unused parameters have zeros in the buffer.
    assert buffer.count_nonzero() <= wanted.count_nonzero()


def training(folder=None, until="6ba"):
    raw = make()
    data = [batch(step, 0) for step in range(12)]
    return Trainer(
        raw,
        data,
        until,
        [build("norm", threshold=BINDING)],
        optimizers=OPTIMIZERS["adamw"](raw.parameters()),
        criterion=nn.MSELoss(),
        accumulation_steps=2,
        flat_gradients=True,
    )


def test_a_training_continues_with_the_same_bits(tmp_path):
    whole = training()
    whole.fit()
    first = training(until="3ba")
    first.fit()
    again = training()
    again.load(first.save(tmp_path))
    again.fit()
    got, wanted = again.model.unwrap().state_dict(), whole.model.unwrap().state_dict()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def layers(number):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))


@pytest.mark.parametrize(
    ("choice", "number", "used"),
    [
        ("auto", 999, False),
        ("auto", 1000, True),
        (True, 1, True),
        (False, 260, False),
    ],
)
def test_when_there_is_a_buffer(choice, number, used):
    model = layers(number)
    sgd = OPTIMIZERS["sgd"](model.parameters())
    _, optimizer, *_ = Booster(flat_gradients=choice).boost(model, sgd)
    assert (optimizer.layout.flat is not None) == used


@pytest.mark.parametrize(
    ("choice", "model", "words"),
    [
        (True, nn.Linear(2, 2).double(), "no parameter is a trained float32 tensor"),
        (True, nn.Linear(100, 100, bias=False), "at most 8,192 elements"),
        ("always", nn.Linear(2, 2), "is 'auto', True or False, not 'always'"),
    ],
)
def test_what_is_refused(choice, model, words):
    with pytest.raises(ValueError, match=words):
        Booster(flat_gradients=choice).boost(model, OPTIMIZERS["sgd"](model.parameters()))


def test_a_layout_that_others_describe():
    layout = Layout.of_parameters([nn.Parameter(torch.ones(3)), torch.ones(3).to_sparse()])
    assert len(flat_gradients.small(layout)) == 1
    assert not flat_gradients.refusal(SinglePlugin(), layout)
