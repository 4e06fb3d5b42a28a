"""Models by name. Each is a plain module whose first weights are a function of torch's generator at construction."""

from hansa.training.models.catalogue import MODELS, build, parameter_count
from hansa.training.models.plain import cifar_cnn, cnn_29k, logistic, mlp
from hansa.training.models.recurrent import lstm
from hansa.training.models.residual import convmixer, resnet18

__all__ = [
    "MODELS",
    "build",
    "cifar_cnn",
    "cnn_29k",
    "convmixer",
    "logistic",
    "lstm",
    "mlp",
    "parameter_count",
    "resnet18",
]
