"""Which optimizers step correctly under which plugin, and a trial step that tells.

================================================  ==============  ==============  =================
An optimizer computes the step of one element     ``single``,     ``zero`` 1,     ``fsdp``, ``zero``
from                                              ``ddp``         ``pipeline``,   2 and 3,
                                                                  ``moe``         ``tensor``
================================================  ==============  ==============  =================
that element: SGD, Adam, AdamW, Lion              correct         correct         correct
its parameter: Adafactor, LARS, Muon, LAMB with   correct         correct         if a trial step is
``max_grad_norm=None``                                                            correct
all parameters: LAMB with ``max_grad_norm``,      correct         refused         if a trial step is
Prodigy                                                                           correct
``torch.optim.LBFGS``                             correct         refused         refused
================================================  ==============  ==============  =================

Plugins of the second column keep a parameter whole, but an optimizer sees those parameters alone
that its rank steps. Plugins of the third column give it DTensors: whether a norm or a mean over one
is taken over all its shards depends on how the optimizer is written. Of ``timm.optim`` and
``torch.optim``, Muon and LARS are correct there; :class:`torch.optim.Adafactor` raises an error.
``hybrid`` has the restrictions of all the plugins it combines.

No list of names can hold the optimizers that people write, so :func:`require_safe` makes small
trial steps with the class and its options, and compares them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runner.booster.plugin import ParallelModel, Plugin
from runner.clip.layout import is_sharded

ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.ASGD,
        optim.SparseAdam,
    }
)
"""Classes (not their subclasses) that are correct on any part of a model, so need no trial."""

BRANCHING = frozenset({"AdamP", "SGDP"})
"""Names of classes that branch on values of a tensor. On DTensors ranks would take different
branches and wait for each other for ever, so these are refused there without a trial."""

TRIAL_STEPS = 3
"""The first step of an Adam hides the size of gradients; later ones show it."""

TOLERANCE = 1e-6
"""Largest relative difference of two float64 updates that should be equal."""

MUON_TOLERANCE = 0.1
"""The same for Muon, whose Newton-Schulz iteration runs in bfloat16. Shards that are orthogonalised
one by one differ by far more."""

WHOLE = (
    "choose LowLevelZeroPlugin(stage=1) (plugin=zero plugin.zero_stage=1) or TorchDDPPlugin "
    "(plugin=ddp), which step whole parameters, or another optimizer"
)


def require_safe(optimizer: Optimizer, spreads: Iterable[ParallelModel], plugin: Plugin) -> None:
    """Refuse an optimizer that would silently take another step than in one process.

    Every rank has to call it: trial steps communicate, and all ranks refuse or none.

    Args:
        optimizer: holds the parameters that this rank steps, as the plugin has placed them.
        spreads: how the modules that own its parameters were spread.
        plugin: the plugin, for the message.

    Raises:
        ValueError: its steps would be wrong; the message names the optimizer and what to choose.
    """
    listed = list(spreads)
    if type(optimizer) in ELEMENTWISE or all(each.layout.group is None for each in listed):
        return
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if started else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = _problem(optimizer, listed, type(plugin).__name__)
    # A rank may hold other experts or stages than its peers, which would wait for it in vain.
    found = [problem] * plugin.world_size
    if plugin.world_size > 1:
        dist.all_gather_object(found, problem)
    for each in found:
        if each:
            raise ValueError(each)


def _problem(optimizer: Optimizer, spreads: Sequence[ParallelModel], where: str) -> str:
    """Why ``optimizer`` would take wrong steps on this rank; empty if it does not."""
    name = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        return (
            f"{name} searches along a direction over all parameters, which {where} spreads over "
            "ranks: choose TorchDDPPlugin (plugin=ddp) or another optimizer"
        )
    if any(_steps_some(spread) for spread in spreads) and _looks_across(optimizer):
        return (
            f"{name} computes its steps from all parameters{_norm_option(optimizer)}, but "
            f"under {where} each rank steps only some of them: choose TorchDDPPlugin "
            "(plugin=ddp) or another optimizer"
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = dict.fromkeys(p.device_mesh for p in held if isinstance(p, DTensor) and is_sharded(p))
    if meshes and any(kind.__name__ in BRANCHING for kind in type(optimizer).__mro__):
        return (
            f"{name} decides by the values of a whole parameter what to do, but under {where} a "
            f"rank holds a shard: {WHOLE}"
        )
    # Each by itself: what fails on one mesh fails on all its ranks alike.
    problems = [_problem_on_shards(optimizer, mesh, where) for mesh in meshes]
    return next((problem for problem in problems if problem), "")


def _steps_some(spread: ParallelModel) -> bool:
    """Whether a rank's optimizer steps some parameters of the model and others none."""
    layout = spread.layout
    dealt = spread.steps is not None and any(id(p.param) not in spread.steps for p in layout.shards)
    return dealt or spread.pipeline is not None or len(layout.shards) < len(layout.names)


def _norm_option(optimizer: Optimizer) -> str:
    """What to say of an option that limits the norm of the whole gradient."""
    set_ = any(group.get("max_grad_norm") for group in optimizer.param_groups)
    return " (max_grad_norm=None turns that off: clip by the booster instead)" if set_ else ""


