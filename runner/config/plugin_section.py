"""Section ``plugin``: how many ranks a run has, and how model and optimizer are spread over them.

Every plugin has every key; the file of a plugin in ``conf/plugin`` lists the keys that it uses, and
another one that is set is a problem. `runner.train.preflight` checks that the sizes fit the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import lcm
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from runner.config.environment import most_ranks_on_cpus
from runner.config.folders import find, options, read_yaml
from runner.config.problem import Problem, or_list
from runner.config.section import Conflicts, Count, Section, Texts, key


def read_plan(value: Any) -> Any:
    """Return the plan of a file, which ranks and the record then have; or a plan as it is."""
    return read_yaml(Path(value).expanduser()) if isinstance(value, str) else value


_FROM_STAGE = {"reshard_after_forward": 3, "param_dtype": 2, "cpu_offload": 2, "no_sync": 2}
"""Keys that have a meaning from a stage of ZeRO on."""

Plan = Annotated[dict[str, str], Field(min_length=1), BeforeValidator(read_plan)]


@cache
def uses() -> Mapping[str, tuple[Any, list[str]]]:
    """Return the keys that some plugins use: the value without effect, and these plugins."""
    folder = find("conf")
    plugins = {name: read_yaml(folder / "plugin" / f"{name}.yaml") for name in options("plugin")}
    neutral_values = read_yaml(folder / "plugin_keys.yaml")
    keys = {}
    for name, neutral in neutral_values.items():
        users = [plugin for plugin, content in plugins.items() if name in content]
        if 0 < len(users) < len(plugins):
            keys[name] = (neutral, users)
    return keys


class PluginSection(Section):
    """Section ``plugin``."""

    name: Literal[options("plugin")] = key("choose the plugin")  # type: ignore[valid-type]
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
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = key(
        "pipeline: order of passes"
    )
    num_microbatches: Count | None = key("pipeline: parts of a batch; null: one for each stage")
    split: Texts | None = key("pipeline: begin stages at these modules; null: the model's cuts")
    tp_plan: Plan | None = key("tensor: modules with styles, or a file; null: the model's")
    param_dtype: Literal["bf16", "fp16"] | None = key("fsdp, zero 2, 3: compute in this type")
    cpu_offload: bool = key("fsdp, zero_stage 2, 3: keep shards in host memory")
    no_sync: bool = key("fsdp, zero_stage 2, 3: false sends each microbatch, saves memory")
    sync_batchnorm: bool = key("GPUs: compute batch norm over all data-parallel ranks")

    def conflicts(self) -> Conflicts:
        """Yield keys that are set, and that the plugin does not use."""
        for name, (neutral, plugins) in uses().items():
            if self.name in plugins or getattr(self, name) == neutral:
                continue
            if self.name == "single" and name == "dp_size" and self.dp_size == 1:
                continue
            users = or_list(f"plugin={plugin}" for plugin in plugins)
            yield name, f"has no meaning under plugin={self.name}; {users} uses it"
        yield from self._below_stage()

    def _below_stage(self) -> Conflicts:
        """Yield keys that need a higher stage of ZeRO."""
        if self.name == "zero" and self.zero_stage == 0:
            yield "zero_stage", "must be 1, 2 or 3 under plugin=zero"
        if self.name in ("zero", "hybrid"):
            for name, stage in _FROM_STAGE.items():
                neutral, _ = uses()[name]
                if self.zero_stage < stage and getattr(self, name) != neutral:
                    yield name, f"has no meaning below plugin.zero_stage={stage}"

    @property
    def least_ranks(self) -> int:
        """The world size to start: ``nnodes`` x ``nproc``, or the product of the given sizes."""
        nodes = self.nnodes or 1
        if self.nproc is not None:
            return nodes * self.nproc
        data_parallel = self.dp_size or self.ep_size or 1
        tensor_parallel = self.tp_size or 1
        pipeline_parallel = self.pp_size or 1
        return lcm(data_parallel * tensor_parallel * pipeline_parallel, nodes * tensor_parallel)

    @property
    def may_grow(self) -> bool:
        """Whether more ranks fit than `least_ranks`: ``nproc`` and one of the sizes are null."""
        sizes = (self.dp_size, self.tp_size, self.pp_size)
        return self.name != "single" and self.nproc is None and None in sizes

    def too_many_ranks(self, ranks: int, gpus: int | None = None) -> Problem | None:
        """Return the problem of more ranks than this machine can run; None if they fit.

        Args:
            ranks: number of ranks that the run starts, on all machines.
            gpus: number of GPUs, of which each rank takes one; None if ranks share the cores.
        """
        if self.nnodes not in (None, 1):
            return None
        limit = most_ranks_on_cpus() if gpus is None else gpus
        if ranks <= limit:
            return None
        share = "four ranks a core" if gpus is None else "one rank a GPU"
        return Problem("plugin.nproc", ranks, f"at most {limit} on this machine ({share})")
