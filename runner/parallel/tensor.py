"""Tensor parallelism: single weights split over ranks, by a plan of module patterns.

Shoeybi et al. 2019 (arXiv 1909.08053). A plan maps patterns of module names to styles, under the
names that transformers' plans use. Parameters become DTensors, which say where their parts lie; the
layers compute on plain local tensors, with one collective where the parts meet. Splits need not be
even.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn import functional as F

from runner.parallel.collectives import copy_to, gather, scatter, span, sum_of
from runner.parallel.hooks import carry_over, gradient_hooks

SEQUENCE = 1
"""Dimension of positions in activations [B, T, width]."""

HEADS = ("heads", "num_heads", "n_head", "num_attention_heads", "num_key_value_heads")
"""What models call the number of heads of an attention."""


class PlanError(ValueError):
    """A model cannot be split as a plan says."""


@dataclass(frozen=True)
class Split:
    """What a style needs to know when its module runs.

    Attributes:
        group: the ranks that share the module.
        sequence: whether activations between split layers are split along the sequence.
    """

    group: dist.ProcessGroup
    sequence: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Split:
        """A copy of a model works on the same ranks."""
        return self

    def enter(self, hidden: Tensor) -> Tensor:
        """The whole input of a layer of which each rank computes a part."""
        if self.sequence:
            length = hidden.shape[SEQUENCE] * self.group.size()
            return gather(hidden, SEQUENCE, length, self.group, sums=True)
        return copy_to(hidden, self.group)

    def leave(self, parts: Tensor) -> Tensor:
        """The sum of the ranks' parts of an output."""
        if self.sequence:
            return scatter(parts, SEQUENCE, self.group, sums=True)
        return sum_of(parts, self.group)


_WHOLE = Replicate()
Run = Callable[..., Any]
"""Runs a module: given the split, the module, its own forward, and the arguments."""


@dataclass(frozen=True)
class Style:
    """How one kind of module is split.

    Attributes:
        run: what it does instead of its own forward.
        kinds: modules that it is for.
        weight: placement of the weight.
        bias: placement of the bias.
        own: whether its parameters see a part of the sequence each, so that their gradients are
            partial sums where activations are split along it.
        summed: whether their gradients are partial sums in any case.
    """

    run: Run
    kinds: tuple[type[nn.Module], ...] = (nn.Module,)
    weight: Placement = _WHOLE
    bias: Placement = _WHOLE
    own: bool = False
    summed: bool = False

    def placement(self, key: str) -> Placement:
        """Where the parameter of that name in its module lies."""
        return {"weight": self.weight, "bias": self.bias}.get(key, _WHOLE)


