"""Plugin ``tensor``: the weights of a layer are sharded over ranks, by a plan of name patterns."""

from __future__ import annotations

from collections.abc import Mapping

from runner.booster.plugin.hybrid import HybridParallelPlugin


class TensorParallelPlugin(HybridParallelPlugin):
    """Tensor parallelism, and data parallelism over the remaining ranks.

    Arguments and errors are those of :class:`~runner.booster.HybridParallelPlugin`. By default
    ``tp_size`` is the number of ranks; ``dp_size`` is what ``tp_size`` leaves of them.
    """

    def __init__(
        self,
        tp_size: int | None = None,
        dp_size: int | None = None,
        sequence_parallel: bool = False,
        tp_plan: Mapping[str, str] | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        super().__init__(
            tp_size=tp_size,
            dp_size=dp_size,
            sequence_parallel=sequence_parallel,
            tp_plan=tp_plan,
            sync_batchnorm=sync_batchnorm,
        )


PLUGIN = TensorParallelPlugin
