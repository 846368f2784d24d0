"""Plugin ``hybrid``: data, tensor, pipeline and expert parallelism on one device mesh.

The plugins ``ddp``, ``fsdp``, ``zero``, ``tensor``, ``pipeline`` and ``moe``, below, are this one
with most sizes set to 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from runner.booster.plugin import base
from runner.config.notation import first_few
from runner.parallel import stages, tensor_styles
from runner.parallel.distribution import Distribution, ParallelModel
from runner.parallel.mesh import MeshSizes, mixtures
from runner.parallel.sharding import why_not_shardable


class HybridParallelPlugin(base.Plugin):
    """Data × tensor × pipeline parallelism, with experts on different data-parallel ranks.

    Gradients are averaged over data-parallel ranks once per step, while its last backward pass
    runs. With ``zero_stage`` 2 and 3 they are averaged in each backward pass outside ``no_sync``,
    or in each one at all (``no_sync=False``);
    with pipeline stages in each backward pass. A size of None takes the ranks that others leave.

    Args:
        tp_size: tensor-parallel size.
        pp_size: pipeline-parallel size.
        dp_size: data-parallel size.
        ep_size: number of data-parallel ranks that share one set of experts; None for all.
        zero_stage: 0: replicas. 1: optimizer state is partitioned over data-parallel ranks. 2:
            gradients too. 3: parameters too. Stages 2 and 3 use ``fully_shard``.
        sequence_parallel: shard activations between sharded layers along the sequence.
        tp_plan: style by name pattern (see :mod:`runner.parallel.tensor_styles`); by default the
            model's own.
        schedule: pipeline schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b`` or ``zero_bubble``.
        num_microbatches: microbatches of one batch in a pipeline; by default one for each stage.
        split: names of the modules with which the second and each further stage starts; by default
            stages have about equal numbers of parameters.
        reshard_after_forward: with ``zero_stage`` 3, see :class:`~runner.booster.TorchFSDPPlugin`;
            with ``schedule="zero_bubble"`` parameters stay unsharded until the backward pass.
        param_dtype: with ``zero_stage`` 2 and 3, as ``cpu_offload``, ``sync_batchnorm`` and
            ``no_sync``.
        precision: ``fp32``, ``bf16`` or ``fp16``, for a Booster that is given no precision.
        initial_scale: initial fp16 loss scale.
        max_norm: if above 0, each optimizer step clips the norm of the gradient to it.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the number of ranks, or options exclude each other.
    """

    open_sizes: tuple[str, ...] = ()
    """Sizes that take the ranks that the others leave, if they are not given."""

    zero_stage_without_option = 0
    """Stage of a plugin that has no option ``zero_stage``."""

    def __init__(
        self,
        tp_size: int | None = 1,
        pp_size: int | None = 1,
        dp_size: int | None = None,
        ep_size: int | None = 1,
        zero_stage: int = 0,
        sequence_parallel: bool = False,
        tp_plan: Mapping[str, str] | None = None,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        split: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
        param_dtype: str | None = None,
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        no_sync: bool = True,
        precision: str | None = None,
        initial_scale: float | None = None,
        max_norm: float = 0.0,
    ) -> None:
        if dist.group.WORLD is None:
            raise RuntimeError(
                f"{type(self).__name__} needs a process group: call runner.launch_from_torch() "
                "first, and start the script by torchrun"
            )
        sizes = MeshSizes.of(self.world_size, dp_size, tp_size, pp_size, ep_size)
        self.distribution = Distribution(
            sizes,
            zero_stage,
            sequence_parallel=sequence_parallel,
            tp_plan=tp_plan,
            schedule=schedule,
            num_microbatches=num_microbatches,
            split=split,
            reshard_after_forward=reshard_after_forward,
            param_dtype=base.dtype_of(param_dtype),
            cpu_offload=cpu_offload,
            sync_batchnorm=sync_batchnorm,
            no_sync=no_sync,
        )
        self.precision = precision
        self.initial_scale = initial_scale
        self.max_norm = max_norm
        self.data_rank = self.distribution.data_rank
        self.data_size = sizes.dp
        self.reports_metrics = self.distribution.has_loss
        self.splits_model = self.distribution.splits_model

    @classmethod
    def sizes_of(cls, ranks: int, options: Mapping[str, Any]) -> MeshSizes:
        """Return the sizes of the mesh for arguments ``options``; SizeError if they do not fit."""
        sizes = dict.fromkeys(cls.open_sizes)
        for name in ("dp_size", "tp_size", "pp_size", "ep_size"):
            if name in options:
                sizes[name] = options[name]
        return MeshSizes.of(ranks, **sizes)

    @classmethod
    def problems(
        cls, model: nn.Module, ranks: int, options: Mapping[str, Any]
    ) -> Iterator[base.Misfit]:
        """Yield what does not fit ranks or model; SizeError if the sizes do not fit the ranks."""
        sizes = cls.sizes_of(ranks, options)
        replicas = options.get("dp_replicate", 1)
        if ranks % replicas:
            yield "dp_replicate", replicas, f"does not divide the {ranks} ranks (plugin.nproc)"
        if sizes.tp > 1 or options.get("tp_plan"):
            yield from _tensor_problems(model, sizes.tp, options)
        if sizes.pp > 1:
            yield from _pipeline_problems(model, sizes.pp, options)
        stage = options.get("zero_stage", cls.zero_stage_without_option)
        if stage >= 2:
            problem = why_not_shardable(model, experts_apart=sizes.ep > 1)
            if problem and "zero_stage" in options:
                yield "zero_stage", stage, problem
            elif problem:
                yield "name", "fsdp", problem
        if sizes.ep > 1:
            yield from _expert_problems(model, sizes.ep, options, "ep_size" in cls.open_sizes)

    def configure(self, model: nn.Module) -> ParallelModel:
        """Distribute ``model`` over the ranks, in place."""
        device = self.device or next(model.parameters()).device
        return self.distribution.distribute(model, device)


def _tensor_problems(
    model: nn.Module, ranks: int, options: Mapping[str, Any]
) -> Iterator[base.Misfit]:
    plan = options.get("tp_plan")
    sequence = ranks > 1 and options.get("sequence_parallel", False)
    try:
        tensor_styles.checked_plan(model, plan, ranks, sequence)
    except tensor_styles.PlanError as error:
        values = {"tp_plan": plan, "tp_size": ranks, "sequence_parallel": True}
        yield error.argument, values[error.argument], str(error)


def _pipeline_problems(
    model: nn.Module, ranks: int, options: Mapping[str, Any]
) -> Iterator[base.Misfit]:
    schedule = options.get("schedule", "1f1b")
    microbatches = options.get("num_microbatches")
    split = options.get("split")
    if microbatches:
        problem = stages.refused_microbatches(schedule, ranks, microbatches)
        if problem:
            yield "num_microbatches", microbatches, problem
    try:
        stages.cut(model, ranks * stages.SCHEDULES[schedule].stages_per_rank, split)
    except stages.CutError as error:
        if split:
            yield "split", split, str(error)
        else:
            yield "pp_size", ranks, str(error)
    if callable(getattr(model, "loss", None)):
        name = type(model).__name__
        yield "pp_size", ranks, f"{name} computes its own loss, which a pipeline cannot cut"


def _expert_problems(
    model: nn.Module, ranks: int, options: Mapping[str, Any], always: bool
) -> Iterator[base.Misfit]:
    """Yield why experts cannot be spread, if that was asked for or the model has some."""
    asked_size = options.get("ep_size")
    stacked = [name for name, _ in model.named_modules() if name.split(".")[-1] == "experts"]
    if any(mixtures(model)) or not (always or asked_size or stacked):
        return
    name = type(model).__name__
    message = f"{name} has no experts to spread over ranks: choose plugin=ddp"
    if stacked:
        which = f"{first_few(stacked, 2)} cannot be; plugin=fsdp shards them"
        message = f"{name} has no experts to spread ({which})"
    yield "ep_size", asked_size or ranks, message


class TorchDDPPlugin(HybridParallelPlugin):
    """A replica of the model on every rank, whose gradients are averaged while they are computed.

    As :class:`torch.nn.parallel.DistributedDataParallel` does, but also for parameters that take no
    part in the loss, are frozen later, or have several backward passes. So each rank has its own
    gradient until clipping, ``optimizer.unscale()`` or the step has made it final.

    Args:
        broadcast_buffers: each step gives all ranks the buffers of the first one; False is refused.
            The others but the last are without effect: scripts of Colossal-AI give them to DDP.
        sync_batchnorm: see :class:`~runner.booster.TorchFSDPPlugin`.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        sync_batchnorm: bool = False,
    ) -> None:
        if not broadcast_buffers:
            raise ValueError("broadcast_buffers=False: all ranks get the buffers of the first one")
        super().__init__(sync_batchnorm=sync_batchnorm)


