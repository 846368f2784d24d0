"""Differences of two trainings, whether they exceed rounding errors, and the text that tells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.clip import Decision
from runner.config.notation import first_few, plural
from runner.gradients import Layout
from runner.parallel.collectives import from_all, several_ranks
from runner.run_folder import keys

Side = Mapping[str, float]  # what is compared of a Decision
Naive = dict[str, Any]  # torch.nn.utils.get_total_norm of one rank: the norm, or what it raised

# Errors of a tensor are relative to at least this share of the largest element of all tensors,
# because some gradients, such as the gradient of a key's bias, are zero up to rounding.
FLOOR = 1e-3
WORST = 5  # parameters that a message names

_METRICS = ("norm", "norm_clipped", "coef", "clipped", "fraction", "peak")
_COMPARED = {
    "norm_error": "‖G‖",
    "norm_clipped_error": "‖G‖ after clipping",
    "gradient_error": "the clipped gradient",
}


def side_of(decision: Decision) -> dict[str, float]:
    """Return the metrics of a decision by name, on the host."""
    metrics = zip(_METRICS, decision.metrics, strict=False)
    return {name: float(value) for name, value in metrics}


def compare_step(
    step: int,
    ranks: Sequence[Side],
    gradients: Mapping[str, Tensor],
    reference: Side,
    expected: Mapping[str, Tensor],
    bound: float,
    *,
    history: bool = False,
) -> dict[str, Any]:
    """Compare one step of the plugin's ``ranks`` with the same step of one process.

    ``history``: the mode compares gradients with earlier ones. A gradient that is zero up to
    rounding may be above its limit on one side alone: counts may differ where the clipped gradients
    do not.
    """
    ours = ranks[0]
    errors = tensor_errors(gradients, expected)
    largest_errors = {
        "norm_error": relative(ours["norm"], reference["norm"]),
        "norm_clipped_error": relative(ours["norm_clipped"], reference["norm_clipped"]),
        "gradient_error": max(errors.values(), default=0.0),
    }
    failures = [
        f"{_COMPARED[key]} of step {step} is off by {error:.2g}"
        for key, error in largest_errors.items()
        if not error <= bound
    ]
    fraction = ours["fraction"]
    expected_fraction = reference["fraction"]
    if fraction != expected_fraction and (failures or not history):
        counts = f"is {fraction!r} instead of {expected_fraction!r}: the counts differ"
        failures.append(f"{keys.CLIP_FRACTION} of step {step} {counts}")
    failures += disagreements(step, ranks)
    surplus = sorted(gradients.keys() - expected.keys())
    if surplus:
        names = first_few(surplus, WORST)
        failures.append(
            f"in step {step}, {names}: a gradient under the plugin, but none in one process"
        )
    missing = sorted(expected.keys() - gradients.keys())
    if missing:
        names = first_few(missing, WORST)
        failures.append(
            f"in step {step}, {names}: a gradient in one process, but none under the plugin"
        )
    return {
        "step": step,
        **largest_errors,
        "plugin": dict(ours),
        "reference": dict(reference),
        "failures": failures,
        "errors": errors,
    }


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
    errors: list[dict[str, Any]] = []
    for name, error in weights.items():
        errors.append({"name": name, "error": error, "of": "weight"})
    for step in steps:
        tensor = f"gradient of step {step['step']}"
        for name, error in step.pop("errors").items():
            errors.append({"name": name, "error": error, "of": tensor})
    errors.sort(key=lambda record: record["error"], reverse=True)
    worst: dict[str, dict[str, Any]] = {}
    for record in errors:
        worst.setdefault(str(record["name"]), record)
    return {
        "binds": any(step["reference"]["clipped"] for step in steps),
        "max_rel_error": max([weight_error, *(_largest(step) for step in steps)]),
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
    raised = next((result["raised"] for result in naive if result["raised"]), None)
    return {
        "error": None,
        "rank": None,
        "ok": ok,
        "max_rel_error": max(mode["max_rel_error"] for mode in modes),
        "naive": raised or max((result["error"] for result in naive), default=None),
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
    largest = max((_size(tensor) for tensor in reference.values()), default=0.0)
    errors = {}
    for name in {**reference, **ours}:
        a = ours.get(name)
        b = reference.get(name)
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
        rank_of_value = {repr(side[name]): rank for rank, side in enumerate(ranks)}
        rank_of_value.pop(repr(first))
        for value, rank in rank_of_value.items():
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
    result: Naive = {"norm": None, "raised": None, "message": "", "rank": dist.get_rank()}
    try:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        result["norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    except Exception as error:
        result["raised"] = type(error).__name__
        result["message"] = str(error).strip().partition("\n")[0]
    return result


def worst_naive(outcomes: Sequence[Naive | None], norm: float) -> Naive | None:
    """Return the result with the largest error; a rank that raised an error comes first."""
    results = []
    for result in outcomes:
        if result is not None:
            error = math.inf if result["norm"] is None else relative(result["norm"], norm)
            results.append(result | {"error": error})
    return max(results, key=lambda r: (r["raised"] is not None, r["error"]), default=None)


HEAD = (
    f"{'step':>4}  {'‖G‖, one process':>22}  {'‖G‖, plugin':>22}  {'off by':>8}  "
    f"{'gradient':>8}  {keys.CLIP_FRACTION:>22}  torch.nn.utils alone"
)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a comparison, given the content of its file."""
    for mode in found["modes"]:
        limit = "" if mode["threshold"] is None else f" clip.threshold={mode['threshold']:.6g}"
        yield from ("", f"clip={mode['mode']}{limit}", HEAD)
        for step in mode["steps"]:
            yield _line_of(step)
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
    plugin = step["plugin"]
    reference = step["reference"]
    fraction = f"{plugin['fraction']:.6g}"
    if plugin["fraction"] != reference["fraction"]:
        fraction += f" not {reference['fraction']:.6g}"
    naive = step["naive"]
    torch_alone = "-" if naive is None else "raises"
    if naive is not None and naive["norm"] is not None:
        torch_alone = f"{naive['norm']:.6g}, off by {naive['error']:.1e}"
    return (
        f"{step['step']:>4}  {reference['norm']:>22.15g}  {plugin['norm']:>22.15g}  "
        f"{step['norm_error']:>8.1e}  {step['gradient_error']:>8.1e}  {fraction:>22}  "
        f"{torch_alone}"
    )


