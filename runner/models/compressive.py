"""A causal transformer with a memory of earlier segments and a compressed memory of older ones.

Source: J. Rae et al., Compressive Transformers for Long-Range Sequence Modelling, 2019, 1911.05507:
two memories in each layer (section 3.1), compression by a strided convolution (3.2), no gradient
into the memories. Here a sequence is split into segments, and the memories are empty at the start
of each sequence, so that samples are independent. The graph holds whole sequences, so the
convolution learns from the loss of later segments, an alternative of the paper to attention
reconstruction (3.3). Positions are a learned bias for each head and distance.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.models.gpt import MLP

INIT_STD = 0.02


class LayerMemory(nn.Module):
    """The memories of one layer: its latest inputs, and older inputs in compressed form."""

    def __init__(self, width: int, memory: int, compressed: int, rate: int) -> None:
        super().__init__()
        self.memory = memory
        self.compressed = compressed
        self.compress = nn.Conv1d(width, width, rate, stride=rate)

    def forward(self, past: tuple[Tensor, Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the compressed and the plain memory after one more segment."""
        old, recent = past
        recent = torch.cat([recent, inputs.detach()], dim=1)
        leaving = recent[:, : max(0, recent.shape[1] - self.memory)]
        if leaving.shape[1]:
            made = self.compress(leaving.transpose(1, 2)).transpose(1, 2)
            old = torch.cat([old, made], dim=1)[:, -self.compressed :]
        return old, recent[:, -self.memory :]


class MemoryBlock(nn.Module):
    """Attention over memory and segment, then an MLP, both with pre-normalisation and residual."""

    def __init__(self, width: int, heads: int, reach: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.by_distance = nn.Parameter(torch.zeros(heads, reach))
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, bias=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
        """Map a segment, [B, T, width], and the memories to [B, T, width]."""
        seen = self.attention_norm(torch.cat([*past, hidden], dim=1))
        length = hidden.shape[1]
        query = self._heads(self.query(seen[:, -length:]))
        key, value = self._heads(self.key(seen)), self._heads(self.value(seen))
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=self._scores(length, seen.shape[1])
        )
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        result: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return result

    def _heads(self, projected: Tensor) -> Tensor:
        batch, places, _ = projected.shape
        return projected.view(batch, places, self.heads, -1).transpose(1, 2)

    def _scores(self, queries: int, keys: int) -> Tensor:
        """Return the bias of each score, [1, heads, queries, keys], -inf for later positions."""
        places = torch.arange(keys, device=self.by_distance.device)
        distance = places[keys - queries :, None] - places
        scores = self.by_distance[:, distance.clamp(min=0)]
        return scores.masked_fill(distance < 0, -torch.inf)[None]


class CompressiveTransformer(nn.Module):
    """Compressive transformer with tied head and embedding."""

    def __init__(
        self,
        vocabulary: int,
        segment: int,
        memory: int,
        compressed: int,
        rate: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}")
        if min(segment, memory, compressed, rate) < 1 or memory % segment or segment % rate:
            raise ValueError(
                f"memory {memory} must be a multiple of segment {segment}, which rate {rate} must "
                f"divide, and compressed {compressed} at least 1"
            )
        self.segment = segment
        self.embed = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        reach = compressed + memory + segment
        self.blocks = nn.ModuleList(
            MemoryBlock(width, heads, reach, dropout) for _ in range(layers)
        )
        self.memories = nn.ModuleList(
            LayerMemory(width, memory, compressed, rate) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to logits of the next token, [B, T, V]."""
        nothing = self.embed.weight.new_zeros(len(tokens), 0, self.embed.embedding_dim)
        past = [(nothing, nothing) for _ in self.blocks]
        segments = torch.split(tokens, self.segment, dim=1)
        read = []
        for number, segment in enumerate(segments, 1):
            hidden = self.dropout(self.embed(segment))
            for layer, (block, memory) in enumerate(zip(self.blocks, self.memories, strict=True)):
                given, hidden = hidden, block(hidden, past[layer])
                # The memories after the last segment, which may be short, are not used.
                if number < len(segments):
                    past[layer] = memory(past[layer], given)
            read.append(self.norm(hidden))
        logits: Tensor = self.head(torch.cat(read, dim=1))
        return logits
