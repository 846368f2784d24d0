"""Give advice on the clipping threshold of a finished run.

By the Deep Learning Tuning Playbook (https://github.com/google-research/tuning_playbook), one that
clips more than half of the updates is "extremely aggressive", a lower learning rate does the same
more simply, and the 90th percentile of the unclipped norms is a good start. What clipping does to a
step depends on the optimizer, see :mod:`runner.optim.effects`.
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

FEWEST = 50  # steps below which there is no advice on a threshold
MOSTLY = 0.5  # share clipped above which a threshold does more than cut outliers
Topic = Literal["nonfinite", "spikes", "few", "never", "limits", "cancels", "weighs", "nothing"]


@dataclass(frozen=True)
class Setting:
    """How a run was clipped."""

    mode: ModeInfo
    threshold: float | None
    nonfinite: Literal["skip", "error", "ignore"] = "skip"
    effect: Effect = PLAIN
    searches: int = 0

    @property
    def stat(self) -> str:
        left_out = self.effect.left_out if self.mode.parts is None else ""
        return f"{self.mode.stat} without {left_out}'s matrices" if left_out else self.mode.stat

    def remedy(self, peak: Mapping[str, float], do: str) -> str:
        """Name a threshold to ``do`` something; a run keeps only the largest unit of each step."""
        if self.mode.parts is not None:
            found = "python -m runner calibrate with the same overrides shows which threshold clips"
            return f"{found} how large a share of the {self.mode.parts}."
        start = f"about {rounded(peak['p90'])}, the 90th percentile of {self.stat}"
        if self.mode.tenth is not None:
            start = f"about {self.mode.tenth:g}"
        return f"{do} clip.threshold to {start}."


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
        text = f"{faults} of {steps} steps had a gradient that was NaN or inf and "
        text += f"{'was' if faults == 1 else 'were'} {done}; no threshold mends that: look at the "
        text += "learning rate, the loss and the precision."
        found.append(Remark("nonfinite", text))
    if spikes := summary.get(keys.CLIP_SKIPPED):
        done = "was skipped as a spike" if spikes == 1 else "were skipped as spikes"
        text = f"{spikes} of {steps} steps {done} (clip.skip): their samples changed no weights. "
        text += "If they are many, raise clip.skip.k, or lower the learning rate."
        found.append(Remark("spikes", text, ("clip.skip.k", "clip.skip.rule")))
        skipped += spikes
    peak, effect = summary[keys.CLIP_PEAK], setting.effect
    lost = not math.isfinite(summary.get("final", {}).get(keys.TRAIN_LOSS, 0.0))
    if setting.threshold is None or not peak or lost:
        return found
    if (counted := steps - skipped) < FEWEST:
        few = "1 step is" if counted == 1 else f"{counted} steps are"
        text = f"{few} too few to tell whether the threshold suits this training."
        return [*found, Remark("few", text)]
    if effect.kind == "sign only":
        text = f"Clipping has no effect with {effect.name}: it uses the sign of each gradient "
        return [*found, Remark("nothing", f"{text}element alone.", optimizer=effect.name)]
    ratio = summary[keys.CLIP_RATIO_TOTAL]
    if ratio == 0:
        return [*found, _never(peak, setting)]
    share = ratio if setting.mode.parts is None else summary[keys.CLIP_FRACTION]
    return [*found, _mostly(share, peak, setting)] if share > MOSTLY else found


def sentences(found: Iterable[Mapping[str, Any]], swept: Collection[str] = ()) -> list[str]:
    """Return the texts of remarks, without those that a sweep answers."""
    return [str(one["text"]) for one in found if not set(one["about"]) & set(swept)]


def _never(peak: Mapping[str, float], setting: Setting) -> Remark:
    text, effect = f"The threshold {setting.threshold:g} clipped nothing: ", setting.effect
    if effect.kind == "orthogonalized" and peak["max"] == 0:
        text += f"{effect.name} steps all parameters, and clip.scales=auto does not scale its "
        text += "gradients."
    else:
        text += f"the largest {setting.stat} was {rounded(peak['max'])}. "
        text += setting.remedy(peak, "To clip the largest tenth of the steps, set")
    return Remark("never", text, ("clip.threshold",))


def _mostly(share: float, peak: Mapping[str, float], setting: Setting) -> Remark:
    effect, whole = setting.effect, setting.mode.parts is None
    parts = "steps" if whole else f"{setting.mode.parts} on average"
    text = f"The threshold {setting.threshold:g} clipped {percent(share)} of the {parts}. "
    remedy = setting.remedy(peak, "To clip spikes alone, raise")
    updates = setting.mode.clips == "updates"
    if effect.scales or updates:
        if whole:
            text += "This acts like a lower learning rate, not as a limit on spikes. "
            text += f"{remedy[:-1]}, and lower optimizer.lr if training then becomes unstable."
        else:
            what = "updates" if updates else "gradients"
            text += f"It changes ordinary {what}, not only outliers. {remedy}"
        return Remark("limits", text, ("optimizer.lr", "clip.threshold"), effect.name)
    if effect.kind == "sign":
        text += f"{effect.name} steps by the sign of a mean of gradients: clipping does not make "
        text += "its steps smaller, it lowers the weight of clipped gradients in that mean. "
        return Remark("weighs", text + remedy, ("clip.threshold",), effect.name)
    text += f"{effect.name} normalizes its updates, so this does not make the steps smaller. "
    return Remark("cancels", text + remedy, ("clip.threshold",), effect.name)
