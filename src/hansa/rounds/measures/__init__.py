"""Measures of a round. Diversity, chi^2 and norms are always recorded; the others are requested with
``hansa.run(..., measures=[hansa.measures.compression])`` or as a callback."""

from hansa.aggregate.aware import chi_square, diversity, surrogate_diversity
from hansa.rounds.measures.base import Measure, Probe, take_measures, wants_mean
from hansa.rounds.measures.compression import compression, gamma, q
from hansa.rounds.measures.heterogeneity import Heterogeneity, heterogeneity, track_heterogeneity
from hansa.rounds.measures.local_mean import local_mean_loss
from hansa.rounds.measures.smoothness import Smoothness, smoothness

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
