"""The better one of two values of a metric."""

from __future__ import annotations

_HIGHER = (
    *("accuracy", "f1", "precision", "recall", "auroc", "roc_auc", "specificity", "f1_score"),
    *("average_precision", "r2", "r2_score", "jaccard_index", "cohen_kappa", "explained_variance"),
    *("matthews_corr_coef", "pearson_corr_coef", "spearman_corr_coef", "cosine_similarity"),
)


def higher_is_better(metric: str) -> bool:
    """Return whether higher values of a metric are better: of an F1 score, not of a loss."""
    return metric.endswith("accuracy") or metric.rpartition("/")[2] in _HIGHER
