"""Keys of metrics, as rows, summaries and trackers spell them.

Keys that end in ``_mean``, ``_max`` or ``ratio`` cover all steps since the row before. Norms are of
synchronised, unscaled, normalised gradients, before clipping unless the key says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

TRAIN_STEP = "train/step"
TRAIN_LOSS = "train/loss"
TRAIN_LR = "train/lr"
TRAIN_SAMPLES = "train/samples"
TRAIN_TOKENS = "train/tokens"

GRAD_NORM = "grad/norm"
GRAD_NORM_CLIPPED = "grad/norm_clipped"
# Norm of the gradients that a coefficient multiplies, where matrices of Muon are left out
GRAD_NORM_SCALED = "grad/norm_scaled"
GRAD_NORM_MEAN = "grad/norm_mean"
GRAD_NORM_MAX = "grad/norm_max"
GRAD_NONFINITE = "grad/nonfinite"  # steps skipped so far because their gradient was not finite
CLIP_SKIPPED = "clip/skipped"  # steps skipped so far as spikes (`clip.skip`): those are finite
CLIP_THRESHOLD = "clip/threshold"
CLIP_COEF = "clip/coef"  # norm after clipping ÷ norm before clipping
CLIP_CLIPPED = "clip/clipped"  # 1 if clipping changed this step, else 0
CLIP_FRACTION = "clip/fraction"  # share clipped of what the mode clips: step, elements, units
CLIP_RATIO = "clip/ratio"
CLIP_RATIO_TOTAL = "clip/ratio_total"  # share of all steps so far that clipping changed
CLIP_PEAK = "clip/peak"  # distribution of the largest value compared with λ (summary only)
UPDATE_RATIO = "update/ratio"  # norm of what a step added to the weights ÷ norm of the weights
NOISE_SCALE = "noise/scale"  # batch size at which noise and gradient are equally large, in samples
TIME_STEP = "time/step_s"
THROUGHPUT = "throughput/samples_per_s"

EVAL = "eval/"  # prefix of all metrics of an evaluation
EVAL_LOSS = f"{EVAL}loss"
EVAL_ACCURACY = f"{EVAL}accuracy"

LAYER_NORM = f"{GRAD_NORM}/"  # prefix of the gradient norm of one parameter
LAYER_UPDATE = f"{UPDATE_RATIO}/"  # prefix of the update-to-weight ratio of one parameter
# Prefix of the share of steps so far that another threshold, which follows, would have clipped
WHAT_IF = "clip/what_if/"
# Facts about a clipping mode that is not one of this project's own (summary only)
CLIP_MODE = "clip/mode"
ENDED_EARLY = "ended_early"  # why a callback ended the training (summary and status only)
# Step from which the training loss was lost until the end; null if it was not (summary only)
DIVERGED = "diverged"
WALL_SECONDS = "wall_s"  # wall time of the run (summary only)


def inner(path: Sequence[tuple[str, str]]) -> list[str]:
    """Return the key of each metric of a mode inside of another one, for what it clips."""
    place = "".join(f"{kind}/{name}/" for kind, name in path)
    metrics = ("norm", "norm_clipped", "coef", "clipped", "fraction", "peak", "threshold")
    return [f"clip/{place}{metric}" for metric in metrics]
