"""Which threshold to begin with: gradients are measured unclipped, and described.

    python -m runner calibrate <the words of a run>

The rule is that of Pascanu, Mikolov and Bengio 2013 (arXiv 1211.5063, section 3.2): look at the
norm over enough updates; thresholds from half to ten times its mean still converge. Modes that
clip elements or units are judged by the share of those that a threshold would clip.
"""

from runner.calibrate.distribution import (
    Distribution,
    Histogram,
    Suggestion,
    candidates,
    distribution,
    suggest,
    suggest_by_parts,
    would_clip,
)

__all__ = [
    "Distribution",
    "Histogram",
    "Suggestion",
    "candidates",
    "distribution",
    "suggest",
    "suggest_by_parts",
    "would_clip",
]
