"""The embedded tables of four hospitals. ``packaging/embedded_data.py`` builds them from UCI's files.

UCI Heart Disease (Janosi, Steinbrunn, Pfisterer, Detrano 1989, doi 10.24432/C52P4X), licensed under CC BY 4.0. Changes:
a header, and the column ``disease``, 1 where ``num`` is above 0, in place of ``num``. Cells are as published; ``?`` is
a missing value.
"""

from __future__ import annotations

import hashlib
import io
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


def _read_asset() -> dict[str, str]:
    path = resources.files("hansa.data") / "assets" / HEART_ASSET
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != HEART_SHA256:
        raise invalid_file(str(path), f"SHA-256 {HEART_SHA256}", digest, "Reinstall hansa.")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}
