"""Norms of the units of one matrix or one large tensor, and their scaling.

A float32 sum of many squares loses digits, so that long units are summed in parts. The result of a
unit depends on its elements alone, not on what else is measured by the same call: ranks that hold
the same unit get the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.norms import ROW, flatten

LONG = 8_192
"""Longest unit that is summed in float32 at once."""

CACHED = 2**16
"""Elements of a block that is read several times while it is in the cache."""

SPARSE = 4
"""Where less than one of so many units of a large tensor is clipped, only these are written."""


def row_norms(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm of each row."""
    wide = torch.promote_types(rows.dtype, dtype)
    length = rows.shape[1]
    if not transfer.can_read(rows.device):
        return _norms(rows, wide)
    if wide != rows.dtype:
        # A conversion is cheap in the cache.
        blocks = torch.split(rows, max(1, CACHED // max(length, 1)))
        return torch.cat([row_norms(block.to(wide), wide) for block in blocks])
    if wide == torch.float32 and length > LONG:
        return _long_row_norms(rows)
    return _norms(rows, wide)


def _norms(rows: Tensor, dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, 2.0, dim=1, dtype=dtype)
    return norms


def _long_row_norms(rows: Tensor) -> Tensor:
    units, length = rows.shape
    part = min(length & -length, ROW)  # the largest power of 2 that divides the length
    if part < 64:
        part = ROW
    whole = length // part * part
    parts = [_norms(rows[:, :whole].reshape(-1, part), torch.float32).view(units, -1)]
    if whole < length:
        parts.append(_norms(rows[:, whole:], torch.float32).unsqueeze(1))
    return _norms(torch.cat(parts, 1), torch.float64)


def large_norms(tensor: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
    """Return the norm of each unit of a large tensor, [units]."""
    wide = torch.promote_types(tensor.dtype, dtype)
    reduced = tuple(range(kept, tensor.ndim))
    if not reduced:
        return tensor.abs().to(wide).reshape(-1)
    if not transfer.can_read(tensor.device):
        norms: Tensor = torch.linalg.vector_norm(tensor, 2.0, dim=reduced, dtype=wide)
        return norms.reshape(-1)
    rows = as_rows(tensor, kept)
    if rows is not None:
        return row_norms(rows, dtype)
    sums = torch.zeros(tensor.shape[:kept], dtype=torch.float64)
    _add_squares(tensor, sums, wide)
    return sums.sqrt_().view(-1)


def as_rows(tensor: Tensor, kept: int) -> Tensor | None:
    """Return a view [units, length] in which each unit is contiguous; None if there is none.

    The order of elements within a unit is only fit for sums and for scaling.
    """
    if not kept:
        return flatten(tensor).unsqueeze(0)
    if not tensor.is_contiguous():
        strides = tensor.stride()
        inner = sorted(range(kept, tensor.ndim), key=lambda dim: -strides[dim])
        tensor = tensor.permute(*range(kept), *inner)
        if not tensor.is_contiguous():
            return None
    return tensor.view(math.prod(tensor.shape[:kept]), -1)


def _add_squares(tensor: Tensor, sums: Tensor, dtype: torch.dtype) -> None:
    """Add the sums of squares over the last dimensions to ``sums``, block by block."""
    kept, elements = sums.ndim, tensor.numel()
    if elements <= CACHED:
        reduced = tuple(range(kept, tensor.ndim))
        sums += tensor.to(dtype).square().sum(reduced)
        return
    outer = max(range(tensor.ndim), key=lambda dim: (tensor.shape[dim] > 1, tensor.stride(dim)))
    size = max(1, tensor.shape[outer] * CACHED // elements)
    for i, block in enumerate(torch.split(tensor, size, outer)):
        part = sums.narrow(outer, i * size, block.shape[outer]) if outer < kept else sums
        _add_squares(block, part, dtype)


def scale_large(tensor: Tensor, kept: int, coefs: Tensor, clipped: float | None) -> None:
    """Multiply each unit of a large tensor in place."""
    if clipped is not None and clipped * SPARSE <= len(coefs):
        rows = as_rows(tensor, kept)
        if rows is not None:
            at = (coefs != 1.0).nonzero().view(-1)
            rows[at] = (rows[at] * coefs[at].unsqueeze(1)).to(rows.dtype)
            return
    tensor.mul_(coefs.view((*tensor.shape[:kept], *[1] * (tensor.ndim - kept))))
