"""Small gradients side by side: a call for each of thousands would take longer than the work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from runner.check.parts import Part

_LARGEST = 2**14  # elements of a gradient that is copied beside others
_MOST = 2**18  # elements of a pack: it stays in a cache

# Mean square of an element below which squares of rounding errors may be zero.
LEAST = {
    torch.float64: 1e-250,
    torch.float32: 1e-16,
    torch.float16: math.inf,
    torch.bfloat16: math.inf,
}
# For the first parameter of each pack the memory of its last copy on the host.
_memory = WeakIdKeyDictionary()


@dataclass
class Pack:
    """Small gradients of one type on one device."""

    parts: list[Part]
    gradients: list[Tensor]

    @property
    def sizes(self) -> list[int]:
        return [gradient.numel() for gradient in self.gradients]

    def keep(self, p: float, on_host: bool) -> Tensor:
        """Keep a copy of each gradient; return their sums of powers in float64, [parts]."""
        flat = self._copy(on_host)
        copies = torch.split(flat, self.sizes)
        for part, gradient, copy in zip(self.parts, self.gradients, copies, strict=True):
            part.before = copy.view(gradient.shape)
        exact = flat.double()
        norms = torch.stack(torch._foreach_norm(list(torch.split(exact, self.sizes)), p))
        return norms if math.isinf(p) or p == 0 else norms**p

    def _copy(self, on_host: bool) -> Tensor:
        """Return a copy of all elements; a CPU reuses the memory of the last check."""
        first = self.gradients[0]
        size = sum(self.sizes)
        device = torch.device("cpu") if on_host else first.device
        flat: Tensor | None = _memory.get(self.parts[0].parameter)  # type: ignore[no-untyped-call]
        if flat is None or (flat.numel(), flat.dtype, flat.device) != (size, first.dtype, device):
            flat = torch.empty(size, dtype=first.dtype, device=device)
            if device.type == "cpu":
                _memory[self.parts[0].parameter] = flat
        elements = [gradient.reshape(-1) for gradient in self.gradients]
        if device == first.device:
            return torch.cat(elements, out=flat)
        return flat.copy_(torch.cat(elements))


def packs_of(parts: Sequence[Part]) -> list[Pack]:
    """Return packs of the parts that have a small gradient."""
    packs: list[Pack] = []
    latest: dict[tuple[torch.dtype, torch.device], Pack] = {}
    filled: dict[int, int] = {}  # elements of each of the latest packs
    for part in parts:
        gradient = part.gradient
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if not 0 < gradient.numel() <= _LARGEST:
            continue
        kind = (gradient.dtype, gradient.device)
        pack = latest.get(kind)
        if pack is None or filled[id(pack)] + gradient.numel() > _MOST:
            pack = Pack([], [])
            packs.append(pack)
            latest[kind] = pack
            filled[id(pack)] = 0
        pack.parts.append(part)
        pack.gradients.append(gradient)
        filled[id(pack)] += gradient.numel()
    return packs


def scaled_together(
    parts: Sequence[Part],
    pairs: Sequence[tuple[Tensor, Tensor] | None],
    coefficients: Sequence[float],
) -> set[int]:
    """Return the ids of small parts whose elements were all multiplied by one coefficient.

    Args:
        parts: all parts of this rank.
        pairs: for each the gradient before and after; None where they cannot be compared.
        coefficients: for each about the coefficient.
    """
    scaled: set[int] = set()
    numbers_by_id = {id(part): number for number, part in enumerate(parts)}
    for pack in packs_of(parts):
        numbers = []
        before = []
        after = []
        for part in pack.parts:
            number = numbers_by_id[id(part)]
            pair = pairs[number]
            if pair is not None and _can_tell(*pair, coefficients[number], part.power):
                numbers.append(number)
                before.append(pair[0])
                after.append(pair[1])
        if not numbers:
            continue
        near = [coefficients[number] for number in numbers]
        for number, off in zip(numbers, _squares(before, after, near), strict=True):
            part = parts[number]
            if off <= allowed_square(before[0].dtype, coefficients[number], part.power):
                scaled.add(id(part))
    return scaled


def _can_tell(before: Tensor, after: Tensor, coefficient: float, power: float) -> bool:
    """Return whether the squares of what is left say that a coefficient is right."""
    if before.dtype != after.dtype or not math.isfinite(coefficient):
        return False
    return power > LEAST[before.dtype] * before.numel()


def allowed_square(dtype: torch.dtype, coefficient: float, square: float) -> float:
    """Return Σ(g' − c·g)² that rounding explains, given Σg²."""
    # Each element is rounded once, by at most half of eps.
    return float((2 * torch.finfo(dtype).eps * coefficient) ** 2 * square)


def _squares(
    before: Sequence[Tensor], after: Sequence[Tensor], coefficients: Sequence[float]
) -> list[float]:
    """Return Σ(g' − c·g)² of each pair of tensors of one type, in one pass."""
    sizes = [tensor.numel() for tensor in before]
    first = torch.cat([tensor.reshape(-1) for tensor in before])
    second = torch.cat([tensor.reshape(-1) for tensor in after])
    of_tensors = torch.tensor(coefficients, dtype=first.dtype, device=first.device)
    lengths = torch.tensor(sizes, device=first.device)
    factors = of_tensors.repeat_interleave(lengths, output_size=len(first))
    difference = second.addcmul_(first, factors, value=-1).double()
    norms = torch._foreach_norm(list(torch.split(difference, sizes)), 2.0)
    squares: list[float] = torch.stack(norms).square().tolist()
    return squares
