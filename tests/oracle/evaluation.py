"""Losses, accuracies and metrics of test rows, one row after the other, in float64 and without torch.

A loss of rows gives entries (l, w) for each row: the loss of all rows is sum_i r_i l_i / sum_i r_i w_i with row weights
r, over all entries. A loss that sums is sum_i r_i l_i / sum_i r_i with one weight a row. A loss that couples rows is a
function of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Entries = list[tuple[float, float]]


def log_softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    total = top + math.log(math.fsum(math.exp(score - top) for score in scores))
    return [score - total for score in scores]


def cross_entropy(
    scores: Array, label: int, weight: Sequence[float] | None, ignored: int, smoothing: float, log: bool = True
) -> Entries:
    """-log p_y, or with smoothing e: (1 - e) w_y l_y + e / C sum_c w_c l_c, of weight w_y; nothing if ignored."""
    if label == ignored:
        return []
    losses = [-each for each in (log_softmax(list(scores)) if log else list(scores))]
    weights = [1.0] * len(losses) if weight is None else [float(np.float32(each)) for each in weight]
    smooth = math.fsum(w * loss for w, loss in zip(weights, losses, strict=True)) / len(losses)
    return [((1 - smoothing) * weights[label] * losses[label] + smoothing * smooth, weights[label])]


def focal(scores: Array, label: int, gamma: float) -> Entries:
    """(1 - p_y)^gamma (-log p_y)."""
    value = -log_softmax(list(scores))[label]
    return [((1 - math.exp(-value)) ** gamma * value, 1.0)]


def multi_margin(scores: Array, label: int) -> Entries:
    """sum_{c != y} max(0, 1 - s_y + s_c) / C."""
    return [(sum(max(0.0, 1 - scores[label] + s) for c, s in enumerate(scores) if c != label) / len(scores), 1.0)]


def bce(logit: float, label: float, pos_weight: float = 1.0, weight: float = 1.0) -> tuple[float, float]:
    """-w (pos_weight y log s(z) + (1 - y) log (1 - s(z)))."""
    positive, negative = (math.log1p(math.exp(-abs(logit))) + max(sign * logit, 0.0) for sign in (-1.0, 1.0))
    return weight * (pos_weight * label * positive + (1 - label) * negative), 1.0


def squared(output: float, target: float) -> tuple[float, float]:
    return (output - target) ** 2, 1.0


def absolute(output: float, target: float) -> tuple[float, float]:
    return abs(output - target), 1.0


def huber(output: float, target: float, delta: float) -> tuple[float, float]:
    d = abs(output - target)
    return (d * d / 2 if d <= delta else delta * (d - delta / 2)), 1.0


def cox(risk: Sequence[float], time: Sequence[float], event: Sequence[float]) -> float:
    """The mean over events of -(r_i - log sum_{t_j >= t_i} exp r_j); 0 without events. Times are distinct."""
    terms = [
        math.log(math.fsum(math.exp(risk[j]) for j in range(len(risk)) if time[j] >= time[i])) - risk[i]
        for i in range(len(risk))
        if event[i]
    ]
    return math.fsum(terms) / len(terms) if terms else 0.0


def ranking(score: Sequence[float], target: Sequence[float]) -> float:
    """The mean over pairs with y_i > y_j of max(0, 1 - s_i + s_j); 0 without pairs."""
    terms = [
        max(0.0, 1 - score[i] + score[j]) for i in range(len(score)) for j in range(len(score)) if target[i] > target[j]
    ]
    return math.fsum(terms) / len(terms) if terms else 0.0


def contrastive(outputs: Array, labels: Sequence[int]) -> float:
    """The mean over rows of -log (sum_{y_j = y_i} exp -|o_i - o_j|^2 / sum_j exp -|o_i - o_j|^2)."""
    values = []
    for i in range(len(outputs)):
        near = [math.exp(-float(((outputs[i] - other) ** 2).sum())) for other in outputs]
        same = math.fsum(each for each, label in zip(near, labels, strict=True) if label == labels[i])
        values.append(math.log(math.fsum(near)) - math.log(same))
    return math.fsum(values) / len(values)


def mean_of_entries(entries: Sequence[Entries], weights: Sequence[float]) -> float:
    above = math.fsum(r * loss for r, row in zip(weights, entries, strict=True) for loss, _ in row)
    below = math.fsum(r * weight for r, row in zip(weights, entries, strict=True) for _, weight in row)
    return above / below if below else math.nan


def sum_of_entries(entries: Sequence[Entries], weights: Sequence[float]) -> float:
    above = math.fsum(r * loss for r, row in zip(weights, entries, strict=True) for loss, _ in row)
    return above / math.fsum(weights) if math.fsum(weights) else math.nan


def accuracy(
    scores: Sequence[Sequence[Array]], labels: Sequence[Sequence[int]], ignored: int | None
) -> tuple[float, float]:
    """The share of positions whose label has the largest score, and the share of those that are nearly tied.

    Negative labels and the ignored one do not count.
    """
    correct = counted = tied = 0
    for row, own in zip(scores, labels, strict=True):
        for position, label in zip(row, own, strict=True):
            if label < 0 or label == ignored:
                continue
            order = sorted(position, reverse=True)
            counted += 1
            tied += order[0] - order[1] < 1e-4
            correct += label == max(range(len(position)), key=lambda c, position=position: position[c])
    return correct / max(1, counted), tied / max(1, counted)


def accuracy_above(outputs: Sequence[float], labels: Sequence[int], threshold: float) -> tuple[float, float]:
    hits = sum((output > threshold) == (label == 1) for output, label in zip(outputs, labels, strict=True))
    tied = sum(abs(output - threshold) < 1e-4 for output in outputs)
    return hits / len(labels), tied / len(labels)


def each_row(function: Callable[..., Entries], outputs: Any, targets: Any) -> list[Entries]:
    return [function(output, target) for output, target in zip(outputs, targets, strict=True)]
