"""Planted faults, one function each: it returns the report, and what the report has to say."""

import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from runner.check import ClippingError, check_clipping
from tests.check.models import (
    average,
    backward,
    cut_by_hand,
    ddp,
    experts,
    fsdp,
    fsdp_beside_plain,
    net,
    scale,
    scripts,
    squares,
    stages,
    summed,
)

LIMIT = 0.5


def is_sharded(parameter):
    return hasattr(parameter, "placements")


def report(model, clip, *, logged=None, returns=True, limit=LIMIT, **options):
    with check_clipping(model, limit, **options) as check:
        norm = clip()
    if logged is not None:
        logged = logged(norm)
    return check.report(norm if returns else None, logged=logged)


# Experts


def experts_left_out():
    model, mesh = experts()
    parameters = list(model.parameters())

    def clip():
        return scale(parameters, squares(model.gate.parameters()).sqrt(), LIMIT)

    return report(
        model, clip, groups={"experts.*": mesh["experts"]}
    ), "left out of the norm|experts.0"


def experts_averaged():
    model, mesh = experts()
    group = mesh.get_group("experts")

    def clip():
        expert_squares = summed(squares(model.experts.parameters()), group) / group.size()
        return scale(
            model.parameters(), (expert_squares + squares(model.gate.parameters())).sqrt(), LIMIT
        )

    text = report(model, clip, groups={"experts.*": mesh["experts"]})
    return text, "averaged over 2 ranks instead of added: experts.0"


def experts_over_the_wrong_group():
    model, mesh = experts()
    group = mesh.get_group("replicas")

    def clip():
        expert_squares = summed(squares(model.experts.parameters()), group) / group.size()
        return scale(
            model.parameters(), (expert_squares + squares(model.gate.parameters())).sqrt(), LIMIT
        )

    text = report(model, clip, groups={"experts.*": mesh["experts"]})
    return text, "the share of this rank alone"


def experts_summed_over_all_ranks():
    model, mesh = experts()

    def clip():
        expert_squares = summed(squares(model.experts.parameters())) * (
            2 if dist.get_world_size() == 2 else 1
        )
        return scale(
            model.parameters(), (expert_squares + squares(model.gate.parameters())).sqrt(), LIMIT
        )

    text = report(model, clip, groups={"experts.*": mesh["experts"]})
    return text, "counted 2 times|experts.0"


def mean_of_the_norms_of_ranks():
    model, mesh = experts()

    def clip():
        norm = summed(squares(model.parameters()).sqrt()) / dist.get_world_size()
        return scale(model.parameters(), norm, LIMIT)

    text = report(model, clip, groups={"experts.*": mesh["experts"]})
    return text, "the mean of the norms of ranks"


def experts_in_no_group():
    model, _ = experts()
    text = report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT))
    return text, "  1. plain tensors with other values on other ranks, in no group: experts.0"


# Replicas, tied weights, shards


def replicated_counted_once_a_rank():
    model = fsdp_beside_plain()

    def clip():
        return scale(model.parameters(), summed(squares(model.parameters())).sqrt(), LIMIT)

    times = dist.get_world_size()
    return report(model, clip), f"replicated parameters counted {times} times: 1.weight, 1.bias"


def tied_counted_on_two_stages():
    model = stages()

    def clip():
        copies = dist.get_world_size() // 2
        return scale(
            model.parameters(), (summed(squares(model.parameters())) / copies).sqrt(), LIMIT
        )

    return report(model, clip), "tied parameters counted 2 times: embed.weight = head.weight"


def shards_not_marked():
    model = cut_by_hand()
    text = report(
        model,
        lambda: clip_grad_norm_(model.parameters(), LIMIT),
        groups={"rows": dist.group.WORLD},
    )
    return text, "the share of this rank alone"


def share_of_one_rank():
    model = fsdp()

    def clip():
        return scale(model.parameters(), squares(model.parameters()).sqrt(), LIMIT)

    return report(model, clip), "of the true norm: the share of this rank alone"


def largest_of_a_rank():
    model = fsdp()

    def clip():
        norm = squares(model.parameters()).sqrt()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return scale(model.parameters(), norm, LIMIT)

    return report(model, clip), "the largest norm of a rank"


def mean_instead_of_sum():
    model = fsdp()

    def clip():
        norm = (summed(squares(model.parameters())) / dist.get_world_size()).sqrt()
        return scale(model.parameters(), norm, LIMIT)

    return report(model, clip), "the mean over ranks of the sums of powers"


# Coefficients


def ranks_with_different_coefficients():
    model, mesh = experts()
    group = mesh.get_group("experts")

    def clip():
        gate = squares(model.gate.parameters())
        expert_squares = squares(model.experts.parameters())
        scale(model.experts.parameters(), expert_squares.sqrt(), LIMIT)
        norm = (gate + summed(expert_squares, group)).sqrt()
        scale(model.gate.parameters(), norm, LIMIT)
        return norm

    text = report(model, clip, groups={"experts.*": mesh["experts"]})
    return text, "experts.0.weight was scaled by |on rank 0 and by |on rank 1"


