"""Server transforms: from an aggregate to the step that the server adds to the model."""

from hansa.server.adaptive import adagrad, adam, ams, amsgrad, momentum, yogi
from hansa.server.base import (
    BaseServerTransform,
    ServerTransform,
    chain,
    derived_control,
    dyn,
    participation_scale,
    scale,
    sgd,
)
from hansa.server.delay import delay_adaptive

__all__ = [
    "BaseServerTransform",
    "ServerTransform",
    "adagrad",
    "adam",
    "ams",
    "amsgrad",
    "chain",
    "delay_adaptive",
    "derived_control",
    "dyn",
    "momentum",
    "participation_scale",
    "scale",
    "sgd",
    "yogi",
]
