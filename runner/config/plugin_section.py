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

from runner.config.folders import find, options, read_yaml
from runner.config.problem import or_list
from runner.config.section import Conflicts, Count, Section, Texts, key


def read_plan(value: Any) -> Any:
    """Return the plan of a file, which ranks and the record then have; or a plan as it is."""
    return read_yaml(Path(value).expanduser()) if isinstance(value, str) else value


Plan = Annotated[dict[str, str], Field(min_length=1), BeforeValidator(read_plan)]


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


class PluginSection(Section):
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
    sync_batchnorm: bool = key("GPUs: compute batch norm over all data-parallel ranks")

    def conflicts(self) -> Conflicts:
        """Yield keys that nothing uses."""
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

    @property
    def least_ranks(self) -> int:
        """The world size to start: ``nnodes`` x ``nproc``, or the product of the given sizes."""
        nodes, tp = self.nnodes or 1, self.tp_size or 1
        if self.nproc is not None:
            return nodes * self.nproc
        data = self.dp_size or self.ep_size or 1
        return lcm(data * tp * (self.pp_size or 1), nodes * tp)

    @property
    def may_grow(self) -> bool:
        """Whether more ranks than that fit: ``nproc`` and one of the sizes are null."""
        sizes = (self.dp_size, self.tp_size, self.pp_size)
        return self.name != "single" and self.nproc is None and None in sizes
