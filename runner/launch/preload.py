"""Name the modules that the fork server imports for the ranks of a run.

Each rank that imports a module by itself pays for it, and the ranks of one machine do so at the
same time. The server only imports: it calculates nothing, because threads of a calculation would
not exist in its children, and it asks for no GPU, because a driver that was asked cannot be used
after a fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runner.config.schema import RunConfig

_KNOWN = ("runner", "torch", "torchvision")
"""Packages that are known to import without a thread or a GPU; those of a user may do anything."""

_SHARDED = ("torch.distributed.tensor", "torch.distributed.fsdp")
_STAGES = (*_SHARDED, "torch.distributed.pipelining")
_OF_PLUGIN = {
    **dict.fromkeys(("fsdp", "zero", "tensor", "moe"), _SHARDED),
    **dict.fromkeys(("pipeline", "hybrid"), _STAGES),
}

_ALWAYS = (
    "torch._dynamo",  # by the first optimizer
    "torch.utils.serialization.config",  # by the first checkpoint
    "omegaconf._impl",
    "numpy.ma",
    "numpy.ctypeslib",
)
"""What libraries import late, when a training first needs it."""


def modules(configs: Iterable[RunConfig]) -> list[str]:
    """Return the modules that ranks of these runs import beside :mod:`runner.launch.rank`."""
    return list(dict.fromkeys(name for config in configs for name in _modules(config)))


def _modules(config: RunConfig) -> Iterator[str]:
    yield from _ALWAYS
    yield f"runner.booster.plugin.{config.plugin.name}"
    yield from _OF_PLUGIN.get(config.plugin.name, ())
    for section in (config.data, config.model, config.optimizer, config.scheduler):
        module = section.target.rpartition(".")[0]
        if module.partition(".")[0] in _KNOWN:
            yield module
