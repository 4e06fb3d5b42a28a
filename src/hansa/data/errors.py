"""Errors about data files: the file, what was expected, what was found."""

from __future__ import annotations

from pathlib import Path

from hansa.core.errors import HansaError

_LONGEST = 400


class DataError(HansaError):
    """A data file, folder or array that is not what it should be.

    >>> issubclass(DataError, HansaError)
    True
    """


class MissingError(DataError):
    """A data file that is not there.

    >>> issubclass(MissingError, DataError)
    True
    """


def damaged(path: Path | str, expected: object, found: object, remedy: str = "") -> DataError:
    """The error for one wrong file.

    >>> damaged("raw/train", "60000 images", "12")
    DataError('raw/train: expected 60000 images, found 12.')
    """
    return DataError(f"{path}: expected {_short(expected)}, found {_short(found)}.{' ' + remedy if remedy else ''}")


def missing(path: Path | str, remedy: str) -> MissingError:
    """The error for a file that is not there; the remedy says where it comes from.

    >>> missing("raw/train", "Run `hansa data get mnist`.")
    MissingError('raw/train: no such file. Run `hansa data get mnist`.')
    """
    return MissingError(f"{path}: no such file. {remedy}")


def _short(value: object) -> str:
    """Words that a file may have had a part in, at most a few lines of them."""
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
