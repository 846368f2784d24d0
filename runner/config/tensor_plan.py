"""Plans of tensor parallelism: which modules are split, and how.

A plan maps patterns of module names to styles, such as ``blocks.*.up: colwise``. A person may give
the path of a YAML file instead; the file is read while a request is checked, so that ranks and the
record have the plan itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from runner.config.clip_section import with_mode_name
from runner.config.problem import did_you_mean, shown
from runner.config.values import Allowed, Refusal

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
"""Styles and their meaning. Names are those of transformers' plans."""

EXPERT_STYLES = ("moe_tp_experts", "moe_identity_expert")
"""Styles of transformers for modules with stacked experts, which stay whole on each rank."""

EXAMPLE = "{blocks.*.up:colwise}"


def read_plan(value: Any) -> dict[str, str]:
    """Return the plan ``value``, or the plan in the file with this path."""
    if isinstance(value, str):
        file = Path(value).expanduser()
        # A plan that is given as such, as to every rank, needs no reader of YAML.
        from runner.config.yaml_file import read_yaml

        content = read_yaml(file)
        if not isinstance(content, Mapping):
            raise Refusal(f"{file} must hold patterns of module names with their styles")
        return _checked(content, f"{file}: ")
    if not isinstance(value, Mapping):
        raise ValueError
    return _checked(value, "")


def settled(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed configuration with the plan in place of the path of its file."""
    plain = with_mode_name(plain)
    section = plain.get("plugin")
    if isinstance(section, Mapping) and isinstance(section.get("tp_plan"), str):
        try:
            return {**plain, "plugin": {**section, "tp_plan": read_plan(section["tp_plan"])}}
        except Refusal:
            pass
    return plain


def _checked(plan: Mapping[Any, Any], where: str) -> dict[str, str]:
    if not plan:
        raise Refusal(f"{where}must hold one pattern at least, such as {EXAMPLE}")
    wrong = []
    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not pattern.strip():
            wrong.append(f"{shown(pattern)} is no pattern of module names")
        elif not isinstance(style, str) or style not in STYLES:
            hint = did_you_mean(style, STYLES)
            wrong.append(f"{pattern} has the unknown style {shown(style)}{hint}")
    if wrong:
        raise Refusal(f"{where}{', '.join(wrong)}  (styles: {', '.join(STYLES)})")
    return {str(pattern): str(style) for pattern, style in plan.items()}


TensorPlan = Annotated[
    dict[str, str],
    PlainValidator(read_plan),
    Allowed(f"the path of a YAML file, or patterns of modules with their styles, {EXAMPLE}"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "minProperties": 1,
                    "additionalProperties": {"enum": list(STYLES)},
                },
            ]
        }
    ),
]
