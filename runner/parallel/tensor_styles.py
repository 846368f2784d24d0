"""Placements of each style of tensor parallelism, and the style of each module by a plan.

Names and meaning of the styles: :data:`runner.config.tensor_plan.STYLES`.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from runner.config.tensor_plan import EXPERT_STYLES, STYLES

HEADS = ("heads", "num_heads", "n_head", "num_attention_heads", "num_key_value_heads")
"""Attributes in which models keep the number of heads of an attention."""


class PlanError(ValueError):
    """A plan cannot be applied to a model."""


@dataclass(frozen=True)
class Style:
    kind: type[nn.Module] = nn.Module
    shards: Mapping[str, Shard] = field(default_factory=dict)  # by the name of a parameter
    sequence: bool = False
    """Whether replicated parameters get partial gradients if the sequence is sharded."""
    partial: bool = False
    """Whether they always get partial gradients on each rank."""

    def placement(self, key: str) -> Placement:
        return self.shards.get(key, Replicate())


_ROWS = {"weight": Shard(0), "bias": Shard(0)}
UNPLANNED = Style()
"""Replicated parameters: those of modules that no pattern matches, and of some styles."""

PLACED: Mapping[str, Style] = {
    "colwise": Style(nn.Linear, _ROWS),
    "rowwise": Style(nn.Linear, {"weight": Shard(1)}, sequence=True),
    "rowwise_split_input": Style(nn.Linear, {"weight": Shard(1)}, sequence=True),
    "colwise_rep": Style(nn.Linear, _ROWS),
    "colwise_gather_output": Style(nn.Linear, _ROWS),
    "embedding_rowwise": Style(nn.Embedding, _ROWS),
    "replicated_with_grad_allreduce": Style(partial=True),
    "sequence_parallel": Style(sequence=True),
}
"""Styles that shard parameters, or make their gradients partial."""


def plan_of(model: nn.Module, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the style of each planned module by its qualified name."""
    plan = given if given is not None else own_plan(model)
    if not plan:
        raise PlanError(
            f"{type(model).__name__} has no plan for tensor parallelism: give plugin.tp_plan a "
            'YAML file with lines such as "blocks.*.mlp.up: colwise"'
        )
    modules = {name: module for name, module in model.named_modules() if name}
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise PlanError(f"{pattern}: unknown style {style!r}; use {', '.join(STYLES)}")
        hits = fnmatch.filter(modules, pattern)
        if not hits:
            raise PlanError(f"{pattern} matches no module; {_near(pattern, list(modules))}")
        for name in hits:
            _check_kind(name, modules[name], style)
        styles.update(dict.fromkeys(hits, style))
    _check_ties(model, styles)
    return styles


def own_plan(model: nn.Module) -> dict[str, str]:
    """Return the model's own ``tp_plan``, without what it plans for no module of this model.

    Plans of transformers are for all models of a family; stacked experts stay whole.
    """
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not hasattr(model, "supports_tp_plan"):  # It is not from transformers.
        return plan
    names = [name for name, _ in model.named_modules()]
    return {
        pattern: style
        for pattern, style in plan.items()
        if style not in EXPERT_STYLES and fnmatch.filter(names, pattern)
    }


def whole_experts(model: nn.Module) -> list[str]:
    """Return the modules whose stacked experts a plan of transformers splits, and this one not."""
    plan = getattr(model, "tp_plan", None) or {}
    names = [name for name, _ in model.named_modules()]
    patterns = [pattern for pattern, style in plan.items() if style in EXPERT_STYLES]
    return [name for pattern in patterns for name in fnmatch.filter(names, pattern)]


def style_of(styles: Mapping[str, str], name: str) -> Style:
    return PLACED.get(styles.get(name, ""), UNPLANNED)


def _check_kind(name: str, module: nn.Module, style: str) -> None:
    kind, made = PLACED.get(style, UNPLANNED).kind, type(module).__name__
    if kind is nn.Module:
        return
    fit = f"torch.nn.{kind.__name__}"
    if not isinstance(module, kind):
        raise PlanError(f"{name}: {style} is for {fit}, not for {made}")
    if type(module).forward is not kind.forward:
        raise PlanError(
            f"{name}: {style} would replace what {made}.forward does by what {fit} does: leave it "
            f"out of the plan, or plan a plain {fit} inside it"
        )
    if module._parameters.get("weight") is None:
        raise PlanError(
            f"{name}: {style} splits a weight, but that of this {made} is computed from others: "
            "leave it out of the plan"
        )
    if (
        isinstance(module, nn.Embedding)
        and style == "embedding_rowwise"
        and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse)
    ):
        raise PlanError(f"{name}: {style} takes no max_norm, scale_grad_by_freq or sparse")


def _check_ties(model: nn.Module, styles: Mapping[str, str]) -> None:
    seen: dict[int, tuple[str, Placement]] = {}
    for prefix, module in model.named_modules():
        style = style_of(styles, prefix)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, placement = f"{prefix}.{key}" if prefix else key, style.placement(key)
            first, known = seen.setdefault(id(parameter), (name, placement))
            if known != placement:
                raise PlanError(
                    f"{name} is tied to {first}, which is split another way ({known}, not "
                    f"{placement}): give both the same split, or untie them"
                )


def _near(pattern: str, names: list[str]) -> str:
    """Suggest the nearest patterns, in which ``*`` replaces numbers."""
    patterns = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    near = difflib.get_close_matches(pattern, patterns, n=3, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(patterns[:8])}"


def check_heads(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
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
                    f"divide: choose a tp_size that divides {heads}"
                )


def check_sequence(styles: Mapping[str, str]) -> None:
    """Refuse a plan that splits no sequence: attention would see later positions."""
    if "split_sequence" not in styles.values():
        raise PlanError(
            "the plan for tensor parallelism splits no sequence: give the style split_sequence to "
            "the module after which activations are to be split (such as the dropout after the "
            "embedding), or choose sequence_parallel=false"
        )
