"""Where data sets are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

from hansa.data.errors import DataError


def data_folder(folder: Path | str | None = None) -> Path:
    """The given folder, else ``HANSA_DATA``, else the platform's cache folder. It need not exist yet.

    >>> data_folder("my/data").name
    'data'
    """
    if folder is not None:
        return Path(folder).expanduser()
    named = os.environ.get("HANSA_DATA")
    return Path(named).expanduser() if named else platformdirs.user_cache_path("hansa") / "data"


def writable(folder: Path) -> Path:
    """The folder, made if need be; one that cannot be written to is refused now, not after the download."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise DataError(
            f"{folder}: the data folder is read-only or cannot be made ({problem.strerror or problem}). "
            "Set HANSA_DATA to a folder you may write to."
        ) from problem
    return folder
