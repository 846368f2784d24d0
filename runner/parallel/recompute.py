"""Activation checkpointing: compute what is inside of a block again in the backward pass."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.parallel.sharding import block_lists


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the elements of each ``ModuleList`` of a model that contain no further ones.

    Experts of a mixture are a part of their block.

    Raises:
        ValueError: there are none.
    """
    elements: dict[nn.Module, None] = {}
    for _, modules in block_lists(model):
        for element in modules:
            elements[element] = None
    if not elements:
        raise ValueError(
            f"{type(model).__name__} has no blocks: a block is an element of a torch.nn.ModuleList"
        )
    blocks = []
    for element in elements:
        inside = [module for module in element.modules() if module is not element]
        if not any(module in elements for module in inside):
            blocks.append(element)
    return blocks


def checkpoint_activations(model: nn.Module, every: int = 1) -> None:
    """Keep the inputs of each ``every``-th block alone, and compute the rest again when needed.

    The gradients are the same to the bit: random numbers, such as dropout's, are drawn again alike.
    Names of parameters stay. Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost,
    2016, arXiv 1604.06174; by :func:`torch.utils.checkpoint.checkpoint` without reentrance.

    Raises:
        ValueError: the model has no blocks.
    """
    for block in blocks_of(model)[every - 1 :: every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
