"""The preprocessing of a trained model's inputs, stored with the model so that predictions repeat it exactly.

A run folder has ``preprocessing.json``; an exported model has a file beside it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hansa import data
from hansa.config import Config
from hansa.core.errors import HansaError
from hansa.data.csv_folder import zero_row
from hansa.data.schema import canonical_json
from hansa.runs.store import DamagedFileError, io
from hansa.training.augment import Pipeline, normalize

PREPROCESSING = "preprocessing.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """The preprocessing of a run.

    Args:
        shape: Shape of one input; None if inputs are several tensors.
        dtype: Name of the inputs' dtype in torch.
        classes: Number of classes, if any.
        encoding: For tables, the schema.
        pixels: For images of bytes, the scaling of the data set.
        normalize: Normalisations of test rows in ``data.augment``, in order. The model applies them itself.
        own: Names of your functions that transform test rows, whose code is not stored.
    """

    shape: tuple[int, ...] | None = None
    dtype: str = "float32"
    classes: int | None = None
    encoding: data.TableEncoding | None = None
    pixels: data.loading.ImageScaling | None = None
    normalize: tuple[normalize, ...] = ()
    own: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON form."""
        return hashlib.sha256(canonical_json(self.to_dict()).encode()).hexdigest()

    def describe(self) -> str:
        """Return one line for a message, "" without preprocessing."""
        parts = [f"your own {name}" for name in self.own] + ["normalisation"] * bool(self.normalize)
        if self.encoding is not None:
            parts.append(f"schema {self.encoding.schema.sha256[:12]} of {len(self.encoding.schema.columns)} columns")
        if self.pixels is not None:
            side = self.pixels.downsample
            parts.append(f"pixels in blocks of {side} x {side} averaged, and scaled by mean and deviation")
        return ", ".join(parts)

    def template(self) -> data.FederatedData | None:
        """Return data with one row of zeros, from which the model can be built without the training data."""
        if self.shape is None:
            return None
        return zero_row(self.shape, self.classes, self.dtype, encoding=self.encoding)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        content: dict[str, Any] = {
            "hansa_preprocessing": FORMAT, "shape": self.shape and list(self.shape), "dtype": self.dtype,
            "classes": self.classes, "pixels": self.pixels and self.pixels._asdict(),
            "normalize": [[list(item.mean), list(item.std)] for item in self.normalize], "own": list(self.own),
        }  # fmt: skip
        if self.encoding is not None:
            schema, statistics = self.encoding.schema, self.encoding.statistics
            content |= {"schema": schema.to_dict(), "schema_sha256": schema.sha256, "site_statistics": statistics}
        return content

    @classmethod
    def from_dict(cls, content: Any, source: str = PREPROCESSING) -> Preprocessing:
        """Return the preprocessing of plain data."""
        if not isinstance(content, Mapping) or content.get("hansa_preprocessing") != FORMAT:
            raise HansaError(f"{source}: expected hansa_preprocessing: {FORMAT}. Export the model again.")
        encoding, pixels = None, content.get("pixels")
        try:
            shape, classes, parts = content["shape"], content["classes"], content["normalize"]
            if "schema" in content:
                statistics = {
                    str(client): {str(column): (float(mean), float(std)) for column, (mean, std) in columns.items()}
                    for client, columns in content["site_statistics"].items()
                }
                encoding = data.TableEncoding(data.Schema.from_dict(content["schema"], source), statistics)
            if pixels is not None:
                mean, std = (tuple(map(float, pixels[name])) for name in ("mean", "std"))
                pixels = data.loading.ImageScaling(mean, std, int(pixels["downsample"]))
            return cls(
                shape=None if shape is None else tuple(map(int, shape)),
                dtype=str(content["dtype"]),
                classes=None if classes is None else int(classes),
                encoding=encoding,
                pixels=pixels,
                normalize=tuple(normalize(mean, std) for mean, std in parts),
                own=tuple(map(str, content["own"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HansaError(f"{source}: damaged: {type(error).__name__}: {str(error)[:200]}. Restore it.") from error

    @classmethod
    def of_task(cls, task: Any, config: Config) -> Preprocessing | None:
        """Return the preprocessing of a task's inputs; None for a task without data."""
        federated = getattr(task, "data", None)
        if federated is None:
            return None
        inputs: Any = getattr(federated, "inputs", None)
        is_tensor = hasattr(inputs, "shape") and hasattr(inputs, "dtype")
        transforms = getattr(task, "augment", Pipeline()).test_pipeline().parts
        functions = [transform for transform in transforms if not isinstance(transform, normalize)]
        dataset = data.DATASETS.get(config.data.name) if config.python is None and config.data.factory is None else None
        return cls(
            shape=tuple(inputs.shape[1:]) if is_tensor else None,
            dtype=str(inputs.dtype).removeprefix("torch.") if is_tensor else "float32",
            classes=getattr(federated, "classes", None),
            encoding=getattr(federated, "encoding", None),
            pixels=data.loading.image_scaling(dataset, **config.data.options) if dataset and dataset.mean else None,
            normalize=tuple(transform for transform in transforms if isinstance(transform, normalize)),
            own=tuple(str(getattr(transform, "__qualname__", type(transform).__qualname__)) for transform in functions),
        )

    def read_tensor(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of a file in the form of the data set: images of bytes scaled, shapes and dtypes adapted."""
        if self.shape is None:
            raise HansaError("the model takes several tensors: pass them to hansa.predict in Python.")
        scaling = self.pixels if rows.dtype == torch.uint8 else None
        shape = self.shape
        if scaling is not None:
            shape = (shape[0], *(side * scaling.downsample for side in shape[1:]))
        if len(rows) == 0 or rows[0].numel() != math.prod(shape):
            raise HansaError(f"inputs of shape {tuple(rows.shape[1:])}: the model takes {shape}.")
        rows = rows.reshape(len(rows), *shape)
        return rows.to(getattr(torch, self.dtype)) if scaling is None else scaling.apply(rows.numpy())


def write_preprocessing(path: Path, record: Preprocessing, **metadata: Any) -> None:
    """Write a record as readable JSON with its SHA-256, and further entries."""
    io.write_json(path, {**record.to_dict(), **metadata, "sha256": record.sha256})


def read_preprocessing(path: Path) -> tuple[Preprocessing, dict[str, Any]] | None:
    """Read a record and the further entries of its file; None if there is no such file."""
    if not path.is_file():
        return None
    content = io.read_json(path)
    record = Preprocessing.from_dict(content, str(path))
    if content.get("sha256") != record.sha256:
        raise DamagedFileError(f"{path}: damaged: its SHA-256 is not the recorded one. Restore it.")
    fields = {*record.to_dict(), "sha256"}
    return record, {name: value for name, value in content.items() if name not in fields}