def _plain(split: Split, module: nn.Module, forward: Run, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _colwise(split: Split, module: nn.Linear, forward: Run, hidden: Tensor) -> Tensor:
    return F.linear(split.enter(hidden), module.weight, module.bias)


def _colwise_rep(split: Split, module: nn.Linear, forward: Run, hidden: Tensor) -> Tensor:
    part = _colwise(split, module, forward, hidden)
    return gather(part, -1, module.out_features, split.group, sums=False)


def _rowwise(split: Split, module: nn.Linear, forward: Run, hidden: Tensor) -> Tensor:
    summed = split.leave(F.linear(hidden, module.weight))
    return summed if module.bias is None else summed + module.bias


def _embedding(split: Split, module: nn.Embedding, forward: Run, tokens: Tensor) -> Tensor:
    start, length = span(module.num_embeddings, split.group.size(), split.group.rank())
    if length == 0:
        nothing = tokens.new_zeros((*tokens.shape, module.embedding_dim), dtype=module.weight.dtype)
        return sum_of(nothing + module.weight.sum(), split.group)
    here = (tokens >= start) & (tokens < start + length)
    # What is in no rank's part stays outside of each, so that torch refuses it.
    elsewhere = ~here & (tokens >= 0) & (tokens < module.num_embeddings)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - start if start <= padding < start + length else None
    rows = F.embedding((tokens - start).masked_fill(elsewhere, 0), module.weight, padding)
    return sum_of(rows * here.unsqueeze(-1), split.group)


def _split_sequence(
    split: Split, module: nn.Module, forward: Run, *args: Any, **kwargs: Any
) -> Any:
    output = forward(*args, **kwargs)
    return scatter(output, SEQUENCE, split.group, sums=False) if split.sequence else output


def _whole_sequence(split: Split, module: nn.Module, forward: Run, hidden: Tensor) -> Tensor:
    if not split.sequence:
        output: Tensor = forward(hidden)
        return output
    length = hidden.shape[SEQUENCE] * split.group.size()
    whole = gather(hidden, SEQUENCE, length, split.group, sums=False)
    return scatter(forward(whole), SEQUENCE, split.group, sums=False)


_LINEAR = (nn.Linear,)
STYLES: Mapping[str, Style] = {
    "colwise": Style(_colwise, _LINEAR, weight=Shard(0), bias=Shard(0)),
    "rowwise": Style(_rowwise, _LINEAR, weight=Shard(1), own=True),
    "colwise_rep": Style(_colwise_rep, _LINEAR, weight=Shard(0), bias=Shard(0)),
    "embedding_rowwise": Style(_embedding, (nn.Embedding,), weight=Shard(0)),
    "replicated_with_grad_allreduce": Style(_plain, summed=True),
    "sequence_parallel": Style(_plain, own=True),
    "split_sequence": Style(_split_sequence),
    "whole_sequence": Style(_whole_sequence),
}
"""``colwise``: output features over ranks. ``rowwise``: input features over ranks, outputs summed.
``colwise_rep``: like colwise, outputs gathered. ``embedding_rowwise``: the vocabulary over ranks.
``replicated_with_grad_allreduce``: whole on each rank, each of which works on a part (a norm of
single heads); their gradients are summed. The last three matter where activations are split along
the sequence: ``sequence_parallel`` works on a part of it, after ``split_sequence`` it is split,
``whole_sequence`` needs all of it."""


def plan_of(model: nn.Module, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The style of each module that a plan names, by the module's qualified name.

    Args:
        model: the whole model.
        given: patterns (``*`` stands for anything) and styles; by default the model's own
            ``tp_plan``. Of two patterns that match a module the last one counts.

    Raises:
        PlanError: there is no plan, a pattern matches nothing, a style is unknown or unfit, or
            parameters that are one would be split in different ways.
    """
    plan = given if given is not None else getattr(model, "tp_plan", None)
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


def _style_of(styles: Mapping[str, str], name: str) -> Style | None:
    return STYLES.get(styles.get(name, ""))


def _check_kind(name: str, module: nn.Module, style: str) -> None:
    kinds, made = STYLES[style].kinds, type(module).__name__
    fit = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds)
    if not isinstance(module, kinds):
        raise PlanError(f"{name}: {style} is for {fit}, not for {made}")
    if kinds == (nn.Module,):
        return
    if all(type(module).forward is not kind.forward for kind in kinds):
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
        style = _style_of(styles, prefix) or Style(_plain)
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
    """What the user may have meant: the nearest names, with numbers as ``*``."""
    words = ([("*" if part.isdigit() else part) for part in name.split(".")] for name in names)
    patterns = list(dict.fromkeys(".".join(parts) for parts in words))
    near = difflib.get_close_matches(pattern, patterns, n=3, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(patterns[:8])}"


def check_heads(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    """Refuse to cut an attention head in two.

    Args:
        model: the whole model.
        styles: from :func:`plan_of`.
        ranks: parts of each split weight.

    Raises:
        PlanError: the heads of an attention whose projections are split do not divide by ``ranks``.
    """
    for name, module in model.named_modules():
        split = any(
            styles.get(f"{name}.{child}") == "colwise" for child, _ in module.named_children()
        )
        for word in HEADS if split else ():
            heads = getattr(module, word, None)
            if isinstance(heads, int) and heads % ranks:
                raise PlanError(
                    f"{name} has {heads} heads ({word}), which tp_size {ranks} does not divide: "
                    f"choose a tp_size that divides {heads}"
                )


def check_sequence(styles: Mapping[str, str]) -> None:
    """Refuse to split activations along the sequence by a plan that never does.

    Layers would gather parts that are each the whole, and attention would see what is to come.

    Args:
        styles: from :func:`plan_of`.

    Raises:
        PlanError: no module has the style ``split_sequence``.
    """
    if "split_sequence" not in styles.values():
        raise PlanError(
            "the plan for tensor parallelism splits no sequence: give the style split_sequence to "
            "the module after which activations are to be split (such as the dropout after the "
            "embedding), or choose sequence_parallel=false"
        )


def parallelize(
    model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh, *, sequence: bool
) -> None:
    """Split the modules of ``model`` in place; parameters of all others are repeated on each rank.

    Args:
        model: what this rank has of the model; the same, also in its weights, on all ranks of
            ``mesh``.
        styles: from :func:`plan_of`.
        mesh: one axis of ranks.
        sequence: split activations between split layers along the sequence.
    """
    group = mesh.get_group()
    # Inside of these all ranks have all of the sequence.
    whole = tuple(f"{name}." for name, style in styles.items() if style == "whole_sequence")
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, module in model.named_modules():
        style = _style_of(styles, name)
        if style is None and next(module.parameters(), None) is None:
            continue
        style = style or Style(_plain)
        own = [key for key, value in module._parameters.items() if value is not None]
        for key in own:
            _distribute(module, key, mesh, style.placement(key), made)
        split = Split(group, sequence and not name.startswith(whole))
        partial_sums = style.summed or (split.sequence and style.own)
        # A row-wise weight sees the whole sequence; its bias is added to a part of it.
        parts = {
            k for k in own if partial_sums and not (k == "weight" and style.weight == Shard(1))
        }
        called = f"{name} ({type(module).__name__})" if name else type(module).__name__
        module.forward = partial(_run, called, style.run, split, module, module.forward, parts)


def _distribute(
    module: nn.Module,
    key: str,
    mesh: DeviceMesh,
    placement: Placement,
    made: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    """Replace a parameter by its DTensor; tied ones, met again, by the same one.

    Args:
        module: the owner.
        key: of the parameter in its module.
        mesh: one axis of ranks.
        placement: along it.
        made: whole parameters and what replaced them, by the id of the whole one, which is kept so
            that no other gets its id.
    """
    parameter = module._parameters[key]
    assert parameter is not None
    if id(parameter) not in made:
        # The ranks have the same weights already: each cuts its own part.
        spread = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        replaced = nn.Parameter(spread, requires_grad=parameter.requires_grad)
        if (hooks := gradient_hooks(parameter)) is not None:
            carry_over(hooks, replaced)
        made[id(parameter)] = parameter, replaced
    module._parameters[key] = made[id(parameter)][1]


def _run(
    called: str,
    run: Run,
    split: Split,
    module: nn.Module,
    forward: Run,
    parts: set[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    try:
        with _local_parameters(module, parts):
            return run(split, module, forward, *args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise PlanError(
            f"{called} computes with a parameter of a module inside it, which under tensor "
            "parallelism only that module's own forward can: let it call the module (of a tied "
            "embedding: a torch.nn.Linear that has the same weight)"
        ) from error


@contextmanager
def _local_parameters(module: nn.Module, parts: set[str]) -> Iterator[None]:
    """The module's own parameters as plain local tensors, through which gradients flow.

    Args:
        module: of which the parameters are DTensors, at other times.
        parts: names of those of which each rank computes a part of the gradient.
    """
    own: dict[str, Any] = module._parameters
    held = dict(own)
    try:
        for name, parameter in held.items():
            if isinstance(parameter, DTensor):
                summed = [Partial()] if name in parts else None
                own[name] = parameter.to_local(grad_placements=summed)
        yield
    finally:
        own.update(held)
