"""Compact transformers: a decoder for the next token, and an encoder for masked ones.

Sources: A. Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2):
normalisation before each sublayer and after the last, learned positions, residual branches scaled
at initialisation by one over the square root of their number (section 2.3). J. Devlin et al., BERT:
Pre-training of Deep Bidirectional Transformers for Language Understanding, 2019, 1810.04805:
normalisation after each sublayer, learned positions, GELU, and a head with one more linear layer
before the weight that it shares with the embedding.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention over [B, T, width] with separate query, key and value projections."""

    def __init__(self, width: int, heads: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.dropout = dropout
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape; position t attends to positions 0 to t."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result


class MLP(nn.Module):
    """Two linear layers with GELU between them and a hidden width of four times ``width``."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape, position by position."""
        result: Tensor = self.down(F.gelu(self.up(hidden), approximate="tanh"))
        return result


class Block(nn.Module):
    """Attention and a feed-forward layer, both with pre-normalisation and residual connection."""

    def __init__(
        self,
        width: int,
        heads: int,
        bias: bool,
        dropout: float,
        feed_forward: Callable[..., nn.Module],
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, bias, dropout)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = feed_forward(width=width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        result: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return result


class GPT(nn.Module):
    """Decoder-only transformer language model."""

    # The tensor-parallel plan: patterns of module names and the style of each.
    tp_plan: ClassVar[dict[str, str]] = {
        "embed": "embedding_rowwise",
        "dropout": "split_sequence",
        "blocks.*.attention_norm": "sequence_parallel",
        "blocks.*.attention.query": "colwise",
        "blocks.*.attention.key": "colwise",
        "blocks.*.attention.value": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp_norm": "sequence_parallel",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "norm": "sequence_parallel",
        "head": "colwise_rep",
    }

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        tied: bool,
        bias: bool,
        dropout: float,
        feed_forward: Callable[..., nn.Module] = MLP,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}")
        self.context = context
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, bias, dropout, feed_forward) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self._initialise(residual_branches=2 * layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to logits of the next token, [B, T, V]."""
        hidden = self._enter(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def pipeline(self) -> list[Any]:
        """Return `forward` as a chain of parts: modules, or their names and a function."""
        first = (("embed", "positions", "dropout"), self._enter)
        return [first, *self.blocks, self.norm, self.head]

    def _enter(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.context}")
        places = torch.arange(length, device=tokens.device)
        hidden: Tensor = self.dropout(self.embed(tokens) + self.positions(places))
        return hidden

    def _initialise(self, residual_branches: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith((".out", ".down"))
                scale = math.sqrt(residual_branches) if ends_branch else 1.0
                nn.init.normal_(module.weight, std=INIT_STD / scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


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
