"""An LSTM language model.

Sources: W. Zaremba et al., Recurrent Neural Network Regularization, 2014, 1409.2329 (layers, and
dropout on everything but the recurrence); O. Press and L. Wolf, Using the Output Embedding to
Improve Language Models, 2017, 1608.05859 (tying).
"""

from torch import Tensor, nn

INIT_RANGE = 0.1


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
