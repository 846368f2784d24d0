"""Keys of metrics, as rows, summaries and trackers spell them.

Keys that end in ``_mean``, ``_max`` or ``ratio`` cover all steps since the row before. Norms are of
synchronised, unscaled, normalised gradients, before clipping unless the key says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TRAIN_STEP = "train/step"
TRAIN_LOSS = "train/loss"
TRAIN_LR = "train/lr"
TRAIN_SAMPLES = "train/samples"
STEP_SAMPLES = "train/step_samples"  # of this step alone, where accumulation.steps has phases
TRAIN_TOKENS = "train/tokens"

GRAD_NORM = "grad/norm"
GRAD_NORM_CLIPPED = "grad/norm_clipped"
# Norm of the gradients that a coefficient multiplies, where matrices of Muon are left out
GRAD_NORM_SCALED = "grad/norm_scaled"
GRAD_NORM_MEAN = "grad/norm_mean"
GRAD_NORM_MAX = "grad/norm_max"
GRAD_ZEROS = "grad/zeros"  # share of all elements of the gradient that are 0
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
UPDATE_NORM = "update/norm"  # norm of what a step added to the weights, or is going to add
UPDATE_SIGMA = "update/sigma"  # its distance from the mean of the rows before, in their deviations
NOISE_SCALE = "noise/scale"  # batch size at which noise and gradient are equally large, in samples
TIME_STEP = "time/step_s"
THROUGHPUT = "throughput/samples_per_s"

EVAL = "eval/"  # prefix of all metrics of an evaluation
EVAL_LOSS = f"{EVAL}loss"
EVAL_ACCURACY = f"{EVAL}accuracy"

# Prefix of the share in ‖G‖^p of a parameter that makes most of it, in a step that was clipped or
# skipped as a spike; without a name: who led these steps (summary only)
GRAD_TOP = "grad/top"
TOP = f"{GRAD_TOP}/"
LAYER_NORM = f"{GRAD_NORM}/"  # prefix of the gradient norm of one parameter
LAYER_UPDATE = f"{UPDATE_RATIO}/"  # prefix of the update-to-weight ratio of one parameter
# Prefix of the share of steps so far that another threshold, which follows, would have clipped
WHAT_IF = "clip/what_if/"
# Facts about a clipping mode that is not one of this project's own (summary only)
CLIP_MODE = "clip/mode"
# The first steps that were skipped, each with its samples, where they have indices (summary only)
SKIPPED_STEPS = "skipped_steps"
ENDED_EARLY = "ended_early"  # why a callback ended the training (summary and status only)
# Step from which the training loss was lost until the end; null if it was not (summary only)
DIVERGED = "diverged"
# Microbatches of a step that accumulation=auto has found (status and manifests of checkpoints only)
ACCUMULATION_STEPS = "accumulation_steps"
WALL_SECONDS = "wall_s"  # wall time of the run (summary only)

# Numbers of a step that others are made of; no row has them
CLIP_SPIKE = "clip/spike"  # 1 for a step that was skipped as a spike, else 0
NOISE_TRACE = "noise/trace"  # an estimate of tr(Σ), the variance of the gradient of a sample
NOISE_SQUARE = "noise/square"  # an estimate of |G|², the squared norm of its mean
LOCAL_LOSS = "local/loss"  # the part of this rank, as in the next two
LOCAL_TRACE = "local/trace"
LOCAL_SQUARE = "local/square"
LOCAL = {LOCAL_LOSS: TRAIN_LOSS, LOCAL_TRACE: NOISE_TRACE, LOCAL_SQUARE: NOISE_SQUARE}
"""What a data-parallel rank knows, and the mean of it over these ranks."""
NOT_IN_ROWS = frozenset({CLIP_PEAK, CLIP_SPIKE, NOISE_TRACE, NOISE_SQUARE, *LOCAL})

OF_DECISION: Mapping[str, str] = {
    "norm": GRAD_NORM,
    "norm_clipped": GRAD_NORM_CLIPPED,
    "coef": CLIP_COEF,
    "clipped": CLIP_CLIPPED,
    "fraction": CLIP_FRACTION,
    "peak": CLIP_PEAK,
    "threshold": CLIP_THRESHOLD,
}
"""The key of each number of a decision, see :attr:`runner.clip.Decision.numbers`."""

ALWAYS = frozenset({LOCAL_LOSS, GRAD_NORM, GRAD_NORM_CLIPPED, CLIP_COEF, CLIP_PEAK})
"""Numbers that are NaN in a step that went wrong. NaN of another one means that there is none."""


def inner(path: Sequence[tuple[str, str]], number: str) -> str:
    """Return the key of a number of a mode inside of another one, for what it clips."""
    place = "".join(f"{kind}/{name}/" for kind, name in path)
    return f"clip/{place}{number}"
