"""The text of a verification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.config.notation import plural
from runner.run_folder import keys

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
        yield from map(_step, mode["steps"])
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


def _step(step: Mapping[str, Any]) -> str:
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
