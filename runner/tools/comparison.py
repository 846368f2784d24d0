"""Differences of two trainings, whether they exceed rounding errors, and the text that tells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.clip import Decision, Layout
from runner.config.notation import first_few, plural
from runner.run_folder import keys

FLOOR = 1e-3
"""Errors of a tensor are relative to at least this share of the largest element of all tensors,
because some gradients, such as that of a key's bias, are zero up to rounding."""

WORST = 5
"""Number of parameters that a message names."""

_COMPARED = {
    "norm_error": "‖G‖",
    "norm_clipped_error": "‖G‖ after clipping",
    "gradient_error": "the clipped gradient",
}


class SideMetrics(NamedTuple):
    """Metrics of one clipped step as floats; see :class:`runner.clip.Decision`."""

    norm: float
    norm_clipped: float
    coef: float
    clipped: float
    fraction: float
    peak: float

    @classmethod
    def of(cls, decision: Decision) -> SideMetrics:
        return cls(*(float(metric) for metric in decision.metrics[:6]))


Naive = dict[str, Any]
"""``torch.nn.utils.get_total_norm`` of the gradients of one rank: the norm, or what it raised."""


def compare_step(
    step: int,
    ranks: Sequence[SideMetrics],
    gradients: Mapping[str, Tensor],
    reference: SideMetrics,
    wanted: Mapping[str, Tensor],
    bound: float,
) -> dict[str, Any]:
    """Compare one step of the plugin's ``ranks`` with that of one process."""
    ours, errors = ranks[0], tensor_errors(gradients, wanted)
    found = {
        "norm_error": relative(ours.norm, reference.norm),
        "norm_clipped_error": relative(ours.norm_clipped, reference.norm_clipped),
        "gradient_error": max(errors.values(), default=0.0),
    }
    failures = [
        f"{_COMPARED[key]} of step {step} is off by {error:.2g}"
        for key, error in found.items()
        if not error <= bound
    ]
    if ours.fraction != reference.fraction:
        counts = f"{ours.fraction!r} instead of {reference.fraction!r}: the counts differ"
        failures.append(f"{keys.CLIP_FRACTION} of step {step} is {counts}")
    failures += disagreements(step, ranks)
    for names, where in (
        (gradients.keys() - wanted.keys(), "under the plugin, but none in one process"),
        (wanted.keys() - gradients.keys(), "in one process, but none under the plugin"),
    ):
        if names:
            who = first_few(sorted(names), WORST)
            failures.append(f"in step {step}, {who}: a gradient {where}")
    sides = {"plugin": ours._asdict(), "reference": reference._asdict()}
    return {"step": step, **found, **sides, "failures": failures, "errors": errors}


def compare_mode(
    steps: Sequence[dict[str, Any]],
    weights: Mapping[str, float],
    drifted: Sequence[str],
    bound: float,
) -> dict[str, Any]:
    """Return what ``verify.json`` says of a mode; ``weights`` are errors after the last step."""
    weight_error = max(weights.values(), default=0.0)
    failures = [failure for step in steps for failure in step["failures"]]
    if not weight_error <= bound:
        failures.append(f"the weights after the last step are off by {weight_error:.2g}")
    if drifted:
        failures.append(f"replicas no longer hold the same bits: {first_few(drifted, WORST)}")
    worst = {name: (error, "weight") for name, error in weights.items()}
    for step in steps:
        for name, error in step.pop("errors").items():
            if error > worst.get(name, (-1.0, ""))[0]:
                worst[name] = (error, f"gradient of step {step['step']}")
    ranked = sorted(worst.items(), key=lambda item: -item[1][0])[:WORST]
    return {
        "binds": any(step["reference"]["clipped"] for step in steps),
        "max_rel_error": max([weight_error, *map(_largest, steps)]),
        "weight_error": weight_error,
        "failures": failures,
        "worst": [{"name": name, "error": error, "of": what} for name, (error, what) in ranked],
        "steps": list(steps),
    }


def _largest(step: Mapping[str, Any]) -> float:
    return max(float(step[name]) for name in _COMPARED)


def outcome(
    modes: Sequence[dict[str, Any]], notes: Iterable[str], causes: Iterable[str], bound: float
) -> dict[str, Any]:
    """Return the part of ``verify.json`` that is about the comparison."""
    naive = []
    for mode in modes:
        for step in mode["steps"]:
            naive += [step["naive"]] if step["naive"] else []
            if not _largest(step) <= bound:
                break  # from here on both sides have other weights
    ok = not any(mode["failures"] for mode in modes)
    raised = next((each["raised"] for each in naive if each["raised"]), None)
    return {
        "ok": ok,
        "error": None,
        "rank": None,
        "max_rel_error": max(mode["max_rel_error"] for mode in modes),
        "naive": raised or max((each["error"] for each in naive), default=None),
        "tolerance": bound,
        "notes": list(notes),
        "causes": [] if ok else list(dict.fromkeys(causes)),
        "modes": list(modes),
    }


def relative(ours: float, reference: float) -> float:
    """Return the relative error of ``ours``; infinity if the two differ and one is not finite."""
    if ours == reference:
        return 0.0
    error = abs(ours - reference) / abs(reference) if reference else math.inf
    return error if math.isfinite(error) else math.inf


