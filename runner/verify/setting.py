"""What both sides train with, where that is not what the request says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from runner.clip import ClipMode
from runner.config.schema import RunConfig
from runner.data.dataset import collate_pairs
from runner.train import build

NEVER = 1e30
"""A threshold that no gradient reaches, and that float32 can hold."""


@dataclass(frozen=True)
class Collate:
    """Makes a batch of samples, its floating-point parts in ``dtype``."""

    dtype: torch.dtype

    def __call__(self, samples: Any) -> Any:
        """The batch; integers stay as they are."""
        return tree_map_only(Tensor, self._cast, collate_pairs(samples))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def dtype_of(config: RunConfig) -> torch.dtype:
    """The numbers of both sides."""
    return torch.float64 if config.verify.dtype == "float64" else torch.float32


def make_model(config: RunConfig, device: torch.device) -> tuple[nn.Module, int]:
    """The request's model, the same weights wherever it is made, in ``verify.dtype``.

    Returns:
        The model, and how many chances of dropout were set to 0 in it.
    """
    torch.manual_seed(config.seed)
    model = build.maker(config.model)().to(device, dtype_of(config))
    assert isinstance(model, nn.Module)
    return model, switch_off_dropout(model)


def make_mode(config: RunConfig, name: str) -> tuple[ClipMode, bool]:
    """A clipping mode, and whether its threshold has yet to be derived.

    The request's own threshold is that of its own mode alone: those of others do not compare.
    """
    chosen = config.clip
    derived = name not in ("none", chosen.mode)
    threshold = NEVER if derived else chosen.threshold
    clip = chosen.model_copy(
        update={"mode": name, "threshold": None if name == "none" else threshold}
    )
    return build.make_mode(config.model_copy(update={"clip": clip})), derived


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: Adam and its kin take the same step whatever a gradient's scale."""
    return torch.optim.SGD(model.parameters(), lr=config.verify.lr)


def comparable(config: RunConfig) -> RunConfig:
    """``config`` without what would round the plugin's side more coarsely than the reference."""
    plugin = config.plugin.model_copy(update={"param_dtype": None})
    return config.model_copy(update={"plugin": plugin})


def notes(config: RunConfig) -> Iterator[str]:
    """What is not as the request has it, in words."""
    asked = config.verify
    optimizer = config.optimizer.target.rpartition(".")[2]
    plain = config.optimizer.mapping() == {"_target_": "torch.optim.SGD", "lr": asked.lr}
    if not plain or not config.scheduler.target.endswith(".ConstantLR"):
        yield (
            f"both sides step by plain SGD at a constant rate of {asked.lr:g} instead of "
            f"{optimizer} and its schedule: adaptive steps hide a gradient of the wrong scale"
        )
    if config.precision.name != "fp32":
        yield f"everything is computed in {asked.dtype}, not in {config.precision.name}"
    if config.plugin.param_dtype is not None:
        yield f"parameters are gathered in {asked.dtype}, not in {config.plugin.param_dtype}"


def switch_off_dropout(model: nn.Module) -> int:
    """Set every chance to drop something to 0: ranks would draw other elements than one process.

    Known by name: attributes with ``drop`` in theirs, and chances (``p``, ``prob``) of modules with
    ``drop`` or ``stochasticdepth`` in the name of their class.

    Returns:
        How many were above 0.
    """
    found = 0
    for module in model.modules():
        kind = type(module).__name__.lower()
        drops = "drop" in kind or "stochasticdepth" in kind
        for name, value in list(vars(module).items()):
            is_chance = isinstance(value, int | float) and not isinstance(value, bool)
            named = "drop" in name.lower() or (drops and name in ("p", "prob"))
            if is_chance and named and 0 < value <= 1:
                setattr(module, name, 0.0)
                found += 1
    return found
