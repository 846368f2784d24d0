"""Give advice on the clipping threshold of a finished run, which depends on its optimizer.

By the Deep Learning Tuning Playbook (https://github.com/google-research/tuning_playbook), one that
clips more than half of the updates is "extremely aggressive", a lower learning rate does the same
more simply, and the 90th percentile of the unclipped norms is a good start.

| kind of optimizer | optimizers | effect of scaling every gradient by the same factor |
|---|---|---|
| plain | SGD, ASGD, L-BFGS | the step is scaled by that factor |
| normalized | Adam and its kin, RMSprop, Adagrad, Adafactor, LAMB, LARS, SOAP | none (*) |
| orthogonalized | Muon | none on matrices (*); mode ``norm`` leaves them out by default |
| sign | Lion, Signum | none; clipped gradients weigh less in the momentum |
| sign only | signSGD, Rprop | none; clipping changes no step |

(*) while the constant that is added to the divisor is small beside the gradient; else it is plain.
Sources: Adam (1412.6980), Adafactor (1804.04235), LAMB (1904.00962), LARS (1708.03888), Lion
(2302.06675), signSGD and Signum (1802.04434), Muon (https://kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from runner.config.leave_out import as_ranges
from runner.config.modes import ModeInfo
from runner.config.notation import first_few, percent, plural, rounded
from runner.run_folder import keys
from runner.telemetry.dominant import FEW, SPIKE

if TYPE_CHECKING:
    from torch.optim import Optimizer

_LED = {
    "spikes": f"steps whose ‖G‖ is above {SPIKE:g} times the median",
    "clipped": "clipped steps",
}
"""What steps of :meth:`runner.telemetry.dominant.Leaders.facts` are called, by their kind."""
FEWEST = 50  # steps below which there is no advice on a threshold
A_FEW = 5  # skipped steps that may have a cause in their samples, also in a short run
MOSTLY = 0.5  # share clipped above which a threshold does more than cut outliers
NEGLIGIBLE = 0.1  # share of the gradient below which a constant in its divisor does not matter
_KINDS = {
    # Muon first: some implementations have Adam in their names for the parameters left over.
    "orthogonalized": "muon",
    "sign only": "rprop|signsgd",
    "sign": "lion|signum|tiger",
    "normalized": "adam|adan|adafactor|adagrad|adadelta|adabelief|adabound|rmsprop|lamb|lars"
    "|novograd|yogi|came|soap|shampoo|prodigy|sophia|apollo",
}
"""Patterns for the lower-case class names of optimizers; the first match counts."""


@dataclass(frozen=True)
class Effect:
    """What an optimizer makes of a gradient that is scaled down."""

    name: str = "SGD"
    kind: str = "plain"
    left_out: str = ""  # class name of an optimizer beside it whose gradients are not scaled


def effect_of(
    optimizers: Sequence[Optimizer], threshold: float | None, parameters: int, leaves_out: bool
) -> Effect:
    """Return the effect of gradients held to ``threshold``; a plain optimizer counts first.

    With ``leaves_out``, gradients of orthogonalized matrices are not scaled beside others.
    """
    effects = [_effect(optimizer, threshold or math.inf, parameters) for optimizer in optimizers]
    orthogonalized = [effect for effect in effects if effect.kind == "orthogonalized"]
    elementwise = [effect for effect in effects if effect not in orthogonalized]
    if leaves_out and orthogonalized and elementwise:
        return replace(_combined(elementwise), left_out=orthogonalized[0].name)
    return _combined(effects)


def _combined(effects: Sequence[Effect]) -> Effect:
    """Return one effect for several optimizers: the plain one, if there is one."""
    first, *more = [effect for effect in effects if effect.kind == "plain"] or effects
    if any(effect.kind != first.kind for effect in more):
        names = " with ".join(effect.name for effect in (first, *more))
        return Effect(names, "normalized")
    return first


def _effect(optimizer: Optimizer, threshold: float, parameters: int) -> Effect:
    name = type(optimizer).__name__
    kind = _kind(optimizer)
    if kind == "orthogonalized":  # it divides by the norm of a matrix, the others each element
        parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    if kind in ("normalized", "orthogonalized"):
        size_of_element = threshold / math.sqrt(max(parameters, 1))
        if _constant_in_divisor(optimizer) > NEGLIGIBLE * size_of_element:
            kind = "plain"
    return Effect(name, kind)


def _kind(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__.lower()
    kinds = (kind for kind, names in _KINDS.items() if re.search(names, name))
    kind = next(kinds, "plain")
    has_momentum = any(optimizer.defaults.get(key) for key in ("momentum", "beta", "betas"))
    return "sign" if kind == "sign only" and has_momentum else kind


def _constant_in_divisor(optimizer: Optimizer) -> float:
    """Return the constant that an optimizer adds to the divisor of gradients."""
    options = optimizer.defaults
    eps = options.get("eps") or 0.0
    if isinstance(eps, Sequence):  # Adafactor's: torch's is a least divisor, the others' is squared
        of_torch = type(optimizer).__module__.startswith("torch.")
        eps = (eps[0] or 2.0**-23) if of_torch else math.sqrt(eps[0] or 0.0)
    return float(eps + math.sqrt(options.get("initial_accumulator_value") or 0.0))


@dataclass(frozen=True)
class Setting:
    """What advice depends on: the mode, its threshold, and the optimizer."""

    mode: ModeInfo
    threshold: float | None
    nonfinite: str = "skip"
    effect: Effect = Effect()
    searches: int = 0  # steps that were skipped to find the loss scale

    @property
    def stat(self) -> str:
        left_out = self.effect.left_out if self.mode.parts is None else ""
        return f"{self.mode.stat} without {left_out}'s matrices" if left_out else self.mode.stat

    def remedy(self, peak: Mapping[str, float], do: str) -> str:
        """Name a threshold to ``do`` something; a run keeps only the largest unit of each step."""
        if self.mode.parts is not None:
            command = "python -m runner calibrate with the same overrides"
            return (
                f"{command} shows which threshold clips how large a share of the {self.mode.parts}"
            )
        start = f"about {rounded(peak['p90'])}, the 90th percentile of {self.stat}"
        if self.mode.tenth is not None:
            start = f"about {self.mode.tenth:g}"
        return f"{do} clip.threshold to {start}"


@dataclass(frozen=True)
class Remark:
    """An observation about a run, with advice, and the configuration keys that it is about."""

    topic: str
    text: str
    about: tuple[str, ...] = ()


def remarks(summary: Mapping[str, Any], setting: Setting) -> list[Remark]:
    """Return remarks on the threshold of a run; none if its metrics do not allow any."""
    listed = []
    steps = summary["steps"]
    nonfinite = summary[keys.GRAD_NONFINITE]
    faults = nonfinite - setting.searches
    if faults:
        done = "taken all the same" if setting.nonfinite == "ignore" else "skipped"
        done = f"{'was' if faults == 1 else 'were'} {done}"
        text = f"{faults} of {plural(steps, 'step')} had a gradient that was NaN or inf and "
        text += f"{done}; no threshold mends that: look at the learning rate, the loss and the "
        text += "precision."
        listed.append(Remark("nonfinite", text))
    spikes = summary.get(keys.CLIP_SKIPPED, 0)
    if spikes:
        verb = "was" if spikes == 1 else "were"
        text = f"{spikes} of {plural(steps, 'step')} {verb} skipped as spikes "
        text += "(clip.skip), and changed no weights. If they are many, raise clip.skip.k, or "
        text += "lower the learning rate."
        listed.append(Remark("spikes", text, ("clip.skip.k", "clip.skip.rule")))
    left_out = faults + spikes
    if summary.get(keys.SKIPPED_STEPS) and left_out <= max(A_FEW, FEW * steps):
        listed.append(_without_samples(summary[keys.SKIPPED_STEPS]))
    cause = _cause(summary)
    if cause is not None:
        listed.append(cause)
    peak = summary[keys.CLIP_PEAK]
    lost = not math.isfinite(summary.get("final", {}).get(keys.TRAIN_LOSS, 0.0))
    if setting.threshold is None or not peak or lost:
        return listed
    taken = steps - nonfinite - spikes
    remark = _on_threshold(summary, setting, taken)
    return listed if remark is None else [*listed, remark]


def before_a_run(norms: Sequence[float], effect: Effect) -> str:
    """Return whether clipping would matter to a training, as a sentence or two.

    Args:
        norms: ‖G‖ of its steps after a warm-up, without clipping.
        effect: what its optimizers make of gradients held to the median of these norms.
    """
    finite = [norm for norm in norms if math.isfinite(norm)]
    steps = plural(len(finite), "step")
    if len(finite) < FEWEST:
        return f"Whether clipping matters here, {steps} are too few to tell."
    if effect.kind == "sign only":
        return f"Clipping does not matter here: {effect.name} uses the sign of each element alone."
    middle = median(finite)
    if middle == 0:
        return "Whether clipping matters here, gradients of zero do not tell."
    spikes = sum(norm > SPIKE * middle for norm in finite)
    largest = f"the largest ‖G‖ is {rounded(max(finite) / middle)} times the median"
    if spikes > FEW * len(finite):
        text = f"‖G‖ changes its size: {spikes} of {steps} are above {SPIKE:g} times the median, "
        return text + "too many for spikes. Thresholds that follow it (clip=percentile) suit it."
    if spikes:
        text = f"Clipping matters here: {spikes} of {steps} {'is' if spikes == 1 else 'are'} "
        return text + f"above {SPIKE:g} times the median, and {largest}."
    text = f"Clipping is a safeguard here: none of {steps} is a spike ({largest}). "
    if effect.kind == "plain":
        return text + "A threshold that clips most steps acts like a lower learning rate."
    if effect.kind == "sign":
        return text + f"{effect.name} steps by signs: clipping does not make its steps smaller."
    return text + f"{effect.name} normalizes its updates: clipping does not make them smaller."


def _without_samples(skipped: Sequence[Mapping[str, Any]]) -> Remark:
    """Name what goes on without the samples of the steps that were skipped."""
    steps = [step["step"] for step in skipped]
    samples = dict.fromkeys(str(sample) for step in skipped for sample in step["samples"])
    text = f"resume=RUN@STEP data.leave_out=[{as_ranges(steps)}] goes on from a checkpoint before "
    text += (
        f"step {steps[0]} without the samples of {'these steps' if steps[1:] else 'this step'}: "
    )
    return Remark("samples", f"{text}{first_few([*samples], 8)}.")


def _cause(summary: Mapping[str, Any]) -> Remark | None:
    """Return a remark on the parameter that makes most of ‖G‖ in the spikes, or clipped steps."""
    leaders = summary.get(keys.GRAD_TOP, {})
    for kind, steps in _LED.items():
        leader = leaders.get(kind)
        if leader is None or leader["share"] < MOSTLY or leader["leads"] <= leader["steps"] / 2:
            continue
        if kind == "clipped" and leader["steps"] < FEWEST:
            continue
        power = "²" if leaders["norm_type"] == 2 else f"^{leaders['norm_type']:g}"
        text = f"{leader['name']} makes {percent(leader['share'])} of ‖G‖{power} in "
        text += f"{leader['leads']} of {leader['steps']} {steps}."
        return Remark("cause", text)
    return None


def _on_threshold(summary: Mapping[str, Any], setting: Setting, taken: int) -> Remark | None:
    """Return the remark on the threshold, if any, after ``taken`` steps that were not skipped."""
    if taken < FEWEST:
        verb = "is" if taken == 1 else "are"
        text = f"{plural(taken, 'step')} {verb} too few to tell whether the threshold "
        text += "suits this training."
        return Remark("few", text)
    if setting.effect.kind == "sign only":
        name = setting.effect.name
        text = f"Clipping has no effect with {name}: it uses the sign of each gradient element "
        return Remark("nothing", f"{text}alone.")
    peak = summary[keys.CLIP_PEAK]
    ratio = summary[keys.CLIP_RATIO_TOTAL]
    if ratio == 0:
        return _never(peak, setting)
    share = ratio if setting.mode.parts is None else summary[keys.CLIP_FRACTION]
    if share > MOSTLY:
        return _mostly(share, peak, setting)
    return _outliers(share, peak, setting) if setting.mode.limits_norm else None


def sentences(found: Iterable[Mapping[str, Any]], swept: Collection[str] = ()) -> list[str]:
    """Return the texts of remarks, without those that a sweep answers."""
    return [str(remark["text"]) for remark in found if not set(remark["about"]) & set(swept)]


def _never(peak: Mapping[str, float], setting: Setting) -> Remark:
    text = f"The threshold {setting.threshold:g} clipped nothing: "
    if setting.effect.kind == "orthogonalized" and peak["max"] == 0:
        text += f"{setting.effect.name} steps all parameters, and clip.scales=auto does not scale "
        text += "its gradients."
    else:
        text += f"the largest {setting.stat} was {rounded(peak['max'])}. "
        text += "clip=none takes the same steps. "
        text += setting.remedy(peak, "To clip the largest tenth of the steps, set") + "."
    return Remark("never", text, ("clip.threshold",))


def _outliers(share: float, peak: Mapping[str, float], setting: Setting) -> Remark:
    assert setting.threshold is not None
    text = (
        f"The threshold {setting.threshold:g} clipped {percent(share)} of the steps; the largest "
    )
    largest = peak["max"] / setting.threshold
    text += f"{setting.stat} was {rounded(largest)} times as large. It limits "
    text += "spikes" if share <= FEW and largest >= SPIKE else "outliers"
    text += ", and leaves the other steps as they are."
    return Remark("outliers", text, ("clip.threshold",))


def _mostly(share: float, peak: Mapping[str, float], setting: Setting) -> Remark:
    effect = setting.effect
    whole = setting.mode.parts is None
    parts = "steps" if whole else f"{setting.mode.parts} on average"
    text = f"The threshold {setting.threshold:g} clipped {percent(share)} of the {parts}. "
    remedy = setting.remedy(peak, "To clip spikes alone, raise")
    clips_updates = setting.mode.clips == "updates"
    if effect.kind == "plain" or clips_updates:
        if whole:
            text += "This acts like a lower learning rate, not as a limit on spikes. "
            text += f"{remedy}, and lower optimizer.lr if training then becomes unstable."
        else:
            what = "updates" if clips_updates else "gradients"
            text += f"It changes ordinary {what}, not only outliers. {remedy}."
        return Remark("limits", text, ("optimizer.lr", "clip.threshold"))
    topic = "weighs" if effect.kind == "sign" else "cancels"
    if topic == "weighs":
        text += f"{effect.name} steps by the sign of a mean of gradients: clipping does not make "
        text += "its steps smaller, it lowers the weight of clipped gradients in that mean. "
    else:
        text += f"{effect.name} normalizes its updates, so this does not make the steps smaller. "
    return Remark(topic, f"{text}{remedy}.", ("clip.threshold",))
