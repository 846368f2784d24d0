"""Convolutional networks: a small one for 8x8 digits, and a language model with gated linear units.

Sources of the latter: Y. Dauphin et al., Language Modeling with Gated Convolutional Networks, 2017,
1612.08083 (architecture, weight normalisation); J. Gehring et al., Convolutional Sequence to
Sequence Learning, 2017, 1705.03122, section 3.5 (initialisation for gated units).
"""

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

PIXEL_MEAN = 0.305
PIXEL_STD = 0.376
"""Mean and standard deviation of all pixels of scikit-learn's digits, scaled to [0, 1]."""


class DigitsCNN(nn.Module):
    """Three 3x3 convolutions with ReLU, 2x2 max pooling after the last two, and a linear head."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width * 2 * 2, num_classes)
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def pipeline(self) -> list[Any]:
        """Return `forward` as a chain of parts: modules, or their names and a function."""
        layers = list(self.features)
        return [(("features.0",), self._enter), *layers[1:], self.head]

    def _enter(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.features[0]((images - PIXEL_MEAN) / PIXEL_STD)
        return hidden

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float [B, 1, 8, 8] in [0, 1], to logits, [B, num_classes]."""
        logits: Tensor = self.head(self.features((images - PIXEL_MEAN) / PIXEL_STD))
        return logits


class GatedConv(nn.Module):
    """A causal convolution with a gated linear unit and a residual connection."""

    def __init__(self, channels: int, kernel: int, dropout: float, weight_norm: bool) -> None:
        super().__init__()
        self.past = kernel - 1
        self.dropout = nn.Dropout(dropout)
        self.conv = nn.Conv1d(channels, 2 * channels, kernel)
        # The gate halves the outputs; four times the variance preserves the variance of the input.
        std = math.sqrt(4 * (1 - dropout) / (kernel * channels))
        nn.init.normal_(self.conv.weight, std=std)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]
        if weight_norm:
            self.conv = parametrizations.weight_norm(self.conv)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, channels, T] to the same shape."""
        # Padding on the left alone: no output depends on later inputs.
        seen = F.pad(self.dropout(hidden), (self.past, 0))
        return hidden + F.glu(self.conv(seen), dim=1)


class GatedConvLanguageModel(nn.Module):
    """Convolutional language model; a prediction depends on `layers * (kernel - 1) + 1` tokens."""

    def __init__(
        self,
        vocabulary: int,
        channels: int,
        layers: int,
        kernel: int,
        dropout: float,
        weight_norm: bool,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, channels)
        self.blocks = nn.ModuleList(
            GatedConv(channels, kernel, dropout, weight_norm) for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, vocabulary)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(channels))
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to logits of the next token, [B, T, V]."""
        hidden = self.embed(tokens).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.dropout(hidden.transpose(1, 2)))
        return logits
