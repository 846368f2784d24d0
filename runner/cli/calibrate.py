"""``python -m runner calibrate``: measure gradients without clipping, and suggest thresholds.

It takes the overrides of a run and checks them in the same way. It writes ``calibrate.json`` to a
folder of its own, and nothing to ``outputs/runs``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.calibrate.distribution import (
    POINTS,
    Histogram,
    candidates,
    distribution,
    suggest,
    suggest_by_parts,
    warm_up,
    would_clip,
)
from runner.calibrate.published import nearest
from runner.calibrate.table import lines
from runner.cli.new_folder import new_folder
from runner.cli.run import single
from runner.compose.jobs import Job
from runner.compose.overrides import key_of
from runner.config.environment import joins
from runner.config.modes import built_in
from runner.config.problem import Problem, RequestError
from runner.config.secrets import masked_words
from runner.telemetry.sinks.console import print_line

FILE = "calibrate.json"

USAGE = """\
python -m runner calibrate [GROUP=OPTION ...] [KEY=VALUE ...]

Trains calibrate.steps optimizer steps without clipping, discards the weights, and prints how large
the gradient was and which clip.threshold to begin with. clip=value and clip=adaptive are measured
in their own units. `python -m runner --help` lists all overrides.

  calibrate.steps=200          number of optimizer steps to measure
  calibrate.warmup_steps=20    number of first steps to describe separately; a tenth by default
  calibrate.output=FOLDER      folder of calibrate.json

Exit codes: 0 measured   1 training failed   2 the request was wrong   129, 130, 143 interrupted"""


def main(words: Sequence[str]) -> int:
    """Calibrate as the arguments ``words`` ask."""
    [job] = single(words, "a calibration").jobs
    clip = job.config.clip
    if clip.info.nested:
        message = (
            "has several thresholds, which cannot be suggested together: calibrate one of its "
            "modes, such as clip=norm"
        )
        raise RequestError([Problem("clip", clip.mode, message)])
    if clip.info.derived:
        message = (
            "derives its limit from earlier steps, so there is no threshold to "
            "calibrate; python -m runner calibrate clip=norm shows how large they are"
        )
        raise RequestError([Problem("clip", clip.mode, message)])
    output = job.config.calibrate.output
    given = Path(output) if output else None
    folder = new_folder("calibration", FILE, "calibrate.output", given)
    from runner.calibrate.measure import end_of, execute
    from runner.launch.failure import Failure, attempt
    from runner.run_folder.strict_json import write_object
    from runner.telemetry.sinks.terminal import TerminalSink

    if joins():
        from runner.launch.rank import join

        return join(execute, job.config.launch.timeout)
    from runner.launch.supervise import train

    folder.mkdir(parents=True, exist_ok=True)
    steps = end_of(job.config).value
    shown = TerminalSink(steps, job.config.log.flush, title="calibration")
    measured = attempt(lambda: train(job.config, folder, [shown], execute))
    if isinstance(measured, Failure):
        shown.close(None, measured.exit_code)
        print_line(f"clip-runner: {measured.error}", sys.stderr)
        return measured.exit_code
    shown.close(None, 0)
    found = describe(job, measured, masked_words(words))
    write_object(folder / FILE, found)
    print_line()
    for line in lines(found):
        print_line(_printable(line))
    print_line(f"\n{folder / FILE}")
    return 0


def describe(job: Job, measured: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the content of ``calibrate.json``; ``measured`` is the result of ``execute``."""
    clip = job.config.clip
    described = clip.described if clip.described.info.clips else built_in("norm")
    chosen = described is clip.described
    mode, info = (clip.mode, clip.info) if chosen else ("norm", described.info)
    norms, peaks = measured["norms"], measured["peaks"]
    steps, first = len(norms), warm_up(len(norms), job.config.calibrate.warmup_steps)
    parts = None if info.parts is None else Histogram(**measured["parts"])
    measure = distribution(peaks[first:])
    suggested = suggest(measure) if parts is None else suggest_by_parts(info.shares, parts)
    listed = candidates(info.studied, suggested, (*clip.what_if, clip.threshold))
    near = nearest(mode, measured["kind"], suggested.start if suggested else None)
    found: dict[str, Any] = {
        "words": list(words),
        "mode": mode,
        "mode_info": info.record(),
        "norm_type": clip.norm_type,
        "steps": steps,
        "warmup_steps": first,
        "nonfinite": distribution(norms).nonfinite,
        "loss": measured["loss"],
        "norm": _apart(norms, first),
    }
    if info.unit != "‖G‖":
        found["peak"] = _apart(peaks, first)
    elif any(peak < norm for peak, norm in zip(peaks, norms, strict=True)):
        found["norm_scaled"] = _apart(peaks, first)  # clip.scales=auto leaves some gradients out
    if parts is not None:
        found["parts"] = {
            "total": parts.total,
            "nonzero": parts.nonzero,
            **{f"p{point}": parts.largest(1 - point / 100) for point in POINTS},
        }
        found["would_clip_parts"] = {str(one): parts.share_above(one) for one in listed}
    return found | {
        "suggested": asdict(suggested) if suggested else None,
        "would_clip": {str(threshold): would_clip(peaks, threshold) for threshold in listed},
        "kind": measured["kind"],
        "published": [
            {**asdict(one), "would_clip": would_clip(peaks, one.threshold)}
            | ({} if parts is None else {"would_clip_parts": parts.share_above(one.threshold)})
            for one in near
        ],
        "next": commands(words, mode, suggested.start if suggested else None),
        "norms": norms,
        "peaks": peaks,
    }


def commands(words: Sequence[str], mode: str, start: float | None) -> dict[str, str]:
    """Return commands of a run and of a sweep to try next, for the arguments ``words``."""
    if start is None:
        return {}
    settled = ("clip", "clip.threshold", "clip.what_if")
    base = [
        word
        for word in words
        if key_of(word) not in settled and not key_of(word).startswith("calibrate.")
    ]
    if "clip._target_" not in map(key_of, words):
        base.append(f"clip={mode}")
    grid = [float(f"{start * factor:.3g}") for factor in (0.25, 0.5, 1, 2, 4)]
    others = ",".join(f"{x:g}" for x in grid if x != start)
    each = ",".join(f"{x:g}" for x in grid)
    runner = ["python", "-m", "runner"]
    run = [*runner, *base, f"clip.threshold={start:g}", f"clip.what_if=[{others}]"]
    return {
        "run": shlex.join(run),
        "sweep": shlex.join([*runner, "-m", *base, f"clip.threshold={each}"]),
    }


def _apart(values: Sequence[float], first: int) -> dict[str, Any]:
    return {
        "warm_up": asdict(distribution(values[:first])),
        "after_warm_up": asdict(distribution(values[first:])),
    }


def _printable(line: str) -> str:
    """Return the line, in ASCII if the terminal cannot encode it."""
    try:
        line.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return line.replace("‖", "|").encode("ascii", "replace").decode("ascii")
    return line
