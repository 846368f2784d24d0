"""Norms of the two parts of a gradient: what a coefficient multiplies, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.norms import Measured, Powers, combine, powers_of
from runner.clip.transfer import Number


class Split(NamedTuple):
    """Norms of the two parts of a gradient, see :meth:`Layout.leave_unscaled`.

    Attributes:
        scaled: norm of the gradients that a coefficient multiplies.
        rest: norm of those that it leaves out.
    """

    scaled: Number
    rest: Number


def measure_split(
    layout: Layout, norm_type: float = 2.0, each: bool = False
) -> tuple[Measured, Split]:
    """Measure all gradients and the two parts of them, see :func:`measure`; one collective too."""
    shards, gradients = layout.gradients()
    parts = []
    for wanted in (True, False):
        chosen = [shard.scaled is wanted for shard in shards]
        parts.append((list(compress(shards, chosen)), list(compress(gradients, chosen))))
    found = [powers_of(*part, norm_type, each) for part in parts]
    if len({powers is None for _, powers in found}) > 1:  # one part alone is not finite
        found = [powers_of(*part, norm_type, True) for part in parts]
    columns = layout.gather([power for power, _ in found])
    norm = combine([*chain.from_iterable(columns)], norm_type)
    scaled, rest = (combine(column, norm_type) for column in columns)
    if isinstance(norm, Tensor):  # also where this rank has no gradient of one part
        scaled, rest = transfer.on_device([scaled, rest], norm.device)
    known = [powers for _, powers in found if powers is not None]
    return Measured(norm, _joined(known, norm_type)), Split(scaled, rest)


def _joined(found: Sequence[Powers], norm_type: float) -> Powers | None:
    """Return the shares of all gradients, given those of parts of them; None if there are none."""
    if not found:
        return None
    shards = [shard for powers in found for shard in powers.shards]
    tensors = [powers.each for powers in found if isinstance(powers.each, Tensor)]
    if tensors:
        return Powers(shards, torch.cat(tensors), norm_type)
    return Powers(shards, [*chain.from_iterable(powers.each for powers in found)], norm_type)
