"""Plugin ``hybrid``: data, tensor, pipeline and expert parallelism on one mesh of ranks.

The plugins ``zero``, ``tensor``, ``pipeline`` and ``moe`` are this one with most sizes left at 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runner.booster.optimizer import nothing
from runner.booster.plugin.base import ParallelModel, Plugin, require_process_group
from runner.booster.precision import dtype_of
from runner.clip import Layout
from runner.clip.head import head_weights
from runner.config.schedules import SCHEDULES, refused_microbatches
from runner.parallel.experts import mixtures, of_experts, spread_experts
from runner.parallel.gradient_sync import (
    GradientSync,
    Replicas,
    ReplicatedBuffers,
    Tied,
    alike,
    synchronise_batch_norm,
)
from runner.parallel.hooks import post_accumulate_hooked, require_no_post_accumulate
from runner.parallel.mesh import Axes, MeshSizes, position
from runner.parallel.partition import Partition
from runner.parallel.pipeline import Pipeline, Stage
from runner.parallel.replica_check import Agreement, repeated
from runner.parallel.sharding import Sharding, reshard, shard_model, unsynchronised
from runner.parallel.stages import (
    CutError,
    copies_of,
    cut,
    keep,
    require_apart,
    stage_to_rank,
    stages_on,
    untie,
)
from runner.parallel.tensor import parallelize
from runner.parallel.tensor_styles import PlanError, check_heads, check_sequence, plan_of
from runner.parallel.usage import Usage

log = logging.getLogger(__name__)


class HybridParallelPlugin(Plugin):
    """Data × tensor × pipeline parallelism, with experts spread over data parts.

    Gradients of data parts are averaged, in the window's last microbatch or, with ``zero_stage`` 2
    and 3, in each backward pass outside of ``no_sync``, and with stages in each.

    Args:
        tp_size: parts of each split weight.
        pp_size: ranks that pipeline stages are dealt to.
        dp_size: data parts; by default what is left of the ranks.
        ep_size: of the data parts, how many share one set of experts.
        zero_stage: 0: replicas. 1: optimizer state is partitioned over data parts. 2: gradients as
            well, 3: parameters as well (both by ``fully_shard``).
        sequence_parallel: split activations between split layers along the sequence.
        tp_plan: patterns of module names and their styles (see ``runner.parallel.tensor``);
            by default the model's own.
        schedule: of pipeline stages: ``gpipe``, ``1f1b``, ``interleaved_1f1b`` or ``zero_bubble``.
        num_microbatches: parts that a batch is split into for the pipeline; by default as many as
            there are stages.
        split: names of the modules with which further stages begin; by default stages have about as
            many parameters each.
        reshard_after_forward: with ``zero_stage`` 3, see :class:`~runner.booster.TorchFSDPPlugin`;
            with ``schedule="zero_bubble"`` parameters stay gathered until the backward pass.
        param_dtype: with ``zero_stage`` 2 and 3, likewise.
        cpu_offload: with ``zero_stage`` 2 and 3, likewise.
        sync_batchnorm: compute batch norm over the samples of all data-parallel ranks
            (:class:`torch.nn.SyncBatchNorm`, on GPUs alone).
        precision: ``fp32``, ``bf16`` or ``fp16``, for a Booster that is not told otherwise.
        initial_scale: the fp16 scale that training begins with.
        max_norm: above 0, each optimizer step limits the norm of the gradient to it.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the ranks, or options do not go together.
    """

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        dp_size: int | None = None,
        ep_size: int = 1,
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
        require_process_group(type(self).__name__)
        if schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {schedule!r}: use {', '.join(SCHEDULES)}")
        if zero_stage not in range(4):
            raise ValueError(f"zero_stage is 0, 1, 2 or 3, not {zero_stage}")
        if zero_stage < 2 and (param_dtype is not None or cpu_offload):
            raise ValueError(
                f"param_dtype and cpu_offload go with zero_stage 2 and 3, not {zero_stage}"
            )
        self.sizes = MeshSizes.of(self.world_size, dp_size, tp_size, pp_size, ep_size)
        self.zero_stage = zero_stage
        self.sync_batchnorm = sync_batchnorm
        self.precision, self.initial_scale, self.max_norm = precision, initial_scale, max_norm
        self.sequence_parallel = sequence_parallel
        self.tp_plan = tp_plan
        self.schedule = schedule
        self.stage_count = pp_size * SCHEDULES[schedule].stages_per_rank
        self.num_microbatches = num_microbatches or self.stage_count
        refused = refused_microbatches(schedule, pp_size, self.num_microbatches)
        if pp_size > 1 and refused:
            raise ValueError(f"num_microbatches={num_microbatches}: {refused}")
        self.split = split
        # A zero-bubble schedule looks for the weights of a stage before it computes gradients, and
        # would not find those that are gathered only then.
        reshard = reshard_after_forward and zero_stage == 3
        if pp_size > 1 and schedule == "zero_bubble":
            reshard = False
        self.sharding = Sharding(reshard, dtype_of(param_dtype), cpu_offload)
        self.stage, self._part, tensor_part = position(self.rank, self.sizes)
        last = stages_on(self.stage, pp_size, schedule)[-1] == self.stage_count - 1
        self.reports_metrics = tensor_part == 0 and (pp_size == 1 or last)

    @property
    def data_rank(self) -> int:
        """Ranks of one tensor group, and of one pipeline, read the same samples."""
        return self._part

    @property
    def data_size(self) -> int:
        """Data parts."""
        return self.sizes.dp

    @classmethod
    def problems(
        cls, model: nn.Module, ranks: int, options: Mapping[str, Any]
    ) -> list[tuple[str, Any, str]]:
        """Sizes that do not fit the ranks, a plan that does not fit the model, too many stages."""
        given = cls.sizes_given(options, ranks)
        try:
            sizes = MeshSizes.of(ranks, **given)
        except ValueError as error:
            return [("nproc", ranks, str(error))]
        found: list[tuple[str, Any, str]] = []
        plan = options.get("tp_plan")
        if sizes.tp > 1 or plan:
            try:
                styles = plan_of(model, plan)
            except PlanError as error:
                found.append(("tp_plan", plan, str(error)))
            else:
                try:
                    check_heads(model, styles, sizes.tp)
                except PlanError as error:
                    found.append(("tp_size", sizes.tp, str(error)))
                if sizes.tp > 1 and options.get("sequence_parallel"):
                    try:
                        check_sequence(styles)
                    except PlanError as error:
                        found.append(("sequence_parallel", True, str(error)))
        if sizes.pp > 1:
            stages = sizes.pp * SCHEDULES[options.get("schedule", "1f1b")].stages_per_rank
            starts = options.get("split")
            try:
                cut(model, stages, starts)
            except CutError as error:
                found.append(("split" if starts else "pp_size", starts or sizes.pp, str(error)))
            if callable(getattr(model, "loss", None)):
                own = f"{type(model).__name__} computes its own loss, which a pipeline cannot cut"
                found.append(("pp_size", sizes.pp, own))
        asked = options.get("ep_size")
        if asked and asked > 1 and not any(mixtures(model)):
            none = f"{type(model).__name__} has no experts to spread; model=moe has"
            found.append(("ep_size", asked, none))
        return found

    @classmethod
    def sizes_given(cls, options: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """Arguments of :meth:`Sizes.of` for these ranks, from those of the constructor."""
        return {
            "dp": options.get("dp_size"),
            "tp": options.get("tp_size") or 1,
            "pp": options.get("pp_size") or 1,
            "ep": options.get("ep_size") or 1,
        }

    def configure(self, model: nn.Module) -> ParallelModel:
        """Cut, deal out experts, split weights, shard: in this order, where each is asked for."""
        world = dist.group.WORLD
        assert world is not None
        sizes = self.sizes
        device = next(model.parameters()).device
        axes = Axes(device.type, sizes)
        if self.sync_batchnorm:
            synchronise_batch_norm(model, axes.group("dp"))
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        heads = head_weights(model)
        experts = of_experts(model) if sizes.ep > 1 else frozenset()
        styles = plan_of(model, self.tp_plan) if sizes.tp > 1 else {}
        check_heads(model, styles, sizes.tp)
        if sizes.tp > 1 and self.sequence_parallel:
            check_sequence(styles)
        stages = cut(model, self.stage_count, self.split) if sizes.pp > 1 else []
        self._check_hooks(model)
        alike(model, world)

        renamed = untie(model, stages)
        homes = [stage_to_rank(number, sizes.pp, self.schedule) for number in range(len(stages))]
        if self.zero_stage >= 2:
            require_apart(model, stages, homes)
        copies = copies_of(model, stages, renamed, homes)
        own = stages_on(self.stage, sizes.pp, self.schedule) if stages else []
        if stages:
            keep(model, stages, own)
        if sizes.ep > 1:
            if not experts and self.rank == 0:
                log.warning("%s has no experts: it is repeated whole", type(model).__name__)
            spread_experts(model, axes.group("ep"))
        if sizes.tp > 1:
            parallelize(model, styles, axes.tp, sequence=self.sequence_parallel)
        modules = {number: Stage(model, stages[number]) for number in own}
        broadcast_params: Callable[[], None] = nothing
        usage = Usage()
        if self.zero_stage >= 2:
            apart = axes.edp if sizes.ep > 1 else None
            roots = list(modules.values()) if stages else [model]
            for root in roots:
                shard_model(root, axes.dp, self.sharding, usage, apart, ends=not stages)
            broadcast_params = partial(reshard, roots)

        def ranks(name: str) -> int:
            replicas = sizes.dp // (sizes.ep if name in experts else 1)
            return replicas * sizes.tp * len(copies.get(renamed.get(name, name), [0]))

        layout = Layout.of_sharded(model, world, whole, ranks, renamed, heads)
        replicas = self._replicas(model, axes, experts)
        partition = Partition(replicas) if self.zero_stage == 1 else None
        found = [self._tied(model, name, where, renamed, axes) for name, where in copies.items()]
        tied = [each for each in found if each is not None]
        agree = Agreement(repeated(model), axes.group("tp")) if sizes.tp > 1 else nothing
        return ParallelModel(
            model,
            layout,
            sync_grads=GradientSync(
                model.parameters(),
                replicas,
                tied,
                agree,
                self._drop_unused(model, axes, experts, usage) if self.zero_stage >= 2 else (),
                [
                    ReplicatedBuffers(model, axes.group("dp"), lambda name: name not in experts),
                    ReplicatedBuffers(model, axes.group("edp"), lambda name: name in experts),
                ],
            ),
            broadcast_params=broadcast_params if partition is None else partition.broadcast_params,
            steps=None if partition is None else partition.mine,
            pipeline=self._pipeline(modules, axes, device) if stages else None,
            renamed=renamed,
        )

    def _check_hooks(self, model: nn.Module) -> None:
        """Refuse hooks that cannot run, and warn of those that run more often than one expects.

        Raises:
            HookError: a parameter with a post-accumulate hook will be replaced, or computed in a
                way that leaves the hook out.
        """
        found = None
        if self.sizes.tp > 1:
            found = "tensor parallelism replaces parameters by the parts on each rank"
        elif self.zero_stage >= 2:
            found = f"zero_stage={self.zero_stage} computes with temporary copies of parameters"
        elif self.sizes.pp > 1 and self.schedule == "zero_bubble":
            found = "schedule=zero_bubble computes the gradients of weights apart"
        if found is not None:
            require_no_post_accumulate(model.named_parameters(), found)
        hooked = post_accumulate_hooked(model.named_parameters())
        if hooked and self.sizes.pp > 1 and self.rank == 0:
            log.warning(
                "%s: a post-accumulate hook runs once for each of the %d microbatches of a batch",
                ", ".join(hooked),
                self.num_microbatches,
            )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Sharded gradients stay local until a backward pass outside, but those of stages, which
        are reduced with every batch; others are averaged once a step in any case.
        """
        return unsynchronised(model) if self.zero_stage >= 2 else nullcontext()

    def _replicas(self, model: nn.Module, axes: Axes, experts: frozenset[str]) -> list[Replicas]:
        """Parameters with the ranks whose gradients are to be averaged."""
        sizes = self.sizes
        named = list(model.named_parameters())
        shared = [p for name, p in named if name not in experts]
        spread = [p for name, p in named if name in experts]
        if self.zero_stage >= 2:
            # Sharded ones are averaged over the ranks that hold the same: for experts too few.
            return [Replicas(spread, None, sizes.ep)] if experts else []
        each = [Replicas(shared, axes.group("dp"), sizes.dp)]
        return [*each, Replicas(spread, axes.group("edp"), sizes.dp)] if experts else each

    def _drop_unused(
        self, model: nn.Module, axes: Axes, experts: frozenset[str], usage: Usage
    ) -> list[Callable[[], None]]:
        """What sets gradients of unused sharded parameters to None, for each group of ranks."""
        named = list(model.named_parameters())
        shares = {
            "dp": {name: p for name, p in named if name not in experts},
            "edp": {name: p for name, p in named if name in experts},
        }
        return [partial(usage.drop_unused, held, axes.group(at)) for at, held in shares.items()]

    def _tied(
        self,
        model: nn.Module,
        name: str,
        where: Sequence[int],
        renamed: Mapping[str, str],
        axes: Axes,
    ) -> Tied | None:
        """The copies here of a parameter that several stages use. Every rank has to call it."""
        homes = sorted(set(where))
        group: dist.ProcessGroup | None = None
        if len(homes) == self.sizes.pp:
            group = axes.group("pp")
        elif len(homes) > 1:
            # On every rank, also on those without a copy: torch numbers groups by counting them.
            pipelines = self.sizes.dp * self.sizes.tp
            own, _ = dist.new_subgroups_by_enumeration(
                [[home * pipelines + i for home in homes] for i in range(pipelines)]
            )
            group = own if isinstance(own, dist.ProcessGroup) else None
        copies = [p for path, p in model.named_parameters() if renamed.get(path, path) == name]
        return Tied(copies, group) if copies else None

    def _pipeline(self, modules: dict[int, Stage], axes: Axes, device: torch.device) -> Pipeline:
        # Experts that are spread, and sharded weights, come from other data parts.
        waits = self.sizes.ep > 1 or self.zero_stage >= 2
        return Pipeline(
            modules,
            self.stage_count,
            self.schedule,
            self.num_microbatches,
            axes.group("pp"),
            device,
            axes.group("dp") if waits else None,
        )


PLUGIN = HybridParallelPlugin
