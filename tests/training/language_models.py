"""A small language model as users write theirs, its tokenized sentences, and functions that make clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from hansa.data import from_arrays, from_function, from_items

VOCABULARY, LENGTH = 11, 6


class Talker(nn.Module):
    """Embeddings tied to the output layer, attention under a mask, dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        seen, _ = self.attend(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)
        return self.head(x + seen)


def sentences(rows=30):
    draw = np.random.default_rng(5)
    ids = draw.integers(1, VOCABULARY, (rows, LENGTH))
    lengths = draw.integers(2, LENGTH + 1, rows)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    labels = np.where(mask == 1, (ids * 2) % VOCABULARY, -100)
    return {"input_ids": ids * mask, "attention_mask": mask}, labels


def tokenized():
    x, y = sentences()
    test = {name: column[:9] for name, column in x.items()}, y[:9]
    return from_arrays(x, y, clients=[0] * 4 + [1] * 11 + [2] * 15, test=test)


def batch_of(items):
    """Pad sequences of any length; labels of what was added are ignored."""
    pad = nn.utils.rnn.pad_sequence
    ids = pad([torch.as_tensor(item) for item in items], batch_first=True)
    mask = pad([torch.ones(len(item), dtype=torch.int64) for item in items], batch_first=True)
    labels = pad([torch.as_tensor(item) * 2 % VOCABULARY for item in items], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": mask}, labels


def ragged():
    draw = np.random.default_rng(6)
    items = [draw.integers(1, VOCABULARY, int(length)).tolist() for length in draw.integers(2, 9, 24)]
    return from_items(items, batch_of, clients=[0] * 5 + [1] * 7 + [2] * 12, test=items[:7])


def rows_of_client(client):
    draw = np.random.default_rng(client)
    x = draw.normal(size=(3 + client % 4, 5)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def crowd(clients=50):
    x, y = (np.concatenate(part) for part in zip(*(rows_of_client(1000 + i) for i in range(8)), strict=True))
    sizes = [3 + client % 4 for client in range(clients)]
    return from_function(rows_of_client, clients=clients, samples=sizes, test=(x, y))