def gradients_given_for_parameters():
    model = ddp()
    gradients = [parameter.grad for parameter in model.parameters()]

    def clip():
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(gradients, LIMIT, norm)
        return norm

    return report(model, clip), "right norm, nothing was scaled"


def a_spent_generator():
    model = ddp()

    def clip():
        parameters = model.parameters()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        torch.nn.utils.clip_grads_with_norm_(parameters, LIMIT, norm)
        return norm

    return report(model, clip), "right norm, nothing was scaled"


def an_iterator_that_is_used_up():
    model = ddp()
    parameters = model.parameters()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    assert trained
    text = report(model, lambda: clip_grad_norm_(parameters, LIMIT))
    return (
        text,
        "0 of the true norm: no gradient was added up, as of an iterator",
    )


def clipped_twice():
    model = ddp()

    def clip():
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        for _ in range(2):
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, norm)
        return norm

    return report(model, clip), "clipped twice"


def clipped_again_to_a_small_norm():
    model = ddp()

    def clip():
        norm = clip_grad_norm_(model.parameters(), 1e-3)
        clip_grad_norm_(model.parameters(), 1e-3)
        return norm

    return report(model, clip, limit=1e-3), "clipped to the same norm again"


def clipped_again_to_one_norm():
    model = ddp()

    def clip():
        clip_grad_norm_(model.parameters(), LIMIT)
        return clip_grad_norm_(model.parameters(), LIMIT)

    return report(model, clip), "this is the norm after clipping, not before"


def nan_after_clipping_by_value():
    model = ddp()
    return report(model, lambda: spoil(model), mode="value"), "became NaN or inf: 0.weight"


def nan_after_adaptive_clipping():
    model = ddp()
    return report(model, lambda: spoil(model), mode="adaptive"), "became NaN or inf: 0.weight"


def spoil(model):
    model.module[0].weight.grad[0, 0] = math.nan


def scaled_up():
    model = ddp()

    def clip():
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.grad.mul_(1000.0 / norm)
        return norm

    return report(model, clip, limit=1000.0), "a smaller gradient was scaled up"


def one_layer_skipped():
    model = ddp()

    def clip():
        return clip_grad_norm_([p for n, p in model.named_parameters() if ".2." not in n], LIMIT)

    return report(model, clip), "left out of the norm: 2.weight, 2.bias|not scaled, while others"


def each_by_its_own_norm():
    model = ddp()

    def clip():
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        for parameter in model.parameters():
            clip_grad_norm_([parameter], LIMIT)
        return norm

    return report(model, clip), "each parameter was clipped by its own norm"


def each_group_by_its_own_norm():
    model = ddp()
    first, second = [*model.parameters()][:4], [*model.parameters()][4:]

    def clip():
        clip_grad_norm_(first, LIMIT)
        return clip_grad_norm_(second, LIMIT)

    words = "the norm of these alone: 2.weight|clipped in 2 groups, each by its own norm: "
    return report(model, clip), words


def a_parameter_given_twice():
    model = ddp()
    parameters = [*model.parameters(), model.module[0].weight]
    words = "counted 2 times: 0.weight|0.weight was scaled by "
    return report(model, lambda: clip_grad_norm_(parameters, LIMIT)), words


def by_the_inverse_of_the_coefficient():
    model = ddp()

    def clip():
        norm = squares(model.parameters()).sqrt()
        for parameter in model.parameters():
            parameter.grad.mul_(norm / LIMIT)
        return norm

    return report(model, clip), "by the inverse of the coefficient"


def divided_by_microbatches_again():
    model = ddp()

    def clip():
        norm = clip_grad_norm_(model.parameters(), LIMIT)
        for parameter in model.parameters():
            parameter.grad.div_(4)
        return norm

    return report(model, clip), "of a threshold of 0.125, or clipped gradients were divided by 4"


def by_value_and_by_the_norm():
    model = ddp()

    def clip():
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.3)
        return clip_grad_norm_(model.parameters(), LIMIT)

    return report(model, clip), "not only scaled, but clipped by value too: 0.weight"


def gradients_rounded_to_bfloat16():
    model = ddp()

    def clip():
        norm = clip_grad_norm_(model.parameters(), LIMIT)
        for parameter in model.parameters():
            parameter.grad.copy_(parameter.grad.bfloat16())
        return norm

    return report(model, clip), "not only scaled, but rounded to bfloat16 too: 0.weight"


def by_value_instead():
    model = ddp()

    def clip():
        torch.nn.utils.clip_grad_value_(model.parameters(), LIMIT)

    return report(model, clip), "clipped by value at 0.5, not by the norm"


def by_norm_instead_of_value():
    model = ddp()
    text = report(
        model,
        lambda: clip_grad_norm_(model.parameters(), LIMIT, math.inf),
        mode="value",
        returns=False,
    )
    return text, "scaled by one coefficient"


# Numbers


