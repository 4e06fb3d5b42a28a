"""A trained model together with its preprocessing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hansa.core.errors import HansaError, check_integer, invalid_argument
from hansa.core.keys import Key
from hansa.runs.preprocessing import Preprocessing
from hansa.training.augment import Pipeline, normalize


class Predictions(NamedTuple):
    """Outputs of a model; for classifiers the class of each row; the targets if they are known; the names of classes.

    >>> Predictions(torch.zeros(1, 2), torch.tensor([0]), None).classes.tolist()
    [0]
    """

    outputs: Tensor
    classes: Tensor | None
    targets: Tensor | None
    class_names: tuple[str, ...] = ()


def trained_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of a model's inputs: that of its trained parameters, since frozen ones may be narrower.

    >>> trained_dtype(nn.Sequential(nn.Linear(2, 2).requires_grad_(False).bfloat16(), nn.Linear(2, 1)))
    torch.float32
    """
    dtypes = [each.dtype for each in sorted(module.parameters(), key=lambda each: not each.requires_grad)]
    return dtypes[0] if dtypes else torch.float32


class TrainedModel(nn.Module):
    """A module in evaluation mode that normalises its inputs as the run did.

    Calling it with inputs, as the run's data has them, applies the normalisations of ``data.augment`` and then
    ``module``. `predict` also takes raw inputs: a data frame or CSV file is encoded by the run's schema, and images of
    bytes are scaled as the data set was. Attributes and ``state_dict`` are those of ``module``.

    Args:
        module: The trained module.
        preprocessing: What inputs pass through before it.
        pipeline: The normalisations, if they are not those of ``preprocessing``.

    >>> TrainedModel(nn.Linear(2, 1)).predict(torch.zeros(3, 2)).outputs.shape
    torch.Size([3, 1])
    """

    def __init__(
        self, module: nn.Module, preprocessing: Preprocessing | None = None, pipeline: Pipeline | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.preprocessing = Preprocessing() if preprocessing is None else preprocessing
        self.pipeline = self.preprocessing.pipeline() if pipeline is None else pipeline
        known = [part for part in self.pipeline.parts if isinstance(part, normalize)]
        self._known = len(known) == len(self.pipeline.parts)
        for place, part in enumerate(known):
            for name, values in (("mean", part.mean), ("std", part.std)):
                column = torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)
                self.register_buffer(f"_{name}_{place}", column, persistent=False)
        self.train(module.training)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.pipeline and len(inputs) == 1:
            return self.module(self.normalized(inputs[0]), **named)
        return self.module(*inputs, **named)

    def normalized(self, inputs: Any) -> Any:
        """Return inputs after the normalisations of the run."""
        if not self._known:
            return self.pipeline(inputs, Key(0), torch.Generator())
        for place in range(len(self.pipeline.parts)):  # as `normalize`, in operations that ONNX has
            mean, std = (getattr(self, f"_{name}_{place}").to(inputs.dtype) for name in ("mean", "std"))
            inputs = (inputs - mean) / std
        return inputs

    def predict(self, frame: Any, *, client: str | None = None, batch_size: int = 500) -> Predictions:
        """Return predictions for raw inputs.

        Args:
            frame: For tables a data frame, a dict of columns, a list of dicts or the path of a CSV file; otherwise an
                array or tensor of inputs.
            client: For columns scaled by site, the client whose statistics are used.
            batch_size: How many rows to evaluate at a time.
        """
        encoding, targets = self.preprocessing.encoding, None
        if encoding is not None and not isinstance(frame, (Tensor, np.ndarray)):
            rows, targets = encoding.inputs(frame, client), encoding.targets(frame)
        elif isinstance(frame, (Tensor, np.ndarray)):
            rows = torch.as_tensor(frame)
            rows = rows if self.preprocessing.shape is None else self.preprocessing.read_tensor(rows)
        else:
            raise HansaError(
                f"predict: {type(frame).__name__}: expected a tensor: the model was not trained on tables."
            )
        dtype = trained_dtype(self.module)
        outputs = predict(self, rows.to(dtype) if rows.is_floating_point() else rows, batch_size)
        return Predictions(outputs, self.classes_of(outputs), targets, self.class_names)

    def classes_of(self, outputs: Tensor) -> Tensor | None:
        """Return the class of each row of outputs; None if they are not one score per class."""
        count = self.preprocessing.classes
        labelled = count is not None and outputs.ndim == 2 and outputs.shape[1] == count
        return outputs.argmax(1) if labelled else None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, for tables."""
        encoding = self.preprocessing.encoding
        target = None if encoding is None else encoding.schema.target
        return () if target is None or target.categories is None else target.categories

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def predict(model: nn.Module, inputs: Tensor, batch_size: int = 500) -> Tensor:
    """Return the outputs of a model, one row per input.

    Args:
        model: A module; it is evaluated without gradients. One of `load_model` normalises inputs as its run did.
        inputs: The inputs, one per row.
        batch_size: How many rows to evaluate at a time.

    >>> import torch
    >>> predict(torch.nn.Linear(2, 1), torch.zeros(3, 2)).shape
    torch.Size([3, 1])
    """
    check_integer("predict", "batch_size", batch_size)
    if len(inputs) == 0:
        raise invalid_argument("predict", "inputs", tuple(inputs.shape), "at least one row")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([model(inputs[start : start + batch_size]) for start in range(0, len(inputs), batch_size)])
    finally:
        model.train(was_training)


def is_table(path: Path | str) -> bool:
    """Return whether a file of inputs is a table with a header."""
    return Path(path).suffix.lower() == ".csv"
