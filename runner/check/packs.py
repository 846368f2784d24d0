"""Gradients of one shape side by side: a call for each of thousands costs more than the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from runner.check.parts import Part
from runner.check.reference import Buffer, copy_and_sum, elements_at_a_time, powers_of_rows

# For the first parameter of each pack the memory of its last copy on the host: new memory costs
# more than the copy.
_memory = WeakIdKeyDictionary()


@dataclass
class Pack:
    """Gradients of one shape and type on one device.

    Attributes:
        parts: those that have these gradients.
        gradients: local shards.
        before: their copies, [parts, *shape], once they are kept.
        powers: Σ|g|^p of each of them in float64, [parts].
    """

    parts: list[Part] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    before: Tensor = field(init=False)
    powers: Tensor = field(init=False)

    def keep(self, p: float, on_host: bool, buffer: Buffer) -> None:
        """Keep a copy of each gradient, and its sum of powers."""
        first = self.gradients[0]
        device = torch.device("cpu") if on_host else first.device
        self.before = self._memory(device)
        powers: list[Tensor] = []
        for start, stop in self._blocks(width=8):
            if stop - start == 1:
                gradient = self.gradients[start]
                power = copy_and_sum(gradient, self.before[start], p, buffer)
                powers.append(power.reshape(1))
                continue
            copies = self.before[start:stop]
            if device == first.device:
                torch.stack(self.gradients[start:stop], out=copies)
            else:
                copies.copy_(torch.stack(self.gradients[start:stop]))
            powers.append(powers_of_rows(copies.view(stop - start, -1), p, buffer))
        self.powers = torch.cat(powers)
        for part, copy in zip(self.parts, self.before.unbind(), strict=True):
            part.before = copy

    def _memory(self, device: torch.device) -> Tensor:
        """Return memory for the copies; a CPU reuses the memory of the last check."""
        first = self.gradients[0]
        shape = (len(self.parts), *first.shape)
        key = self.parts[0].parameter
        memory: Tensor | None = _memory.get(key)  # type: ignore[no-untyped-call]
        if memory is not None:
            fits = memory.shape == shape and memory.dtype == first.dtype
            if fits and memory.device == device:
                return memory
        memory = torch.empty(shape, dtype=first.dtype, device=device)
        if device.type == "cpu":
            _memory[key] = memory
        return memory

    def _blocks(self, width: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of gradients that are worked on together, so that they stay in a cache."""
        elements = self.gradients[0].numel()
        count = elements_at_a_time(self.gradients[0], width) // elements if elements else 1
        count = max(1, count)
        for start in range(0, len(self.parts), count):
            yield start, min(start + count, len(self.parts))

    def pairs(self, buffer: Buffer) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield ranges of gradients, their copies, and what they are after the clipping.

        A range of one gradient has vectors; a longer one has rows, and those after the clipping
        are memory of ``buffer``, which the next range uses too.
        """
        for start, stop in self._blocks(self.before.element_size()):
            before = self.before[start:stop]
            if stop - start == 1:
                after = self.parts[start].after
                assert after is not None
                yield start, stop, before[0].reshape(-1), after.reshape(-1)
                continue
            now = [part.after for part in self.parts[start:stop]]
            space = buffer.like(before.reshape(-1), before.dtype, "after").view(before.shape)
            torch.stack(now, out=space)  # type: ignore[arg-type]
            rows = stop - start
            yield start, stop, before.view(rows, -1), space.view(rows, -1)


def packs_of(parts: Sequence[Part]) -> list[Pack]:
    """Return packs of the parts that have a gradient."""
    packs: dict[tuple[torch.Size, torch.dtype, torch.device], Pack] = {}
    for part in parts:
        gradient = part.gradient
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise TypeError(f"{part.name} has a sparse gradient: build the layer with sparse=False")
        kind = (gradient.shape, gradient.dtype, gradient.device)
        pack = packs.get(kind)
        if pack is None:
            pack = packs[kind] = Pack()
        pack.parts.append(part)
        pack.gradients.append(gradient)
    return list(packs.values())
