"""Faults that were reported in public in 2025 and 2026: the report's number, ours and theirs.

Each function is a script of its own words, with the arithmetic that the report describes, of tools
that can't be installed here, or whose call needs a GPU; ``tests/check/calls.py`` has the tools' own
calls. It returns what a check says of it, then what it says of
:func:`runner.apply_gradient_clipping` on the same gradients, and the words that have to be in both.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from runner import apply_gradient_clipping
from runner.check import check_accumulation, check_clipping
from tests.check.models import (
    experts,
    fsdp,
    fsdp_beside_plain,
    net,
    scale,
    scripts,
    squares,
    stages,
    summed,
    tensor_parallel,
)

LIMIT = 0.5


def compared(make, theirs, words, *, logged=None, groups=None, ours=True, p=2.0):
    """Report on ``theirs``, a function of the model, and on ours."""
    model = make()
    with check_clipping(model, LIMIT, groups=groups, norm_type=p) as check:
        norm = theirs(model)
    text = check.report(norm, logged=None if logged is None else logged(model))
    if not ours:
        return text, words
    model = make()
    with check_clipping(model, LIMIT, groups=groups, norm_type=p) as check:
        decision = apply_gradient_clipping(model, "norm", LIMIT, p, process_groups=groups)
    our_text = check.report(decision, logged=decision.norm)
    return text + our_text.replace("check_clipping", "\nours"), f"{words}|ours: right"


def experts_of_four_numbers():
    """Four experts, two on a rank of two, whose gradients are 1, 2, 3 and 4."""
    model = nn.Module()
    number = dist.get_rank() % 2
    model.experts = nn.ParameterList(nn.Parameter(torch.full((4,), 1.0 + number)) for _ in "ab")
    for place, parameter in enumerate(model.experts):
        parameter.grad = torch.full((4,), 1.0 + place + 2 * number)
    return model


def deepspeed_8478():
    """deepspeedai/DeepSpeed issue 8475, PR 8478: norms are averaged, 7.23607 for 10.9545."""
    group = pair()

    def theirs(model):
        norm = summed(squares(model.parameters()).sqrt(), group) / 2
        return scale(model.parameters(), norm, LIMIT)

    words = "0.6606 of the true norm: the mean of the norms of ranks|7.23607|10.9545"
    return compared(experts_of_four_numbers, theirs, words, groups={"experts.*": group})


def pair():
    """The group of this rank's two experts."""
    groups = [dist.new_group([i, i + 1]) for i in range(0, dist.get_world_size(), 2)]
    return groups[dist.get_rank() // 2]


def automodel_3816():
    """NVIDIA-NeMo/Automodel issue 3816: each expert group has a coefficient of its own."""
    _, mesh = experts()

    def make():
        return experts()[0]

    def theirs(model):
        expert_squares = squares(model.experts.parameters())
        scale(model.experts.parameters(), expert_squares.sqrt(), LIMIT)
        norm = (
            summed(expert_squares, mesh.get_group("experts")) + squares(model.gate.parameters())
        ).sqrt()
        return scale(model.gate.parameters(), norm, LIMIT)

    words = "1 fault|experts.0.weight was scaled by |on rank 0 and by |on rank 1"
    return compared(make, theirs, words, groups={"experts.*": mesh["experts"]})


def nemo_rl_3788():
    """NVIDIA-NeMo/RL PR 3788: one sum over the tensor-parallel ranks, whatever the placement."""

    def theirs(model):
        return scale(model.parameters(), summed(squares(model.parameters())).sqrt(), LIMIT)

    times = dist.get_world_size()
    words = f"replicated parameters counted {times} times: 2.bias, 4.weight, 4.bias"
    return compared(tensor_parallel, theirs, words)


def hyper_parallel_526():
    """mindspore-ai/hyper-parallel issue 526: ignored parameters are summed over shards too."""

    def theirs(model):
        return scale(model.parameters(), summed(squares(model.parameters())).sqrt(), LIMIT)

    times = dist.get_world_size()
    words = f"replicated parameters counted {times} times: 1.weight, 1.bias"
    return compared(fsdp_beside_plain, theirs, words)


def miles_diffusion_35():
    """radixark/miles_diffusion PR 35: the part of one rank goes to the log, √n too small."""
    shares = []

    def theirs(model):
        shares.append(float(squares(model.parameters()).sqrt()))
        return torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)

    words = "1 fault|the logged value is |the share of this rank alone|rank 0 logs"
    return compared(fsdp, theirs, words, logged=lambda _: None if dist.get_rank() else shares[0])


def torchrec_3199():
    """meta-pytorch/torchrec PR 3199: the root of p = inf is taken, and the norm is always 1."""

    def theirs(model):
        largest = max(parameter.grad.to_local().abs().amax() for parameter in model.parameters())
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return scale(model.parameters(), largest ** (1.0 / math.inf), LIMIT)

    return compared(fsdp, theirs, "the norm of p=inf is always 1", p=math.inf)


def simpletuner_2900():
    """bghira/SimpleTuner PR 2900: the largest element of the shards of one rank."""

    def theirs(model):
        largest = max(parameter.grad.to_local().abs().amax() for parameter in model.parameters())
        return scale(model.parameters(), largest, LIMIT)

    return compared(fsdp, theirs, "the share of this rank alone", p=math.inf)


def torchtitan_596():
    """pytorch/torchtitan issue 596: each pipeline stage clips by the norm of its own layers."""

    def theirs(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)

    return compared(stages, theirs, "the share of this rank alone", ours=False)


def megatron_7227():
    """NVIDIA/Megatron-LM PR 7227: a tied embedding is counted on two stages, 40 for 28.2843."""

    def make():
        stage = dist.get_rank() % 2
        layer = nn.Linear(4, 8, bias=False) if stage else nn.Embedding(8, 4)
        layer.weight.detach().copy_(torch.arange(32.0).view(8, 4))
        layer.weight.grad = torch.full((8, 4), 5.0)
        return nn.ModuleDict({"head" if stage else "embed": layer})

    def theirs(model):
        copies = dist.get_world_size() // 2
        return scale(
            model.parameters(), (summed(squares(model.parameters())) / copies).sqrt(), LIMIT
        )

    words = "1.414 of the true norm: tied parameters counted 2 times|returned 40|28.2843"
    return compared(make, theirs, words, ours=False)


def nanochat_59():
    """karpathy/nanochat PR 59: a mean of means over microbatches of unequal numbers of tokens."""
    model = net()
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = []
    for tokens in (12, 3, 7):
        targets = torch.randint(4, (tokens,), generator=generator)
        batches.append((torch.randn(tokens, 6, generator=generator), targets))

    def loss(model, batch):
        inputs, targets = batch
        return cross_entropy(model(inputs), targets, reduction="sum"), len(targets)

    def step(window):
        for inputs, targets in window:
            (cross_entropy(model(inputs), targets) / len(window)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    check = check_accumulation(step, batches, model=model, loss=loss)
    return check.report(), "a mean of means: each microbatch counts the same|12, 3, 7 on rank 0"


FAULTS = {
    name: body for name, body in scripts(globals()).items() if name.rpartition("_")[2].isdigit()
}
