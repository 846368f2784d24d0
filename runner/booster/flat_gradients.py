"""One buffer for the gradients of a model with very many small parameters.

Most of the time of a pass over 2,000 gradients of 64 elements is spent on tensors, not on elements.
Here such gradients are moved to one buffer after the backward pass, and are measured, unscaled and
clipped as one tensor.

They are moved once a step, by one copy. If they were in the buffer before the backward pass, it
would add to each of them in place, which takes longer than the buffer saves.

The buffer stays allocated between steps. It is as large as the gradients in it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, compress, repeat
from operator import attrgetter, is_, methodcaller, or_
from typing import Literal

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from runner.booster.plugin import Plugin, SinglePlugin, TorchDDPPlugin
from runner.clip import Layout, ParamShard

FEWEST = 2_000
"""Number of small parameters from which ``auto`` uses a buffer. With fewer, moving the gradients
takes as long as the buffer saves."""

SMALL = 8_192
"""Largest number of elements of a gradient in the buffer: larger ones take longer to copy than the
buffer saves."""

Choice = Literal["auto"] | bool

_GRADIENT, _STORAGE = attrgetter("grad"), attrgetter("layout")
_HAS_HISTORY, _USES = attrgetter("requires_grad"), methodcaller("_use_count")


class FlatGradients:
    """Keeps the gradients of small float32 parameters in one buffer.

    Call :meth:`begin_backward` before a backward pass, and :meth:`end_backward` after it to move
    the new gradients. Each is then a tensor of its own over the memory of the buffer. Further
    backward passes of the step add to it.

    What else happens to ``.grad`` is noticed. A gradient that is sparse, has a history, or is the
    user's own stays where it is. One that somebody still refers to is never written over.

    Args:
        layout: the parameters, all of them whole on this rank.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._before: list[Tensor | None] = []  # gradients before the backward pass
        self._parts: list[Tensor] | None = None
        self._writable = False
        self._used: list[bool] = []  # whether a gradient was moved to its place in this step
        self._alone, self._attached = _usual_holders()
        self._choose()

    def begin_backward(self) -> None:
        """Note which gradients there are before a backward pass."""
        self._before = self._here()

    def end_backward(self) -> None:
        """Move the gradients that the backward pass has made to the buffer."""
        before, self._before = self._before, []
        now = self._here()
        if not before or all(map(is_, before, now)):
            return
        begins = all(map(is_, before, repeat(None)))
        made = [a is None and b is not None for a, b in zip(before, now, strict=True)]
        found: list[Tensor] = list(compress(now, made))  # type: ignore[arg-type]
        del before, now  # they would count as holders
        if begins:
            self._begin_step()
        elif not self._is_free({self._alone, self._attached}):
            return
        movable = self._movable(found)
        if not all(movable):
            fits = iter(movable)
            made = [one and next(fits) for one in made]
            found = list(compress(found, movable))
        places = list(compress(self._gradients, made))
        try:
            self._copy(found, places)
            deque(map(setattr, compress(self._parameters, made), repeat("grad"), places), maxlen=0)
        except (RuntimeError, TypeError):  # a parameter has another type, shape or device now
            self._choose()
            return
        self._used = list(map(or_, self._used, made))

    @torch.no_grad()
    def _copy(self, found: list[Tensor], places: list[Tensor]) -> None:
        packed = self._contiguous and len(found) == len(self._gradients)
        if packed and all(map(Tensor.is_contiguous, found)):
            # Faster than one copy for each gradient.
            self._buffer.copy_(_flatten_dense_tensors(found))  # type: ignore[no-untyped-call]
        else:
            torch._foreach_copy_(places, found)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Context in which gradients are not replaced, so that they are looked at only once."""
        self._parts, self._writable = self._find()
        try:
            yield
        finally:
            self._parts = None

    def parts(self, *, writes: bool = False) -> list[Tensor] | None:
        """Return tensors that together hold all gradients, each element once, besides zeros.

        The same elements are at the same places on every rank and after a checkpoint, so that the
        norm has the same bits.

        Args:
            writes: whether they will be changed, which has to change the gradients.

        Returns:
            The tensors. None outside of :meth:`settled`, and where gradients have to be read one by
            one: none is in the buffer, or one is sparse; for writing also where the user has
            replaced one.
        """
        return self._parts if self._writable or not writes else None

    def unmatched(self) -> Sequence[ParamShard]:
        """Return the shards whose gradient may have other strides than the parameter."""
        if not all(map(is_, self._here(), self._gradients)):
            return self._layout.shards
        if list(map(Tensor.stride, self._parameters)) == self._strides:
            return self._outside
        self._choose()
        return self._layout.shards

    def _here(self) -> list[Tensor | None]:
        return list(map(_GRADIENT, self._parameters))

    def _choose(self) -> None:
        """Choose the parameters whose gradients are in the buffer, and make one."""
        inside = small(self._layout)
        kept = {id(shard) for shard in inside}
        self._outside = [shard for shard in self._layout.shards if id(shard) not in kept]
        self._parameters = [shard.param for shard in inside]
        self._strides = [parameter.stride() for parameter in self._parameters]
        self._contiguous = all(map(Tensor.is_contiguous, self._parameters))
        self._allocate()

    def _allocate(self) -> None:
        """Make a buffer of zeros, and a gradient in it for each parameter."""
        sizes = [parameter.numel() for parameter in self._parameters]
        like = torch.zeros(sum(sizes), device=self._layout.device)
        storage, starts = like.untyped_storage(), accumulate([0, *sizes])
        self._buffer = like
        self._gradients = [
            like.new_empty(0).set_(storage, start, parameter.size(), stride)
            for parameter, stride, start in zip(
                self._parameters, self._strides, starts, strict=False
            )
        ]
        del storage
        self._views = torch._C._storage_Use_Count(like.untyped_storage()._cdata)
        self._used = [False] * len(sizes)

    def _begin_step(self) -> None:
        if self._is_free({self._alone}):
            self._buffer.zero_()
            self._used = [False] * len(self._used)
        else:
            self._allocate()

    def _is_free(self, holders: set[tuple[int, int]]) -> bool:
        """Return whether nobody else refers to the buffer, or to a gradient in it."""
        views = torch._C._storage_Use_Count(self._buffer.untyped_storage()._cdata)
        return views == self._views and {*_holders(self._gradients)} <= holders

    def _movable(self, found: list[Tensor]) -> list[bool]:
        """Return which gradients are ordinary tensors that only their parameters refer to."""
        alone = list(map(self._attached.__eq__, _holders(found)))
        if (
            all(alone)
            and {*map(type, found)} <= {Tensor}
            and {*map(_STORAGE, found)} <= {torch.strided}
            and not any(map(_HAS_HISTORY, found))
        ):
            return alone
        plain = map(_is_dense, found)
        return [
            a and b and not g.requires_grad for a, b, g in zip(alone, plain, found, strict=True)
        ]

    @torch.no_grad()
    def _find(self) -> tuple[list[Tensor] | None, bool]:
        """Return the parts, and whether they may be changed."""
        if not self._parameters:
            return None, False
        here, buffer, writable = self._here(), self._buffer, True
        outside = [g for s in self._outside if (g := s.param.grad) is not None and g.numel()]
        if not all(map(is_, here, self._gradients)):
            if not any(map(is_, here, self._gradients)):
                return None, False
            for own, used, present in zip(self._gradients, self._used, here, strict=True):
                if present is own or (present is None and not used):
                    continue
                if present is not None and not (_is_dense(present) and present.shape == own.shape):
                    return None, False
                if writable:
                    buffer, writable = buffer.clone(), False
                place = buffer.as_strided(own.size(), own.stride(), own.storage_offset())
                place.zero_() if present is None else place.copy_(present)
        return ([buffer, *outside], writable) if all(map(_is_dense, outside)) else (None, False)


def _is_dense(gradient: Tensor) -> bool:
    return type(gradient) is Tensor and gradient.layout is torch.strided


def _holders(tensors: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Count what refers to each tensor of a list, the list included, in Python and in C++."""
    return zip(map(sys.getrefcount, tensors), map(_USES, tensors), strict=True)


