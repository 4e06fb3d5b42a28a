"""Clients of unequal sizes, in a class of the user's own."""

from __future__ import annotations

import torch


class Shards:
    """Rows that are divided among clients in their order; the first ten are test rows."""

    def __init__(self, inputs, targets, sizes=(5, 9, 7)):
        self.inputs, self.targets, self.population = inputs, targets, len(sizes)
        self.test_inputs, self.test_targets = inputs[:10], targets[:10]
        self._rows = torch.arange(len(inputs)).split(sizes)

    @classmethod
    def of(cls, shape, classes, sizes=(5, 9, 7), words=0):
        draw, form = torch.Generator().manual_seed(0), (sum(sizes), *shape)
        inputs = torch.randint(0, words, form, generator=draw) if words else torch.randn(form, generator=draw)
        return cls(inputs, torch.randint(0, classes, form[:1], generator=draw), sizes)

    def rows(self, client):
        return self._rows[client]

    def samples(self, client):
        return len(self._rows[client])
