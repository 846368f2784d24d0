"""Parts of a model of transformers, by its own plan for pipelines (``base_model_pp_plan``).

The plan names the modules before the layers, the list of layers, and those after it. A part runs
the forward pass of the model in which the modules of all other parts return their input, so that
masks and position embeddings are those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Listed = list[tuple[tuple[str, ...], Callable[[Tensor], Tensor]]]
"""For each part the qualified names of its modules, and its function of one tensor."""


class _Skipped(nn.Module):
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


def planned_parts(model: nn.Module) -> Listed:
    """Return the parts of a model of transformers in order; none if it has no such plan."""
    planned = {*(getattr(model, "_pp_plan", None) or {})}
    names = [name for name, _ in model.named_modules() if name in planned]
    lists = [name for name in names if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1:
        return []
    start = names.index(lists[0])
    before, after = names[:start], names[start + 1 :]
    layers = [f"{lists[0]}.{i}" for i, _ in model.get_submodule(lists[0]).named_children()]
    everything = [*before, *layers, *after]
    if not before or not after:
        return []
    inside: Any = model.base_model
    _require_nothing_between(model, inside, everything)

    def enter(tokens: Tensor) -> Tensor:
        with _skipping(model, [*layers, *after]):
            return _hidden(inside(input_ids=tokens, use_cache=False))

    def pass_on(layer: str, hidden: Tensor) -> Tensor:
        with _skipping(model, [name for name in everything if name != layer]):
            return _hidden(inside(inputs_embeds=hidden, use_cache=False))

    def leave(hidden: Tensor) -> Tensor:
        with _skipping(model, [*before, *layers]):
            outputs: Any = model(inputs_embeds=hidden, use_cache=False)
            logits: Tensor | None = getattr(outputs, "logits", None)
            return _hidden(outputs) if logits is None else logits

    return [
        (tuple(before), enter),
        *(((name,), partial(pass_on, name)) for name in layers),
        (tuple(after), leave),
    ]


def _hidden(outputs: Any) -> Tensor:
    hidden: Tensor = outputs.last_hidden_state
    return hidden


@contextmanager
def _skipping(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let the modules called ``names`` return their input."""
    skipped = _Skipped()
    places = []
    for name in names:
        owner, _, key = name.rpartition(".")
        modules = model.get_submodule(owner)._modules
        places.append((modules, key, modules[key]))
    try:
        for modules, key, _ in places:
            modules[key] = skipped
        yield
    finally:
        for modules, key, module in places:
            modules[key] = module


@torch.no_grad()
def _require_nothing_between(model: nn.Module, inside: nn.Module, names: Sequence[str]) -> None:
    """Refuse a model that changes hidden states outside of the modules of its plan."""
    weight = inside.get_input_embeddings().weight  # type: ignore[operator]
    if weight.is_meta:
        return
    hidden = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device, dtype=weight.dtype)
    hidden = hidden.view(1, 2, -1)
    with _skipping(model, names):
        if not torch.equal(_hidden(inside(inputs_embeds=hidden, use_cache=False)), hidden):
            raise ValueError("its forward computes between the modules of its plan for pipelines")