def _usual_holders() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the counts of a tensor that only a list refers to, and a list and a parameter."""
    parameter = nn.Parameter(torch.zeros(1))
    listed = [torch.zeros(1)]
    (alone,) = _holders(listed)
    parameter.grad = listed[0]
    (attached,) = _holders(listed)
    return alone, attached


def of_optimizer(choice: Choice, plugin: Plugin, layout: Layout) -> FlatGradients | None:
    """Return the buffer for the gradients of an optimizer; None if there is to be none.

    Args:
        choice: whether to have a buffer; ``auto`` for one where that is possible, on a CPU, for
            :data:`FEWEST` small parameters or more.
        plugin: how the model is spread over ranks.
        layout: where the gradients live.

    Raises:
        ValueError: a buffer was asked for that is not possible, or the choice is none of these.
    """
    if choice not in ("auto", True, False):
        raise ValueError(f"flat_gradients is 'auto', True or False, not {choice!r}")
    if choice is False:
        return None
    why = refusal(plugin, layout)
    if choice is True and why:
        raise ValueError(f"flat_gradients=True: {why}")
    few = len(small(layout)) < FEWEST or layout.device.type != "cpu"
    return None if why or (choice == "auto" and few) else FlatGradients(layout)


def refusal(plugin: Plugin, layout: Layout) -> str:
    """Return why gradients cannot lie in a buffer; empty if they can."""
    if not isinstance(plugin, SinglePlugin | TorchDDPPlugin) or layout.group is not None:
        return (
            f"{type(plugin).__name__} keeps gradients in buffers of its own: use SinglePlugin or "
            "TorchDDPPlugin, or flat_gradients='auto'"
        )
    if isinstance(plugin, TorchDDPPlugin) and plugin.ddp_kwargs["gradient_as_bucket_view"]:
        return "gradients lie in DDP's buckets already: gradient_as_bucket_view=False"
    return "" if small(layout) else NOTHING_SMALL


NOTHING_SMALL = f"no parameter is a trained float32 tensor of at most {SMALL:,} elements"


def small(layout: Layout) -> list[ParamShard]:
    """Return the shards whose gradient can lie in a buffer: small, dense, float32, one device."""
    device = layout.device
    return [s for s in layout.shards if s.param.device == device and _is_small(s.param)]


def _is_small(parameter: Tensor) -> bool:
    return (
        type(parameter) in (Tensor, nn.Parameter)
        and parameter.requires_grad
        and parameter.dtype == torch.float32
        and parameter.layout is torch.strided
        and 0 < parameter.numel() <= SMALL
        # Dense: a new tensor like it has its strides.
        and torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    )
