"""From a model's name to the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hansa.core.errors import HansaError, suggestion
from hansa.training.models.plain import cifar_cnn, cnn_29k, logistic, mlp
from hansa.training.models.recurrent import lstm
from hansa.training.models.residual import convmixer, resnet18

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cifar_cnn": cifar_cnn,
    "cnn_29k": cnn_29k,
    "convmixer": convmixer,
    "logistic": logistic,
    "lstm": lstm,
    "mlp": mlp,
    "resnet18": resnet18,
}


def build(name: str, *, classes: int, shape: Sequence[int], **options: Any) -> nn.Module:
    """A new model; ``functools.partial(build, name, ...)`` is the factory that a task wants.

    >>> parameter_count(build("cnn_29k", classes=10, shape=(1, 28, 28)))
    28938
    >>> build("cnn29k", classes=10, shape=(1, 28, 28))
    Traceback (most recent call last):
    hansa.core.errors.HansaError: no model 'cnn29k'. Did you mean cnn_29k?
    """
    make = MODELS.get(name.replace("-", "_"))
    if make is None:
        raise HansaError(f"no model {name!r}. {suggestion(name, MODELS)}")
    known = [word for word in inspect.signature(make).parameters if word not in ("classes", "shape")]
    for option in options:
        if option not in known:
            hint = suggestion(option, known) if known else "It takes none."
            raise HansaError(f"{name}: no option {option!r}. {hint}")
    return make(classes=classes, shape=tuple(shape), **options)


def parameter_count(model: nn.Module) -> int:
    """How many trainable numbers a model has.

    >>> parameter_count(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
