"""An ordinary script takes the same steps under every plugin as in plain PyTorch, or is refused.

The reference is one process in float64 with a clipping of its own: it takes the part of each
data-parallel rank in turn. Each pair of plugin and condition is compared with it, and the replicas
on all ranks with each other, bit for bit.
"""

import math
import re
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from hashlib import sha256
from math import isfinite

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from runner import apply_gradient_clipping
from runner.booster import Booster, LossScale
from runner.clip import build
from tests.against_torch.conditions import (
    CONDITIONS,
    INPUTS,
    KINDS,
    LIMITS,
    PLUGINS,
    SOME,
    UNITS,
    network,
)
from tests.ranks import run_ranks

MICROS, SAMPLES = 2, 8


def data(condition, step, micro):
    """Inputs [8, 4] and targets [8, 6] of all ranks."""
    generator = torch.Generator().manual_seed(MICROS * step + micro)
    drawn = torch.randn(SAMPLES, 10, dtype=torch.float64, generator=generator)
    if "fp16" in condition.options and (step, micro) == (3, 0):
        drawn[0, 0] = torch.inf
    if "converted" in condition.options and step >= 3:
        drawn = drawn.float()
    if "bf16" in condition.options:
        drawn = drawn.to(torch.bfloat16)
    if "classes" in condition.options:  # of the first four samples one counts
        return drawn[:, :4], drawn[:, 4:].argmax(1).index_fill(0, torch.arange(3), -100)
    return drawn[:, :4], drawn[:, 4:]


def mode_of(name, title):
    """The modes in turn, so that each plugin has each."""
    place = [*KINDS].index(name) + [*CONDITIONS].index(title)
    return CONDITIONS[title].mode or ("norm", "value", "adaptive")[place % 3]


def made(condition, name):
    """The model and the optimizers."""
    net = network(name)
    built = condition.build(net)
    net = net if built is None else built
    optimizers = condition.optimizer(net)
    return net, optimizers if isinstance(optimizers, list) else [optimizers]


def own(weights):
    return {key.removeprefix("_orig_mod."): value.clone() for key, value in weights.items()}


def clip(net, mode, unscaled=(), inputs=None):
    """Clip in plain PyTorch; return ‖G‖ and the share of units that were clipped.

    Args:
        net: model, whose last linear layer is the head.
        mode: clipping mode.
        unscaled: parameters of Muon, which mode ``norm`` leaves as they are.
        inputs: dimensions that a unit spans, by the name of the parameter.
    """
    head = [module for module in net.modules() if isinstance(module, nn.Linear)][-1].weight
    graded = {n: p for n, p in net.named_parameters() if p.grad is not None and p.numel()}
    skipped = {id(p) for p in unscaled if mode == "norm"}
    limited = {name: p for name, p in graded.items() if id(p) not in skipped}
    whole, part = (
        float(torch.cat([p.grad.double().flatten() for p in chosen.values()]).norm())
        for chosen in (graded, limited)
    )
    limit = LIMITS[mode]
    over = []
    for name, p in limited.items():
        if mode == "value":
            over.append(p.grad.abs() > limit)
            p.grad.clamp_(-limit, limit)
        elif mode == "adaptive" and p is not head:
            dims = (inputs or {}).get(name, list(range(p.ndim > 1, p.ndim)))
            size, weight = (
                values.abs() if dims is None else values.square().sum(dims, keepdim=True).sqrt()
                for values in (p.grad, p.detach())
            )
            bound = limit * weight.clamp(min=1e-3)
            over.append(size > bound)
            p.grad = p.grad * torch.where(over[-1], bound / size, 1.0)
        elif mode.startswith("norm"):
            p.grad.mul_(min(1.0, limit / part))
            over = [torch.tensor([part > limit])]
    units = sum(mask.numel() for mask in over)
    return whole, sum(int(mask.sum()) for mask in over) / max(1, units)


def clip_groups(groups, limit):
    """Clip by what parameter groups say; return ‖G‖ and the share of norms that were clipped."""

    def norm(parameters):
        return math.sqrt(sum(float(p.grad.square().sum()) for p in parameters))

    graded = [[p for p in group["params"] if p.grad is not None] for group in groups]
    by_limit = {None: [], limit: []}
    for group, parameters in zip(groups, graded, strict=True):
        own = group.get("clip")
        by_limit.setdefault(None if own is False else own or limit, []).extend(parameters)
    whole = norm(p for parameters in graded for p in parameters)
    left_out = by_limit.pop(None)
    assert norm(left_out) > 0
    over = []
    for threshold, parameters in by_limit.items():
        size = norm(parameters)
        over.append(size > threshold)
        for p in parameters:
            p.grad.mul_(min(1.0, threshold / size))
    return whole, sum(over) / len(over)


