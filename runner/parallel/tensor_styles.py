"""Plans for tensor parallelism: placements of each style, and a check of what a plan leaves out.

A replicated parameter that works on the output of a sharded layer (a norm of single heads) has only
a part of its gradient on each rank. Without the check its replicas would silently diverge.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from runner.config.notation import first_few
from runner.config.problem import did_you_mean
from runner.gradients.shard import local

# Attributes in which models keep the number of heads of an attention.
HEADS = ("heads", "num_heads", "n_head", "num_attention_heads", "num_key_value_heads")


class PlanError(ValueError):
    """A plan cannot be applied to a model; ``argument`` of the plugin is to be changed."""

    def __init__(self, message: str, argument: str = "tp_plan") -> None:
        super().__init__(message)
        self.argument = argument


@dataclass(frozen=True)
class Style:
    """How a module of a class is split: its parameters, and the sequences that it reads."""

    kind: type[nn.Module] = nn.Module
    shards: Mapping[str, Shard] = field(default_factory=dict)  # by the name of a parameter
    sequence: bool = False  # replicated parameters get partial gradients if the sequence is sharded
    partial: bool = False  # they always get partial gradients on each rank

    def placement(self, key: str) -> Placement:
        return self.shards.get(key, Replicate())


_ROWS = {"weight": Shard(0), "bias": Shard(0)}
UNPLANNED = Style()  # replicated parameters, also of modules that no pattern matches

PLACED = {
    "colwise": Style(nn.Linear, _ROWS),
    "rowwise": Style(nn.Linear, {"weight": Shard(1)}, sequence=True),
    "rowwise_split_input": Style(nn.Linear, {"weight": Shard(1)}, sequence=True),
    "colwise_rep": Style(nn.Linear, _ROWS),
    "colwise_gather_output": Style(nn.Linear, _ROWS),
    "embedding_rowwise": Style(nn.Embedding, _ROWS),
    "replicated_with_grad_allreduce": Style(partial=True),
    "sequence_parallel": Style(sequence=True),
}  # styles that shard parameters, or make their gradients partial
STYLES = (*PLACED, "split_sequence", "whole_sequence")
EXPERT_STYLES = ("moe_tp_experts", "moe_identity_expert")
"""Styles of transformers for modules with stacked experts, which stay whole on each rank."""


def checked_plan(
    model: nn.Module, given: Mapping[str, str] | None, ranks: int, sequence: bool
) -> dict[str, str]:
    """Return the style of each planned module by its qualified name, for ``ranks`` ranks."""
    styles = plan_of(model, given)
    check_heads(model, styles, ranks)
    if sequence and "split_sequence" not in styles.values():  # attention would see later positions
        raise PlanError(
            "the plan for tensor parallelism splits no sequence: give the style split_sequence to "
            "the module after which activations are to be split (such as the dropout after the "
            "embedding), or choose sequence_parallel=false",
            "sequence_parallel",
        )
    return styles


def plan_of(model: nn.Module, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the style of each planned module by its name.

    Args:
        model: the whole model.
        given: styles by patterns of names; None for the model's own plan.

    Raises:
        PlanError: there is no plan, or it does not fit the model.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    plan = own_plan(model) if given is None else given
    if not plan:
        raise PlanError(
            f"{type(model).__name__} has no plan for tensor parallelism: give one by patterns of "
            "modules, such as plugin.tp_plan={blocks.*.up:colwise,blocks.*.down:rowwise}, or a file"
        )
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            near = did_you_mean(style, STYLES)
            raise PlanError(f"{pattern}: unknown style {style!r}; use {', '.join(STYLES)}{near}")
        hits = fnmatch.filter(modules, pattern)
        if not hits:
            patterns = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules)
            raise PlanError(f"{pattern} matches no module; there are {first_few([*patterns], 8)}")
        for name in hits:
            _check_kind(name, modules[name], style)
        styles.update(dict.fromkeys(hits, style))
    _check_ties(model, styles)
    return styles


def own_plan(model: nn.Module) -> dict[str, str]:
    """Return the model's own ``tp_plan``, without modules that others of its family have."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not hasattr(model, "supports_tp_plan"):  # It is not from transformers.
        return plan
    names = [name for name, _ in model.named_modules()]
    return {
        pattern: style
        for pattern, style in plan.items()
        if style not in EXPERT_STYLES and fnmatch.filter(names, pattern)
    }


def style_of(styles: Mapping[str, str], name: str) -> Style:
    """Return the style of a module by its name; unplanned modules are replicated."""
    return PLACED.get(styles.get(name, ""), UNPLANNED)


