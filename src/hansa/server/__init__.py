"""Server transforms: from an aggregate to the step that the server adds to the model."""

from hansa.server.adaptive import adagrad, adam, ams, amsgrad, momentum, yogi
from hansa.server.base import (
    BaseServerTransform,
    ServerTransform,
    chain,
    delay_adaptive,
    derived_control,
    dyn,
    participation_scale,
    scale,
    sgd,
)

__all__ = [
    "BaseServerTransform", "ServerTransform", "adagrad", "adam", "ams", "amsgrad", "chain", "delay_adaptive",
    "derived_control", "dyn", "momentum", "participation_scale", "scale", "sgd", "yogi",
]  # fmt: skip
