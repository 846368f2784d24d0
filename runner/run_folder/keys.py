"""Keys of metrics, as rows, summaries and trackers spell them.

A row holds the metrics of one optimizer step. Keys that end in ``_mean``, ``_max`` or ``ratio``
cover all steps since the row before it. Norms of gradients are taken after synchronisation,
unscaling and normalisation, and before clipping unless the key says otherwise.
"""

from __future__ import annotations

TRAIN_STEP = "train/step"
TRAIN_LOSS = "train/loss"
TRAIN_LR = "train/lr"
TRAIN_SAMPLES = "train/samples"
TRAIN_TOKENS = "train/tokens"

GRAD_NORM = "grad/norm"
GRAD_NORM_CLIPPED = "grad/norm_clipped"
GRAD_NORM_MEAN = "grad/norm_mean"
GRAD_NORM_MAX = "grad/norm_max"
GRAD_NONFINITE = "grad/nonfinite"
"""Steps skipped so far because their gradient was not finite."""

CLIP_THRESHOLD = "clip/threshold"
CLIP_COEF = "clip/coef"
"""Norm after clipping ÷ norm before clipping."""
CLIP_CLIPPED = "clip/clipped"
"""1 if clipping changed this step, else 0."""
CLIP_FRACTION = "clip/fraction"
"""Share clipped of what the mode clips: the step, the elements or the units."""
CLIP_RATIO = "clip/ratio"
CLIP_RATIO_TOTAL = "clip/ratio_total"
"""Share of all steps so far that clipping changed."""
CLIP_PEAK = "clip/peak"
"""Distribution over steps of the largest value that the mode compares with its threshold (summary
only)."""

TIME_STEP = "time/step_s"
THROUGHPUT = "throughput/samples_per_s"

EVAL = "eval/"
"""Prefix of all metrics of an evaluation."""
EVAL_LOSS = f"{EVAL}loss"
EVAL_ACCURACY = f"{EVAL}accuracy"

LAYER_NORM = f"{GRAD_NORM}/"
"""Prefix of the gradient norm of one parameter."""
WHAT_IF = "clip/what_if/"
"""Prefix of the share of steps so far that another threshold would have clipped."""

CLIP_MODE = "clip/mode"
"""Facts about a clipping mode that is not one of this project's own (summary only)."""

ENDED_EARLY = "ended_early"
"""Why a callback ended the training, such as early stopping (summary and status only)."""

WALL_SECONDS = "wall_s"
"""Wall time of the run (summary only)."""


def layer_norm(parameter: str) -> str:
    """Return the key of the gradient norm of a parameter."""
    return f"{LAYER_NORM}{parameter}"


def what_if(threshold: float) -> str:
    """Return the key of the share of steps that ``threshold`` would have clipped."""
    return f"{WHAT_IF}{threshold}"
