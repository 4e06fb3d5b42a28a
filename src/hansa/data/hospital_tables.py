"""The embedded tables of four hospitals. ``python -m hansa.data.hospital_tables FOLDER`` builds them from UCI's files.

UCI Heart Disease (Janosi, Steinbrunn, Pfisterer, Detrano 1989, doi 10.24432/C52P4X), licensed under CC BY 4.0. Changes:
a header, and the column ``disease``, 1 where ``num`` is above 0, in place of ``num``. Cells are as published; ``?`` is
a missing value.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from importlib import resources
from pathlib import Path

from hansa.data.csv_folder import TEST, complete_schema, dataset_of_tables
from hansa.data.federated import Dataset
from hansa.data.files import invalid_file
from hansa.data.schema.table_schema import Schema
from hansa.data.schema.tables import Table, read_csv_text

HEART_ASSET = "heart-disease.zip"
HEART_SHA256 = "5dbf55378f8e35518424dd861053b4ee3a00c669ac74c85f24ec9f9565f0b237"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SCHEMA_FILE, README_FILE = "schema.yaml", "README.txt"
_COLUMNS = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,disease"
_SCHEMA = """\
# The schema of four hospital tables. Mean and deviation are open: the hospitals agree on them.
hansa_schema: 1
name: heart-disease
columns:
  - {name: age, kind: number, scale: pooled}
  - {name: sex, kind: number}
  - {name: cp, kind: category, categories: ['1', '2', '3', '4']}
  - {name: trestbps, kind: number, missing: indicator, scale: pooled}
  - {name: chol, kind: number, missing: indicator, scale: pooled}
  - {name: fbs, kind: number, missing: indicator}
  - {name: restecg, kind: category, categories: ['0', '1', '2'], missing: indicator}
  - {name: thalach, kind: number, missing: indicator, scale: pooled}
  - {name: exang, kind: number, missing: indicator}
  - {name: oldpeak, kind: number, missing: indicator, scale: pooled}
  - {name: slope, kind: category, categories: ['1', '2', '3'], missing: indicator}
  - {name: ca, kind: number, missing: indicator}
  - {name: thal, kind: category, categories: ['3', '6', '7'], missing: indicator}
  - {name: disease, kind: target, categories: ['0', '1']}
"""
_README = """\
Heart Disease, four tables of the UCI Machine Learning Repository, doi 10.24432/C52P4X.
Licence: Creative Commons Attribution 4.0 International (CC BY 4.0), https://creativecommons.org/licenses/by/4.0/

The data were collected by
  Andras Janosi, M.D., Hungarian Institute of Cardiology, Budapest (hungarian.csv);
  William Steinbrunn, M.D., University Hospital, Zurich (switzerland.csv);
  Matthias Pfisterer, M.D., University Hospital, Basel (switzerland.csv);
  Robert Detrano, M.D., Ph.D., V.A. Medical Center, Long Beach (va.csv) and Cleveland Clinic Foundation (cleveland.csv).

Changes: a header was added, and the column disease (1 if num is above 0, otherwise 0) replaces num.
Missing values are ?; a chol of 0 was not measured.
"""


def read_hospital_tables() -> tuple[list[Table], Schema]:
    """Return the tables of the four hospitals and the draft of their schema."""
    content = _read_asset()
    return [read_csv_text(content[f"{name}.csv"], f"{name}.csv") for name in HOSPITALS], Schema.from_yaml(
        content[SCHEMA_FILE], SCHEMA_FILE
    )


def load_hospitals(name: str, test: float = TEST) -> Dataset:
    """Return the tables as one data set whose natural owners are the hospitals."""
    tables, draft = read_hospital_tables()
    schema = complete_schema(draft, tables, test, 0)
    return dataset_of_tables(schema, tables, test, 0, name)


def write_hospital_tables(folder: Path) -> None:
    """Write the four files, the draft of their schema and their licence into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _read_asset().items():
        (folder / name).write_text(text, encoding="utf-8")


def hospital_files() -> tuple[str, ...]:
    """Return the names of the files that `write_hospital_tables` writes."""
    return (*(f"{name}.csv" for name in HOSPITALS), SCHEMA_FILE, README_FILE)


def build_hospital_asset(folder: Path) -> bytes:
    """Return the embedded file, built from processed.*.data in ``folder``."""
    files = {}
    for name in HOSPITALS:
        rows = [line.split(",") for line in (folder / f"processed.{name}.data").read_text().split()]
        lines = [",".join([*row[:-1], str(int(int(row[-1]) > 0))]) for row in rows]
        files[f"{name}.csv"] = "\n".join([_COLUMNS, *lines]) + "\n"
    files |= {SCHEMA_FILE: _SCHEMA, README_FILE: _README}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, (1989, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
    return stream.getvalue()


def _read_asset() -> dict[str, str]:
    path = resources.files("hansa.data") / "assets" / HEART_ASSET
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != HEART_SHA256:
        raise invalid_file(str(path), f"SHA-256 {HEART_SHA256}", digest, "Reinstall hansa.")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


if __name__ == "__main__":
    asset = build_hospital_asset(Path(sys.argv[1]))
    Path(HEART_ASSET).write_bytes(asset)
    print(f"{HEART_ASSET}: {len(asset):,} bytes, SHA-256 {hashlib.sha256(asset).hexdigest()}")
