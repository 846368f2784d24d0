"""Plugin ``pipeline``: consecutive layers are on different ranks, and microbatches pass through."""

from __future__ import annotations

from collections.abc import Sequence

from runner.booster.plugin.hybrid import HybridParallelPlugin


class PipelineParallelPlugin(HybridParallelPlugin):
    """Pipeline parallelism, and data parallelism over the remaining ranks.

    Args:
        pp_size: pipeline-parallel size; by default all ranks.
        dp_size: data-parallel size; by default the ranks that ``pp_size`` leaves.
        schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b`` or ``zero_bubble``; the last two have
            two stages per rank.
        num_microbatches: microbatches of one batch; by default the number of stages.
        split: names of the modules with which the second and each further stage starts; by default
            stages have about equal numbers of parameters.
        sync_batchnorm: see :class:`~runner.booster.TorchFSDPPlugin`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the number of ranks.
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
