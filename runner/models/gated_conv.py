"""A convolutional language model with gated linear units.

Sources: Y. Dauphin et al., Language Modeling with Gated Convolutional Networks, 2017, 1612.08083
(architecture, weight normalisation); J. Gehring et al., Convolutional Sequence to Sequence
Learning, 2017, 1705.03122, section 3.5 (initialisation for gated units).
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

EMBEDDING_STD = 0.1


class GatedConv(nn.Module):
    """A causal convolution with a gated linear unit and a residual connection."""

    def __init__(self, channels: int, kernel: int, dropout: float, weight_norm: bool) -> None:
        super().__init__()
        self.past = kernel - 1
        self.dropout = nn.Dropout(dropout)
        self.conv = nn.Conv1d(channels, 2 * channels, kernel)
        # The gate halves the outputs; four times the variance preserves that of the input.
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
        if min(vocabulary, channels, layers, kernel) < 1:
            raise ValueError(
                f"vocabulary {vocabulary}, channels {channels}, layers {layers} and "
                f"kernel {kernel} must be at least 1"
            )
        self.embed = nn.Embedding(vocabulary, channels)
        self.blocks = nn.ModuleList(
            GatedConv(channels, kernel, dropout, weight_norm) for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, vocabulary)
        nn.init.normal_(self.embed.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(channels))
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to logits of the next token, [B, T, V]."""
        hidden = self.embed(tokens).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.dropout(hidden.transpose(1, 2)))
        return logits