def share_of_one_rank_is_logged():
    model = fsdp()
    share = squares(model.parameters()).sqrt()
    text = report(
        model, lambda: clip_grad_norm_(model.parameters(), LIMIT), logged=lambda _: float(share)
    )
    return text, "the logged value is |the share of this rank alone"


def norm_after_clipping_is_logged():
    model = fsdp()
    text = report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT), logged=lambda _: LIMIT)
    return text, "the logged value is |the norm after clipping"


def the_coefficient_is_logged():
    model = ddp()
    text = report(
        model,
        lambda: clip_grad_norm_(model.parameters(), LIMIT),
        logged=lambda norm: LIMIT / float(norm),
    )
    return text, "1 fault|the logged value is |this is the coefficient"


def a_norm_of_two_decimal_places():
    model = ddp()
    for parameter in model.parameters():
        parameter.grad.mul_(0.71)

    def clip():
        return round(float(clip_grad_norm_(model.parameters(), LIMIT)), 2)

    return report(model, clip), "the norm is rounded to 2 decimal places"


def the_norm_of_inf_is_one():
    model = fsdp()

    def clip():
        total = torch.zeros(())
        for parameter in model.parameters():
            total += parameter.grad.to_local().abs().amax()
        dist.all_reduce(total)
        return scale(model.parameters(), total ** (1 / math.inf), LIMIT)

    return report(model, clip, norm_type=math.inf), "the norm of p=inf is always 1"


def another_p():
    model = fsdp()
    return (
        report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT, 1.0).full_tensor()),
        "this is the norm of p=1, not of p=2",
    )


def rounded_to_bfloat16():
    model = fsdp()

    def clip():
        norm = summed(squares(model.parameters())).sqrt().bfloat16()
        return scale(model.parameters(), norm, LIMIT)

    return report(model, clip), "bfloat16"


def squares_that_overflow():
    model = ddp()
    for parameter in model.parameters():
        parameter.grad.mul_(1e20)
    text = report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT))
    return text, "inf of the true norm: the sum of powers is too large for float32"


def of_gradients_that_were_not_unscaled():
    model = ddp()

    def clip():
        norm = squares(model.parameters()).sqrt() * 2.0**16
        return scale(model.parameters(), norm, LIMIT)

    return report(model, clip), "not unscaled"


def the_coefficient_is_returned():
    model = ddp()

    def clip():
        return LIMIT / clip_grad_norm_(model.parameters(), LIMIT)

    return report(model, clip), "this is the coefficient that gradients are multiplied by"


def frozen_parameters_counted():
    model = net()
    backward(model)
    average(parameter.grad for parameter in model.parameters())
    model[0].requires_grad_(False)

    def clip():
        return clip_grad_norm_(model.parameters(), LIMIT)

    return report(model, clip), "frozen parameters counted: 0.weight, 0.bias"


def buffers_counted():
    model = net()
    model.register_buffer("positions", torch.arange(5.0))
    backward(model)
    average(parameter.grad for parameter in model.parameters())

    def clip():
        total = squares(model.parameters()) + model.positions.square().sum()
        return scale(model.parameters(), total.sqrt(), LIMIT)

    return report(model, clip), "the norm counts buffers"


# Order


def before_backward():
    model = DistributedDataParallel(net())
    text = report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT))
    return text, "no parameter has a gradient: clipped before backward()"


def before_sync():
    model = DistributedDataParallel(net())
    with model.no_sync():
        backward(model)
    text = report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT))
    return text, "clipped before gradients were averaged: ranks differ in 0.weight"


def per_microbatch():
    model = DistributedDataParallel(net())
    for number in range(2):
        backward(model, seed=number)
        text = report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT))
    return text, "clipped per microbatch"


def after_the_step():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(2):
        optimizer.zero_grad()
        backward(model, seed=number)
        optimizer.step()
        text = report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT))
    return text, "clipped after the step"


def nan_on_one_rank_alone():
    model = fsdp()
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local()[0, 0] = math.nan

    def clip():
        norm = squares(model.parameters()).sqrt()
        if norm.isfinite():
            scale(model.parameters(), norm, LIMIT)
        return norm

    return report(model, clip), "the norm is not finite, but |rank 0|0.weight on rank 1"


def nan_in_one_replica():
    model = net()
    backward(model)
    average(parameter.grad for parameter in model.parameters())
    if dist.get_rank() == 1:
        model[2].bias.grad[0] = math.nan
    text = report(model, lambda: clip_grad_norm_(model.parameters(), LIMIT))
    return text, "a gradient is not finite on rank 1 alone: 2.bias"


FAULTS = scripts(globals())


def hang():
    """A rank without a gradient leaves out a collective: what each rank is told."""
    model, mesh = experts()
    if dist.get_rank() == 1:
        model.experts[1].bias.grad = None
    try:
        with check_clipping(model, LIMIT, groups={"experts.*": mesh["experts"]}, timeout=3):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    summed(parameter.grad.square().sum())
    except ClippingError as error:
        return str(error)
    return "nothing"
