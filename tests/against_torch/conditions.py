"""What ordinary scripts do: the conditions of :mod:`tests.against_torch.test_same_step`."""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from timm.optim import AdamP, Lamb, Lars, Lion, NvNovoGrad
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, AdamW, Muon
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from runner.booster import SinglePlugin
from runner.models.mixture import Mixture
from runner.optim.groups import parameter_groups
from runner.parallel.recompute import checkpoint_activations
from tests.distributed.cases import Ddp, Experts, Fsdp, Hybrid, Stages, Tensors, Zero

PLAN = {"0.linear": "colwise", "1.linear": "rowwise", "2": "colwise_rep"}


@dataclass(frozen=True)
class Kind:
    """A plugin, its ranks, its data-parallel ranks, and the microbatches of its pipeline."""

    make: Any
    ranks: int = 2
    parts: int = 2
    chunks: int = 1


PLUGINS = {
    "single": Kind(SinglePlugin, 1, 1),
    "ddp": Kind(Ddp),
    "fsdp": Kind(Fsdp),
    **{f"zero{stage}": Kind(partial(Zero, stage)) for stage in (1, 2, 3)},
    "tensor": Kind(partial(Tensors, tp_plan=PLAN), parts=1),
    "pipeline": Kind(partial(Stages, split=["1"]), parts=1, chunks=2),
    "moe": Kind(Experts),
    "hybrid": Kind(partial(Hybrid, tp_size=2, pp_size=2, tp_plan=PLAN, split=["1"]), 4, 1, 2),
}
MORE = {
    "hsdp": Kind(partial(Fsdp, dp_replicate=2), 4, 4),
    "tensor_zero3": Kind(
        partial(Hybrid, tp_size=2, zero_stage=3, tp_plan=PLAN, no_sync=False), 4, 2
    ),
    "pipeline_zero2": Kind(partial(Hybrid, pp_size=2, zero_stage=2, split=["1"]), 4, 2, 2),
    "zero_bubble": Kind(partial(Stages, schedule="zero_bubble"), 2, 1, 4),
}
"""Plugins that only some conditions are run under: those of ``SOME``."""
SOME = ("plain", "unfrozen, frozen", "hooks", "branches", "turns", "batch norm")
KINDS = PLUGINS | MORE
REPLACED = ("fsdp", "zero2", "zero3", "tensor", "hybrid")  # Parameters become others.
AVERAGED = ("ddp", "zero1", "moe")  # Gradients are final only when they are clipped.
SHARDED = ("fsdp", "zero2", "zero3")
STAGES = ("pipeline", "hybrid")
SOME_STEPPED = ("zero1", "pipeline", "moe", "hybrid")  # A rank steps some parameters.
ALL = tuple(PLUGINS)
LIMITS = {"norm": 0.05, "norm of all": 0.05, "value": 0.004, "adaptive": 0.02, "none": None}


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.linear = nn.Linear(before, after)
        self.then = nn.Tanh()
        self.recomputes = False
        self.further = None

    def forward(self, inputs):
        if self.recomputes:
            # PyTorch's reentrant way needs an input with a gradient.
            return checkpoint(self._run, inputs, use_reentrant=inputs.requires_grad)
        return self._run(inputs)

    def _run(self, inputs):
        out = self.then(self.linear(inputs))
        return out if self.further is None else out + self.further.sum().real


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, hidden):
        branch = self.left if float(hidden.detach()[:, 0].sum()) > 0 else self.right
        return branch(hidden).tanh()


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.either = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.turn = 0

    def forward(self, hidden):
        return self.either[self.turn](hidden).tanh()


