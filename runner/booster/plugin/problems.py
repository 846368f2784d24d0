"""Reasons for which a model cannot be distributed, found before any rank starts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from runner.booster.plugin.base import Misfit
from runner.config.notation import first_few
from runner.config.plugin_section import SCHEDULES
from runner.config.sizes import MeshSizes
from runner.parallel.experts import mixtures, stacked_experts
from runner.parallel.stages import CutError, cut
from runner.parallel.tensor_styles import PlanError, check_heads, check_sequence, plan_of


def tensor_problems(model: nn.Module, sizes: MeshSizes, options: Mapping[str, Any]) -> list[Misfit]:
    """Return what is wrong with the plan for tensor parallelism."""
    plan = options.get("tp_plan")
    if sizes.tp == 1 and not plan:
        return []
    try:
        styles = plan_of(model, plan)
    except PlanError as error:
        return [("tp_plan", plan, str(error))]
    checks = [("tp_size", sizes.tp, partial(check_heads, model, styles, sizes.tp))]
    if sizes.tp > 1 and options.get("sequence_parallel"):
        checks.append(("sequence_parallel", True, partial(check_sequence, styles)))
    found: list[Misfit] = []
    for argument, value, check in checks:
        try:
            check()
        except PlanError as error:
            found.append((argument, value, str(error)))
    return found


def pipeline_problems(
    model: nn.Module, sizes: MeshSizes, options: Mapping[str, Any]
) -> list[Misfit]:
    """Return why the model cannot be split into stages."""
    if sizes.pp == 1:
        return []
    found: list[Misfit] = []
    starts = options.get("split")
    try:
        cut(model, sizes.pp * SCHEDULES[options.get("schedule", "1f1b")].stages_per_rank, starts)
    except CutError as error:
        found.append(("split" if starts else "pp_size", starts or sizes.pp, str(error)))
    if callable(getattr(model, "loss", None)):
        own = f"{type(model).__name__} computes its own loss, which a pipeline cannot cut"
        found.append(("pp_size", sizes.pp, own))
    return found


def expert_problems(model: nn.Module, sizes: MeshSizes, options: Mapping[str, Any]) -> list[Misfit]:
    """Return a problem if experts are to be distributed but the model has none that can be."""
    asked = options.get("ep_size")
    if any(mixtures(model)):
        return []
    if sizes.ep > 1 and (stacked := stacked_experts(model)):
        cannot = (
            f"the experts of {type(model).__name__} are stacked in one parameter "
            f"({first_few(stacked, 2)}), which cannot be distributed by expert; plugin=fsdp shards "
            "them"
        )
        return [("ep_size", asked or sizes.ep, cannot)]
    if not asked or asked == 1:
        return []
    return [("ep_size", asked, f"{type(model).__name__} has no experts to spread; model=moe has")]