def _check_kind(name: str, module: nn.Module, style: str) -> None:
    kind = PLACED.get(style, UNPLANNED).kind
    if kind is nn.Module:
        return
    expected = f"torch.nn.{kind.__name__}"
    actual = type(module).__name__
    if not isinstance(module, kind):
        raise PlanError(f"{name}: {style} is for {expected}, not for {actual}")
    options = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if vars(module).get(key)]
    has_own_forward = type(module).forward is not kind.forward
    if has_own_forward or module._parameters.get("weight") is None or options:
        described = " ".join(["this", actual, *options])
        raise PlanError(
            f"{name}: {style} computes as a plain {expected}, and {described} "
            f"does not: leave it out of the plan, or plan a plain {expected} inside it"
        )


def _check_ties(model: nn.Module, styles: Mapping[str, str]) -> None:
    seen: dict[int, tuple[str, Placement]] = {}
    for prefix, module in model.named_modules():
        style = style_of(styles, prefix)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            placement = style.placement(key)
            first, first_placement = seen.setdefault(id(parameter), (name, placement))
            if first_placement != placement:
                raise PlanError(
                    f"{name} is tied to {first}, which is split another way "
                    f"({first_placement}, not {placement}): give both the same split, or untie them"
                )


def check_heads(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    """Refuse attention whose heads the ranks cannot share evenly, by a PlanError."""
    for name, module in model.named_modules():
        children = [child for child, _ in module.named_children()]
        split = any(styles.get(f"{name}.{child}") == "colwise" for child in children)
        # transformers keeps the number of heads in the configuration of the model.
        attends = any(child.endswith(("q_proj", "query")) for child in children)
        config = getattr(module, "config", None) if attends else None
        for attribute in HEADS if split else ():
            heads = getattr(module, attribute, None) or getattr(config, attribute, None)
            if isinstance(heads, int) and heads % ranks:
                raise PlanError(
                    f"{name} has {heads} heads ({attribute}), which tp_size {ranks} does not "
                    f"divide: choose a tp_size that divides {heads}",
                    "tp_size",
                )


TOLERANCE = (0.01, 0.05)  # relative difference that rounding explains, also in half precision
LEAST = 1e-3  # share of the largest norm below which a gradient may be rounding alone


def replicated(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters that all tensor-parallel ranks hold, by name."""
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and parameter.placements[axes.index("tp")].is_replicate():
                parameters[name] = parameter
    return parameters


class ReplicaCheck:
    """Compares final gradients over ranks in the first step; every rank calls it once a step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.waiting = dict(parameters)
        self.group = group
        self._largest = 0.0

    @torch.no_grad()
    def __call__(self) -> None:
        if not self.waiting:
            return
        # On the host, in float64.
        on_this_rank = torch.stack([_fingerprint(p) for p in self.waiting.values()])
        rows = [torch.empty_like(on_this_rank) for _ in range(self.group.size())]
        dist.all_gather(rows, on_this_rank, group=self.group)
        prints = torch.stack(rows)
        if not bool(prints.isfinite().all()):
            return  # An overflow: checked in the next step.
        sizes: list[float] = prints[..., 0].amax(0).tolist()
        spread: list[float] = (prints.amax(0) - prints.amin(0)).amax(1).tolist()
        first = self._largest == 0
        self._largest = max(self._largest, *sizes)
        if self._largest == 0:
            return
        compared = list(zip(self.waiting.items(), sizes, spread, strict=True))
        differing = []
        for (name, parameter), size, difference in compared:
            tolerance = TOLERANCE[parameter.dtype.itemsize < 4]
            if difference > tolerance * max(size, LEAST * self._largest):
                differing.append(name)
        if differing:
            names = first_few(differing, 8)
            raise PlanError(
                f"{names}: the gradient differs between tensor ranks, each of which "
                "sees a part of what this parameter works on: in the plan, give its module the "
                "style replicated_with_grad_allreduce (if the ranks draw different random numbers, "
                "seed them alike)"
            )
        # A later layer that starts at zero makes gradients zero, but only in the first step.
        self.waiting = {name: p for (name, p), size, _ in compared if first and size == 0}


def _fingerprint(parameter: nn.Parameter) -> Tensor:
    """Return the gradient's norm, and its dot product with a random vector, equal on all ranks."""
    if parameter.grad is None:
        return torch.zeros(2, dtype=torch.float64)
    gradient = local(parameter.grad)
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    same = torch.Generator(gradient.device).manual_seed(0)
    drawn = torch.empty_like(gradient).normal_(generator=same)
    return torch.stack([gradient.norm(), (gradient * drawn).sum()]).cpu().double()
