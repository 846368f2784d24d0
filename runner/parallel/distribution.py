"""How a model is distributed over ranks: stages, experts, shards of weights, data replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from runner.clip import Layout
from runner.clip.units import head_weights
from runner.parallel import gradient_sync as sync
from runner.parallel import mesh, stages, tensor_styles
from runner.parallel.collectives import broadcast, on_any_rank
from runner.parallel.hooks import AfterBatch, Usage, require_no_post_accumulate
from runner.parallel.mesh import Axes, MeshSizes, grid
from runner.parallel.pipeline import Pipeline
from runner.parallel.sharding import hold, mixed_dtypes, reshard, shard_model
from runner.parallel.stages import SCHEDULES
from runner.parallel.tensor import parallelize, partial_parameters


@dataclass(frozen=True)
class ParallelModel:
    """How a model lies on ranks, and what an optimizer step does for it, on every rank."""

    layout: Layout  # placement of the gradients
    sync_grads: Callable[[], None] = sync.nothing  # makes gradients final, once a step
    # Brings new parameters to all ranks that use them, or frees stale copies, after each step.
    broadcast_params: Callable[[], None] = sync.nothing
    steps: frozenset[int] | None = None  # ids of what the optimizer of this rank steps; None: all
    pipeline: Pipeline | None = None  # runs batches, if the model is split into stages
    renamed: Mapping[str, str] = field(default_factory=dict)  # other names in the whole model
    # Called with True before backward passes under no_sync, and with False after them.
    hold: Callable[[bool], None] = lambda held: None
    # Called by zero_grad, which may drop a window before its step.
    forget: Callable[[bool], None] = lambda set_to_none: None
    # Whether making gradients final twice is wrong: it would sum those of tied copies twice.
    once: bool = False
    # Calls a function with each parameter whose gradient has become final in a backward pass; None
    # if they are final only after it.
    watch_final: Callable[[Callable[[Tensor], None]], None] | None = None

    def rebind(
        self, optimizers: Sequence[Optimizer], given: Mapping[str, nn.Parameter], model: nn.Module
    ) -> None:
        """Replace the parameters ``given`` to optimizers by those that this rank steps."""
        now: dict[str, list[nn.Parameter]] = {}
        for own, parameter in model.named_parameters():
            if self.steps is None or id(parameter) in self.steps:
                now.setdefault(self.renamed.get(own, own), []).append(parameter)
        replaced = {id(old): now.get(name, []) for name, old in given.items()}
        if all([id(p) for p in new] == [old] for old, new in replaced.items()):
            return
        if any(optimizer.state for optimizer in optimizers):
            raise ValueError("boost the model before the first step: the optimizer has state")
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new for p in group["params"] for new in replaced[id(p)]]
                sharded = any(isinstance(parameter, DTensor) for parameter in group["params"])
                if sharded and not isinstance(optimizer, Adam):
                    group["fused"] = None  # Only fused Adam, and AdamW, accept DTensors.


@dataclass
class Distribution:
    """The axes of a device mesh, and what is done along them."""

    sizes: MeshSizes
    zero_stage: int
    sequence_parallel: bool
    tp_plan: Mapping[str, str] | None
    schedule: str
    num_microbatches: int | None
    split: Sequence[str] | None
    reshard_after_forward: bool
    param_dtype: torch.dtype | None
    cpu_offload: bool
    sync_batchnorm: bool
    dp_replicate: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}: use {', '.join(SCHEDULES)}")
        if self.zero_stage not in range(4):
            raise ValueError(f"zero_stage is 0, 1, 2 or 3, not {self.zero_stage}")
        if self.zero_stage < 2 and (self.param_dtype is not None or self.cpu_offload):
            raise ValueError(
                f"param_dtype and cpu_offload go with zero_stage 2 and 3, not {self.zero_stage}"
            )
        pp, schedule = self.sizes.pp, SCHEDULES[self.schedule]
        self.stage_count = pp * schedule.stages_per_rank
        self.microbatches = self.num_microbatches or self.stage_count
        refused = stages.refused_microbatches(self.schedule, pp, self.microbatches)
        if pp > 1 and refused:
            raise ValueError(f"num_microbatches={self.num_microbatches}: {refused}")
        self.sharded = self.zero_stage >= 2
        # A schedule that splits the backward pass looks for the weights of a stage before it
        # computes gradients, and would not find weights that are unsharded only then.
        self.splits_backward = pp > 1 and schedule.splits_backward
        reshards = self.reshard_after_forward and self.zero_stage == 3 and not self.splits_backward
        self.fsdp: dict[str, Any] = {"reshard_after_forward": reshards}
        if self.param_dtype is not None:
            self.fsdp["mp_policy"] = MixedPrecisionPolicy(self.param_dtype, torch.float32)
        if self.cpu_offload:
            self.fsdp["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        self.pp_rank, self.data_rank, tp_rank = mesh.position(dist.get_rank(), self.sizes)
        last = stages.stages_on(self.pp_rank, pp, self.schedule)[-1] == self.stage_count - 1
        # Ranks of a tensor group or a pipeline read the same samples.
        self.has_loss = tp_rank == 0 and last

    def distribute(self, model: nn.Module) -> ParallelModel:
        """Split into stages, distribute experts, shard weights, then shard over data ranks."""
        sizes, world, device = self.sizes, dist.group.WORLD, next(model.parameters()).device
        assert world is not None
        axes = Axes.of(device.type, sizes)
        data = axes.dp.get_group()
        if self.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(model, data)  # type: ignore[no-untyped-call]
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        heads = head_weights(model)
        experts = mesh.of_experts(model) if sizes.ep > 1 else frozenset()
        styles, sequence = {}, self.sequence_parallel
        if sizes.tp > 1:
            styles = tensor_styles.checked_plan(model, self.tp_plan, sizes.tp, sequence)
        parts = stages.cut(model, self.stage_count, self.split) if sizes.pp > 1 else []
        self._require_hooks_that_run(model)
        if self.sharded and (problem := mixed_dtypes(model, experts_apart=sizes.ep > 1)):
            raise ValueError(problem)
        # Ranks may have drawn different weights.
        broadcast([each.detach() for each in (*model.parameters(), *model.buffers())], world)
        own = stages.keep_own(model, parts, self.pp_rank, sizes.pp, self.schedule)
        if sizes.ep > 1:
            mesh.spread_experts(model, axes.ep.get_group())
        if sizes.tp > 1:
            parallelize(model, styles, axes.tp, sequence=sequence)
        modules = {number: stages.Stage(model, parts[number]) for number in own.numbers}
        roots = list(modules.values()) if parts else [model]
        usage = Usage()
        if self.sharded:
            self._shard(roots, axes, usage, device.type, ends=not parts)

        def ranks(name: str) -> int:
            replicas = sizes.dp // (sizes.ep if name in experts else 1)
            return replicas * sizes.tp * len(own.copies.get(own.renamed.get(name, name), [0]))

        if max(sizes.tp, sizes.pp, sizes.ep, self.zero_stage + 1) == 1:
            # All ranks have bitwise equal gradients, so that clipping needs no collective.
            layout = Layout.of_model(model)
        else:
            layout = Layout.of_sharded(model, world, whole, ranks, own.renamed, heads)
        replicas = sync.replicas_of(model, axes, experts, sharded=self.sharded)
        broadcast_params = partial(reshard, roots) if self.sharded else sync.nothing
        steps = None
        if self.zero_stage == 1:
            partition = sync.Partition(replicas)
            steps, broadcast_params = partition.mine, partition.broadcast_params
        tied = sync.tied_copies(model, own.copies, own.renamed, axes)
        staged = [p for stage in modules.values() for p in stage.parameters()]
        backwards = {id(p): self.microbatches for p in staged}
        after_batch = AfterBatch(model.parameters() if parts else ())
        waiting = partial_parameters(model)
        if parts and any(on_any_rank([after_batch.runs_hooks], world)):
            # Hooks change gradients after the backward pass: no average may begin before.
            waiting = frozenset(backwards)
        averagings = [sync.Averaging(each, backwards, waiting) for each in replicas]
        # Data-parallel ranks exchange tokens for experts, and gather sharded weights.
        waits = data if sizes.ep > 1 or self.sharded else None
        ways = (self.stage_count, self.schedule, self.microbatches)
        pipeline = None
        if parts:
            group = axes.pp.get_group()
            pipeline = Pipeline(modules, *ways, group, device, waits, after_batch)
        tensor, both = axes.tp.get_group(), (data, axes.edp.get_group())
        held = zip(mesh.split_parameters(model, experts), both, strict=True) if self.sharded else ()
        split = [p for p in model.parameters() if isinstance(p, DTensor) and sizes.tp > 1]
        calls: list[Callable[[], None]] = [
            *([] if pipeline is None else [pipeline.require_unchanged]),
            *(partial(usage.drop_unused, *each) for each in held),
            partial(sync.sum_partial, split, tensor),
            *(each.finish for each in averagings),
            *tied,
            sync.broadcast_buffers(model, axes, experts),
            tensor_styles.ReplicaCheck(tensor_styles.replicated(model), tensor),
        ]
        made = (steps, pipeline, own.renamed, partial(hold, model, averagings), usage.forget)
        finish, once = partial(sync.in_turn, calls), bool(own.copies or experts)
        return ParallelModel(layout, finish, broadcast_params, *made, once=once)

    def _require_hooks_that_run(self, model: nn.Module) -> None:
        """Refuse hooks after accumulation where autograd accumulates into other parameters."""
        named = list(model.named_parameters())
        if self.sizes.tp > 1:
            why = "tensor parallelism replaces parameters by the parts on each rank"
            require_no_post_accumulate(named, why)
        if self.sharded:
            why = f"zero_stage={self.zero_stage} computes with copies of parameters"
            require_no_post_accumulate(named, why)
        if self.splits_backward:
            why = f"schedule={self.schedule} computes gradients of weights apart"
            require_no_post_accumulate(named, why)

    def _shard(
        self, roots: Sequence[nn.Module], axes: Axes, usage: Usage, device: str, *, ends: bool
    ) -> None:
        """Shard the parameters of ``roots`` over data-parallel ranks, experts over their own."""
        experts = axes.edp if self.sizes.ep > 1 else None
        over = axes.dp
        if self.dp_replicate > 1:
            shape = self.dp_replicate, self.sizes.dp // self.dp_replicate
            over = grid(device, shape, ("dp_replicate", "dp_shard"))
        for root in roots:
            shard_model(root, over, self.fsdp, usage, experts, ends=ends)
