"""A causal transformer that remembers earlier segments, and older ones in compressed form.

Source: J. Rae et al., Compressive Transformers for Long-Range Sequence Modelling, 2019, 1911.05507:
the two memories of each layer (section 3.1), compression by a strided convolution (3.2), and no
gradient into what is remembered. A sequence is cut into segments here, and memory begins empty with
each sequence, so that samples stay independent of one another. That keeps whole sequences in the
graph, so the convolution learns from the loss of later segments: the paper's other choice beside
the reconstruction of attention (3.3). Positions are a learned bias of each head for each distance.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.models.gpt import MLP

INIT_STD = 0.02


class LayerMemory(nn.Module):
    """What one layer remembers of a sequence: its latest inputs, and older ones compressed.

    Args:
        width: of the inputs.
        memory: inputs kept as they are.
        compressed: compressed inputs kept.
        rate: inputs that become one compressed input.
    """

    def __init__(self, width: int, memory: int, compressed: int, rate: int) -> None:
        super().__init__()
        self.memory = memory
        self.compressed = compressed
        self.compress = nn.Conv1d(width, width, rate, stride=rate)

    def forward(self, past: tuple[Tensor, Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The compressed and the plain memory after one more segment.

        Args:
            past: both memories, [B, up to compressed, width] and [B, up to memory, width].
            inputs: what the layer was given for the segment, [B, T, width]; no gradient reaches it.
        """
        old, recent = past
        recent = torch.cat([recent, inputs.detach()], dim=1)
        leaving = recent[:, : max(0, recent.shape[1] - self.memory)]
        if leaving.shape[1]:
            made = self.compress(leaving.transpose(1, 2)).transpose(1, 2)
            old = torch.cat([old, made], dim=1)[:, -self.compressed :]
        return old, recent[:, -self.memory :]


class MemoryBlock(nn.Module):
    """Attention over memory and segment, then an MLP, each normalised before and added on."""

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
        """A segment [B, T, width] to the same, with what was remembered before it."""
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
        """What distance adds to each score, [1, heads, queries, keys]; -inf for what is to come.

        Distance counts places among the keys: a compressed memory is one place.
        """
        places = torch.arange(keys, device=self.by_distance.device)
        distance = places[keys - queries :, None] - places
        scores = self.by_distance[:, distance.clamp(min=0)]
        return scores.masked_fill(distance < 0, -torch.inf)[None]


class CompressiveTransformer(nn.Module):
    """Tokens to logits of the next token at every position; head and embedding are tied.

    Args:
        vocabulary: number of tokens, V.
        segment: tokens read at a time.
        memory: inputs that each layer keeps as they are; a multiple of `segment`.
        compressed: compressed inputs that each layer keeps.
        rate: inputs that become one compressed input; it divides `segment`.
        layers: transformer blocks.
        heads: of each attention; they divide the width.
        width: of the residual stream.
        dropout: chance to drop an element of the embedding and of a residual branch.

    Raises:
        ValueError: when sizes do not divide as they must.
    """

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
        """Tokens int64 [B, T] to logits [B, T, V]."""
        nothing = self.embed.weight.new_zeros(len(tokens), 0, self.embed.embedding_dim)
        past = [(nothing, nothing) for _ in self.blocks]
        segments = torch.split(tokens, self.segment, dim=1)
        read = []
        for number, segment in enumerate(segments, 1):
            hidden = self.dropout(self.embed(segment))
            for layer, (block, memory) in enumerate(zip(self.blocks, self.memories, strict=True)):
                given, hidden = hidden, block(hidden, past[layer])
                # Nobody reads what the last segment would leave, and it may be a short one.
                if number < len(segments):
                    past[layer] = memory(past[layer], given)
            read.append(self.norm(hidden))
        logits: Tensor = self.head(torch.cat(read, dim=1))
        return logits
