"""Find the rank and the microbatch in which a gradient first holds NaN or inf."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from runner.clip import Layout, transfer
from runner.clip.shard import local
from runner.parallel.usage import computed_with


class GradientTrace:
    """Checks every gradient of every microbatch, before ranks combine their gradients.

    It reads each gradient once more, so it is on only where a bad gradient is expected. On an
    accelerator the results stay on the device until :meth:`found` reads them.

    Args:
        layout: the parameters on this rank.
        microbatch: returns the number of the microbatch that runs, from 1.

    Attributes:
        hooks: those that check gradients now; none while nothing is checked.
    """

    def __init__(self, layout: Layout, microbatch: Callable[[], int]) -> None:
        self._layout = layout
        self._microbatch = microbatch
        self.hooks: list[RemovableHandle] = []
        self._seen: list[tuple[int, str, bool | Tensor]] = []

    def start(self) -> None:
        """Check the gradients of all backward passes from now on."""
        for shard in () if self.hooks else self._layout.shards:
            parameter = computed_with(shard.param)
            if parameter.requires_grad:
                # Not a post-accumulate hook: it would see the sum of microbatches, or of ranks.
                hook = partial(self._check, shard.name)
                self.hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Check no gradients any more."""
        while self.hooks:
            self.hooks.pop().remove()
        self._seen.clear()

    def end_step(self) -> None:
        """Forget the gradients of this step."""
        self._seen.clear()

    def found(self) -> list[tuple[int, str]]:
        """Return the bad gradients of this step on this rank, in the order of the backward passes.

        Returns:
            Pairs of a microbatch and the name of a parameter.
        """
        return list(self._bad())

    def _bad(self) -> Iterator[tuple[int, str]]:
        away = [flag for _, _, flag in self._seen if isinstance(flag, Tensor)]
        flags = iter(torch.stack(away).tolist() if away else [])
        for microbatch, name, bad in self._seen:
            if next(flags) if isinstance(bad, Tensor) else bad:
                yield microbatch, name

    def _check(self, name: str, gradient: Tensor) -> None:
        here = local(gradient.detach())
        if here.layout is not torch.strided or not here.numel():
            return
        if not transfer.can_read(here.device):
            self._seen.append((self._microbatch(), name, ~here.isfinite().all()))
        # A sum takes a fraction of the time, but may overflow where every element is finite.
        elif not math.isfinite(here.sum()) and not here.isfinite().all():
            self._seen.append((self._microbatch(), name, True))
