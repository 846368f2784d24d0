"""Clipping that is right, in ways that people do it: no report may name a fault."""

import math

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from runner import apply_gradient_clipping
from runner.check import check_clipping
from tests.check.models import (
    average,
    backward,
    cut_by_hand,
    ddp,
    experts,
    fsdp,
    fsdp_beside_plain,
    hsdp,
    net,
    scale,
    scripts,
    squares,
    stages,
    summed,
    tensor_parallel,
    two_dimensions,
)

LIMIT = 0.5


def report(model, clip, limit=LIMIT, **options):
    with check_clipping(model, limit, **options) as check:
        norm = clip()
    value = norm if norm is None or isinstance(norm, torch.Tensor) else norm.norm
    logged = None if value is None or dist.get_rank() else float(value)
    return check.report(norm, logged=logged)


def by_torch(model, limit=LIMIT, p=2.0, **options):
    def clip():
        norm = clip_grad_norm_(model.parameters(), limit, p)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    return report(model, clip, limit, norm_type=p, **options)


def by_ours(model, kind="norm", limit=LIMIT, **options):
    groups = options.get("groups")
    more = {"exclude": options["exclude"]} if "exclude" in options else {}

    def clip():
        return apply_gradient_clipping(
            model, kind, limit, options.get("norm_type", 2.0), process_groups=groups, **more
        )

    return report(model, clip, limit, mode=kind, **options)


def torch_on_ddp():
    return by_torch(ddp())


def torch_twice_to_one_norm():
    """The second call changes nothing that counts."""
    model = ddp()

    def clip():
        norm = clip_grad_norm_(model.parameters(), LIMIT)
        clip_grad_norm_(model.parameters(), LIMIT)
        return norm

    return report(model, clip)


def torch_on_ddp_not_binding():
    return by_torch(ddp(), 1e6)


def torch_on_ddp_on_the_host():
    return by_torch(ddp(gradient_as_bucket_view=True), on_host=True)


def torch_on_fsdp():
    return by_torch(fsdp())


def torch_on_hsdp():
    return by_torch(hsdp())


def torch_by_p_of_1():
    return by_torch(fsdp(), p=1.0)


def torch_by_p_of_inf():
    return by_torch(fsdp(), p=math.inf)


def torch_by_p_of_3():
    return by_torch(ddp(), p=3.0)


def torch_in_bfloat16():
    return by_torch(fsdp(torch.bfloat16))


def torch_in_bfloat16_on_replicas():
    model = backward(DistributedDataParallel(net(torch.bfloat16)))
    return by_torch(model)


def torch_in_float64():
    return by_torch(fsdp(torch.float64))


def ours_on_fsdp_beside_plain():
    return by_ours(fsdp_beside_plain())


def ours_on_tensor_parallel():
    return by_ours(tensor_parallel())


def ours_on_two_dimensions():
    return by_ours(two_dimensions())


def ours_by_p_of_1_on_tensor_parallel():
    return by_ours(tensor_parallel(), norm_type=1.0)


def ours_by_p_of_inf_on_two_dimensions():
    return by_ours(two_dimensions(), norm_type=math.inf)


def ours_with_experts():
    model, mesh = experts()
    return by_ours(model, groups={"experts.*": mesh["experts"]})


def experts_by_hand():
    model, mesh = experts()
    group = mesh.get_group("experts")

    def clip():
        expert_squares = summed(squares(model.experts.parameters()), group)
        norm = (expert_squares + squares(model.gate.parameters())).sqrt()
        return scale(model.parameters(), norm, LIMIT)

    return report(model, clip, groups={"experts.*": group})


def experts_without_a_gradient_on_one_rank():
    model, mesh = experts()
    if mesh.get_local_rank("experts") == 1:
        for parameter in model.experts.parameters():
            parameter.grad = None
    return by_ours(model, groups={"experts.*": mesh["experts"]})


def unused_parameters():
    model = net()
    model[1].unused = nn.Parameter(torch.ones(3))
    return by_torch(backward(DistributedDataParallel(model, find_unused_parameters=True)))


def values():
    model = fsdp()
    return report(model, lambda: clip_grad_value_(model.parameters(), LIMIT), mode="value")


def ours_by_value():
    return by_ours(tensor_parallel(), "value")


def values_in_bfloat16():
    model = fsdp(torch.bfloat16)
    return report(model, lambda: clip_grad_value_(model.parameters(), 0.3), 0.3, mode="value")


def ours_adaptive():
    return by_ours(two_dimensions(), "adaptive", 0.01)


def ours_adaptive_on_fsdp():
    return by_ours(fsdp(), "adaptive", 0.01, exclude=["0.*"])


def timm_adaptive():
    model = ddp()

    def clip():
        timm.utils.agc.adaptive_clip_grad(model.parameters(), 0.01)

    return report(model, clip, 0.01, mode="adaptive", exclude=())


def tied_in_one_module():
    model = net()
    model.append(nn.Linear(4, 8))
    model.append(model[2])
    model = DistributedDataParallel(model)
    return by_torch(backward(model))


def tied_over_stages():
    model = stages()

    def clip():
        copies = dist.get_world_size() // 2
        both = summed(squares(model.parameters())) / copies
        weight = model["embed"].weight if "embed" in model else model["head"].weight
        return scale(model.parameters(), (both - squares([weight])).sqrt(), LIMIT)

    return report(model, clip)


def cut_by_hand_in_a_group():
    model = cut_by_hand()

    def clip():
        norm = (summed(squares([model.rows])) + squares([model.norm])).sqrt()
        return scale(model.parameters(), norm, LIMIT)

    return report(model, clip, groups={"rows": dist.group.WORLD})


def nan_on_all_ranks_alike():
    model = fsdp()
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local()[0, 0] = math.nan
    return by_torch(model)


def a_step_that_ours_leaves_as_it_is():
    model = fsdp()
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local()[0, 0] = math.inf
    return by_ours(model)


def huge():
    model = ddp()
    for parameter in model.parameters():
        parameter.grad.mul_(1e20)
    return by_ours(model)


def zeros():
    model = net()
    model[2].weight.grad = torch.zeros(8, 8)
    backward(model)
    average(parameter.grad for parameter in model.parameters())
    model[4].weight.grad.zero_()
    return by_torch(model)


def several_steps():
    """Loops with steps, and with gradients that are set by hand between two checks."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    texts = []
    for number in range(3):
        for micro in range(2):
            backward(model, seed=10 * number + micro)
        texts.append(by_torch(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=number == 1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        texts.append(by_torch(model))
    return "\n".join(texts)


def a_skipped_step():
    """A step that is not finite is left out, and its gradients are zeroed in place."""
    model = DistributedDataParallel(net())
    texts = []
    for factor in (math.inf, 1.0):
        backward(model, scale=factor)
        texts.append(by_torch(model))
        model.zero_grad(set_to_none=False)
    return "\n".join(texts)


RIGHT = scripts(globals())
