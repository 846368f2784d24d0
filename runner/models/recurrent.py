"""Recurrent language models: Elman's, LSTM, weight-dropped LSTM.

Sources: T. Mikolov et al., Recurrent neural network based language model, 2010 (an Elman network;
the gradient through T steps is a product of T Jacobians, which may grow exponentially: clipping
was made for this); W. Zaremba et al., Recurrent Neural Network Regularization, 2014, 1409.2329
(LSTM layers, and dropout on everything but the recurrence); O. Press and L. Wolf, Using the Output
Embedding to Improve Language Models, 2017, 1608.05859 (tying); S. Merity, N. Keskar and R. Socher,
Regularizing and Optimizing LSTM Language Models, 2018, 1708.02182: DropConnect on the recurrent
weights (section 2), variational dropout (4.2), embedding dropout (4.3), tied weights with an
embedding narrower than the layers (4.4, 4.5). Its activation regularisation (4.6) is a term of the
loss and is not implemented.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    batch, _, width = hidden.shape
    return hidden * F.dropout(hidden.new_ones(batch, 1, width), chance, training)


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
        options: dict[str, Any] = {"dropout": 0.0, "train": self.training, "bidirectional": False}
        options |= {"has_biases": True, "num_layers": 1, "batch_first": True}
        output: Tensor = torch.lstm(sequence, (state, state), weights, **options)[0]
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
        kept = self.embed.weight.new_ones(self.embed.num_embeddings, 1)
        kept = F.dropout(kept, self.dropout_embedding, self.training)
        return F.embedding(tokens, self.embed.weight * kept)