def in_plain_pytorch(name, title):
    """Norms, shares and weights of one process."""
    kind = KINDS[name]
    condition = CONDITIONS[title]
    mode = mode_of(name, title)
    net, optimizers = made(condition, name)
    parameters = list(net.parameters())
    buffers = list(net.buffers())
    unscaled = optimizers[0].param_groups[0]["params"] if title.startswith("muon") else []
    to_none = "zeros" not in condition.options
    results = []
    average = AveragedModel(net) if "average" in condition.options else None
    if title == "shared gradient":
        net[1].then.stacked = False  # PyTorch would add each microbatch to the one tensor twice.

    def of_part(inputs, targets):
        chunks = kind.chunks if "chunks" in condition.options else 1
        for x, y in zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True):
            if condition.passes is not None:
                condition.passes(net, x, y, 1 / MICROS, torch.Tensor.backward)
            else:
                (condition.criterion(net(x), y) / (MICROS * chunks)).backward()

    def gradients(step):
        total = {p: torch.zeros_like(p) for p in parameters if p.grad is not None}
        before = [buffer.clone() for buffer in buffers]
        first = None
        for part in range(kind.parts):
            net.zero_grad()
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            for micro in range(MICROS):
                of_part(
                    *(tensor.chunk(kind.parts)[part] for tensor in data(condition, step, micro))
                )
            for p in parameters:
                if p.grad is not None:
                    total[p] = total.get(p, 0.0) + p.grad / kind.parts
            first = first or [buffer.clone() for buffer in buffers]
        for buffer, value in zip(buffers, first, strict=True):
            buffer.copy_(value)  # those of the first rank
        for p in parameters:
            p.grad = total.get(p)

    def clip_now():
        if title == "groups with clip":
            results.append(clip_groups(optimizers[0].param_groups, LIMITS["norm"]))
            return
        results.append(clip(net, mode, unscaled, INPUTS if "units" in condition.options else None))

    for step in range(condition.steps):
        condition.change(step, net, optimizers[0])
        gradients(step)
        condition.after(step, net, optimizers[0])
        finite = all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)
        clip_now()
        for optimizer in optimizers if finite else ():
            optimizer.step()
        if average is not None:
            average.update_parameters(net)
        net.zero_grad(set_to_none=to_none)
    trained = net if average is None else average.module
    return {"found": results, "weights": own(trained.state_dict())}


def same_step(name, title):
    """The same under a plugin on this rank: with bits of what it holds, or why it is refused."""
    condition, mode = CONDITIONS[title], mode_of(name, title)
    plugin = KINDS[name].make()
    fp16 = LossScale(2.0**10) if "fp16" in condition.options else None
    booster = Booster("fp16" if fp16 else None, plugin=plugin, loss_scale=fp16)
    net, optimizers = made(condition, name)
    if "compiled" in condition.options:
        net = torch.compile(net, backend="eager")
    try:
        stepped = optimizers if len(optimizers) > 1 else optimizers[0]
        model, optimizer, *_ = booster.boost(net, stepped, condition.criterion)
        average = AveragedModel(model) if "average" in condition.options else None
        results = train(booster, model, optimizer, condition, mode, average)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        return str(error)
    assert fp16 is None or fp16.scale == 2.0**9
    trained = model if average is None else average.module
    tensors = [*trained.unwrap().named_parameters(), *trained.unwrap().named_buffers()]
    local = {model.renamed.get(key, key): whole(tensor) for key, tensor in tensors}
    weights = local if average is not None else booster.state_dict(model)
    return {
        "found": results,
        "weights": own(weights),
        "bits": {key: bits(tensor) for key, tensor in own(local).items()},
    }


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def bits(tensor):
    return sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def train(booster, model, optimizer, condition, mode, average):
    """Train under a plugin; return norms and shares."""
    net = model.unwrap()
    first = optimizer.optimizers[0]
    results = []
    options = {"scales": "all"} if mode == "norm of all" else {}
    if "units" in condition.options:
        options["units"] = UNITS
    clipping = build(mode.split()[0], threshold=LIMITS[mode], **options)
    rank = booster.plugin.data_rank
    size = booster.plugin.data_size
    backward = partial(booster.backward, optimizer=optimizer)

    def share(outputs, targets):
        return condition.criterion(outputs, targets) / MICROS

    if hasattr(condition.criterion, "loss_items"):
        share.loss_items = condition.criterion.loss_items

    def gradients(step):
        for micro in range(MICROS):
            inputs, targets = (tensor.chunk(size)[rank] for tensor in data(condition, step, micro))
            last = micro == MICROS - 1
            with nullcontext() if last else booster.no_sync(model, optimizer):
                if condition.passes is not None:
                    condition.passes(model, inputs, targets, 1 / MICROS, backward)
                elif model.pipeline is None:
                    backward(share(model(inputs), targets))
                else:
                    # Its outputs take a forward pass of their own, which must leave no trace.
                    batch = iter([(inputs, targets)])
                    booster.execute_pipeline(batch, model, share, optimizer, return_outputs=last)

    def clip_now(step):
        if "one call" in condition.options:
            targets = [model, model.module, net, model.parameters(), list(net.parameters())]
            decision = apply_gradient_clipping(targets[step % 5], mode, LIMITS[mode])
        else:
            clipping.bind(optimizer.layout)
            decision = optimizer.clip(clipping)
        results.append((float(decision.norm), float(decision.fraction)))

    for step in range(condition.steps):
        condition.change(step, net, first)
        gradients(step)
        condition.after(step, net, first)
        clip_now(step)
        optimizer.step(*([lambda: None] if "closure" in condition.options else []))
        optimizer.zero_grad(set_to_none="zeros" not in condition.options)
        if average is not None:
            average.update_parameters(model)
    return results


