"""A bidirectional encoder for masked language modelling.

Source: J. Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding, 2019, 1810.04805: normalisation after each sublayer, learned positions, GELU, and a
head with one more linear layer before the weight that it shares with the embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02


class MaskedLanguageModel(nn.Module):
    """Transformer encoder that predicts the token at every position from both sides."""

    def __init__(
        self, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}")
        self.vocabulary = vocabulary
        self.context = context
        self.embed = nn.Embedding(vocabulary + 1, width)
        self.positions = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, activation="gelu", batch_first=True
            )
            for _ in range(layers)
        )
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary + 1)
        self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T] from 0 to V (the mask), to logits, [B, T, V]."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.context}")
        places = torch.arange(length, device=tokens.device)
        hidden = self.dropout(self.norm(self.embed(tokens) + self.positions(places)))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.transform_norm(F.gelu(self.transform(hidden))))
        return logits[..., : self.vocabulary]
