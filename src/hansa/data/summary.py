"""Statistics of a partition."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hansa.core.errors import HansaError
from hansa.data.split import Split


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes of the clients, and for labelled data the distribution of labels.

    Args:
        clients: Number of clients.
        samples: Number of samples of all clients.
        smallest: Samples of the smallest client.
        median: Median number of samples.
        largest: Samples of the largest client.
        label_entropy: Mean over clients of H = -sum p log2 p over the client's labels: 0 for one label each,
            log2(classes) for uniform labels.
        effective_clients: For each label 2^H over the clients that have it: the number of equal clients with the same
            entropy.

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
            f"{self.smallest} / {self.median:g} / {self.largest} per client (min, median, max)"
        ]
        if self.label_entropy is not None and self.effective_clients:
            spread = self.effective_clients
            mean = sum(spread) / len(spread)
            lines.append(
                f"mean label entropy {self.label_entropy:.2f} bits; "
                f"effective clients per label {min(spread):.1f} to {max(spread):.1f}, mean {mean:.1f}"
            )
        return "\n".join(lines)


def label_counts(split: Split, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Count the rows of each label of each client, [clients, classes].

    Args:
        split: The split.
        labels: The class number of every row.
        classes: Number of classes.

    >>> label_counts(Split.of_rows([[0, 1], [2]]), torch.tensor([1, 1, 0]), 2).tolist()
    [[0, 2], [1, 0]]
    """
    if labels.ndim != 1 or labels.is_floating_point():
        raise HansaError(
            f"label_counts: expected one class number per row, found {labels.dtype} {tuple(labels.shape)}."
        )
    cells = split.owners() * classes + labels[split.index]
    return torch.bincount(cells, minlength=split.population * classes).view(split.population, classes)


def summarize_split(split: Split, counts: torch.Tensor | None) -> Summary:
    """Return the summary of a split and its label counts, if there are labels."""
    sizes = split.sizes
    entropy, effective = None, None
    if counts is not None:
        nonempty = counts[counts.sum(1) > 0]
        entropy = float(_entropy_bits(nonempty).mean()) if len(nonempty) else 0.0
        present = counts[:, counts.sum(0) > 0]
        effective = tuple(torch.exp2(_entropy_bits(present.T)).tolist())
    return Summary(
        clients=split.population,
        samples=int(sizes.sum()),
        smallest=int(sizes.min()),
        median=float(sizes.double().quantile(0.5)),
        largest=int(sizes.max()),
        label_entropy=entropy,
        effective_clients=effective,
    )


def _entropy_bits(counts: torch.Tensor) -> torch.Tensor:
    """Return the Shannon entropy of every row of counts, in bits."""
    shares = counts.double() / counts.sum(1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
