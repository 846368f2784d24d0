"""Public faults, shown by the tools' own calls: red there, green with ours on the same gradients.

``TORCH`` has calls of torch itself, as reports say that trainers make them. ``PINNED`` has calls of
versions that have the fault: ``tests/check/test_calls.py`` installs each in a folder of its own.
What can't be installed here stands in ``tests/check/public.py``, by the arithmetic of its report.
"""

import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from runner import apply_gradient_clipping
from runner.check import check_clipping
from tests.check.models import ddp, experts, fsdp, fsdp_beside_plain, two_dimensions
from tests.check.public import LIMIT, compared, experts_of_four_numbers, pair

RAISES = "raises "


def stopped(make, theirs):
    """Return what a call raises inside of a check, and what a check says of ours."""
    text = ""
    try:
        with check_clipping(model := make(), LIMIT):
            theirs(model)
    except (RuntimeError, ValueError) as error:
        if dist.get_rank() == 0:
            text = f"{RAISES}{type(error).__name__}: {error}\n"
    model = make()
    with check_clipping(model, LIMIT) as check:
        decision = apply_gradient_clipping(model, "norm", LIMIT)
    return text + check.report(decision).replace("check_clipping", "ours")


def torchtitan_1258():
    """pytorch/torchtitan PR 1258: torch's two calls share a generator, which the first spends."""

    def theirs(model):
        parameters = model.parameters()
        norm = get_total_norm([parameter.grad for parameter in parameters])
        clip_grads_with_norm_(parameters, LIMIT, norm)
        return norm

    return compared(ddp, theirs, "1 fault|right norm, nothing was scaled")


def transformers_46113():
    """huggingface/transformers PR 46113: gradients are given where torch expects parameters."""

    def theirs(model):
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = get_total_norm(gradients)
        clip_grads_with_norm_(gradients, LIMIT, norm)
        return norm.full_tensor()

    return compared(fsdp, theirs, "1 fault|right norm, nothing was scaled")


def pytorch_180346():
    """pytorch/pytorch issue 180346: one call cannot clip parameters of several meshes."""
    text = stopped(two_dimensions, lambda model: clip_grad_norm_(model.parameters(), LIMIT))
    return text, f"{RAISES}|ours: right"


def transformers_48208():
    """huggingface/transformers PR 48208: one call cannot clip DTensors beside plain tensors."""
    text = stopped(fsdp_beside_plain, lambda model: clip_grad_norm_(model.parameters(), LIMIT))
    return text, f"{RAISES}|mixed torch.Tensor and DTensor|ours: right"


def deepspeed_8475():
    """deepspeedai/DeepSpeed issue 8475: norms are averaged over ranks with other experts."""
    import deepspeed
    from deepspeed.runtime.utils import clip_grad_norm_ as deepspeeds
    from deepspeed.utils import groups

    deepspeed.init_distributed("gloo", verbose=False)
    group = pair()
    groups._get_data_parallel_group = lambda: group

    def theirs(model):
        return deepspeeds(list(model.parameters()), LIMIT)

    words = "0.6606 of the true norm: the mean of the norms of ranks|7.23607|10.9545"
    return compared(experts_of_four_numbers, theirs, words, groups={"experts.*": group})


def automodel_3816():
    """NVIDIA-NeMo/Automodel issue 3816: each expert group scales shared weights by its own norm."""
    from nemo_automodel.components.training.utils import clip_grad_norm

    _, mesh = experts()
    words = "the share of this rank alone|was scaled by |on rank 0 and by |on rank 1 (and 5 more)"
    return compared(
        lambda: experts()[0],
        lambda model: clip_grad_norm(LIMIT, [model]),
        words,
        groups={"experts.*": mesh["experts"]},
    )


def accelerate_4219():
    """huggingface/accelerate PR 4219: DTensors beside plain tensors stop the training."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)

    def theirs(model):
        return accelerator.clip_grad_norm_(model.parameters(), LIMIT)

    return stopped(fsdp_beside_plain, theirs), f"{RAISES}|mixed torch.Tensor|ours: right"


TORCH = [torchtitan_1258, transformers_46113, pytorch_180346, transformers_48208]
PINNED = {
    deepspeed_8475: [
        "deepspeed==0.18.9",
        *("einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo"),
    ],
    automodel_3816: ["nemo-automodel==0.6.0"],
    accelerate_4219: ["accelerate==1.14.0", "psutil"],
}
