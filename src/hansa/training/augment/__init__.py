"""Augmentation: what happens to a batch of inputs on its way to the model, drawn from the run's keys."""

from hansa.training.augment.base import Augmentation, Pipeline, pipeline
from hansa.training.augment.images import crop, flip, normalize

__all__ = ["Augmentation", "Pipeline", "crop", "flip", "normalize", "pipeline"]