class Merged(nn.Module):
    """A weight that is the sum of two, which autograd gives one gradient tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.stacked = True

    def forward(self, hidden):
        both = [self.first, self.second]
        return hidden @ (torch.stack(both).sum(0) if self.stacked else both[0] + both[1])


class GatedExperts(nn.Module):
    """Gated experts, each weight [experts, in, out]."""

    def __init__(self):
        super().__init__()
        # A different size of each unit, so that one unit for an expert would be another limit.
        gate_up, down = (
            torch.randn(shape) * torch.linspace(0.1, 0.9, shape[2])
            for shape in ((3, 4, 10), (3, 5, 4))
        )
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(down)

    def forward(self, hidden):
        gate, up = torch.einsum("bth,eho->ebto", hidden, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebti,eih->bth", F.silu(gate) * up, self.down_proj)


class Odd(nn.Module):
    """Layers that keep their outputs elsewhere than in dimension 0."""

    def __init__(self):
        super().__init__()
        self.c_fc = Conv1D(5, 4)
        self.c_proj = Conv1D(4, 5)
        self.experts = GatedExperts()
        self.depthwise = nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.mix = nn.Parameter(torch.randn(2, 4) * 0.3)

    def forward(self, inputs):
        hidden = torch.stack([inputs, inputs.cos(), inputs.sin()], 1)
        hidden = hidden + self.c_proj(self.c_fc(hidden).tanh())
        hidden = hidden + self.experts(hidden)
        return (self.rnn(self.depthwise(hidden.mT).mT)[0] * self.mix[0] + self.mix[1]).mean(1)


UNITS = {"0.linear.weight": 1, "*.mix": (), "1.linear.bias": 0}
"""The dimensions of outputs that a user names."""
INPUTS = {
    **{f"1.then.{name}.weight": [0] for name in ("c_fc", "c_proj")},
    **{f"1.then.experts.{key}": [1] for key in ("gate_up_proj", "down_proj")},
    "1.then.mix": [0, 1],
    "0.linear.weight": [0],
    "1.linear.bias": None,
}
"""Dimensions of inputs then; by default all but the first of a matrix. None: each element."""


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.7, dtype=torch.float64))

    def forward(self, outputs, targets):
        return mean_square(outputs * self.scale, targets)


def network(name):
    """Layers that can be split, cut into stages and sharded; the same weights each time."""
    torch.manual_seed(0)
    further = {"moe": [Mixture(4, experts=3, top_k=2, bias=True)], "zero_bubble": [Block(4, 4)]}
    return nn.Sequential(Block(4, 6), Block(6, 4), *further.get(name, []), nn.Linear(4, 6)).double()


def by(kind, **options):
    """What makes an optimizer for all parameters of a network."""
    return lambda net: kind(net.parameters(), **options)


sgd = by(SGD, lr=0.3, momentum=0.9, weight_decay=0.1)


def lion_lars_lamb(net):
    return [
        Lion(net[0].parameters(), lr=0.01),
        Lars(net[1:-1].parameters(), lr=0.5, momentum=0.9, weight_decay=0.1),
        Lamb(net[-1].parameters(), lr=0.05, max_grad_norm=None),
    ]


def muon(net):
    matrices = [net[0].linear.weight, net[1].linear.weight]
    further = [p for p in net.parameters() if p is not matrices[0] and p is not matrices[1]]
    return [Muon(matrices, lr=0.02), SGD(further, lr=0.3)]


def with_clip(net):
    """Parameter groups that say how they are clipped, beside two that do not."""
    return SGD(
        [
            {"params": net[0].parameters(), "clip": False},
            {"params": net[1].parameters()},
            {"params": net[2:-1].parameters(), "clip": 0.02},
            {"params": net[-1].parameters()},
        ],
        lr=0.3,
    )


def mean_square(outputs, targets):
    return (outputs - targets).square().mean()


def weighted(outputs, targets):
    counts = (targets > 0).to(outputs.dtype)
    return ((outputs - targets).square() * counts).sum() / counts.sum()


STATED = partial(weighted)
IGNORING = nn.CrossEntropyLoss()
STATED.loss_items = lambda targets: float((targets > 0).sum())
IGNORING.loss_items = lambda targets: float((targets >= 0).sum())


def nothing(*_):
    pass


@dataclass(frozen=True)
class Condition:
    """What a script does; ``refused`` and ``tolerances`` are for names of plugins."""

    build: Any = nothing  # changes the model before it is boosted, or returns another one
    change: Any = nothing  # called before each step with its number, the model and the optimizer
    after: Any = nothing  # called between the backward pass and clipping
    optimizer: Any = sgd  # makes the optimizer, or a list of several
    criterion: Any = mean_square
    passes: Any = None  # backward passes of (model, inputs, targets, share of the loss, backward)
    refused: dict[tuple[str, ...], str] = field(default_factory=dict)  # pattern of the message
    # Largest error of a weight, and relative one of a norm; 1e-12 for others.
    tolerances: dict[tuple[str, ...], float] = field(default_factory=dict)
    mode: str = ""  # in turn by default
    steps: int = 4
    options: tuple[str, ...] = ()  # chunks: it matters how a pipeline splits a batch

    def message(self, name):
        """The pattern of the refusal under a plugin; None if it is not refused."""
        return next((text for names, text in self.refused.items() if name in names), None)

    def tolerance(self, name):
        return next((error for names, error in self.tolerances.items() if name in names), 1e-12)


def at(when, do):
    return lambda step, net, optimizer: do(net, optimizer) if step == when else None


def freeze(number, trained=False):
    def do(net, *_):
        net[number].requires_grad_(trained)

    return do


def thaw_and_freeze(step, net, optimizer):
    net[0].requires_grad_(step >= 3)
    net[1].requires_grad_(not 4 <= step < 6)


def by_patterns(net):
    patterns = {"*.bias": {"lr": 0.02}}
    groups = parameter_groups(net, patterns, no_decay=True)
    return SGD(groups, lr=0.3, momentum=0.9, weight_decay=0.1)


def head_later(net, optimizer):
    optimizer.add_param_group({"params": list(net[-1].parameters()), "lr": 0.1})


def tie(net, *_):
    net[-1].weight = net[0].linear.weight


def recompute(net):
    net[0].recomputes = True
    holder = nn.Module()
    holder.blocks = nn.ModuleList([net[1]])
    checkpoint_activations(holder)
    net[0].never = nn.Linear(3, 3).double()


def further(value):
    def build(net):
        net[1].further = nn.Parameter(value.clone())

    return build


def then(make):
    def build(net):
        net[1].then = make().double()

    return build


def norms():
    return nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None))


def turn(step, net, optimizer):
    net[1].then.turn = step % 2


def hooked(net):
    """Hooks that need the whole gradient of a rank as a plain tensor, and one to be removed."""

    def mask(gradient):
        kept = torch.zeros(gradient.shape, dtype=gradient.dtype)
        kept[1::2, ::2] = 1.0
        return gradient * kept

    net[0].linear.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    net[0].linear.weight.register_hook(lambda gradient: 3.0 * gradient)
    net[1].linear.weight.register_hook(mask)
    net[1].linear.bias.register_hook(lambda gradient: gradient * torch.arange(4.0).double())
    net.handle = net[-1].weight.register_hook(torch.zeros_like)
    net[0].requires_grad_(False)


def unhook_and_thaw(step, net, optimizer):
    net.handle.remove()
    net[0].requires_grad_(step > 2)


def halved(net):
    def hook(parameter):
        parameter.grad.mul_(0.5)

    net[1].linear.weight.register_post_accumulate_grad_hook(hook)


def halve_later(net, optimizer):
    if net[1].linear.weight is not None:
        halved(net)


def hook_later(net, optimizer):
    if net[1].linear.weight is not None:
        net[1].linear.weight.register_hook(lambda gradient: gradient * 2.0)


def sparse(net):
    class Words(nn.Embedding):
        def forward(self, inputs):
            return super().forward((inputs[:, 0] > 0).long())

    return nn.Sequential(Words(2, 4, sparse=True).double(), *net)


def twice(model, inputs, targets, share, backward):
    outputs = model(inputs)
    (outputs.square().mean() * share).backward(retain_graph=True)
    (mean_square(outputs, targets) * share).backward()


class Boxed(nn.Sequential):
    def forward(self, inputs):
        return SimpleNamespace(parts=[super().forward(inputs)])


def twice_of_an_object(model, *rest):
    twice(lambda inputs: model(inputs).parts[0], *rest)


def crosswise(model, inputs, targets, share, backward):
    halves = [model(half) for half in inputs.chunk(2)]
    for outputs, half in zip(halves, targets.chunk(2), strict=True):
        (mean_square(outputs, half) * share / 2).backward()


def assigned(model, inputs, targets, share, backward):
    loss = mean_square(model(inputs), targets) * share
    trained = list(model.parameters())
    for p, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        p.grad = gradient if p.grad is None else p.grad + gradient


def penalized(model, inputs, targets, share, backward):
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    backward((mean_square(outputs, targets) + slope.square().mean()) * share)


CHANGED = r"\S+\.weight was (replaced|added).*after boost.*before booster.boost"
IN_STAGES = {STAGES: "this model is cut into stages: call booster.execute_pipeline"}
SHARDS = {REPLACED: " cannot step the parameters that"}
PARTS = {SOME_STEPPED: " computes its steps from all parameters"}
CONDITIONS = {
    "plain": Condition(),
    "unfrozen, frozen": Condition(build=freeze(0), change=thaw_and_freeze, steps=7),
    "frozen with a gradient": Condition(
        change=at(4, lambda net, _: net.requires_grad_(True)),
        after=at(3, lambda net, _: net.requires_grad_(False)),
        refused={ALL[1:]: r"linear\.weight was frozen while it has a gradient"},
        steps=5,
    ),
    "groups by patterns": Condition(optimizer=by_patterns),
    "group later": Condition(optimizer=lambda net: sgd(net[:-1]), change=at(3, head_later)),
    "group of old parameters": Condition(
        build=lambda net: setattr(net, "old", list(net[-1].parameters())),
        optimizer=lambda net: sgd(net[:-1]),
        change=at(3, lambda net, optimizer: optimizer.add_param_group({"params": net.old})),
        refused={(*REPLACED, "pipeline"): r"param_groups\[1\]\['params'\]\[0\] of SGD, .* is no"},
    ),
    "layer added": Condition(
        change=at(3, lambda net, _: net.append(nn.Linear(6, 6).double())), refused={ALL: CHANGED}
    ),
    "head replaced": Condition(
        change=at(3, lambda net, _: net.__setitem__(-1, nn.Linear(4, 6).double())),
        refused={ALL: CHANGED},
    ),
    "tied later": Condition(change=at(3, tie), refused={ALL: CHANGED}),
    "converted": Condition(
        change=at(3, lambda net, _: net.float()),
        refused={
            REPLACED: r"Couldn't swap Linear\.weight",  # torch refuses it already
            ALL[1:]: r"linear\.weight is torch\.float32, but was torch\.float64 at boost: change",
        },
        tolerances={("single",): 1e-7},  # gradients are float32: 3e-8 in a norm, 0 in weights
        options=("converted",),
    ),
    "tied": Condition(build=tie, mode="value"),
    "tied and frozen": Condition(
        build=tie,
        change=at(3, freeze(0)),
        refused={STAGES: r"0\.linear\.weight is tied across pipeline stages, and frozen on some"},
    ),
    "checkpoint, unused, one by one, ignored targets": Condition(
        build=recompute,
        optimizer=by(SGD, lr=0.3, momentum=0.9, weight_decay=0.1, foreach=False),
        criterion=IGNORING,
        options=("classes",),
    ),
    "batch norm": Condition(build=then(norms), options=("chunks",)),
    "compiled": Condition(options=("compiled",)),
    "average": Condition(
        refused={(*SHARDED, *STAGES): "cannot be copied: for an average of its weights"},
        options=("average",),
    ),
    "sparse": Condition(
        build=sparse,
        refused={
            ("single",): r"0\.weight has a sparse gradient: build .* sparse=False",
            ALL: r"0 has sparse gradients, which \w+ cannot synchronise.*sparse=False",
        },
    ),
    "complex": Condition(
        build=further(torch.ones(3, dtype=torch.complex128)),
        refused={ALL: r"1\.further is complex: clipping is defined on real"},
    ),
    "one of bf16": Condition(
        build=further(torch.ones(3, dtype=torch.bfloat16)),
        refused={SHARDED: r"float64 \(0\.linear.*bfloat16 \(1\.further\), which"},
        mode="norm",
        options=("chunks",),
    ),
    "bf16": Condition(
        build=lambda net: net.to(torch.bfloat16),
        # Sharded products, experts and sums over chunks round each part: 3e-3, below eps = 8e-3.
        tolerances={("tensor", "moe", *STAGES): 8e-3},
        mode="norm",
        options=("bf16", "chunks"),
    ),
    "empty": Condition(
        build=further(torch.ones(0, dtype=torch.float64)),
        mode="adaptive",
        refused={SHARDED: r"1\.further has no elements, and fully_shard cannot reduce"},
    ),
    "closure": Condition(refused={ALL: r"step\(\) takes no closure: run"}, options=("closure",)),
    "two backward passes": Condition(passes=twice, refused=IN_STAGES),
    "inf": Condition(options=("fp16",)),
    "odd layers": Condition(build=then(Odd), mode="adaptive", options=("units",)),
    "branches": Condition(build=then(Branches), options=("chunks",)),
    "turns": Condition(build=then(Turns), change=turn),
    "turns with zeros": Condition(build=then(Turns), change=turn, options=("zeros",)),
    "shared gradient": Condition(build=then(Merged)),
    "hooks": Condition(build=hooked, change=unhook_and_thaw, options=("chunks",)),
    "post-accumulate hook": Condition(
        build=halved,
        refused={REPLACED: r"1\.linear\.weight: a hook of register_post_acc.* use register_hook"},
    ),
    "post-accumulate hook after boost": Condition(
        change=at(3, halve_later),
        refused={
            SHARDED: r"1\.linear\.weight: .* registered after boost, and runs on a shard",
            STAGES: "registered after boost, and runs once for each microbatch of a pipeline",
            AVERAGED: "changed in place before they were averaged",
        },
    ),
    "hook after boost": Condition(
        change=at(3, hook_later),
        refused={SHARDED: r"1\.linear\.weight: a hook was registered after boost"},
    ),
    "torch's clipping": Condition(
        after=lambda step, net, _: nn.utils.clip_grad_norm_(net.parameters(), 0.05),
        mode="none",
        refused={
            AVERAGED: r"changed in place before they were averaged .* optimizer\.unscale",
            STAGES: "changed in place after the backward pass, and a rank of a pipeline",
        },
    ),
    "gradients assigned": Condition(
        passes=assigned,
        refused={
            ("fsdp", "zero3"): "appears to not have been used in the graph",
            ("zero2",): r"0\.linear\.weight: a gradient was assigned to the copy",
            **IN_STAGES,
        },
    ),
    "two optimizers": Condition(
        optimizer=lambda net: [sgd(net[0]), AdamW(net[1:].parameters(), lr=0.01, weight_decay=0.1)]
    ),
    "three optimizers": Condition(optimizer=lion_lars_lamb),
    "muon": Condition(optimizer=muon, mode="norm"),
    "groups with clip": Condition(optimizer=with_clip, mode="norm"),
    "muon, all scaled": Condition(optimizer=muon, mode="norm of all"),
    "muon, adaptive": Condition(optimizer=muon, mode="adaptive"),
    "learned criterion": Condition(
        criterion=Learned(), refused={ALL: r"the criterion has parameters \(scale\)"}
    ),
    "one call": Condition(mode="norm", steps=5, options=("one call",)),
    "two backward passes of an object": Condition(
        lambda net: Boxed(*net),
        passes=twice_of_an_object,
        refused={
            SHARDED: "Boxed returns tensors in a SimpleNamespace",
            STAGES: r"Boxed cannot be cut into stages: give it a method pipeline\(\)",
        },
    ),
    "crosswise": Condition(passes=crosswise, refused=IN_STAGES),
    "gradient penalty": Condition(
        passes=penalized,
        refused={SHARDED: "storage of size 0", ("tensor",): "differentiate twice"} | IN_STAGES,
    ),
    "divisor": Condition(criterion=weighted),
    "divisor stated": Condition(criterion=STATED),
    "lamb": Condition(optimizer=by(Lamb, lr=0.05), refused=PARTS),
    "adafactor": Condition(optimizer=by(Adafactor, lr=0.05), refused=SHARDS),
    "adamp": Condition(optimizer=by(AdamP, lr=0.05, weight_decay=0.1), refused=SHARDS),
    "novograd": Condition(optimizer=by(NvNovoGrad, lr=0.05), refused=SHARDS),
}
