"""Build the data files that the package embeds, byte for byte, from the official ones.

python packaging/embedded_data.py images FOLDER     from FOLDER/FashionMNIST/raw
python packaging/embedded_data.py hospitals FOLDER  from FOLDER/processed.*.data of UCI's heart disease
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hansa.data.csv_folder import HEART_ASSET, HOSPITALS, README_FILE, SCHEMA_FILE, _read_asset
from hansa.data.loading import ASSET
from hansa.data.readers import read_idx
from hansa.data.sources import dataset_info, invalid_file

HEADER = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,disease"


def first_of_each(labels: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    """Return the row numbers of the first ``count`` of every label, in increasing order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]))


def build_images(folder: Path) -> bytes:
    """Return the embedded part of Fashion-MNIST: 1,000 training and 200 test images of every class."""
    stream = io.BytesIO()
    files = dataset_info("fashion-mnist").files
    for images_file, labels_file, count in ((files[0], files[1], 1_000), (files[2], files[3], 200)):
        arrays = []
        for file, axes in ((images_file, 3), (labels_file, 1)):
            array, digest = read_idx(folder / file.path, axes)
            if digest != file.sha256:
                raise invalid_file(folder / file.path, f"contents of SHA-256 {file.sha256}", digest)
            arrays.append(array)
        rows = first_of_each(arrays[1], count)
        for array in arrays:
            np.save(stream, array[rows], allow_pickle=False)
    return gzip.compress(stream.getvalue(), mtime=0)


def build_hospitals(folder: Path) -> bytes:
    """Return the tables of four hospitals, with the schema and the licence that the package has beside them."""
    files = {}
    for name in HOSPITALS:
        rows = [line.split(",") for line in (folder / f"processed.{name}.data").read_text().split()]
        lines = [",".join([*row[:-1], str(int(int(row[-1]) > 0))]) for row in rows]
        files[f"{name}.csv"] = "\n".join([HEADER, *lines]) + "\n"
    kept = _read_asset()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in {**files, SCHEMA_FILE: kept[SCHEMA_FILE], README_FILE: kept[README_FILE]}.items():
            entry = zipfile.ZipInfo(name, (1989, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
    return stream.getvalue()


if __name__ == "__main__":
    target, build = {"images": (ASSET, build_images), "hospitals": (HEART_ASSET, build_hospitals)}[sys.argv[1]]
    content = build(Path(sys.argv[2]))
    Path(target).write_bytes(content)
    print(f"{target}: {len(content):,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
