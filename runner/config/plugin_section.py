"""Section ``plugin``: how model and optimizer are spread over ranks.

Every option has every key, so that a sweep over plugins or a recipe may set any of them where they
mean something. A key that is set where nothing uses it is a problem: whoever set it expects an
effect that it does not have.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator

from runner.config.folders import read_yaml
from runner.config.problem import did_you_mean, or_list, shown
from runner.config.section import Conflict, Count, OneOf, Section, Texts, option_of
from runner.config.sizes import MeshSizes, SizeError, least_ranks, may_grow, sizes


class Schedule(NamedTuple):
    """One pipeline schedule."""

    stages_per_rank: int
    fills_every_stage: bool
    splits_backward: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(1, fills_every_stage=False),
    "1f1b": Schedule(1, fills_every_stage=True),
    "interleaved_1f1b": Schedule(2, fills_every_stage=True),
    "zero_bubble": Schedule(2, fills_every_stage=False, splits_backward=True),
}


def stages_text(schedule: str, pp_size: int, section: str = "") -> str:
    """Return how many stages ``pp_size`` ranks hold, to begin a message."""
    stages = pp_size * SCHEDULES[schedule].stages_per_rank
    return f"{section}pp_size={pp_size} with {section}schedule={schedule} is {stages} stages"


def refused_microbatches(
    schedule: str, pp_size: int, microbatches: int, section: str = ""
) -> str | None:
    """Return why ``microbatches`` do not fill the pipeline; None if they do."""
    stages = pp_size * SCHEDULES[schedule].stages_per_rank
    given = stages_text(schedule, pp_size, section)
    if SCHEDULES[schedule].fills_every_stage and microbatches < stages:
        way = f"give {stages} or more, or {section}schedule=gpipe"
        return f"{given}, each of which needs a microbatch: {way}"
    rounds = microbatches // pp_size
    if schedule == "interleaved_1f1b" and microbatches % rounds:
        fitting = f"{pp_size * rounds} or {pp_size * (rounds + 1)}"
        return f"{given}, in which {microbatches} microbatches make no equal rounds: give {fitting}"
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


class Use(NamedTuple):
    """What a key is for."""

    neutral: Any
    options: tuple[str, ...]
    gives: str


_DATA = ("tensor", "pipeline", "moe", "hybrid")
_TENSOR = ("tensor", "hybrid")
_PIPELINE = ("pipeline", "hybrid")
_SHARDED = ("fsdp", "zero", "hybrid")
_REPLICAS = ("ddp", "fsdp", "zero", "tensor", "pipeline", "moe", "hybrid")

USES = {
    "find_unused_parameters": Use(False, ("ddp",), "looks for parameters out of use"),
    "reshard_after_forward": Use(True, _SHARDED, "gathers parameters for each block"),
    "dp_replicate": Use(1, ("fsdp",), "has replicas that are sharded"),
    "dp_size": Use(None, _DATA, "has ranks that are not all data-parallel"),
    "tp_size": Use(1, _TENSOR, "has tensor parallelism"),
    "pp_size": Use(1, _PIPELINE, "has pipeline stages"),
    "ep_size": Use(1, ("moe", "hybrid"), "spreads experts"),
    "zero_stage": Use(0, ("zero", "moe", "hybrid"), "shards the optimizer state of replicas"),
    "sequence_parallel": Use(False, _TENSOR, "has tensor parallelism"),
    "tp_plan": Use(None, _TENSOR, "has tensor parallelism"),
    "schedule": Use("1f1b", _PIPELINE, "has pipeline stages"),
    "num_microbatches": Use(None, _PIPELINE, "has pipeline stages"),
    "split": Use(None, _PIPELINE, "has pipeline stages"),
    "param_dtype": Use(None, _SHARDED, "gathers parameters in a type of their own"),
    "cpu_offload": Use(False, _SHARDED, "keeps shards in host memory"),
    "sync_batchnorm": Use(False, _REPLICAS, "has data-parallel ranks"),
}
"""Keys that not every plugin uses."""

_JUDGED = {"single", "ddp"}.union(*(use.options for use in USES.values()))

# For each size, the plugin under which null means all ranks.
_OWN = {"tp_size": "tensor", "pp_size": "pipeline", "ep_size": "moe"}


class PluginSection(Section):
    """How model and optimizer are spread over ranks."""

    name: Annotated[str, option_of("plugin")] = Field(description="choose the plugin")
    nproc: Count | None = Field(
        description="start this many ranks on each machine; null: the product of the sizes"
    )
    nnodes: Count | None = Field(
        default=None,
        description="train on this many machines, under torchrun or srun; null: as many as started",
    )
    find_unused_parameters: bool = Field(
        description="ddp: set it if some parameters take no part in the loss"
    )
    reshard_after_forward: bool = Field(
        description="fsdp, zero_stage 3: false takes more memory and less traffic"
    )
    dp_replicate: int = Field(
        ge=1, description="fsdp: number of replicas, each sharded over its share of the ranks"
    )
    dp_size: Count | None = Field(description="data-parallel size; null: world size / other sizes")
    tp_size: Count | None = Field(
        description="split each weight over this many ranks; null: world size / dp_size"
    )
    pp_size: Count | None = Field(
        description="split the layers over this many ranks; null: world size / dp_size"
    )
    ep_size: Count | None = Field(
        description="spread the experts over this many data-parallel ranks; null: all"
    )
    zero_stage: int = Field(
        ge=0, le=3, description="partition 1 optimizer state, 2 gradients too, 3 parameters too"
    )
    sequence_parallel: bool = Field(
        description="tensor: split norms and dropout along the sequence, to save memory"
    )
    schedule: Annotated[str, OneOf(tuple(SCHEDULES))] = Field(
        description="pipeline: order of forward and backward passes"
    )
    num_microbatches: Count | None = Field(
        description="pipeline: split a batch into this many; null: one for each stage"
    )
    split: Texts | None = Field(
        description="pipeline: begin further stages at these modules; null: the model's cuts"
    )
    tp_plan: Annotated[dict[str, str], PlainValidator(read_plan)] | None = Field(
        description="tensor: modules to split, as patterns with styles or a file; null: the model's"
    )
    param_dtype: Literal["bf16", "fp16"] | None = Field(
        description="fsdp, zero_stage 2, 3: gather and compute parameters in this type"
    )
    cpu_offload: bool = Field(
        description="fsdp, zero_stage 2, 3: keep shards in host memory, to fit larger models"
    )
    sync_batchnorm: bool = Field(
        description="GPUs: compute batch norm over all data-parallel ranks, for small batches"
    )

    @property
    def shards_parameters(self) -> bool:
        """Whether the optimizer of a rank steps shards of parameters."""
        tensor = self.name == "tensor" or (self.name == "hybrid" and self.tp_size != 1)
        return self.name == "fsdp" or self.zero_stage > 1 or tensor

    def conflicts(self) -> Iterator[Conflict]:
        """Yield keys that nothing uses, sizes that do not multiply, and an unfilled pipeline."""
        if self.name not in _JUDGED:  # a plugin of the user's own checks its arguments itself
            return
        unused = list(self._unused())
        yield from unused
        if unused:
            return
        if self.name in ("zero", "hybrid"):
            yield from self._of_zero()
        mesh = None
        if (ranks := _known_ranks(self)) is not None:
            try:
                mesh = sizes(self, ranks)
            except SizeError as error:
                yield Conflict(error.key, str(error))
        tensor = self.tp_size if mesh is None else mesh.tp
        if self.sequence_parallel and tensor == 1:
            message = "splits the sequence over plugin.tp_size ranks, which must be 2 or more"
            yield Conflict("sequence_parallel", message)
        stages = _stages(self, mesh)
        if stages is not None:
            yield from self._of_pipeline(stages)

    def _unused(self) -> Iterator[Conflict]:
        if self.name == "single" and self.nproc not in (None, 1):
            yield Conflict("nproc", "plugin=single is one process; plugin=ddp spreads over ranks")
        if self.name == "single" and self.nnodes not in (None, 1):
            yield Conflict("nnodes", "plugin=single is one process; plugin=ddp spreads over ranks")
        for key, use in USES.items():
            value = getattr(self, key)
            if self.name in use.options:
                if value is None and self.name != _OWN.get(key, self.name):
                    message = f"must be a number here; null means all ranks for plugin={_OWN[key]}"
                    yield Conflict(key, message)
                continue
            if value == use.neutral or (key == "dp_size" and value == 1 and self.name == "single"):
                continue
            message = f"has no meaning under plugin={self.name}"
            if key == "dp_size" and self.name != "single":
                message += f", where all ranks are data-parallel: give plugin.nproc={value}"
            elif key == "dp_size":
                message += f"; plugin=ddp plugin.nproc={value} has so many data-parallel ranks"
            else:
                options = or_list(f"plugin={option}" for option in use.options)
                message += f"; {options} {use.gives}"
            yield Conflict(key, message)

    def _of_zero(self) -> Iterator[Conflict]:
        stage = self.zero_stage
        if stage == 0 and self.name == "zero":
            yield Conflict("zero_stage", "must be 1, 2 or 3 under plugin=zero; plugin=ddp is 0")
        if stage != 3 and not self.reshard_after_forward:
            message = f"has no meaning with plugin.zero_stage={stage}; stage 3 shards parameters"
            yield Conflict("reshard_after_forward", message)
        for key in ("param_dtype", "cpu_offload"):
            if stage < 2 and getattr(self, key) != USES[key].neutral:
                message = f"has no meaning with plugin.zero_stage={stage}; stages 2 and 3 use it"
                yield Conflict(key, message)

    def _of_pipeline(self, stages: int) -> Iterator[Conflict]:
        ranks, many = stages // SCHEDULES[self.schedule].stages_per_rank, self.num_microbatches
        if many and (message := refused_microbatches(self.schedule, ranks, many, "plugin.")):
            yield Conflict("num_microbatches", message)
        if self.split is not None and len(self.split) != stages - 1:
            given = stages_text(self.schedule, ranks, "plugin.")
            message = f"{given}, so it must name {stages - 1} of them, all but the first"
            yield Conflict("split", message)


def pipeline_microbatches(plugin: PluginSection) -> int | None:
    """Return the microbatches that a batch is split into; None without a pipeline."""
    if plugin.name not in _PIPELINE:
        return None
    ranks = _known_ranks(plugin)
    stages = _stages(plugin, None if ranks is None else sizes(plugin, ranks))
    if plugin.num_microbatches is not None and (stages is not None or plugin.name == "pipeline"):
        return plugin.num_microbatches
    return stages


def _known_ranks(plugin: PluginSection) -> int | None:
    """Return the number of ranks; None if it depends on the machine."""
    return None if may_grow(plugin) else least_ranks(plugin)


def _stages(plugin: PluginSection, mesh: MeshSizes | None) -> int | None:
    """Return the stages of the pipeline; None if there is none, or if it depends on the ranks."""
    ranks = plugin.pp_size if mesh is None else mesh.pp
    if plugin.name not in _PIPELINE or ranks is None:
        return None
    if plugin.name == "hybrid" and ranks == 1:
        return None
    return ranks * SCHEDULES[plugin.schedule].stages_per_rank
