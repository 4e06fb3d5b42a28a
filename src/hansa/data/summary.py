"""Numbers that say how uneven a partition is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hansa.core.errors import HansaError
from hansa.data.split import Split


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes, and for labelled data how labels and clients mix.

    ``label_entropy`` is the mean over clients of H = -sum p log2 p over the labels a client holds: 0 is one label each,
    log2(classes) is even. ``effective_clients[c]`` is 2^H over the clients that hold label c: the number of equal
    holders that would be as spread.

    >>> from hansa.data import federate
    >>> federate("synthetic", clients=4).summary().clients
    4
    """

    clients: int
    samples: int
    smallest: int
    median: float
    largest: int
    label_entropy: float | None
    effective_clients: tuple[float, ...] | None

    def __str__(self) -> str:
        lines = [
            f"{self.clients} clients, {self.samples} samples: "
            f"{self.smallest} / {self.median:g} / {self.largest} a client (least, median, most)"
        ]
        if self.label_entropy is not None and self.effective_clients:
            spread = self.effective_clients
            mean = sum(spread) / len(spread)
            lines.append(
                f"mean label entropy {self.label_entropy:.2f} bits; "
                f"effective clients a label {min(spread):.1f} to {max(spread):.1f}, mean {mean:.1f}"
            )
        return "\n".join(lines)


def label_counts(split: Split, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """How many rows of each label each client holds, [clients, classes]: the heat map of a partition.

    >>> label_counts(Split.of_rows([[0, 1], [2]]), torch.tensor([1, 1, 0]), 2).tolist()
    [[0, 2], [1, 0]]
    """
    if labels.ndim != 1 or labels.is_floating_point():
        raise HansaError(f"label_counts: expected one class number a row, found {labels.dtype} {tuple(labels.shape)}.")
    cells = split.owners() * classes + labels[split.index]
    return torch.bincount(cells, minlength=split.population * classes).view(split.population, classes)


def summarize(split: Split, counts: torch.Tensor | None) -> Summary:
    """The summary of a split, given its label counts where there are labels."""
    sizes = split.sizes
    entropy, effective = None, None
    if counts is not None:
        held = counts[counts.sum(1) > 0]
        entropy = float(_bits(held).mean()) if len(held) else 0.0
        present = counts[:, counts.sum(0) > 0]
        effective = tuple(torch.exp2(_bits(present.T)).tolist())
    return Summary(
        clients=split.population,
        samples=int(sizes.sum()),
        smallest=int(sizes.min()),
        median=float(sizes.double().quantile(0.5)),
        largest=int(sizes.max()),
        label_entropy=entropy,
        effective_clients=effective,
    )


def _bits(counts: torch.Tensor) -> torch.Tensor:
    """Shannon entropy of every row of counts, in bits."""
    shares = counts.double() / counts.sum(1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
