"""Section ``plugin``: how model and optimizer are spread over ranks.

Every option has every key, so that a sweep over plugins or a recipe may set any of them where they
mean something. A key that is set where nothing uses it is a problem: whoever set it expects an
effect that it does not have. The file of a plugin in ``conf/plugin`` lists the keys that it uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainValidator

from runner.config.folders import find, options, read_yaml
from runner.config.problem import did_you_mean, or_list, shown
from runner.config.section import Conflict, Count, OneOf, Texts, key
from runner.config.sizes import MeshSizes, SizeError, Sizes, least_ranks, may_grow, sizes


class Schedule(NamedTuple):
    stages_per_rank: int
    fills_every_stage: bool
    splits_backward: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(1, fills_every_stage=False),
    "1f1b": Schedule(1, fills_every_stage=True),
    "interleaved_1f1b": Schedule(2, fills_every_stage=True),
    "zero_bubble": Schedule(2, fills_every_stage=False, splits_backward=True),
}


def refused_microbatches(schedule: str, pp_size: int, microbatches: int) -> str | None:
    """Return why ``microbatches`` do not fill the pipeline; None if they do."""
    stages = pp_size * SCHEDULES[schedule].stages_per_rank
    if SCHEDULES[schedule].fills_every_stage and microbatches < stages:
        return f"must be {stages} or more, one for each stage, or schedule=gpipe"
    if schedule == "interleaved_1f1b" and microbatches % (microbatches // pp_size):
        return f"must make equal rounds over {pp_size} ranks: give a multiple of {pp_size}"
    return None


STYLES: Mapping[str, str] = {
    "colwise": "output features are sharded",
    "rowwise": "input features are sharded, and outputs are summed over ranks",
    "colwise_rep": "output features are sharded, and outputs are gathered",
    "embedding_rowwise": "the vocabulary is sharded",
    "colwise_gather_output": "the name of colwise_rep since transformers 5",
    "rowwise_split_input": "like rowwise, for inputs that are whole on each rank",
    "replicated_with_grad_allreduce": "parameters are replicated; each rank computes a part of "
    "their gradient, as for a norm of single heads",
    "sequence_parallel": "with sequence_parallel, the module computes on a shard of the sequence",
    "split_sequence": "with sequence_parallel, outputs are sharded along the sequence",
    "whole_sequence": "with sequence_parallel, the module gets the whole sequence",
}
"""Styles of a plan of tensor parallelism and their meaning. Names are those of transformers."""

EXPERT_STYLES = ("moe_tp_experts", "moe_identity_expert")
"""Styles of transformers for modules with stacked experts, which stay whole on each rank."""


def read_plan(value: Any) -> dict[str, str]:
    """Return a plan, patterns of module names with styles, or the one in the file at a path.

    The file is read while a request is checked, so that ranks and the record have the plan itself.
    """
    where, plan = "", value
    if isinstance(value, str):
        where, plan = f"{value}: ", read_yaml(Path(value).expanduser())
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(f"{where}must be patterns of modules with styles, {{blocks.*.up:colwise}}")
    wrong = [
        f"{shown(pattern)} has the unknown style {shown(style)}{did_you_mean(style, STYLES)}"
        for pattern, style in plan.items()
        if not (isinstance(pattern, str) and isinstance(style, str) and style in STYLES)
    ]
    if wrong:
        raise ValueError(f"{where}{', '.join(wrong)}  (styles: {', '.join(STYLES)})")
    return dict(plan)


@cache
def uses() -> Mapping[str, tuple[Any, list[str]]]:
    """Return, of each key that not every plugin uses, the value of no effect, and the plugins."""
    folder = find("conf")
    files = {name: read_yaml(folder / "plugin" / f"{name}.yaml") for name in options("plugin")}
    found = {
        key: (neutral, [name for name, file in files.items() if key in file])
        for key, neutral in read_yaml(folder / "plugin_keys.yaml").items()
    }
    return {key: use for key, use in found.items() if 0 < len(use[1]) < len(files)}


class PluginSection(Sizes):
    reshard_after_forward: bool = key("fsdp, zero_stage 3: false takes memory, saves traffic")
    dp_replicate: Count = key("fsdp: number of replicas, each sharded over its share of the ranks")
    zero_stage: int = key("partition 1 optimizer state, 2 gradients, 3 parameters too", ge=0, le=3)
    sequence_parallel: bool = key("tensor: split norms and dropout along the sequence")
    schedule: Annotated[str, OneOf(SCHEDULES)] = key("pipeline: order of passes")
    num_microbatches: Count | None = key("pipeline: parts of a batch; null: one for each stage")
    split: Texts | None = key("pipeline: begin stages at these modules; null: the model's cuts")
    tp_plan: Annotated[dict[str, str], PlainValidator(read_plan)] | None = key(
        "tensor: patterns of modules with styles, or a file; null: the model's"
    )
    param_dtype: Literal["bf16", "fp16"] | None = key("fsdp, zero 2, 3: compute in this type")
    cpu_offload: bool = key("fsdp, zero_stage 2, 3: keep shards in host memory")
    sync_batchnorm: bool = key("GPUs: compute batch norm over all data-parallel ranks")

    @property
    def shards_parameters(self) -> bool:
        """Whether the optimizer of a rank steps shards of parameters."""
        tensor = self.name == "tensor" or (self.name == "hybrid" and self.tp_size != 1)
        return self.name == "fsdp" or self.zero_stage > 1 or tensor

    def conflicts(self) -> Iterator[Conflict]:
        """Yield keys that nothing uses, sizes that do not multiply, and an unfilled pipeline."""
        if unused := list(self._unused()):
            yield from unused
            return
        mesh = None
        if not may_grow(self):
            try:
                mesh = sizes(self, least_ranks(self))
            except SizeError as error:
                yield Conflict(error.key, str(error))
        if self.sequence_parallel and (self.tp_size if mesh is None else mesh.tp) == 1:
            message = "splits the sequence over plugin.tp_size ranks, which must be 2 or more"
            yield Conflict("sequence_parallel", message)
        if (stages := self._stages(mesh)) is None:
            return
        ranks, many = stages // SCHEDULES[self.schedule].stages_per_rank, self.num_microbatches
        if many and (why := refused_microbatches(self.schedule, ranks, many)):
            yield Conflict("num_microbatches", why)
        if self.split is not None and len(self.split) != stages - 1:
            message = f"must name {stages - 1} modules, since the pipeline has {stages} stages"
            yield Conflict("split", message)

    def _unused(self) -> Iterator[Conflict]:
        for name in ("nproc", "nnodes"):
            if self.name == "single" and getattr(self, name) not in (None, 1):
                yield Conflict(name, "plugin=single is one process; plugin=ddp spreads over ranks")
        for name, (neutral, plugins) in uses().items():
            value = getattr(self, name)
            if self.name in plugins:
                if value is None and self.name == "hybrid" and name in ("tp_size", "pp_size"):
                    yield Conflict(name, "must be a number under plugin=hybrid")
            elif value != neutral and (name, value, self.name) != ("dp_size", 1, "single"):
                users = or_list(f"plugin={plugin}" for plugin in plugins)
                message = f"has no meaning under plugin={self.name}; {users} uses it"
                yield Conflict(name, message)
        stage = self.zero_stage
        if self.name == "zero" and stage == 0:
            yield Conflict("zero_stage", "must be 1, 2 or 3 under plugin=zero")
        least = {"reshard_after_forward": 3, "param_dtype": 2, "cpu_offload": 2}
        for name, least_stage in least.items() if self.name in ("zero", "hybrid") else ():
            if stage < least_stage and getattr(self, name) != uses()[name][0]:
                message = f"has no meaning with plugin.zero_stage={stage}: give {least_stage}"
                yield Conflict(name, f"{message} or more" if least_stage < 3 else message)

    def _stages(self, mesh: MeshSizes | None) -> int | None:
        """Return the stages of the pipeline; None without one, or if it depends on the ranks."""
        ranks = self.pp_size if mesh is None else mesh.pp
        if self.name not in uses()["schedule"][1] or ranks is None:
            return None
        if self.name == "hybrid" and ranks == 1:
            return None
        return ranks * SCHEDULES[self.schedule].stages_per_rank

    @property
    def pipeline_microbatches(self) -> int | None:
        """Microbatches that a batch is split into; None without a pipeline."""
        stages = self._stages(None if may_grow(self) else sizes(self, least_ranks(self)))
        if self.num_microbatches is None or (stages is None and self.name != "pipeline"):
            return stages
        return self.num_microbatches