def _verdict(mode: Mapping[str, Any]) -> Iterator[str]:
    steps = mode["steps"]
    failures = mode["failures"]
    yield (
        f"clip={mode['mode']}: weights after {plural(len(steps), 'step')} off by "
        f"{mode['weight_error']:.1e}, largest error {mode['max_rel_error']:.1e}"
    )
    if mode["derived"]:
        yield "  clip.threshold is a tenth of the largest value of step 1, so that it binds"
    elif mode["threshold"] is not None and not mode["binds"]:
        yield "  no step was clipped: a lower clip.threshold compares clipping too"
    if not failures and any(s["plugin"]["fraction"] != s["reference"]["fraction"] for s in steps):
        yield "  counts differ by gradients that are 0 up to rounding, and so is their limit"
    naive = next((s["naive"] for s in steps if s["naive"] and s["naive"]["raised"]), None)
    if naive is not None:
        what = f"{naive['raised']}: {naive['message']}"
        yield f"  torch.nn.utils alone, on rank {naive['rank']}: {what}"
    if failures:
        yield from _failures(failures, mode["worst"])


def _failures(failures: Sequence[str], worst: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for failure in failures:
        yield f"  {failure}"
    yield "  furthest off:"
    width = max((len(tensor["name"]) for tensor in worst), default=0)
    for tensor in worst:
        yield f"    {tensor['name']:<{width}}  {tensor['error']:.1e}  {tensor['of']}"
