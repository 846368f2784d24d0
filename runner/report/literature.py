"""Thresholds of published settings, as marks on the axis of their mode.

They come from other losses, optimizers and batch sizes, and carry over as orders of magnitude.
``value`` has no mark: the cutoff of 15 in Mikolov's RNNLM bounds errors at hidden units, which is
no threshold on gradients of weights.
"""

from __future__ import annotations

PUBLISHED: dict[str, tuple[tuple[float, str], ...]] = {
    "norm": (
        (0.1, "Compressive Transformer (Rae 2019), gated convolutional LM (Dauphin 2016)"),
        (0.25, "AWD-LSTM (Merity 2017), CTRL (Keskar 2019)"),
        (1.0, "GPT-3 (Brown 2020), LLaMA (Touvron 2023), TaBERT (Yin 2020)"),
        (2.0, "Inception v3 (Szegedy 2015)"),
    ),
    "adaptive": (
        (0.01, "NFNet at batch 4096 (Brock 2021)"),
        (0.02, "NF-ResNet ablation (Brock 2021)"),
        (0.04, "NF-ResNet ablation (Brock 2021)"),
        (0.08, "NF-ResNet ablation (Brock 2021)"),
        (0.16, "NF-ResNet ablation (Brock 2021); batch 128 to 256 (Thakur)"),
    ),
}
