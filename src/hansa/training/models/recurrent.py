"""The LSTM for next-character prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hansa.core.errors import HansaError, check_decay, check_integer


class NextCharacter(nn.Module):
    """Embedding, LSTM, dropout, linear: the logits of the character that follows the window."""

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(x.long()))
        logits: torch.Tensor = self.head(self.dropout(states[:, -1]))
        return logits


def lstm(
    *,
    classes: int = 80,
    shape: Sequence[int] = (80,),
    embedding: int = 80,
    hidden: int = 256,
    layers: int = 2,
    dropout: float = 0.05,
) -> NextCharacter:
    """The LSTM of [AFGA]: an embedding of 80, 2 layers of 256, dropout 0.05; 899,408 parameters at 80 characters.

    >>> sum(p.numel() for p in lstm().parameters())
    899408
    """
    for argument, value in (("classes", classes), ("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        check_integer("lstm", argument, value)
    check_decay("lstm", "dropout", dropout)
    if len(shape) != 1:
        raise HansaError(f"lstm(shape={tuple(shape)!r}): expected windows of characters, (length,).")
    return NextCharacter(classes, embedding, hidden, layers, dropout)
