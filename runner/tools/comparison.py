"""Differences of two trainings, whether they exceed rounding errors, and the text that tells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.clip import Decision, Layout
from runner.config.notation import first_few, plural
from runner.parallel.collectives import from_all, several_ranks
from runner.run_folder import keys

Side = Mapping[str, float]  # what is compared of a Decision
Naive = dict[str, Any]  # torch.nn.utils.get_total_norm of one rank: the norm, or what it raised

# Errors of a tensor are relative to at least this share of the largest element of all tensors,
# because some gradients, such as that of a key's bias, are zero up to rounding.
FLOOR = 1e-3
WORST = 5  # parameters that a message names

_METRICS = ("norm", "norm_clipped", "coef", "clipped", "fraction", "peak")
_COMPARED = {
    "norm_error": "‖G‖",
    "norm_clipped_error": "‖G‖ after clipping",
    "gradient_error": "the clipped gradient",
}


def side_of(decision: Decision) -> dict[str, float]:
    return dict(zip(_METRICS, map(float, decision.metrics), strict=False))


def compare_step(
    step: int,
    ranks: Sequence[Side],
    gradients: Mapping[str, Tensor],
    reference: Side,
    wanted: Mapping[str, Tensor],
    bound: float,
    *,
    history: bool = False,
) -> dict[str, Any]:
    """Compare one step of the plugin's ``ranks`` with that of one process.

    ``history``: the mode compares gradients with earlier ones. One that is zero up to rounding may
    be above its limit on one side alone: counts may differ where the clipped gradients do not.
    """
    ours, errors = ranks[0], tensor_errors(gradients, wanted)
    found = {
        "norm_error": relative(ours["norm"], reference["norm"]),
        "norm_clipped_error": relative(ours["norm_clipped"], reference["norm_clipped"]),
        "gradient_error": max(errors.values(), default=0.0),
    }
    failures = [
        f"{_COMPARED[key]} of step {step} is off by {error:.2g}"
        for key, error in found.items()
        if not error <= bound
    ]
    share, other = ours["fraction"], reference["fraction"]
    if share != other and (failures or not history):
        counts = f"is {share!r} instead of {other!r}: the counts differ"
        failures.append(f"{keys.CLIP_FRACTION} of step {step} {counts}")
    failures += disagreements(step, ranks)
    for names, where in (
        (gradients.keys() - wanted.keys(), "under the plugin, but none in one process"),
        (wanted.keys() - gradients.keys(), "in one process, but none under the plugin"),
    ):
        if names:
            who = first_few(sorted(names), WORST)
            failures.append(f"in step {step}, {who}: a gradient {where}")
    sides = {"plugin": dict(ours), "reference": dict(reference)}
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
    every = [(error, name, "weight") for name, error in weights.items()]
    for step in steps:
        of = f"gradient of step {step['step']}"
        every += [(error, name, of) for name, error in step.pop("errors").items()]
    worst: dict[str, dict[str, Any]] = {}
    for error, name, of in sorted(every, key=lambda one: -one[0]):
        worst.setdefault(name, {"name": name, "error": error, "of": of})
    return {
        "binds": any(step["reference"]["clipped"] for step in steps),
        "max_rel_error": max([weight_error, *map(_largest, steps)]),
        "weight_error": weight_error,
        "failures": failures,
        "worst": [*worst.values()][:WORST],
        "steps": list(steps),
    }


def _largest(step: Mapping[str, Any]) -> float:
    return max(float(step[name]) for name in _COMPARED)


def outcome(
    modes: Sequence[dict[str, Any]], notes: Sequence[str], causes: Iterable[str], bound: float
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
        **dict.fromkeys(("error", "rank")),
        "ok": ok,
        "max_rel_error": max(mode["max_rel_error"] for mode in modes),
        "naive": raised or max((each["error"] for each in naive), default=None),
        "tolerance": bound,
        "notes": notes,
        "causes": [] if ok else list(dict.fromkeys(causes)),
        "modes": list(modes),
    }


def relative(ours: float, reference: float) -> float:
    """Return the relative error of ``ours``; infinity if the two differ and one is not finite."""
    return 0.0 if ours == reference else _share(abs(ours - reference), abs(reference))


def _share(off: float, size: float) -> float:
    error = off / size if size else (0.0 if off == 0.0 else math.inf)
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
        errors[name] = _share(off, size)
    return errors


def _size(tensor: Tensor | None) -> float:
    """Return max|t|: NaN if any element is NaN, 0 for an empty tensor or None."""
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.detach().abs().amax())


def disagreements(step: int, ranks: Sequence[Side]) -> Iterator[str]:
    """Yield messages about metrics of ``ranks`` that are not equal bit for bit."""
    for name, first in ranks[0].items():
        others = {repr(side[name]): rank for rank, side in enumerate(ranks)}
        others.pop(repr(first))
        for value, rank in others.items():
            yield f"{name} of step {step} is {value} on rank {rank}, {first!r} on rank 0"


def naive_norm(layout: Layout, norm_type: float) -> Naive | None:
    """Call ``torch.nn.utils.get_total_norm`` on this rank's gradients; a collective.

    None in one process, and where the call would wait for other ranks for ever.
    """
    if not several_ranks():
        return None
    gradients = [p.param.grad for p in layout.shards if p.param.grad is not None]
    # The ranks of each gradient's mesh: gradients on one mesh are reduced over it.
    meshes = {
        tuple(g.device_mesh.mesh.flatten().tolist()) if isinstance(g, DTensor) else ()
        for g in gradients
    }
    everywhere = from_all(meshes)
    if len(meshes) == 1 and not all(everywhere[rank] == meshes for rank in next(iter(meshes))):
        return None
    found: Naive = {"norm": None, "raised": None, "message": "", "rank": dist.get_rank()}
    try:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        found["norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    except Exception as error:
        found |= {"raised": type(error).__name__, "message": str(error).strip().partition("\n")[0]}
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
        limit = "" if mode["threshold"] is None else f" clip.threshold={mode['threshold']:.6g}"
        yield from ("", f"clip={mode['mode']}{limit}", HEAD)
        yield from map(_line_of, mode["steps"])
        yield from _verdict(mode)
    for kind, sentences in (("note", found["notes"]), ("possible cause", found["causes"])):
        if sentences:
            yield from ("", *(f"{kind}: {sentence}" for sentence in sentences))


def last_line(found: Mapping[str, Any]) -> str:
    """Return the last line, which programs may parse."""
    naive = found["naive"]
    shown = f"{naive:.2g}" if isinstance(naive, float) else naive or "none"
    verdict = "ok" if found["ok"] else "FAILED"
    return f"verify: {verdict} max_rel_error={found['max_rel_error']:.2g} naive={shown}"


def _line_of(step: Mapping[str, Any]) -> str:
    plugin, reference, naive = step["plugin"], step["reference"], step["naive"]
    share, other = plugin["fraction"], reference["fraction"]
    fraction = f"{share:.6g}" if share == other else f"{share:.6g} not {other:.6g}"
    alone = "-" if naive is None else "raises"
    if naive is not None and naive["norm"] is not None:
        alone = f"{naive['norm']:.6g}, off by {naive['error']:.1e}"
    return (
        f"{step['step']:>4}  {reference['norm']:>22.15g}  {plugin['norm']:>22.15g}  "
        f"{step['norm_error']:>8.1e}  {step['gradient_error']:>8.1e}  {fraction:>22}  {alone}"
    )


def _verdict(mode: Mapping[str, Any]) -> Iterator[str]:
    steps, failures, worst = mode["steps"], mode["failures"], mode["worst"]
    sides = [(step["plugin"], step["reference"]) for step in steps]
    yield (
        f"clip={mode['mode']}: weights after {plural(len(steps), 'step')} off by "
        f"{mode['weight_error']:.1e}, largest error {mode['max_rel_error']:.1e}"
    )
    if mode["derived"]:
        yield "  clip.threshold is a tenth of the largest value of step 1, so that it binds"
    elif mode["threshold"] is not None and not mode["binds"]:
        yield "  no step was clipped: a lower clip.threshold compares clipping too"
    if not failures and any(p["fraction"] != r["fraction"] for p, r in sides):
        yield "  counts differ by gradients that are 0 up to rounding, and so is their limit"
    raising = (one["naive"] for one in steps if one["naive"] and one["naive"]["raised"])
    for one in list(raising)[:1]:
        yield f"  torch.nn.utils alone, on rank {one['rank']}: {one['raised']}: {one['message']}"
    yield from (f"  {failure}" for failure in failures)
    if failures:
        yield "  furthest off:"
        width = max((len(one["name"]) for one in worst), default=0)
        yield from (f"    {one['name']:<{width}}  {one['error']:.1e}  {one['of']}" for one in worst)
