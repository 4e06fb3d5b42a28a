"""Aggregators: how the server combines the updates of a round."""

from hansa.aggregate.aware import aware, chi_square, diversity, mgda, surrogate_diversity
from hansa.aggregate.base import Aggregator, BaseAggregator, Combined, client_weights, mean, normalize_weights, nova
from hansa.aggregate.min_norm import Certificate, MinNorm, min_norm
from hansa.aggregate.robust import clipped, krum, median, trimmed_mean
from hansa.aggregate.staleness import Discount, calibrated, constant, discounted, hinge, mixed_models, polynomial

__all__ = [
    "Aggregator", "BaseAggregator", "Certificate", "Combined", "Discount", "MinNorm", "aware", "calibrated",
    "chi_square", "client_weights", "clipped", "constant", "discounted", "diversity", "hinge", "krum", "mean",
    "median", "mgda", "min_norm", "mixed_models", "normalize_weights", "nova", "polynomial",
    "surrogate_diversity", "trimmed_mean",
]  # fmt: skip