def _looks_across(optimizer: Optimizer) -> bool:
    """Whether the updates of some tensors change when the optimizer holds others as well.

    False for a class that cannot be built from its options: nothing is known about it.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = held[0].device if held else None
    few: list[list[Tensor]] = []
    more: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        kinds = sorted({parameter.ndim for parameter in group["params"]}) or [2]
        # Some options (capturable) are for an accelerator alone.
        few.append(
            [torch.ones((4, 3, *[2] * n)[:n], dtype=torch.float64, device=device) for n in kinds]
        )
        more.append([*few[-1], *few[-1]])

    def gradients(groups: Sequence[Sequence[Tensor]], step: int) -> list[list[Tensor]]:
        # The others' gradients are larger, and more so with each step.
        return [
            [
                _drawn(tensor.shape, 100 * step + i).to(tensor.device)
                * (1.0 if i < len(own) else 10.0**step)
                for i, tensor in enumerate(group)
            ]
            for group, own in zip(groups, few, strict=True)
        ]

    try:
        alone = _updates(optimizer, few, partial(gradients, few))
        together = _updates(optimizer, more, partial(gradients, more))
        return any(
            _difference(a, b) > TOLERANCE
            for one, both in zip(alone, together, strict=True)
            for a, b in zip(one, both, strict=False)
        )
    except Exception:
        return False


def _problem_on_shards(optimizer: Optimizer, mesh: DeviceMesh, where: str) -> str:
    """Compare trial steps on the shards of a mesh with the same steps on whole tensors.

    Returns:
        Why they are wrong; empty if they are equal, or nothing is known about the class.
    """
    name = type(optimizer).__name__
    groups = [_examples(group["params"], mesh) for group in optimizer.param_groups]
    starts = [[_filled(p, i) for i, p in enumerate(group)] for group in groups]
    drawn = [
        [[_filled(p, 100 * step + i) for i, p in enumerate(group)] for group in groups]
        for step in range(1, TRIAL_STEPS + 1)
    ]
    whole = [[[_gathered(t) for t in group] for group in each] for each in (starts, *drawn)]
    try:
        wanted = _updates(optimizer, whole[0], lambda step: whole[step])
    except Exception:
        return ""
    try:
        got = _updates(optimizer, starts, lambda step: drawn[step - 1])
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"{name} cannot step the parameters that {where} shards over ranks ({first}): {WHOLE}"
        )
    off = max(
        _difference(a, _gathered(b))
        for one, other in zip(wanted, got, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    muon = any("muon" in kind.__name__.lower() for kind in type(optimizer).__mro__)
    if not off <= (MUON_TOLERANCE if muon else TOLERANCE):
        return (
            f"{name} takes other steps on the parameters that {where} shards over ranks than on "
            f"whole ones (off by {off:.1g} in a trial): {WHOLE}"
        )
    return ""


def _examples(parameters: Iterable[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """The smallest parameter on ``mesh`` of each number of dimensions and placement, in order."""
    listed = [p for p in parameters if isinstance(p, DTensor) and p.device_mesh == mesh]
    found: dict[Any, int] = {}
    for place in sorted(range(len(listed)), key=lambda place: listed[place].numel()):
        found.setdefault((listed[place].ndim, listed[place].placements), place)
    return [listed[place] for place in sorted(found.values())]


def _drawn(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _filled(like: Tensor, seed: int) -> Tensor:
    """Random numbers in the shape and placement of ``like``; the same on its replicas."""
    if not isinstance(like, DTensor):
        return _drawn(like.shape, seed).to(like.device)
    mesh = like.device_mesh
    for axis, (placement, at) in enumerate(
        zip(like.placements, mesh.get_coordinate() or (), strict=True)
    ):
        seed += 10_000 * (axis + 1) * at * (not placement.is_replicate())
    return DTensor.from_local(
        _drawn(like.to_local().shape, seed).to(mesh.device_type),
        mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _updates(
    optimizer: Optimizer,
    starts: Sequence[Sequence[Tensor]],
    gradients: Callable[[int], Sequence[Sequence[Tensor]]],
) -> list[list[Tensor]]:
    """What a new optimizer with the options of ``optimizer`` adds to tensors in a few steps.

    Args:
        optimizer: the class and the options.
        starts: the values of the parameters of each group.
        gradients: those of a step, from 1 on.
    """
    groups = [[nn.Parameter(t.clone()) for t in group] for group in starts]
    kind = type(optimizer)
    options = vars(optimizer) | optimizer.defaults
    accepted = [name for name in inspect.signature(kind).parameters if name in options]
    # A schedule may have set the learning rate to 0.
    rate = {} if options.get("lr") is None else {"lr": 0.01}
    given = [
        {**group, **rate, "params": parameters}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    made = kind(given, **{name: options[name] for name in accepted} | rate)
    for step in range(1, TRIAL_STEPS + 1):
        for parameters, own in zip(groups, gradients(step), strict=True):
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = gradient.clone()
        made.step()
    return [
        [parameter.detach() - start for parameter, start in zip(parameters, own, strict=True)]
        for parameters, own in zip(groups, starts, strict=True)
    ]


def _difference(wanted: Tensor, got: Tensor) -> float:
    """The relative difference of two updates, by their L2 norms."""
    if not wanted.numel():
        return 0.0
    off = float((wanted - got).norm())
    return off / max(float(wanted.norm()), 1e-30) if off else 0.0
