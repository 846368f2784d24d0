"""Make a small optimizer of the kind of another one, to see how that kind takes steps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

Groups = list[list[Tensor]]
"""The tensors of each parameter group."""


def optimizer_like(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """Make an optimizer of the class and the options of ``optimizer``."""
    kind = type(optimizer)
    options = vars(optimizer) | optimizer.defaults
    accepted = [name for name in inspect.signature(kind).parameters if name in options]
    # A schedule may have set the learning rate to 0.
    rate = {} if options.get("lr") is None else {"lr": 0.01}
    given = [
        {**group, **rate, "params": [nn.Parameter(tensor.clone()) for tensor in tensors]}
        for group, tensors in zip(optimizer.param_groups, groups, strict=True)
    ]
    return kind(given, **{name: options[name] for name in accepted} | rate)


def step_with(optimizer: Optimizer, gradients: Sequence[Sequence[Tensor]]) -> None:
    """Take one step with the gradients of each parameter group."""
    for group, own in zip(optimizer.param_groups, gradients, strict=True):
        for parameter, gradient in zip(group["params"], own, strict=True):
            parameter.grad = gradient.clone()
    optimizer.step()
