"""Plugin ``pipeline``: consecutive layers are on different ranks, and microbatches pass through."""

from __future__ import annotations

from collections.abc import Sequence

from runner.booster.plugin.hybrid import HybridParallelPlugin


class PipelineParallelPlugin(HybridParallelPlugin):
    """Pipeline parallelism, and data parallelism over the remaining ranks.

    Arguments and errors are those of :class:`~runner.booster.HybridParallelPlugin`. By default
    ``pp_size`` is the number of ranks; ``dp_size`` is what ``pp_size`` leaves of them.
    """

    def __init__(
        self,
        pp_size: int | None = None,
        dp_size: int | None = None,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        split: Sequence[str] | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        super().__init__(
            pp_size=pp_size,
            dp_size=dp_size,
            schedule=schedule,
            num_microbatches=num_microbatches,
            split=split,
            sync_batchnorm=sync_batchnorm,
        )


PLUGIN = PipelineParallelPlugin
