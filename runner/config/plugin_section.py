"""Section ``plugin``: how many ranks a run has, and how model and optimizer are spread over them.

All arithmetic of ranks is here. Every plugin has every key; the file of a plugin in ``conf/plugin``
lists the keys that it uses, and another one that is set is a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import lcm, prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from runner.config.environment import started_nodes, started_rank
from runner.config.folders import find, options, read_yaml
from runner.config.notation import plural
from runner.config.problem import or_list
from runner.config.section import Conflicts, Count, OneOf, Section, Texts, key


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


STYLES = (
    *("colwise", "rowwise", "colwise_rep", "colwise_gather_output", "rowwise_split_input"),
    *("embedding_rowwise", "replicated_with_grad_allreduce"),
    *("sequence_parallel", "split_sequence", "whole_sequence"),
)
"""Styles of a plan of tensor parallelism: names of transformers, and three for the sequence."""

EXPERT_STYLES = ("moe_tp_experts", "moe_identity_expert")
"""Styles of transformers for modules with stacked experts, which stay whole on each rank."""


def read_plan(value: Any) -> Any:
    """Return the plan of a file, which ranks and the record then have; or a plan as it is."""
    return read_yaml(Path(value).expanduser()) if isinstance(value, str) else value


Plan = Annotated[
    dict[str, Annotated[str, OneOf(STYLES)]], Field(min_length=1), BeforeValidator(read_plan)
]


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


class SizeError(ValueError):
    """Sizes that do not multiply to the number of ranks; ``key`` is the one to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class MeshSizes(NamedTuple):
    """Number of ranks along each axis of the device mesh; dp · tp · pp is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(
        cls,
        ranks: int,
        dp_size: int | None = None,
        tp_size: int | None = 1,
        pp_size: int | None = 1,
        ep_size: int | None = 1,
    ) -> MeshSizes:
        """Divide ``ranks``; the first of tp, pp and dp that is None takes those that are left."""
        given = _given(dp_size=dp_size, tp_size=tp_size, pp_size=pp_size)
        rest, product = _open_size(given), prod(given.values())
        if ranks % product or (rest is None and ranks != product):
            factors = [f"{name} {size}" for name, size in given.items() if size > 1]
            text = f"{' x '.join(factors) or 'one process'} = {product}"
            many = "" if rest is None else "a multiple of "
            raise SizeError("nproc", f"{plural(ranks, 'rank')} cannot be {many}{text}")
        found = {"tp_size": 1, "pp_size": 1, "dp_size": 1, **given}
        if rest is not None:
            found[rest] = ranks // product
        dp = found["dp_size"]
        if dp % (ep := ep_size or dp):
            message = f"{ep} ranks cannot share the experts of {dp} data-parallel ranks evenly"
            raise SizeError("ep_size", message)
        return cls(dp, found["tp_size"], found["pp_size"], ep)


def _given(**sizes: int | None) -> dict[str, int]:
    return {key: size for key, size in sizes.items() if size is not None}


def _open_size(given: Mapping[str, int]) -> str | None:
    """Return the size that takes the ranks which the others leave; None if all are given."""
    return next((key for key in ("tp_size", "pp_size", "dp_size") if key not in given), None)


class PluginSection(Section):
    name: Annotated[str, OneOf(options("plugin"))] = key("choose the plugin")
    nproc: Count | None = key("start so many ranks on each machine; null: the product of the sizes")
    nnodes: Count | None = key("train on so many machines; null: as many as were started", None)
    dp_size: Count | None = key("data-parallel size; null: world size / other sizes")
    tp_size: Count | None = key("split each weight over so many ranks; null: world size / dp_size")
    pp_size: Count | None = key("split the layers over so many ranks; null: world size / dp_size")
    ep_size: Count | None = key("spread the experts over so many data-parallel ranks; null: all")
    reshard_after_forward: bool = key("fsdp, zero_stage 3: false takes memory, saves traffic")
    dp_replicate: Count = key("fsdp: number of replicas, each sharded over its share of the ranks")
    zero_stage: int = key("partition 1 optimizer state, 2 gradients, 3 parameters too", ge=0, le=3)
    sequence_parallel: bool = key("tensor: split norms and dropout along the sequence")
    schedule: Annotated[str, OneOf(SCHEDULES)] = key("pipeline: order of passes")
    num_microbatches: Count | None = key("pipeline: parts of a batch; null: one for each stage")
    split: Texts | None = key("pipeline: begin stages at these modules; null: the model's cuts")
    tp_plan: Plan | None = key("tensor: modules with styles, or a file; null: the model's")
    param_dtype: Literal["bf16", "fp16"] | None = key("fsdp, zero 2, 3: compute in this type")
    cpu_offload: bool = key("fsdp, zero_stage 2, 3: keep shards in host memory")
    sync_batchnorm: bool = key("GPUs: compute batch norm over all data-parallel ranks")

    @property
    def given(self) -> dict[str, int]:
        """The sizes that are numbers."""
        return _given(dp_size=self.dp_size, tp_size=self.tp_size, pp_size=self.pp_size)

    @property
    def shards_parameters(self) -> bool:
        """Whether the optimizer of a rank steps shards of parameters."""
        tensor = self.name == "tensor" or (self.name == "hybrid" and self.tp_size != 1)
        return self.name == "fsdp" or self.zero_stage > 1 or tensor

    @property
    def pipeline_microbatches(self) -> int | None:
        """Microbatches that a batch is split into; None without a pipeline."""
        stages = self._stages(None if may_grow(self) else sizes(self, least_ranks(self)))
        if self.num_microbatches is None or (stages is None and self.name != "pipeline"):
            return stages
        return self.num_microbatches

    def conflicts(self) -> Conflicts:
        """Yield keys that nothing uses, sizes that do not multiply, and an unfilled pipeline."""
        if unused := list(self._unused()):
            yield from unused
            return
        mesh = None
        if not may_grow(self):
            try:
                mesh = sizes(self, least_ranks(self))
            except SizeError as error:
                yield error.key, str(error)
        if self.sequence_parallel and (self.tp_size if mesh is None else mesh.tp) == 1:
            yield "sequence_parallel", "splits over plugin.tp_size ranks, which must be 2 or more"
        if (stages := self._stages(mesh)) is None:
            return
        ranks, many = stages // SCHEDULES[self.schedule].stages_per_rank, self.num_microbatches
        if many and (why := refused_microbatches(self.schedule, ranks, many)):
            yield "num_microbatches", why
        if self.split is not None and len(self.split) != stages - 1:
            yield "split", f"must name {stages - 1} modules, since there are {stages} stages"

    def _unused(self) -> Conflicts:
        for name, (neutral, plugins) in uses().items():
            value, users = getattr(self, name), or_list(f"plugin={one}" for one in plugins)
            allowed = (neutral, 1) if (self.name, name) == ("single", "dp_size") else (neutral,)
            if self.name not in plugins and value not in allowed:
                yield name, f"has no meaning under plugin={self.name}; {users} uses it"
        if self.name not in ("zero", "hybrid"):
            return
        if self.name == "zero" and self.zero_stage == 0:
            yield "zero_stage", "must be 1, 2 or 3 under plugin=zero"
        for name, least in (("reshard_after_forward", 3), ("param_dtype", 2), ("cpu_offload", 2)):
            if self.zero_stage < least and getattr(self, name) != uses()[name][0]:
                yield name, f"has no meaning below plugin.zero_stage={least}"

    def _stages(self, mesh: MeshSizes | None) -> int | None:
        """Return the stages of the pipeline; None without one, or if it depends on the ranks."""
        ranks = self.pp_size if mesh is None else mesh.pp
        if self.name not in uses()["schedule"][1] or ranks is None:
            return None
        if self.name == "hybrid" and ranks == 1:
            return None
        return ranks * SCHEDULES[self.schedule].stages_per_rank


def sizes(plugin: PluginSection, ranks: int, *, started: bool = False) -> MeshSizes:
    """Divide ``ranks`` among the axes as the section ``plugin`` asks."""
    if plugin.name == "single" and ranks != 1:
        message = f"plugin=single is one process, not {ranks} ranks; plugin=ddp spreads over ranks"
        raise SizeError("nnodes" if ranks == plugin.nnodes else "nproc", message)
    found = MeshSizes.of(ranks, plugin.dp_size, plugin.tp_size, plugin.pp_size, plugin.ep_size)
    nodes, joined = plugin.nnodes or 1, started_rank() if started else None
    local = ranks // nodes
    if joined is not None:
        nodes, local = started_nodes() or nodes, joined.local_world_size
        if plugin.nnodes not in (None, nodes):
            raise SizeError("nnodes", f"{plural(nodes, 'machine')} started ranks: leave it out")
    if nodes > 1 and local % found.tp:
        text = f"{found.tp} do not divide the {local} ranks of a machine (plugin.nnodes={nodes})"
        raise SizeError("tp_size", text)
    return found


def data_parallel_size(plugin: PluginSection, ranks: int) -> int:
    """Return the data-parallel size on ``ranks`` ranks; all ranks if the sizes do not fit them."""
    try:
        return sizes(plugin, ranks).dp
    except SizeError:
        return ranks


def least_ranks(plugin: PluginSection) -> int:
    """Return the world size to start: ``nnodes`` x ``nproc``, or the product of the given sizes."""
    nodes = plugin.nnodes or 1
    if plugin.nproc is not None:
        return nodes * plugin.nproc
    experts = (plugin.ep_size or 1) if plugin.dp_size is None else 1
    sized = experts * prod(plugin.given.values())
    return lcm(sized, nodes * (plugin.tp_size or 1)) if nodes > 1 else sized


def may_grow(plugin: PluginSection) -> bool:
    """Return whether more ranks than `least_ranks` fit: ``nproc`` and one of the sizes are null."""
    is_open = plugin.name != "single" and plugin.nproc is None
    return is_open and _open_size(plugin.given) is not None


def ranks_of(plugin: PluginSection, gpus: int = 0) -> int:
    """Return the world size of a run that this process starts or belongs to."""
    if (joined := joined_ranks()) is not None:
        return joined
    least, gpus = least_ranks(plugin), gpus * (plugin.nnodes or 1)
    return max(least, gpus - gpus % least) if may_grow(plugin) else least


def joined_ranks() -> int | None:
    """Return the number of ranks that torchrun or Slurm started; None without such a launcher."""
    started = started_rank()
    return None if started is None else started.world_size
