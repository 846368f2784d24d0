"""How a model is distributed over ranks: stages, experts, shards of weights, data replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from runner.gradients import Layout
from runner.gradients.units import head_weights
from runner.parallel import gradient_sync as sync
from runner.parallel import mesh, stages, tensor_styles
from runner.parallel.collectives import on_any_rank
from runner.parallel.full_state_dict import FirstRankValues
from runner.parallel.hooks import AfterBatch, Usage, require_no_post_accumulate
from runner.parallel.mesh import Axes, MeshSizes, grid
from runner.parallel.pipeline import Pipeline
from runner.parallel.sharding import hold, reshard, shard_model, why_not_shardable
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
    # Whether making gradients final twice is wrong: it would sum gradients of tied copies twice.
    once: bool = False
    # Calls a function with each parameter whose gradient has become final in a backward pass; None
    # if they are final only after it.
    watch_final: Callable[[Callable[[Tensor], None]], None] | None = None

    def rebind(
        self, optimizers: Sequence[Optimizer], before: Mapping[str, nn.Parameter], model: nn.Module
    ) -> None:
        """Replace the parameters in optimizers by the parameters that this rank steps.

        Args:
            optimizers: the optimizers of the model before it was distributed.
            before: the parameters of the whole model, by name.
            model: this rank's part of the model.
        """
        stepped = self._stepped(model)
        replacements = {id(old): stepped.get(name, []) for name, old in before.items()}
        if all(_is_only(old, new) for old, new in replacements.items()):
            return
        if any(optimizer.state for optimizer in optimizers):
            raise ValueError("boost the model before the first step: the optimizer has state")
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters: list[nn.Parameter] = []
                for old_parameter in group["params"]:
                    parameters += replacements[id(old_parameter)]
                group["params"] = parameters
                if not isinstance(optimizer, Adam) and _any_sharded(parameters):
                    group["fused"] = None  # Only fused Adam, and AdamW, accept DTensors.

    def _stepped(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """Return the parameters that this rank steps, by their names in the whole model."""
        stepped: dict[str, list[nn.Parameter]] = {}
        for local_name, parameter in model.named_parameters():
            if self.steps is None or id(parameter) in self.steps:
                name = self.renamed.get(local_name, local_name)
                stepped.setdefault(name, []).append(parameter)
        return stepped


def _is_only(parameter_id: int, parameters: Sequence[nn.Parameter]) -> bool:
    return [id(parameter) for parameter in parameters] == [parameter_id]


def _any_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _resharding(roots: Sequence[nn.Module]) -> Callable[[], None]:
    return lambda: reshard(roots)


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
    no_sync: bool
    dp_replicate: int = 1

    def __post_init__(self) -> None:
        self._require_options_of_stage()
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}: use {', '.join(SCHEDULES)}")
        pp = self.sizes.pp
        schedule = SCHEDULES[self.schedule]
        self.stage_count = pp * schedule.stages_per_rank
        self.microbatches = self.num_microbatches or self.stage_count
        refused = stages.refused_microbatches(self.schedule, pp, self.microbatches)
        if pp > 1 and refused:
            raise ValueError(f"num_microbatches={self.num_microbatches}: {refused}")
        self.sharded = self.zero_stage >= 2
        # A schedule that splits the backward pass looks for the weights of a stage before it
        # computes gradients, and would not find weights that are unsharded only then.
        self.splits_backward = pp > 1 and schedule.splits_backward
        self.fsdp = self._fsdp_options()
        self.pp_rank, self.data_rank, tp_rank = mesh.position(dist.get_rank(), self.sizes)
        last = stages.stages_on(self.pp_rank, pp, self.schedule)[-1] == self.stage_count - 1
        # Ranks of a tensor group or a pipeline read the same samples.
        self.has_loss = tp_rank == 0 and last

    def _require_options_of_stage(self) -> None:
        """Refuse options that need another stage of ZeRO."""
        if self.zero_stage not in range(4):
            raise ValueError(f"zero_stage is 0, 1, 2 or 3, not {self.zero_stage}")
        if self.zero_stage < 2 and (self.param_dtype is not None or self.cpu_offload):
            raise ValueError(
                f"param_dtype and cpu_offload go with zero_stage 2 and 3, not {self.zero_stage}"
            )
        if self.zero_stage < 2 and not self.no_sync:
            raise ValueError(f"no_sync goes with zero_stage 2 and 3, not {self.zero_stage}")

    def _fsdp_options(self) -> dict[str, Any]:
        reshards = self.reshard_after_forward and self.zero_stage == 3 and not self.splits_backward
        options: dict[str, Any] = {"reshard_after_forward": reshards}
        if self.param_dtype is not None:
            options["mp_policy"] = MixedPrecisionPolicy(self.param_dtype, torch.float32)
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return options

    def distribute(self, model: nn.Module, device: torch.device) -> ParallelModel:
        """Split into stages, distribute experts, shard weights, then shard over data ranks.

        The values come from the first rank, whose model may lie on the host. Each rank gets its
        parts of them on ``device``.
        """
        sizes = self.sizes
        world = dist.group.WORLD
        assert world is not None
        axes = Axes.of(device.type, sizes)
        if self.sync_batchnorm:
            data = axes.dp.get_group()
            nn.SyncBatchNorm.convert_sync_batchnorm(model, data)  # type: ignore[no-untyped-call]
        self._require_shardable(model)

        # What is asked of the whole model, before it is split.
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        heads = head_weights(model)
        experts = mesh.of_experts(model) if sizes.ep > 1 else frozenset()
        styles = self._tensor_styles(model)
        parts = stages.cut(model, self.stage_count, self.split) if sizes.pp > 1 else []
        values = FirstRankValues(model)

        # Split: stages, experts, weights, and shards of what is left on the rank.
        own_stages = stages.keep_own(model, parts, self.pp_rank, sizes.pp, self.schedule)
        if sizes.ep > 1:
            mesh.spread_experts(model, axes.ep.get_group())
        if sizes.tp > 1:
            # fully_shard allocates what it keeps.
            kept = torch.device("meta") if self.sharded else device
            parallelize(model, styles, axes.tp, kept, sequence=self.sequence_parallel)
        modules = {number: stages.Stage(model, parts[number]) for number in own_stages.numbers}
        roots = list(modules.values()) if parts else [model]
        usage = Usage()
        if self.sharded:
            self._shard_over_data(roots, axes, usage, device, ends=not parts)
        values.fill(model, own_stages.renamed, device)

        # Where gradients lie, and what an optimizer step does.
        if self._is_replicated():
            # All ranks have bitwise equal gradients, so that clipping needs no collective.
            layout = Layout.of_model(model)
        else:
            num_replicas = self._num_replicas(own_stages, experts)
            layout = Layout.of_sharded(model, world, whole, num_replicas, own_stages.renamed, heads)
        replicas = sync.replicas_of(model, axes, experts, sharded=self.sharded)
        steps, broadcast_params = self._steps_of_rank(replicas, roots)
        tied = sync.tied_copies(model, own_stages.copies, own_stages.renamed, axes)
        after_batch = AfterBatch(model.parameters() if parts else ())
        averagings = self._averagings(model, modules, replicas, after_batch)
        pipeline = self._pipeline(modules, axes, device, after_batch) if parts else None
        replicated = tensor_styles.replicated(model)
        # In this order, once a step, on every rank.
        calls: list[Callable[[], None]] = []
        if pipeline is not None:
            calls.append(pipeline.require_unchanged)
        calls += [
            *self._drop_unused(model, axes, experts, usage),
            self._sum_partial(model, axes),
            *(averaging.finish for averaging in averagings),
            *tied,
            sync.broadcast_buffers(model, axes, experts),
            tensor_styles.ReplicaCheck(replicated, axes.tp.get_group()),
        ]
        return ParallelModel(
            layout=layout,
            sync_grads=lambda: sync.in_turn(calls),
            broadcast_params=broadcast_params,
            steps=steps,
            pipeline=pipeline,
            renamed=own_stages.renamed,
            hold=lambda held: hold(model, averagings, held and self.no_sync),
            forget=usage.forget,
            once=bool(own_stages.copies or experts),
        )

    def _steps_of_rank(
        self, replicas: Sequence[sync.Replicas], roots: Sequence[nn.Module]
    ) -> tuple[frozenset[int] | None, Callable[[], None]]:
        """Return what the optimizer of this rank steps, and what brings that to the other ranks."""
        if self.sharded:
            return None, _resharding(roots)
        if self.zero_stage == 1:
            partition = sync.Partition(replicas)
            return partition.mine, partition.broadcast_params
        return None, sync.nothing

    @property
    def splits_model(self) -> bool:
        """Whether each rank holds a part of the parameters only."""
        sizes = self.sizes
        return self.sharded or max(sizes.tp, sizes.pp, sizes.ep) > 1

    def _is_replicated(self) -> bool:
        """Return True if every rank holds and steps the whole model."""
        return not self.splits_model and self.zero_stage == 0

    def _tensor_styles(self, model: nn.Module) -> Mapping[str, str]:
        """Return how each layer is split over tensor-parallel ranks."""
        if self.sizes.tp == 1:
            return {}
        ranks = self.sizes.tp
        return tensor_styles.checked_plan(model, self.tp_plan, ranks, self.sequence_parallel)

    def _require_shardable(self, model: nn.Module) -> None:
        """Refuse blocks that cannot be sharded, and hooks that would not be called."""
        problem = None
        if self.sharded:
            problem = why_not_shardable(model, experts_apart=self.sizes.ep > 1)
        if problem:
            raise ValueError(problem)
        reasons = []
        if self.sizes.tp > 1:
            reasons.append("tensor parallelism replaces parameters by the parts on each rank")
        if self.sharded:
            reasons.append(f"zero_stage={self.zero_stage} computes with copies of parameters")
        if self.splits_backward:
            reasons.append(f"schedule={self.schedule} computes gradients of weights apart")
        for reason in reasons:
            require_no_post_accumulate(model.named_parameters(), reason)

    def _shard_over_data(
        self,
        roots: Iterable[nn.Module],
        axes: Axes,
        usage: Usage,
        device: torch.device,
        ends: bool,
    ) -> None:
        if self.cpu_offload:
            device = torch.device("cpu")
        over = axes.dp
        if self.dp_replicate > 1:
            shape = (self.dp_replicate, self.sizes.dp // self.dp_replicate)
            over = grid(over.device_type, shape, ("dp_replicate", "dp_shard"))
        experts = axes.edp if self.sizes.ep > 1 else None
        for root in roots:
            shard_model(root, over, self.fsdp, usage, device, experts, ends=ends)

    def _num_replicas(
        self, own_stages: stages.OwnStages, experts: frozenset[str]
    ) -> Callable[[str], int]:
        """Return a function that gives the number of ranks with a parameter, or a shard of it."""
        sizes = self.sizes

        def num_replicas(name: str) -> int:
            data_ranks = sizes.dp // (sizes.ep if name in experts else 1)
            copies = own_stages.copies.get(own_stages.renamed.get(name, name), [0])
            return data_ranks * sizes.tp * len(copies)

        return num_replicas

    def _averagings(
        self,
        model: nn.Module,
        modules: Mapping[int, nn.Module],
        replicas: Iterable[sync.Replicas],
        after_batch: AfterBatch,
    ) -> list[sync.Averaging]:
        staged = [parameter for stage in modules.values() for parameter in stage.parameters()]
        backwards = {id(parameter): self.microbatches for parameter in staged}
        waiting = partial_parameters(model)
        if self.sizes.pp > 1 and any(on_any_rank([after_batch.runs_hooks], dist.group.WORLD)):
            # Hooks change gradients after the backward pass: no average may begin before.
            waiting = frozenset(backwards)
        return [sync.Averaging(group, backwards, waiting) for group in replicas]

    def _pipeline(
        self,
        modules: dict[int, stages.Stage],
        axes: Axes,
        device: torch.device,
        after_batch: AfterBatch,
    ) -> Pipeline:
        # Data-parallel ranks exchange tokens for experts, and gather sharded weights.
        waits = axes.dp.get_group() if self.sizes.ep > 1 or self.sharded else None
        return Pipeline(
            modules,
            self.stage_count,
            self.schedule,
            self.microbatches,
            axes.pp.get_group(),
            device,
            waits,
            after_batch,
        )

    def _drop_unused(
        self, model: nn.Module, axes: Axes, experts: frozenset[str], usage: Usage
    ) -> list[Callable[[], None]]:
        """Return what drops gradients of sharded parameters that no rank has used."""
        if not self.sharded:
            return []
        shared, expert = mesh.split_parameters(model, experts)
        data = axes.dp.get_group()
        expert_data = axes.edp.get_group()
        return [
            lambda: usage.drop_unused(shared, data),
            lambda: usage.drop_unused(expert, expert_data),
        ]

    def _sum_partial(self, model: nn.Module, axes: Axes) -> Callable[[], None]:
        """Return what sums gradients of which each tensor-parallel rank has a part."""
        split: list[Any] = []
        if self.sizes.tp > 1:
            split = [p for p in model.parameters() if isinstance(p, DTensor)]
        group = axes.tp.get_group()
        return lambda: sync.sum_partial(split, group)
