"""The batches that a training loop reads: pairs (inputs, targets), or what a model's loss takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class BatchError(TypeError):
    """A batch has a structure that the training loop cannot read."""


def targets_of(batch: Any) -> Tensor | None:
    """Return the targets of a pair (inputs, targets); None for any other batch."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[1] if batch[1].ndim else None
    return None


def batch_size(batch: Any) -> int:
    """Return the length of the first tensor in a batch of any structure.

    Raises:
        BatchError: the batch has no tensor with a dimension.
    """
    structure = batch
    if isinstance(batch, Mapping):
        structure = dict(batch)  # pytree does not know every mapping.
    elif is_dataclass(batch):
        structure = vars(batch)
    for leaf in tree_leaves(structure):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise BatchError(
        f"a batch has to hold a tensor [samples, ...]: there is none in this "
        f"{type(batch).__name__}; let the DataLoader's collate_fn make one"
    )


def not_a_pair(batch: Any) -> BatchError:
    """Build the error for a batch that is not a pair (inputs, targets)."""
    kind = type(batch).__name__
    match batch:
        case Mapping():
            keys = ", ".join(map(repr, list(batch)[:5])) + (", ..." if len(batch) > 5 else "")
            what = f"a {kind} with the keys {keys}"
        case tuple() | list() if len(batch) != 2:
            what = f"a {kind} of {len(batch)}"
        case [_, Tensor()]:
            what = "a pair whose targets are a tensor without dimensions"
        case [_, targets]:
            what = f"a pair whose targets are a {type(targets).__name__}"
        case _ if is_dataclass(batch):
            what = f"a dataclass {kind}"
        case _:
            what = f"a {kind}"
    return BatchError(
        f"a batch has to be a pair (inputs, targets) whose targets are a tensor [samples, ...], not"
        f" {what}: give the DataLoader a collate_fn that returns such a pair, or give the model a "
        "method loss(outputs, batch); forward and loss then get the whole batch"
    )