@contextmanager
def exact_muon():
    """Muon's own cast to bfloat16 rounds away what is compared here."""
    before = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda tensor: tensor
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = before


def conditions_of(name):
    """The conditions that are tried under a plugin."""
    return CONDITIONS if name in PLUGINS else SOME


def table(*names):
    """The results of this rank, by plugin and condition."""
    results = {}
    for name in names:
        for title in conditions_of(name):
            torch._dynamo.reset()
            with exact_muon():
                results[name, title] = same_step(name, title)
    return results


@cache
def tables(*names):
    """The tables of all ranks, which have imported what they need once for all plugins."""
    ranks = KINDS[names[0]].ranks
    return run_ranks(table, ranks, *names) if ranks > 1 else [table(*names)]


def compare(name, title, results):
    """Describe what is wrong with the results of all ranks for one condition."""
    condition = CONDITIONS[title]
    tolerance = CONDITIONS[title].tolerance(name)
    pattern = condition.message(name)
    if pattern is not None or any(isinstance(result, str) for result in results):
        right = [isinstance(r, str) and re.search(pattern or "$^", r) for r in results]
        return [] if all(right) else [f"{title}: {results!r:.300}"]
    with exact_muon():
        expected = in_plain_pytorch(name, title)
    off = []
    for key, tensor in expected["weights"].items():
        got = next((r["weights"][key] for r in results if key in r["weights"]), tensor.new_zeros(0))
        far = (got - tensor).abs().max() / max(1.0, tensor.abs().max()) if tensor.numel() else 0.0
        if got.shape != tensor.shape or not far <= tolerance:
            off.append(f"{title}: {key} is off by {far:.1e}")
    same = {}
    for rank, result in enumerate(results):
        for key, value in result.get("bits", {}).items():
            if same.setdefault(key, value) != value:
                off.append(f"{title}: rank {rank} has another {key}")
        steps = result.get("found", [])
        for a, b in zip(steps, expected["found"], strict=True) if steps else ():
            if isfinite(b[0]) and a != pytest.approx(b, rel=tolerance, abs=0):
                off.append(f"{title}: rank {rank}: {a} instead of {b}")
    return off


# zero2 and zero3 are fsdp by another name, hybrid is tensor and pipeline at once: slow. FSDP of
# tensor parallelism replaces parameters twice, and sends gradients in each microbatch.
DAILY = [name for name in PLUGINS if name not in ("zero2", "zero3", "hybrid")] + ["tensor_zero3"]


def computed_together(name):
    """The plugins whose conditions one start of ranks computes, ``name`` among them."""
    if name not in DAILY:
        return (name,)
    return tuple(daily for daily in DAILY if KINDS[daily].ranks == KINDS[name].ranks)


def pairs():
    """All pairs of a plugin and a condition; those that a day leaves out are slow."""
    for name in KINDS:
        marks = () if name in DAILY else pytest.mark.slow
        for title in conditions_of(name):
            yield pytest.param(name, title, marks=marks, id=f"{name}-{title}")


@pytest.mark.xdist_group("same step")
@pytest.mark.parametrize(("name", "title"), list(pairs()))
def test_the_condition_is_right_or_refused(name, title):
    ranks = tables(*computed_together(name))
    problems = compare(name, title, [results[name, title] for results in ranks])
    assert not problems, "\n".join(problems)
