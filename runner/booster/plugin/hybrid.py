"""Plugin ``hybrid``: data, tensor, pipeline and expert parallelism on one device mesh.

The plugins ``ddp``, ``fsdp``, ``zero``, ``tensor``, ``pipeline`` and ``moe``, below, are this one
with most sizes set to 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from runner.booster.plugin import base
from runner.clip import Layout
from runner.clip.units import head_weights
from runner.config.notation import first_few
from runner.parallel import gradient_sync as sync
from runner.parallel import mesh as device_mesh
from runner.parallel import stages, tensor_styles
from runner.parallel.hooks import Usage, require_no_post_accumulate
from runner.parallel.mesh import Axes, MeshSizes, grid, mixtures, of_experts, position
from runner.parallel.pipeline import Pipeline
from runner.parallel.sharding import fsdp_options, hold, reshard, shard_model
from runner.parallel.tensor import parallelize, partial_parameters

SIZES = ("dp_size", "tp_size", "pp_size", "ep_size")


class HybridParallelPlugin(base.Plugin):
    """Data × tensor × pipeline parallelism, with experts on different data-parallel ranks.

    Gradients are averaged over data-parallel ranks once per step, while its last backward pass
    runs. With ``zero_stage`` 2 and 3 they are averaged in each backward pass outside ``no_sync``;
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
        param_dtype: with ``zero_stage`` 2 and 3, as ``cpu_offload`` and ``sync_batchnorm``.
        precision: ``fp32``, ``bf16`` or ``fp16``, for a Booster that is given no precision.
        initial_scale: initial fp16 loss scale.
        max_norm: if above 0, each optimizer step clips the norm of the gradient to it.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the number of ranks, or options exclude each other.
    """

    open_sizes: tuple[str, ...] = ()
    """Sizes that take the ranks that the others leave, if they are not given."""

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
        precision: str | None = None,
        initial_scale: float | None = None,
        max_norm: float = 0.0,
    ) -> None:
        if dist.group.WORLD is None:
            raise RuntimeError(
                f"{type(self).__name__} needs a process group: call runner.launch_from_torch() "
                "first, and start the script by torchrun"
            )
        self.world = dist.group.WORLD
        if schedule not in stages.SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}: use {', '.join(stages.SCHEDULES)}")
        if zero_stage not in range(4):
            raise ValueError(f"zero_stage is 0, 1, 2 or 3, not {zero_stage}")
        if zero_stage < 2 and (param_dtype is not None or cpu_offload):
            raise ValueError(
                f"param_dtype and cpu_offload go with zero_stage 2 and 3, not {zero_stage}"
            )
        self.dp_replicate = 1
        self.sizes = MeshSizes.of(self.world_size, dp_size, tp_size, pp_size, ep_size)
        pp = self.sizes.pp
        self.zero_stage, self.sharded = zero_stage, zero_stage >= 2
        self.sync_batchnorm = sync_batchnorm
        self.precision, self.initial_scale, self.max_norm = precision, initial_scale, max_norm
        self.sequence_parallel, self.tp_plan = sequence_parallel, tp_plan
        self.schedule, self.split = schedule, split
        self.stage_count = pp * stages.SCHEDULES[schedule].stages_per_rank
        self.num_microbatches = num_microbatches or self.stage_count
        refused = stages.refused_microbatches(schedule, pp, self.num_microbatches)
        if pp > 1 and refused:
            raise ValueError(f"num_microbatches={num_microbatches}: {refused}")
        # A schedule that splits the backward pass looks for the weights of a stage before it
        # computes gradients, and would not find weights that are unsharded only then.
        self.splits_backward = pp > 1 and stages.SCHEDULES[schedule].splits_backward
        reshards = reshard_after_forward and zero_stage == 3 and not self.splits_backward
        self.sharding = fsdp_options(reshards, base.dtype_of(param_dtype), cpu_offload)
        # Ranks of a tensor group or a pipeline read the same samples.
        self.pp_rank, self.data_rank, tp_rank = position(self.rank, self.sizes)
        self.data_size = self.sizes.dp
        last = stages.stages_on(self.pp_rank, pp, schedule)[-1] == self.stage_count - 1
        self.reports_metrics = tp_rank == 0 and (pp == 1 or last)

    @classmethod
    def sizes_of(cls, ranks: int, options: Mapping[str, Any]) -> MeshSizes:
        """Return the sizes of the mesh for arguments ``options``; SizeError if they do not fit."""
        given = {name: options[name] for name in SIZES if name in options}
        return MeshSizes.of(ranks, **{**dict.fromkeys(cls.open_sizes), **given})

    @classmethod
    def problems(
        cls, model: nn.Module, ranks: int, options: Mapping[str, Any]
    ) -> list[base.Misfit]:
        """Return what does not fit the ranks or the model, see :meth:`Plugin.problems`."""
        return list(_problems(model, ranks, cls.sizes_of(ranks, options), options))

    def configure(self, model: nn.Module) -> base.ParallelModel:
        """Split into stages, distribute experts, shard weights, then shard over data ranks."""
        sizes = self.sizes
        device = next(model.parameters()).device
        axes = Axes.of(device.type, sizes)
        data = axes.dp.get_group()
        if self.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(model, data)  # type: ignore[no-untyped-call]
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        heads = head_weights(model)
        experts = of_experts(model) if sizes.ep > 1 else frozenset()
        styles, sequence = {}, self.sequence_parallel
        if sizes.tp > 1:
            styles = tensor_styles.checked_plan(model, self.tp_plan, sizes.tp, sequence)
        parts = stages.cut(model, self.stage_count, self.split) if sizes.pp > 1 else []
        self._check_hooks(model)
        sync.broadcast_model(model, self.world)
        own = stages.keep_own(model, parts, self.pp_rank, sizes.pp, self.schedule)
        if sizes.ep > 1:
            device_mesh.spread_experts(model, axes.ep.get_group())
        if sizes.tp > 1:
            parallelize(model, styles, axes.tp, sequence=sequence)
        modules = {number: stages.Stage(model, parts[number]) for number in own.numbers}
        roots = list(modules.values()) if parts else [model]
        usage = Usage()
        if self.sharded:
            apart, mesh = axes.edp if sizes.ep > 1 else None, axes.dp
            if self.dp_replicate > 1:
                shape = self.dp_replicate, sizes.dp // self.dp_replicate
                mesh = grid(device.type, shape, ("dp_replicate", "dp_shard"))
            for root in roots:
                shard_model(root, mesh, self.sharding, usage, apart, ends=not parts)

        def ranks(name: str) -> int:
            replicas = sizes.dp // (sizes.ep if name in experts else 1)
            return replicas * sizes.tp * len(own.copies.get(own.renamed.get(name, name), [0]))

        if max(sizes.tp, sizes.pp, sizes.ep, self.zero_stage + 1) == 1:
            # All ranks have bitwise equal gradients, so that clipping needs no collective.
            layout = Layout.of_model(model)
        else:
            layout = Layout.of_sharded(model, self.world, whole, ranks, own.renamed, heads)
        replicas = sync.replicas_of(model, axes, experts, sharded=self.sharded)
        broadcast_params = partial(reshard, roots) if self.sharded else sync.nothing
        steps = None
        if self.zero_stage == 1:
            partition = sync.Partition(replicas)
            steps, broadcast_params = partition.mine, partition.broadcast_params
        tied = sync.tied_copies(model, own.copies, own.renamed, axes)
        staged = [p for stage in modules.values() for p in stage.parameters()]
        backwards = {id(p): self.num_microbatches for p in staged}
        waiting = partial_parameters(model) if sizes.tp > 1 else frozenset()
        averagings = [sync.Averaging(each, backwards, waiting) for each in replicas]
        # Data-parallel ranks exchange tokens for experts, and gather sharded weights.
        waits = data if sizes.ep > 1 or self.sharded else None
        ways = (self.stage_count, self.schedule, self.num_microbatches)
        pipeline = Pipeline(modules, *ways, axes.pp.get_group(), device, waits) if parts else None
        calls = [] if pipeline is None else [pipeline.require_unchanged]
        calls += usage.drops(model, axes, experts) if self.sharded else []
        if sizes.tp > 1:
            split = [p for p in model.parameters() if isinstance(p, DTensor)]
            calls.append(partial(sync.sum_partial, split, axes.tp.get_group()))
        calls += [each.finish for each in averagings]
        calls += [*tied, sync.broadcast_buffers(model, axes, experts)]
        if sizes.tp > 1:
            replicated = tensor_styles.replicated(model)
            calls.append(tensor_styles.ReplicaCheck(replicated, axes.tp.get_group()))
        made = (steps, pipeline, own.renamed, partial(hold, model, averagings), usage.forget)
        finish, once = partial(sync.in_turn, calls), bool(own.copies or experts)
        return base.ParallelModel(layout, finish, broadcast_params, *made, once=once)

    def _check_hooks(self, model: nn.Module) -> None:
        """Refuse post-accumulate hooks that would not run."""
        why = "tensor parallelism replaces parameters by the parts on each rank"
        if self.sizes.tp == 1 and self.sharded:
            why = f"zero_stage={self.zero_stage} computes with temporary copies of parameters"
        elif self.sizes.tp == 1:
            why = f"schedule={self.schedule} computes the gradients of weights apart"
        if self.sizes.tp > 1 or self.sharded or self.splits_backward:
            require_no_post_accumulate(model.named_parameters(), why)


def _problems(
    model: nn.Module, ranks: int, sizes: MeshSizes, options: Mapping[str, Any]
) -> Iterator[base.Misfit]:
    kind, plan, starts = type(model).__name__, options.get("tp_plan"), options.get("split")
    if ranks % (replicas := options.get("dp_replicate", 1)):
        yield "dp_replicate", replicas, f"does not divide the {ranks} ranks (plugin.nproc)"
    if sizes.tp > 1 or plan:
        try:
            sequence = sizes.tp > 1 and options.get("sequence_parallel", False)
            tensor_styles.checked_plan(model, plan, sizes.tp, sequence)
        except tensor_styles.PlanError as error:
            given = {"tp_plan": plan, "tp_size": sizes.tp, "sequence_parallel": True}
            yield error.argument, given[error.argument], str(error)
    if sizes.pp > 1:
        schedule, many = options.get("schedule", "1f1b"), options.get("num_microbatches")
        if many and (refused := stages.refused_microbatches(schedule, sizes.pp, many)):
            yield "num_microbatches", many, refused
        count = sizes.pp * stages.SCHEDULES[schedule].stages_per_rank
        try:
            stages.cut(model, count, starts)
        except stages.CutError as error:
            yield "split" if starts else "pp_size", starts or sizes.pp, str(error)
        if callable(getattr(model, "loss", None)):
            own = f"{kind} computes its own loss, which a pipeline cannot cut"
            yield "pp_size", sizes.pp, own
    asked = options.get("ep_size")
    stacked = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    if sizes.ep > 1 and (asked or stacked) and not any(mixtures(model)):
        which = f" ({first_few(stacked, 2)} cannot be; plugin=fsdp shards them)" if stacked else ""
        yield "ep_size", asked or sizes.ep, f"{kind} has no experts to spread{which}"


class TorchDDPPlugin(HybridParallelPlugin):
    """A replica of the model on every rank, whose gradients are averaged while they are computed.

    As :class:`torch.nn.parallel.DistributedDataParallel` does, but also for parameters that take no
    part in the loss, are frozen later, or have several backward passes. So a gradient is that of
    this rank until clipping, ``optimizer.unscale()`` or the step has made it final.

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
    """

    def __init__(
        self,
        reshard_after_forward: bool = True,
        dp_replicate: int = 1,
        param_dtype: str | None = None,
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
    ) -> None:
        own: dict[str, Any] = {"param_dtype": param_dtype, "cpu_offload": cpu_offload}
        own |= {"reshard_after_forward": reshard_after_forward, "sync_batchnorm": sync_batchnorm}
        super().__init__(zero_stage=3, **own)
        if self.world_size % dp_replicate:
            raise ValueError(f"{dp_replicate} replicas do not divide {self.world_size} ranks")
        self.dp_replicate = dp_replicate


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
        chosen = stage if zero_stage is None else zero_stage
        if chosen not in (1, 2, 3):
            raise ValueError(f"zero_stage is 1, 2 or 3, not {chosen}")
        super().__init__(zero_stage=chosen, **options)


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
    """Expert parallelism, by default over all data-parallel ranks; other weights are repeated."""

    open_sizes = ("ep_size",)
