"""The Python version of CIFAR-10 and CIFAR-100: pickled batches of 3 x 32 x 32 bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hansa.data.files import invalid_file, missing_file
from hansa.data.readers.pickled import read_pickled

_PIXELS = 3 * 32 * 32


def read_cifar(path: Path, classes: int, remedy: str = "") -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], str]:
    """Return images [n, 3, 32, 32], (fine) labels [n], and the SHA-256 of the pixels and labels, a byte each."""
    if not path.is_file():
        raise missing_file(path, remedy)
    batch = read_pickled(path)
    key = "fine_labels" if "fine_labels" in batch else "labels"
    pixels, labels = batch.get("data"), batch.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        actual = f"shape {pixels.shape}" if isinstance(pixels, np.ndarray) else f"keys {sorted(batch)}"
        raise invalid_file(path, f"'data' of shape (n, {_PIXELS})", actual)
    if not isinstance(labels, list) or len(labels) != len(pixels):
        actual = f"{len(labels)}" if isinstance(labels, list) else f"keys {sorted(batch)}"
        raise invalid_file(path, f"{len(pixels)} labels in 'labels' or 'fine_labels'", actual)
    wrong = [label for label in labels if type(label) is not int or not 0 <= label < classes]
    if wrong:
        raise invalid_file(path, f"labels from 0 to {classes - 1}", repr(wrong[0])[:40])
    label_bytes = np.array(labels, np.uint8)
    digest = hashlib.sha256(pixels.tobytes())
    digest.update(label_bytes.tobytes())
    return pixels.reshape(-1, 3, 32, 32), label_bytes, digest.hexdigest()
