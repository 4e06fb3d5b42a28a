"""Stamps of run folders that this user created on this machine; code that other folders name needs consent.

A run whose configuration names code gets a stamp: an HMAC of the run and of the code that it names, with a secret key
that only this user can read. A folder from elsewhere, or one that names other code now, has no valid stamp.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import platformdirs

from hansa.core.errors import HansaError
from hansa.runs.store import io

STAMP = ".hansa-stamp"
VARIABLE = "HANSA_KEY"
"""The environment variable that names another key file."""
KEY_BYTES = 32


class UntrustedFolderError(HansaError):
    """A run folder names code and was not created by this user on this machine."""


def key_path() -> Path:
    """Return the file of the secret key."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else platformdirs.user_data_path("hansa") / "trust.key"


def write_stamp(folder: Path, identity: str, names: Sequence[str]) -> None:
    """Mark a folder as created by this user on this machine, if it names code and a key can be stored."""
    key = _load_key(create=True) if names else None
    if key is not None:
        io.write_file(folder / STAMP, f"{_stamp(key, identity, names)}\n".encode())


def is_own(folder: Path, identity: str, names: Sequence[str]) -> bool:
    """Return whether a folder has the stamp of this user on this machine for the code that it names."""
    key = _load_key(create=False)
    try:
        written = (folder / STAMP).read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return False
    return key is not None and hmac.compare_digest(written, _stamp(key, identity, names))


def require_trust(folder: Path, identity: str, names: Sequence[str], *, trust: bool = False) -> None:
    """Refuse a folder that names code unless this user created it on this machine or ``trust`` is set."""
    from hansa.config.registry.import_path import is_trusted  # runs in memory need no configuration

    if not names or trust or is_trusted() or is_own(folder, identity, names):
        return
    reason = "" if _load_key(create=False) is not None else (
        f" (There is no readable key of this user, {key_path()}, by which own folders are recognized.)"
    )  # fmt: skip
    raise UntrustedFolderError(
        f"{folder}: was not made by this user on this machine, and names code that would be imported: "
        f"{', '.join(names)}. If you trust it: --trust, in Python trust=True.{reason}"
    )


def _stamp(key: bytes, identity: str, names: Sequence[str]) -> str:
    return hmac.new(key, json.dumps([identity, sorted(set(names))]).encode(), "sha256").hexdigest()


def _load_key(*, create: bool) -> bytes | None:
    """Return the secret key; None if it is missing and cannot be created, or if other users could have written it."""
    path = key_path()
    if create and not path.exists():
        with suppress(OSError):
            _create_key(path)
    try:
        with open(path, "rb") as file:
            status, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    except OSError:
        return None
    private = os.name != "posix" or (status.st_uid == os.getuid() and not status.st_mode & 0o077)
    return key if private and len(key) == KEY_BYTES else None


def _create_key(path: Path) -> None:
    """Create the key with mode 0600, complete from the start; another process may be first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
