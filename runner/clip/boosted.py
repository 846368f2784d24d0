"""Which optimizer clips which boosted model, so that one call can clip any model.

Gradients of a boosted model have to be synchronised and unscaled before they are clipped. Its
optimizer does both, and registers here the modules and parameters that it clips.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from runner.clip.decision import Decision
from runner.clip.layout import Layout
from runner.clip.mode import ClipMode


class Clipper(Protocol):
    """Clips the gradients of all modules that were boosted together."""

    layout: Layout

    def begin_clip(self) -> None:
        """Synchronise and unscale the gradients."""

    def clip(self, mode: ClipMode) -> Decision:
        """Synchronise and unscale the gradients, and clip them by ``mode``."""


_clippers = WeakIdKeyDictionary()
"""For modules and parameters a weak reference to their clipper, or "none" if they have none."""


def register(clipper: Clipper | None, owned: Iterable[nn.Module | Tensor]) -> None:
    """Register which clipper clips modules and parameters."""
    known = "none" if clipper is None else ref(clipper)
    for each in owned:
        _clippers[each] = known


def clip_boosted(given: nn.Module | list[Tensor], mode: ClipMode) -> Decision | None:
    """Clip a module or parameters of a boosted model."""
    for module in given.modules() if isinstance(given, nn.Module) else ():
        if isinstance(module, FSDPModule):
            # A forward pass after the backward pass may have gathered other parameters than those
            # that have the gradients.
            module.reshard()
    parameters = list(given.parameters()) if isinstance(given, nn.Module) else given
    found = [_clipper_of(parameter) for parameter in parameters]
    if isinstance(given, nn.Module) and given in _clippers:
        found.append(_clipper_of(given))
    clippers = {id(clipper): clipper for clipper in found if clipper is not None}
    if not clippers:
        return None
    clipper = next(iter(clippers.values()))
    if clipper == "none":
        raise ValueError(
            "this model was boosted without its optimizer, which synchronises gradients before "
            "they are clipped: booster.boost(model, optimizer)"
        )
    if len(clippers) > 1 or any(each is None for each in found):
        raise ValueError(
            "these parameters are not all of one boosted model: clip each boosted model by itself, "
            "or boost them together: booster.boost([first, second], optimizer)"
        )
    shards = {id(shard.param): shard for shard in clipper.layout.shards}
    if any(id(parameter) not in shards for parameter in parameters):
        raise ValueError(
            "these parameters were replaced when the model was boosted: give the boosted model, "
            "or its parameters() of now"
        )
    asked = {id(parameter) for parameter in parameters}
    if all(key in asked or not shard.param.requires_grad for key, shard in shards.items()):
        mode.bind(clipper.layout)
        return clipper.clip(mode)
    if clipper.layout.group is not None:
        raise ValueError(
            "these are some of the parameters that were boosted together, whose gradients lie on "
            "several ranks: clip all of them, by apply_gradient_clipping(boosted_model, ...) or by "
            "optimizer.clip_grad_by_norm(max_norm)"
        )
    clipper.begin_clip()
    return None


def _clipper_of(owned: nn.Module | Tensor) -> Clipper | Literal["none"] | None:
    """Return the clipper of a part of a boosted model; None for anything else."""
    known: ReferenceType[Clipper] | Literal["none"] | None
    known = _clippers.get(owned)  # type: ignore[no-untyped-call]
    return known() if isinstance(known, ReferenceType) else known
