"""A line at the start of FedAvg: whether clients of different sizes count equally."""

from __future__ import annotations

from hansa.aggregate import mean
from hansa.algorithm import Algorithm
from hansa.core.types import MODEL, Population


def unweighted_note(algorithm: Algorithm, population: Population) -> str:
    """Return a sentence if FedAvg counts clients of different sizes equally; otherwise "".

    Args:
        algorithm: The algorithm of a run.
        population: Its clients.

    >>> from hansa import presets
    >>> unweighted_note(presets.fedavg(), Population((10, 40)))
    "fedavg: clients of 10 to 40 rows count equally. weights='samples' (server.weights: samples) weighs them by rows."
    >>> unweighted_note(presets.fedavg(weights="samples"), Population((10, 40)))
    ''
    """
    channel = algorithm.channels.get(MODEL)
    sizes = population.samples
    if algorithm.name != "fedavg" or channel is None or channel.aggregate != mean("uniform") or len(set(sizes)) < 2:
        return ""
    return (
        f"fedavg: clients of {min(sizes)} to {max(sizes)} rows count equally. weights='samples' (server.weights: "
        "samples) weighs them by rows."
    )
