"""What inputs pass through before a trained model: written beside the model, so that predictions repeat it exactly.

A run folder has it as ``preprocessing.json``; an exported model has a file beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hansa import data
from hansa.config import Config
from hansa.core.errors import HansaError
from hansa.data.csv_folder import schema_template
from hansa.data.schema import canonical_json
from hansa.runs.folder_lock import PREPROCESSING
from hansa.runs.store import DamagedFileError, io
from hansa.training.augment import Pipeline, normalize

if TYPE_CHECKING:
    from torch import Tensor

    from hansa.data.loading import ImageScaling

FORMAT = 1

Channels: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation of each channel."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """The preprocessing of a run.

    Args:
        shape: Shape of one input; None if inputs are several tensors.
        dtype: dtype of inputs, as torch names it.
        classes: Number of classes, if there are any.
        encoding: For tables, the schema.
        pixels: For images of bytes, the scaling (x / 255 - mean) / std that the data set was loaded with.
        normalize: Normalisations of test rows in ``data.augment``, in order. The model applies them itself.
        own: Your functions that test rows pass through. They are code and cannot be written down.
        downsample: For images of bytes, the side of the blocks of pixels that were averaged at loading.
    """

    shape: tuple[int, ...] | None = None
    dtype: str = "float32"
    classes: int | None = None
    encoding: data.TableEncoding | None = None
    pixels: Channels | None = None
    normalize: tuple[Channels, ...] = ()
    own: tuple[str, ...] = ()
    downsample: int = 1

    @property
    def changes_inputs(self) -> bool:
        """Whether inputs pass through anything."""
        return self.encoding is not None or self.pixels is not None or bool(self.normalize) or bool(self.own)

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON form."""
        return hashlib.sha256(canonical_json(self.to_dict()).encode()).hexdigest()

    def describe(self) -> str:
        """Return one line for a message."""
        parts = []
        if self.encoding is not None:
            parts.append(f"schema {self.encoding.schema.sha256[:12]} of {len(self.encoding.schema.columns)} columns")
        if self.pixels is not None:
            blocks = "" if self.downsample == 1 else f"averaged in blocks of {self.downsample} x {self.downsample} and "
            parts.append(f"pixels {blocks}scaled by mean and deviation")
        if self.normalize:
            parts.append("normalisation")
        if self.own:
            parts.append(f"your own {', '.join(self.own)}")
        return ", ".join(parts) or "none"

    def pipeline(self) -> Pipeline:
        """Return the normalisations of test rows."""
        return Pipeline(tuple(normalize(mean, std) for mean, std in self.normalize))

    def template(self) -> data.FederatedData | None:
        """Return data of one row of zeros from which the model can be built, without the training data."""
        if self.encoding is not None and self.encoding.schema.target is not None:
            return schema_template(self.encoding.schema)
        if self.shape is None:
            return None
        inputs = torch.zeros(1, *self.shape, dtype=getattr(torch, self.dtype))
        targets = torch.zeros(1) if self.classes is None else torch.zeros(1, dtype=torch.int64)
        return data.FederatedData(inputs, targets, torch.tensor([0]), torch.tensor([0, 1]), classes=self.classes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        content: dict[str, Any] = {
            "hansa_preprocessing": FORMAT, "shape": None if self.shape is None else list(self.shape),
            "dtype": self.dtype, "classes": self.classes,
        }  # fmt: skip
        if self.encoding is not None:
            content["schema"] = self.encoding.schema.to_dict()
            content["schema_sha256"] = self.encoding.schema.sha256
            if self.encoding.statistics:
                content["site_statistics"] = {
                    client: {column: list(pair) for column, pair in by_column.items()}
                    for client, by_column in self.encoding.statistics.items()
                }
        if self.pixels is not None:
            content["pixels"] = [list(values) for values in self.pixels]
        if self.normalize:
            content["normalize"] = [[list(values) for values in pair] for pair in self.normalize]
        if self.own:
            content["own"] = list(self.own)
        if self.downsample != 1:
            content["downsample"] = self.downsample
        return content

    @classmethod
    def from_dict(cls, content: Any, source: str = PREPROCESSING) -> Preprocessing:
        """Return the preprocessing of plain data."""
        if not isinstance(content, Mapping) or content.get("hansa_preprocessing") != FORMAT:
            raise HansaError(f"{source}: expected hansa_preprocessing: {FORMAT}. Export the model again.")
        encoding = None
        try:
            if "schema" in content:
                schema = data.Schema.from_dict(content["schema"], source)
                if schema.sha256 != content["schema_sha256"]:
                    raise DamagedFileError(f"{source}: damaged: its schema has another SHA-256. Restore it.")
                statistics = {
                    str(client): {str(column): (float(mean), float(std)) for column, (mean, std) in columns.items()}
                    for client, columns in content.get("site_statistics", {}).items()
                }
                encoding = data.TableEncoding(schema, statistics)
            shape, pixels = content["shape"], content.get("pixels")
            return cls(
                None if shape is None else tuple(int(length) for length in shape),
                str(content["dtype"]),
                None if content["classes"] is None else int(content["classes"]),
                encoding,
                None if pixels is None else _channels(pixels),
                tuple(map(_channels, content.get("normalize", ()))),
                tuple(str(name) for name in content.get("own", ())),
                int(content.get("downsample", 1)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, HansaError):
                raise
            raise HansaError(f"{source}: damaged: {type(error).__name__}: {str(error)[:200]}. Restore it.") from error

    @classmethod
    def of_task(cls, task: Any, config: Config) -> Preprocessing | None:
        """Return the preprocessing of a task's inputs; None for a task without data."""
        federated = getattr(task, "data", None)
        if federated is None:
            return None
        inputs = getattr(federated, "inputs", None)
        tensor = inputs if hasattr(inputs, "shape") and hasattr(inputs, "dtype") else None
        parts = getattr(task, "augment", Pipeline()).test_pipeline().parts
        known = [part for part in parts if isinstance(part, normalize)]
        scaling = _image_scaling(config)
        return cls(
            None if tensor is None else tuple(tensor.shape[1:]),
            "float32" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            getattr(federated, "classes", None),
            getattr(federated, "encoding", None),
            None if scaling is None else (scaling.mean, scaling.std),
            tuple((tuple(part.mean), tuple(part.std)) for part in known),
            tuple(_name(part) for part in parts if not isinstance(part, normalize)),
            1 if scaling is None else scaling.downsample,
        )

    def read_tensor(self, rows: Tensor) -> Tensor:
        """Return rows of a file as the data set has them: bytes of images are scaled, shapes and dtypes adapted."""
        if self.shape is None:
            raise HansaError("the model takes several tensors: pass them to hansa.predict in Python.")
        if self.downsample > 1 and rows.dtype == torch.uint8 and tuple(rows.shape[1:]) == self._byte_shape:
            from hansa.data.loading import average_blocks

            return self._scale(average_blocks(rows.to(torch.float32), self.downsample))
        if tuple(rows.shape[1:]) != self.shape:
            if len(rows) == 0 or rows[0].numel() != _count(self.shape):
                raise HansaError(f"inputs of shape {tuple(rows.shape[1:])}: the model takes {self.shape}.")
            rows = rows.reshape(len(rows), *self.shape)
        if self.pixels is not None and rows.dtype == torch.uint8:
            return self._scale(rows.to(torch.float32))
        return rows.to(getattr(torch, self.dtype))

    @property
    def _byte_shape(self) -> tuple[int, ...]:
        """The shape of an image before blocks of pixels are averaged."""
        channels, height, width = self.shape or (0, 0, 0)
        return channels, height * self.downsample, width * self.downsample

    def _scale(self, values: Tensor) -> Tensor:
        assert self.pixels is not None
        mean, std = (torch.tensor(entries).view(1, -1, 1, 1) for entries in self.pixels)
        return values.div(255).sub(mean).div(std)


def write_preprocessing(path: Path, record: Preprocessing, **also: Any) -> None:
    """Write a record as readable JSON with its SHA-256, and further entries."""
    content = {**record.to_dict(), **also, "sha256": record.sha256}
    io.write_file(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_preprocessing(path: Path) -> tuple[Preprocessing, dict[str, Any]] | None:
    """Read a record and the further entries of its file; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: damaged: not JSON ({str(error)[:200]}). Restore it.") from error
    record = Preprocessing.from_dict(content, str(path))
    if content.get("sha256") != record.sha256:
        raise DamagedFileError(f"{path}: damaged: its SHA-256 is not the recorded one. Restore it.")
    known = {*record.to_dict(), "sha256"}
    return record, {name: value for name, value in content.items() if name not in known}


def _image_scaling(config: Config) -> ImageScaling | None:
    """Return how the images of a data set were scaled at loading; None if the data are others."""
    entry = data.DATASETS.get(config.data.name)
    if config.python is not None or config.data.factory is not None or entry is None or not entry.mean:
        return None
    from hansa.data.loading import image_scaling

    return image_scaling(entry, config.data.options)


def _channels(pair: Any) -> Channels:
    mean, std = pair
    return tuple(float(value) for value in mean), tuple(float(value) for value in std)


def _name(part: Any) -> str:
    return str(getattr(part, "__qualname__", type(part).__qualname__))


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
