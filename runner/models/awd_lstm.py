"""A weight-dropped LSTM language model.

Source: S. Merity, N. Keskar and R. Socher, Regularizing and Optimizing LSTM Language Models, 2018,
1708.02182: DropConnect on the recurrent weights (section 2), variational dropout (4.2), embedding
dropout (4.3), tied weights with an embedding narrower than the layers (4.4, 4.5). Its activation
regularisation (4.6) is a term of the loss, not of the network, and is not here.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EMBEDDING_RANGE = 0.1


def locked_dropout(hidden: Tensor, chance: float, training: bool) -> Tensor:
    """Drop the same elements of [B, T, width] at every time step (variational dropout)."""
    if not training or chance == 0:
        return hidden
    batch, _, width = hidden.shape
    return hidden * F.dropout(hidden.new_ones(batch, 1, width), chance)


class WeightDroppedLSTM(nn.Module):
    """One LSTM layer whose recurrent weights are dropped at random, once for a whole sequence.

    The gates stand in torch's order (input, forget, cell, output), a quarter of the rows each.

    Args:
        inputs: width of what it reads.
        hidden: width of its state and of what it returns.
        weight_dropout: chance to drop an element of the recurrent weights.
    """

    def __init__(self, inputs: int, hidden: int, weight_dropout: float) -> None:
        super().__init__()
        self.weight_dropout = weight_dropout
        self.input_weight = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.recurrent_weight = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    def forward(self, sequence: Tensor) -> Tensor:
        """[B, T, inputs] to [B, T, hidden], from a state of zeros."""
        recurrent = F.dropout(self.recurrent_weight, self.weight_dropout, self.training)
        state = sequence.new_zeros(1, len(sequence), recurrent.shape[1])
        # torch.lstm takes the weights as arguments, so the dropped ones need no place in a module;
        # torch adds two biases to the gates, of which one is enough.
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
    """Tokens to logits of the next token; each sequence starts from a state of zeros.

    The last layer is as wide as the embedding, whose weights are those of the head.

    Args:
        vocabulary: number of tokens, V.
        embedding: width of the token embedding and of the last layer.
        hidden: width of the other layers.
        layers: LSTM layers.
        dropout: chance to drop an element of the last layer's output.
        dropout_hidden: the same between layers.
        dropout_input: the same for the embedded tokens.
        dropout_embedding: chance to drop a token of the vocabulary, everywhere in a batch.
        weight_dropout: chance to drop a recurrent weight.

    Raises:
        ValueError: when a size is below one.
    """

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
        if min(vocabulary, embedding, hidden, layers) < 1:
            raise ValueError(
                f"vocabulary {vocabulary}, embedding {embedding}, hidden {hidden} and "
                f"layers {layers} must be at least 1"
            )
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
        nn.init.uniform_(self.embed.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B, T] to logits [B, T, V]."""
        hidden = locked_dropout(self._embedded(tokens), self.dropout_input, self.training)
        for number, layer in enumerate(self.layers, 1):
            last = number == len(self.layers)
            chance = self.dropout if last else self.dropout_hidden
            hidden = locked_dropout(layer(hidden), chance, self.training)
        logits: Tensor = self.head(hidden)
        return logits

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The embedding of tokens int64 [B, T], with whole tokens dropped while training."""
        weight = self.embed.weight
        if self.training and self.dropout_embedding:
            weight = weight * F.dropout(weight.new_ones(len(weight), 1), self.dropout_embedding)
        return F.embedding(tokens, weight)
