"""Find the user's model inside the wrappers of other libraries."""

from __future__ import annotations

from torch import nn

_INSIDE = (
    ("DistributedDataParallel", "module"),
    ("OptimizedModule", "_orig_mod"),  # torch.compile
    ("_FabricModule", "_forward_module"),  # Lightning Fabric's, around what really runs
)
"""Names of wrappers, and their attribute that holds the model."""


def without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model that DDP, ``torch.compile`` and Lightning Fabric have wrapped.

    Its parameters have the names of the user's own model.
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise TypeError(
                "this model is wrapped by FSDP 1 (FullyShardedDataParallel), whose flat parameters "
                "cannot be clipped: use fully_shard (in Accelerate fsdp_version=2, in Lightning "
                "ModelParallelStrategy)"
            )
    while attribute := _attribute(model):
        model = getattr(model, attribute)
    return model


def _attribute(model: nn.Module) -> str | None:
    kinds = {kind.__name__ for kind in type(model).__mro__}
    return next((attribute for name, attribute in _INSIDE if name in kinds), None)
