"""Give advice on the clipping threshold of a finished run.

The bounds follow the Deep Learning Tuning Playbook of Google Research
(https://github.com/google-research/tuning_playbook): a threshold that clips more than half of the
updates is "extremely aggressive", and a lower learning rate does the same more simply; the 90th
percentile of the unclipped norms is a good start. What clipping does to a step depends on the
optimizer, see :mod:`runner.optim.effects`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runner.config.modes import ModeInfo
from runner.config.notation import percent, rounded
from runner.optim.effects import PLAIN, Effect
from runner.run_folder import keys

FEWEST = 50
"""Number of steps below which there is no advice on a threshold."""

MOSTLY = 0.5
"""Share of clipped steps, elements or units above which a threshold does more than cut outliers."""

FULLY = 0.95
"""Share of clipped steps above which a threshold is practically always exceeded."""

Topic = Literal["nonfinite", "spikes", "few", "never", "limits", "cancels", "weighs", "nothing"]


@dataclass(frozen=True)
class Setting:
    """How a run was clipped."""

    mode: ModeInfo
    threshold: float | None
    nonfinite: Literal["skip", "error", "ignore"] = "skip"
    effect: Effect = PLAIN
    searches: int = 0


@dataclass(frozen=True)
class Remark:
    """An observation about a run, with advice, and the configuration keys that it is about."""

    topic: Topic
    text: str
    about: tuple[str, ...] = ()
    optimizer: str = ""


def remarks(summary: Mapping[str, Any], setting: Setting) -> list[Remark]:
    """Return remarks on the threshold of a run; none if its metrics do not allow any."""
    found = []
    steps, skipped = summary["steps"], summary[keys.GRAD_NONFINITE]
    if faults := skipped - setting.searches:
        done = "taken all the same" if setting.nonfinite == "ignore" else "skipped"
        text = (
            f"{faults} of {steps} steps had a gradient that was NaN or inf and "
            f"{'was' if faults == 1 else 'were'} {done}; no threshold mends that: look at the "
            "learning rate, the loss and the precision."
        )
        found.append(Remark("nonfinite", text))
    if spikes := summary.get(keys.CLIP_SKIPPED):
        done = "was skipped as a spike" if spikes == 1 else "were skipped as spikes"
        text = (
            f"{spikes} of {steps} steps {done} (clip.skip): their samples changed no weights. If "
            "they are many, raise clip.skip.k, or lower the learning rate."
        )
        found.append(Remark("spikes", text, ("clip.skip.k", "clip.skip.rule")))
        skipped += spikes
    peak = summary[keys.CLIP_PEAK]
    lost = not math.isfinite(summary.get("final", {}).get(keys.TRAIN_LOSS, 0.0))
    if setting.threshold is None or not peak or lost:
        return found
    if (counted := steps - skipped) < FEWEST:
        few = "1 step is" if counted == 1 else f"{counted} steps are"
        text = f"{few} too few to tell whether the threshold suits this training."
        return [*found, Remark("few", text)]
    if setting.effect.kind == "sign only":
        name = setting.effect.name
        text = f"Clipping has no effect with {name}: it uses the sign of each gradient element "
        return [*found, Remark("nothing", f"{text}alone.", optimizer=name)]
    ratio = summary[keys.CLIP_RATIO_TOTAL]
    if ratio == 0:
        return [*found, _never(peak, setting)]
    share = ratio if setting.mode.parts is None else summary[keys.CLIP_FRACTION]
    return [*found, _mostly(share, peak, setting)] if share > MOSTLY else found


def sentences(found: Iterable[Mapping[str, Any]], swept: Collection[str] = ()) -> list[str]:
    """Return the texts of remarks, without those that a sweep answers."""
    return [str(one["text"]) for one in found if not set(one["about"]) & set(swept)]


def _never(peak: Mapping[str, float], setting: Setting) -> Remark:
    """Return the remark on a threshold that clipped nothing."""
    text, effect = f"The threshold {setting.threshold:g} clipped nothing: ", setting.effect
    if effect.kind == "orthogonalized" and peak["max"] == 0:
        text += f"{effect.name} steps all parameters, and clip.scales=auto does not scale its "
        text += "gradients."
    else:
        text += f"the largest {_stat(setting)} was {rounded(peak['max'])}. "
        if setting.mode.parts is None:
            text += "To clip the largest tenth of the steps, set clip.threshold to "
            text += f"{_start(peak, setting)}."
        else:
            text += _calibrate(setting)
    return Remark("never", text, ("clip.threshold",))


def _mostly(share: float, peak: Mapping[str, float], setting: Setting) -> Remark:
    """Return the remark on a threshold that clips most steps, elements or units."""
    effect, whole = setting.effect, setting.mode.parts is None
    parts = "steps" if whole else f"{setting.mode.parts} on average"
    text = f"The threshold {setting.threshold:g} clipped {percent(share)} of the {parts}. "
    if whole and effect.left_out:
        text += f"The gradients of {effect.left_out} are not scaled. "
    spikes = f"To clip spikes alone, raise clip.threshold to {_start(peak, setting)}."
    remedy = spikes if whole else _calibrate(setting)
    updates = setting.mode.clips == "updates"
    if effect.scales or updates:
        if effect.floor and not updates:
            text += f"eps of {effect.name} is not negligible for gradients this small, so clipping "
            text += "makes the steps smaller. "
            if whole and effect.kind == "orthogonalized":
                text += f"clip.scales=auto does not scale the gradients of {effect.name}. "
        if whole:
            text += "A threshold that clips so many steps acts like a lower learning rate, not as "
            text += f"a limit on spikes. {spikes[:-1]}, and lower optimizer.lr if training then "
            text += "becomes unstable."
        else:
            what = "updates" if updates else "gradients"
            text += f"It changes ordinary {what}, not only outliers. {remedy}"
        return Remark("limits", text, ("optimizer.lr", "clip.threshold"), effect.name)
    if effect.kind == "sign":
        text += f"{effect.name} steps by the sign of a mean of gradients: clipping does not make "
        text += "its steps smaller, it lowers the weight of clipped gradients in that mean. "
        return Remark("weighs", text + remedy, ("clip.threshold",), effect.name)
    how, whose = "divides by the size of earlier gradients", "its"
    if " with " in effect.name:
        how, whose = "normalize the size of gradients", "their"
    elif effect.kind == "orthogonalized":
        how = "orthogonalizes its updates"
    text += f"{effect.name} {how}, so this does not make {whose} steps smaller"
    text += ": thresholds this low train nearly alike. " if whole and share > FULLY else ". "
    return Remark("cancels", text + remedy, ("clip.threshold",), effect.name)


def _start(peak: Mapping[str, float], setting: Setting) -> str:
    """Return a threshold to begin with."""
    if setting.mode.tenth is not None:
        return f"about {setting.mode.tenth:g}"
    return f"about {rounded(peak['p90'])}, the 90th percentile of {_stat(setting)}"


def _stat(setting: Setting) -> str:
    """Return the name of what the mode compares with λ."""
    stat, left_out = setting.mode.stat, setting.effect.left_out
    return f"{stat} without {left_out}'s matrices" if left_out and not setting.mode.parts else stat


def _calibrate(setting: Setting) -> str:
    """Refer to ``calibrate``: a run keeps only the largest element or unit of each step."""
    return (
        "python -m runner calibrate with the same overrides shows which threshold clips how large "
        f"a share of the {setting.mode.parts}."
    )
