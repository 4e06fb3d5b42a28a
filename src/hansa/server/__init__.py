"""Server transforms: what the server does with an aggregate before adding it."""

from hansa.server.adaptive import adagrad, adam, ams, amsgrad, momentum, yogi
from hansa.server.base import BaseServerTransform, ServerTransform, chain, dyn, participation_scale, scale, sgd

__all__ = [
    "BaseServerTransform",
    "ServerTransform",
    "adagrad",
    "adam",
    "ams",
    "amsgrad",
    "chain",
    "dyn",
    "momentum",
    "participation_scale",
    "scale",
    "sgd",
    "yogi",
]
