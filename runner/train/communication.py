"""What a plugin sends in an optimizer step, in a sentence for people."""

from __future__ import annotations

from runner.config.schema import RunConfig
from runner.train.build import mesh_of, ranks_of


def gradients_sent(config: RunConfig, gradient_bytes: int) -> str:
    """Return how often data-parallel ranks send gradients in a step, and how many bytes.

    Args:
        config: the checked configuration; its sizes fit the ranks.
        gradient_bytes: size of the gradients of the whole model.

    Returns:
        The sentence; empty if gradients are not averaged, as in one process. The bytes are those
        that a rank sends by ring algorithms: (n - 1)/n of its gradients to reduce-scatter them
        over n ranks, twice that to all-reduce them.
    """
    plugin = config.plugin
    sizes = mesh_of(plugin, ranks_of(config))
    if sizes.dp == 1:
        return ""
    phases = config.accumulation.phases
    microbatches = phases.most
    shards = plugin.name == "fsdp" or plugin.zero_stage >= 2
    in_each = shards and (not plugin.no_sync or sizes.pp > 1)
    times = microbatches if in_each else 1
    text = "gradients are sent once a step"
    if in_each:
        text = "gradients are sent in each microbatch"
    if microbatches > 1:
        bound = "up to " if phases.moves else ""
        text += f" of {bound}{microbatches} microbatches"
    if sizes.ep > 1:  # experts are averaged over fewer ranks
        return text
    of_rank = gradient_bytes / (sizes.tp * sizes.pp)
    passes_over_ring = 1 if shards else 2
    sent = times * passes_over_ring * of_rank * (sizes.dp - 1) / sizes.dp
    return f"{text}, about {size(sent)} a rank"


def size(count: float) -> str:
    """Return a number of bytes in the largest unit that fits it: ``3.4 MB``."""
    unit = "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if count >= 1000:
            count /= 1000
            unit = larger
    return f"{count:.3g} {unit}"
