"""Measures of a round that are made on request: ``hansa.run(..., measures=[hansa.measures.compression])``."""

from hansa.measures.base import Measure, Probe, measured
from hansa.measures.compression import compression, gamma, q

__all__ = ["Measure", "Probe", "compression", "gamma", "measured", "q"]
