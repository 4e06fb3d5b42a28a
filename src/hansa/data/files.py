"""The data folder, and errors that name a data file, what was expected and what was found."""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib import resources
from pathlib import Path

import platformdirs

from hansa.core.errors import HansaError


class DataError(HansaError):
    """A data file, folder or array has the wrong content.

    >>> issubclass(DataError, HansaError)
    True
    """


class MissingFileError(DataError):
    """A data file does not exist.

    >>> issubclass(MissingFileError, DataError)
    True
    """


def invalid_file(path: Path | str, expected: object, actual: object, remedy: str = "") -> DataError:
    """Return the error for a file with the wrong content.

    >>> invalid_file("raw/train", "60000 images", "12")
    DataError('raw/train: expected 60000 images, found 12.')
    """
    return DataError(f"{path}: expected {expected!s:.400}, found {actual!s:.400}.{' ' + remedy if remedy else ''}")


def missing_file(path: Path | str, remedy: str) -> MissingFileError:
    """Return the error for a file that does not exist; the remedy says where to get it.

    >>> missing_file("raw/train", "Run `hansa data get mnist`.")
    MissingFileError('raw/train: no such file. Run `hansa data get mnist`.')
    """
    return MissingFileError(f"{path}: no such file. {remedy}")


def read_asset(name: str, digest: str) -> bytes:
    """Return a file that is shipped with the package, after a check of its SHA-256."""
    path = resources.files("hansa.data") / "assets" / name
    content = path.read_bytes()
    if (actual := hashlib.sha256(content).hexdigest()) != digest:
        raise invalid_file(str(path), f"SHA-256 {digest}", actual, "Reinstall hansa.")
    return content


def data_folder(folder: Path | str | None = None) -> Path:
    """Return the folder that holds the data sets. It need not exist yet.

    Args:
        folder: The folder to use; by default ``HANSA_DATA``, or else the platform's cache folder.

    >>> data_folder("my/data").name
    'data'
    """
    if folder is not None:
        return Path(folder).expanduser()
    variable = os.environ.get("HANSA_DATA")
    return Path(variable).expanduser() if variable else platformdirs.user_cache_path("hansa") / "data"


def ensure_writable(folder: Path) -> Path:
    """Create the folder if needed. Raise now, not after the download, if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(f"{folder}: is not writable ({error.strerror or error}). Set HANSA_DATA to another.") from error
    return folder


def spreadsheet_text(text: str) -> str:
    """Return a text for a cell of a CSV file: what a spreadsheet would run as a formula gets an apostrophe in front.

    >>> spreadsheet_text("=1+1"), spreadsheet_text("north")
    ("'=1+1", 'north')
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