def tensor_errors(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return max|a - b| ÷ max(max|b|, 1e-3 · max over all b) for each tensor b of ``reference``."""
    largest = max(map(_size, reference.values()), default=0.0)
    errors = {}
    for name in {**reference, **ours}:
        a, b = ours.get(name), reference.get(name)
        size = max(_size(b), FLOOR * largest)
        if a is None or b is None:
            off = _size(a if b is None else b)
        else:
            off = _size(a - b) if a.shape == b.shape else math.inf
        error = off / size if size else (0.0 if off == 0.0 else math.inf)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def _size(tensor: Tensor | None) -> float:
    """Return max|t|: NaN if any element is NaN, 0 for an empty tensor or None."""
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.detach().abs().amax())


def disagreements(step: int, ranks: Sequence[SideMetrics]) -> list[str]:
    """Return messages about metrics of ``ranks`` that are not equal bit for bit."""
    found = []
    for name, (first, *others) in zip(SideMetrics._fields, zip(*ranks, strict=True), strict=True):
        for rank, other in enumerate(others, 1):
            if other != first and not (math.isnan(other) and math.isnan(first)):
                where = f"{other!r} on rank {rank}, {first!r} on rank 0"
                found.append(f"{name} of step {step} is {where}")
                break
    return found


def naive_norm(layout: Layout, norm_type: float) -> Naive | None:
    """Call ``torch.nn.utils.get_total_norm`` on this rank's gradients; a collective.

    None in one process, and where the call would wait for other ranks for ever.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    gradients = [p.param.grad for p in layout.shards if p.param.grad is not None]
    # The ranks of each gradient's mesh: gradients on one mesh are reduced over it.
    meshes = {
        tuple(g.device_mesh.mesh.flatten().tolist()) if isinstance(g, DTensor) else ()
        for g in gradients
    }
    everywhere: list[set[tuple[int, ...]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, meshes)
    if len(meshes) == 1 and not all(everywhere[rank] == meshes for rank in next(iter(meshes))):
        return None
    found: Naive = {"norm": None, "raised": None, "message": "", "rank": dist.get_rank()}
    try:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        found["norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    except Exception as error:
        found["raised"] = type(error).__name__
        found["message"] = str(error).strip().partition("\n")[0]
    return found


def worst_naive(outcomes: Sequence[Naive | None], norm: float) -> Naive | None:
    """Return the result with the largest error; one that raised has the largest of all."""
    made = [
        one | {"error": math.inf if one["norm"] is None else relative(one["norm"], norm)}
        for one in outcomes
        if one is not None
    ]
    return max(made, key=lambda one: (one["raised"] is not None, one["error"]), default=None)


HEAD = (
    f"{'step':>4}  {'‖G‖, one process':>22}  {'‖G‖, plugin':>22}  {'off by':>8}  "
    f"{'gradient':>8}  {keys.CLIP_FRACTION:>22}  torch.nn.utils alone"
)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    for mode in found["modes"]:
        yield ""
        threshold = mode["threshold"]
        limit = "" if threshold is None else f" clip.threshold={threshold:.6g}"
        yield f"clip={mode['mode']}{limit}"
        yield HEAD
        yield from map(_line_of, mode["steps"])
        yield from _verdict(mode)
    for kind, sentences in (("note", found["notes"]), ("possible cause", found["causes"])):
        if sentences:
            yield ""
            yield from (f"{kind}: {sentence}" for sentence in sentences)


def last_line(found: Mapping[str, Any]) -> str:
    """Return the last line, which programs may parse."""
    naive = found["naive"]
    if naive is None:
        naive = "none"
    elif isinstance(naive, float):
        naive = f"{naive:.2g}"
    verdict = "ok" if found["ok"] else "FAILED"
    return f"verify: {verdict} max_rel_error={found['max_rel_error']:.2g} naive={naive}"


def _line_of(step: Mapping[str, Any]) -> str:
    plugin, reference, naive = step["plugin"], step["reference"], step["naive"]
    ours, theirs = plugin["fraction"], reference["fraction"]
    fraction = f"{ours:.6g}" if ours == theirs else f"{ours:.6g} not {theirs:.6g}"
    if naive is None:
        alone = "-"
    elif naive["norm"] is None:
        alone = "raises"
    else:
        alone = f"{naive['norm']:.6g}, off by {naive['error']:.1e}"
    return (
        f"{step['step']:>4}  {reference['norm']:>22.15g}  {plugin['norm']:>22.15g}  "
        f"{step['norm_error']:>8.1e}  {step['gradient_error']:>8.1e}  {fraction:>22}  {alone}"
    )


def _verdict(mode: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"clip={mode['mode']}: weights after {plural(len(mode['steps']), 'step')} off by "
        f"{mode['weight_error']:.1e}, largest error {mode['max_rel_error']:.1e}"
    )
    if mode["derived"]:
        yield "  clip.threshold is a tenth of the largest value of step 1, so that it binds"
    elif mode["threshold"] is not None and not mode["binds"]:
        yield (
            "  no step was clipped, so only norms were compared; a lower clip.threshold compares "
            "clipping too"
        )
    naive = [step["naive"] for step in mode["steps"] if step["naive"]]
    if raised := next((one for one in naive if one["raised"]), None):
        at = f"torch.nn.utils alone, on rank {raised['rank']}"
        yield f"  {at}: {raised['raised']}: {raised['message']}"
    if mode["failures"]:
        yield from (f"  {failure}" for failure in mode["failures"])
        yield "  furthest off:"
        width = max((len(one["name"]) for one in mode["worst"]), default=0)
        yield from (
            f"    {one['name']:<{width}}  {one['error']:.1e}  {one['of']}" for one in mode["worst"]
        )
