"""The text of a verification."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from runner.config.notation import plural
from runner.run_folder import keys
from runner.run_folder.rows import Row

HEAD = (
    f"{'step':>4}  {'‖G‖, one process':>22}  {'‖G‖, plugin':>22}  {'off by':>8}  "
    f"{'gradient':>8}  {keys.CLIP_FRACTION:>22}  torch.nn.utils alone"
)


class StepLines:
    """A sink that prints a line for each compared step."""

    def __init__(self, modes: Sequence[str], say: Callable[[str], None]) -> None:
        self._modes = modes
        self._say = say
        self._begun = -1

    def write(self, row: Row) -> None:
        """Print the line of a step, and a heading before the first step of a mode."""
        number = int(row["verify/mode"])
        if number != self._begun:
            self._begun = number
            threshold = row[keys.CLIP_THRESHOLD]
            limit = "" if math.isnan(threshold) else f" clip.threshold={threshold:.6g}"
            self._say("")
            self._say(f"clip={self._modes[number]}{limit}")
            self._say(HEAD)
        self._say(step_line(row))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Do nothing."""


def step_line(row: Row) -> str:
    """Return the line of one compared step."""
    ours, theirs = row[keys.CLIP_FRACTION], row["verify/fraction"]
    fraction = f"{ours:.6g}" if ours == theirs else f"{ours:.6g} not {theirs:.6g}"
    value, error = row["verify/naive"], row["verify/naive_error"]
    if math.isnan(error):
        by_hand = "-"
    elif math.isnan(value):
        by_hand = "raises"
    else:
        by_hand = f"{value:.6g}, off by {error:.1e}"
    return (
        f"{row[keys.TRAIN_STEP]:>4}  {row['verify/norm']:>22.15g}  {row[keys.GRAD_NORM]:>22.15g}  "
        f"{row['verify/norm_error']:>8.1e}  {row['verify/gradient_error']:>8.1e}  "
        f"{fraction:>22}  {by_hand}"
    )


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines to print after the last step."""
    for mode in found["modes"]:
        yield ""
        yield from _of_mode(mode)
    for kind, sentences in (("note", found["notes"]), ("possible cause", found["causes"])):
        if sentences:
            yield ""
            yield from (f"{kind}: {sentence}" for sentence in sentences)


def last_line(found: Mapping[str, Any]) -> str:
    """Return the last line, which programs may parse."""
    by_hand = found["naive"]
    if by_hand is None:
        by_hand = "none"
    elif isinstance(by_hand, float):
        by_hand = f"{by_hand:.2g}"
    verdict = "ok" if found["ok"] else "FAILED"
    return f"verify: {verdict} max_rel_error={found['max_rel_error']:.2g} naive={by_hand}"


def exception_only(error: str) -> str:
    """Return the end of a traceback: the exception, its message and its notes."""
    every = error.strip().splitlines()
    # The last line that begins with a class, right below a stack; without one, the whole text.
    raised = [
        number
        for number, (above, line) in enumerate(pairwise(every), 1)
        if above[:1].isspace() and re.match(r"[\w.]+(:|$)", line)
    ]
    return "\n".join(every[raised[-1] if raised else 0 :]) or "no reason was given"


def _of_mode(mode: Mapping[str, Any]) -> Iterator[str]:
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
    raised = next((one for one in naive if one["raised"]), None)
    if raised is not None:
        at = f"torch.nn.utils alone, on rank {raised['rank']}"
        yield f"  {at}: {raised['raised']}: {raised['message']}"
    if not mode["failures"]:
        return
    yield from (f"  {failure}" for failure in mode["failures"])
    yield "  furthest off:"
    width = max((len(one["name"]) for one in mode["worst"]), default=0)
    for one in mode["worst"]:
        yield f"    {one['name']:<{width}}  {one['error']:.1e}  {one['of']}; {one['placed']}"