class TorchFSDPPlugin(HybridParallelPlugin):
    """Fully sharded data parallelism by torch's ``fully_shard``.

    FSDP2 (Zhao et al. 2023, arXiv 2304.11277): each parameter is a DTensor sharded along its first
    dimension, and all-gathered for the forward and backward pass of its block.

    Args:
        reshard_after_forward: whether to reshard the parameters of a block after its forward pass
            and gather them again for its backward pass: less memory, more communication.
        dp_replicate: number of replicas; each is sharded over world size ÷ ``dp_replicate`` ranks.
        param_dtype: ``bf16`` or ``fp16``, the dtype in which parameters are gathered and computed;
            gradients are reduced in float32. None keeps the dtype of each parameter.
        cpu_offload: whether to keep parameters, gradients and optimizer state in host memory.
        sync_batchnorm: whether to compute batch norm over the samples of all data-parallel ranks
            (:class:`torch.nn.SyncBatchNorm`, only on GPUs).
        no_sync: whether microbatches under ``booster.no_sync`` send no gradients
            (``set_requires_gradient_sync`` of torch). Each rank then holds gradients of the whole
            model until the last microbatch. False: each microbatch sends its gradients, and a rank
            holds its shards of their sum alone.
    """

    zero_stage_without_option = 3

    def __init__(
        self,
        reshard_after_forward: bool = True,
        dp_replicate: int = 1,
        param_dtype: str | None = None,
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        no_sync: bool = True,
    ) -> None:
        super().__init__(
            zero_stage=3,
            reshard_after_forward=reshard_after_forward,
            param_dtype=param_dtype,
            cpu_offload=cpu_offload,
            sync_batchnorm=sync_batchnorm,
            no_sync=no_sync,
        )
        if self.world_size % dp_replicate:
            raise ValueError(f"{dp_replicate} replicas do not divide {self.world_size} ranks")
        self.distribution.dp_replicate = dp_replicate


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Data parallelism whose optimizer state, gradients or parameters are partitioned over ranks.

    Rajbhandari et al. 2020 (arXiv 1910.02054). With stage 1 each rank steps some of the parameters.
    Stages 2 and 3 shard every parameter by torch's ``fully_shard``; stage 2 keeps it unsharded
    between forward and backward pass, stage 3 reshards it.

    Args:
        stage: ZeRO stage 1, 2 or 3; Colossal-AI's name of ``zero_stage``.
        zero_stage: the same; it overrides ``stage``.
        options: further arguments of :class:`~runner.booster.HybridParallelPlugin`.
    """

    def __init__(self, stage: int = 1, zero_stage: int | None = None, **options: Any) -> None:
        stage = stage if zero_stage is None else zero_stage
        if stage not in (1, 2, 3):
            raise ValueError(f"zero_stage is 1, 2 or 3, not {stage}")
        super().__init__(zero_stage=stage, **options)


class _OverRanks(HybridParallelPlugin):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**dict.fromkeys(self.open_sizes), **options})


class TensorParallelPlugin(_OverRanks):
    """Tensor parallelism, by default over all ranks, and data parallelism over the others."""

    open_sizes = ("tp_size",)


class PipelineParallelPlugin(_OverRanks):
    """Pipeline parallelism, by default over all ranks, and data parallelism over the others."""

    open_sizes = ("pp_size",)


class MoeHybridParallelPlugin(_OverRanks):
    """Expert parallelism, by default over all data-parallel ranks; other weights are repeated.

    Raises:
        ValueError: the model has no experts to spread (in ``boost``).
    """

    open_sizes = ("ep_size",)

    def configure(self, model: nn.Module) -> ParallelModel:
        """Distribute ``model`` over the ranks, in place."""
        if self.distribution.sizes.ep > 1 and not any(mixtures(model)):
            raise ValueError(
                f"{type(model).__name__} has no experts to spread over "
                f"{self.distribution.sizes.ep} ranks: choose TorchDDPPlugin (plugin=ddp)"
            )
        return super().configure(model)
