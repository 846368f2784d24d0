"""torch's fused Adam under the name that Colossal-AI's scripts use."""

from __future__ import annotations

from typing import Any

from torch.optim import Adam, AdamW


def HybridAdam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    nvme_offload_fraction: float = 0.0,
    nvme_offload_dir: str | None = None,
    **defaults: Any,
) -> Adam:
    """Return torch's :class:`~torch.optim.AdamW`, or :class:`~torch.optim.Adam`, with a fused step.

    It is the optimizer itself, not a subclass: its state can be loaded into AdamW or Adam.

    Args:
        model_params: parameters, or groups of parameters.
        lr: learning rate.
        bias_correction: always True.
        betas: decay rates of the mean gradient and of the mean square.
        eps: added to the divisor.
        weight_decay: 0 by default, unlike AdamW of torch.
        adamw_mode: whether the decay is decoupled from the gradient (AdamW; Loshchilov and Hutter
            2019, arXiv 1711.05101). Otherwise it is added to the gradient (Adam).
        nvme_offload_fraction: always 0: the state is in memory.
        nvme_offload_dir: accepted, without effect.
        defaults: further arguments of torch's optimizer.

    Raises:
        ValueError: an option that torch's Adam does not have.
    """
    if not bias_correction:
        raise ValueError("HybridAdam corrects the bias, as torch's Adam does: bias_correction=True")
    if nvme_offload_fraction:
        raise ValueError(
            "HybridAdam keeps its state in memory: leave nvme_offload_fraction at 0, and shard the "
            "state by LowLevelZeroPlugin"
        )
    made = AdamW if adamw_mode else Adam
    options = {"fused": True, **defaults}
    return made(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
