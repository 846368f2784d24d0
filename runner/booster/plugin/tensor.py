"""Plugin ``tensor``: the weights of a layer are sharded over ranks, by a plan of name patterns."""

from __future__ import annotations

from collections.abc import Mapping

from runner.booster.plugin.hybrid import HybridParallelPlugin


class TensorParallelPlugin(HybridParallelPlugin):
    """Tensor parallelism, and data parallelism over the remaining ranks.

    Args:
        tp_size: tensor-parallel size; by default all ranks.
        dp_size: data-parallel size; by default the ranks that ``tp_size`` leaves.
        sequence_parallel: shard activations between sharded layers along the sequence.
        tp_plan: style by name pattern (see :mod:`runner.parallel.tensor_styles`); by default the
            model's own.
        sync_batchnorm: see :class:`~runner.booster.TorchFSDPPlugin`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the number of ranks.
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
