"""A simple recurrent language model.

Source: T. Mikolov et al., Recurrent neural network based language model, 2010 (Interspeech), an
Elman network: one hidden layer over the token and its own last state. The gradient through T time
steps is a product of T Jacobians, which may grow exponentially: clipping was made for this.
"""

from torch import Tensor, nn

INIT_STD = 0.1


class RNNLanguageModel(nn.Module):
    """Elman language model that starts each sequence from a zero state."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.rnn = nn.RNN(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)
        for weight in (self.embed.weight, self.head.weight):
            nn.init.normal_(weight, std=INIT_STD)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [B, T], to logits of the next token, [B, T, V]."""
        hidden, _ = self.rnn(self.embed(tokens))
        logits: Tensor = self.head(hidden)
        return logits
