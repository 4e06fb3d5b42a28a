"""Aggregators: how the server combines the updates of a round."""

from hansa.aggregate.aware import aware
from hansa.aggregate.base import Aggregator, BaseAggregator, Combined, client_weights, normalize_weights
from hansa.aggregate.diversity import chi_square, diversity, surrogate_diversity
from hansa.aggregate.mean import mean, nova
from hansa.aggregate.mgda import mgda
from hansa.aggregate.min_norm import Certificate, MinNorm, min_norm
from hansa.aggregate.robust import clipped, krum, median, trimmed_mean

__all__ = [
    "Aggregator",
    "BaseAggregator",
    "Certificate",
    "Combined",
    "MinNorm",
    "aware",
    "chi_square",
    "client_weights",
    "clipped",
    "diversity",
    "krum",
    "mean",
    "median",
    "mgda",
    "min_norm",
    "normalize_weights",
    "nova",
    "surrogate_diversity",
    "trimmed_mean",
]
