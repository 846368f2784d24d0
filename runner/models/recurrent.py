"""Language models with a memory: Elman's, LSTM, weight-dropped LSTM, compressive transformer.

Sources: T. Mikolov et al., Recurrent neural network based language model, 2010 (an Elman network;
the gradient through T steps is a product of T Jacobians, which may grow exponentially: clipping
was made for this); W. Zaremba et al., Recurrent Neural Network Regularization, 2014, 1409.2329
(LSTM layers, and dropout on everything but the recurrence); O. Press and L. Wolf, Using the Output
Embedding to Improve Language Models, 2017, 1608.05859 (tying); S. Merity, N. Keskar and R. Socher,
Regularizing and Optimizing LSTM Language Models, 2018, 1708.02182: DropConnect on the recurrent
weights (section 2), variational dropout (4.2), embedding dropout (4.3), tied weights with an
embedding narrower than the layers (4.4, 4.5). Its activation regularisation (4.6) is a term of the
loss and is not implemented.

J. Rae et al., Compressive Transformers for Long-Range Sequence Modelling, 2019, 1911.05507: two
memories in each layer (section 3.1), compression by a strided convolution (3.2), no gradient into
the memories. Here they are empty at the start of each sequence, so that samples are independent.
The graph holds whole sequences, so the convolution learns from the loss of later segments, an
alternative of the paper to attention reconstruction (3.3). Positions are a learned bias for each
head and distance.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.models.gpt import INIT_STD, MLP

INIT_RANGE = 0.1


class RNNLanguageModel(nn.Module):
    """Elman language model that starts each sequence from a zero state."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.rnn = nn.RNN(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)
        for weight in (self.embed.weight, self.head.weight):
            nn.init.normal_(weight, std=INIT_RANGE)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to logits of the next token, [B, T, V]."""
        hidden, _ = self.rnn(self.embed(tokens))
        logits: Tensor = self.head(hidden)
        return logits


class LSTMLanguageModel(nn.Module):
    """LSTM language model that starts each sequence from a zero state."""

    def __init__(
        self,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        if tied and embedding != hidden:
            raise ValueError(
                f"a tied head needs embedding {embedding} and hidden {hidden} to be equal"
            )
        self.embed = nn.Embedding(vocabulary, embedding)
        self.dropout = nn.Dropout(dropout)
        # PyTorch warns if a single layer gets a dropout between layers.
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True, dropout=between)
        self.head = nn.Linear(hidden, vocabulary)
        if tied:
            self.head.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -INIT_RANGE, INIT_RANGE)
        nn.init.uniform_(self.head.weight, -INIT_RANGE, INIT_RANGE)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to logits of the next token, [B, T, V]."""
        hidden, _ = self.lstm(self.dropout(self.embed(tokens)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


def locked_dropout(hidden: Tensor, chance: float, training: bool) -> Tensor:
    """Drop the same elements of [B, T, width] at every time step (variational dropout)."""
    if not training or chance == 0:
        return hidden
    batch, _, width = hidden.shape
    return hidden * F.dropout(hidden.new_ones(batch, 1, width), chance)


class WeightDroppedLSTM(nn.Module):
    """One LSTM layer with dropout on its recurrent weights, drawn once per sequence."""

    def __init__(self, inputs: int, hidden: int, weight_dropout: float) -> None:
        super().__init__()
        self.weight_dropout = weight_dropout
        self.input_weight = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.recurrent_weight = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    def forward(self, sequence: Tensor) -> Tensor:
        """Map [B, T, inputs] to [B, T, hidden], starting from a zero state."""
        recurrent = F.dropout(self.recurrent_weight, self.weight_dropout, self.training)
        state = sequence.new_zeros(1, len(sequence), recurrent.shape[1])
        # torch.lstm takes the weights as arguments, so the dropped ones need not be parameters.
        # It adds two biases to the gates; one is enough.
        weights = [self.input_weight, recurrent, self.bias, torch.zeros_like(self.bias)]
        output: Tensor = torch.lstm(
            sequence,
            (state, state),
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=self.training,
            bidirectional=False,
            batch_first=True,
        )[0]
        return output


class AWDLSTM(nn.Module):
    """LSTM language model that starts each sequence from a zero state."""

    def __init__(
        self,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float,
        dropout_hidden: float,
        dropout_input: float,
        dropout_embedding: float,
        weight_dropout: float,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.dropout_hidden = dropout_hidden
        self.dropout_input = dropout_input
        self.dropout_embedding = dropout_embedding
        self.embed = nn.Embedding(vocabulary, embedding)
        widths = [embedding, *[hidden] * (layers - 1), embedding]
        self.layers = nn.ModuleList(
            WeightDroppedLSTM(before, after, weight_dropout) for before, after in pairwise(widths)
        )
        self.head = nn.Linear(embedding, vocabulary)
        self.head.weight = self.embed.weight
        nn.init.uniform_(self.embed.weight, -INIT_RANGE, INIT_RANGE)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to logits of the next token, [B, T, V]."""
        hidden = locked_dropout(self._embedded(tokens), self.dropout_input, self.training)
        for number, layer in enumerate(self.layers, 1):
            last = number == len(self.layers)
            chance = self.dropout if last else self.dropout_hidden
            hidden = locked_dropout(layer(hidden), chance, self.training)
        logits: Tensor = self.head(hidden)
        return logits

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Embed tokens, int64 [B, T], with dropout of whole tokens in training mode."""
        weight = self.embed.weight
        if self.training and self.dropout_embedding:
            weight = weight * F.dropout(weight.new_ones(len(weight), 1), self.dropout_embedding)
        return F.embedding(tokens, weight)


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
