"""Measures of a round. Diversity, chi^2 and norms are always recorded; the others are requested with
``hansa.run(..., measures=[hansa.measures.compression])`` or as a callback."""

from hansa.aggregate.aware import chi_square, diversity, surrogate_diversity
from hansa.rounds.measures.base import Measure, Probe, compression, gamma, local_mean_loss, q, take_measures, wants_mean
from hansa.rounds.measures.gradients import Heterogeneity, Smoothness, heterogeneity, smoothness, track_heterogeneity

__all__ = [
    "Heterogeneity",
    "Measure",
    "Probe",
    "Smoothness",
    "chi_square",
    "compression",
    "diversity",
    "gamma",
    "heterogeneity",
    "local_mean_loss",
    "q",
    "smoothness",
    "surrogate_diversity",
    "take_measures",
    "track_heterogeneity",
    "wants_mean",
]
