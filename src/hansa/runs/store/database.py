"""The files of a run: one SQLite database, and a file of large rows that the database refers to.

============  ==========================================================================================
about         the identity of the record, and its head: rounds, generation, and running digests of both
rounds        one record a round as JSON, and its client columns
vectors       rows of clients, and tensors of checkpoints: content, or its offset in the row file
checkpoints   the server's state as JSON; its tensors are vectors
============  ==========================================================================================

SQLite does not detect changed values, so everything has a `seal`: a SHA-256 of the identity of the record, the key and
the content. Rounds are chained; the head has the sum of the seals of all live rows, so that none can be missing.

A round is one transaction. The row file is synced before it commits; a slot that a kept checkpoint needs is never
written. A write-ahead log lets others read during the run; on network file systems, which cannot share the index of
that log, it is a rollback journal. Closing the database leaves one plain file. No connection crosses a fork.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from io import BytesIO, FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import torch

from hansa.core.errors import HansaError
from hansa.core.vectors import kernels
from hansa.core.vectors.kernels import crc32
from hansa.runs.store import io
from hansa.runs.store.io import DamagedFileError

DATABASE, ROWS = "run.db", "run.rows"
ASIDE = DATABASE + io.TEMPORARY_SUFFIX
LOGS = (DATABASE + "-wal", DATABASE + "-shm", DATABASE + "-journal", ASIDE + "-journal")
FILES = (DATABASE, *LOGS, ROWS)
"""All files of a record."""

FORMAT = 4
LARGE = 1 << 16  # bytes from which a row is kept in the row file
PIECE = 1 << 17  # bytes of a row read at a time, and checked while in cache
REMEDY = "Restore it, or use an older checkpoint: `hansa resume --fallback`."

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The names of the dtypes of rows; commands that only look load no torch."""

_PAGE = 4096
_SCHEMA = (
    "CREATE TABLE about (record TEXT, head TEXT)",
    "CREATE TABLE checkpoints (round INTEGER PRIMARY KEY, head TEXT, state TEXT, digest TEXT)",
    "CREATE INDEX replaced ON vectors (died) WHERE died IS NOT NULL",
    "CREATE TABLE rounds (round INTEGER PRIMARY KEY, record TEXT, digest TEXT, sha TEXT, clients BLOB)",
    "CREATE TABLE vectors (id INTEGER PRIMARY KEY, kind TEXT, client INTEGER, name TEXT, born INTEGER, died INTEGER, "
    "dtype TEXT, shape TEXT, place INTEGER, crc INTEGER, sha TEXT, seal TEXT, content BLOB)",
)
_WAIT = 600.0  # seconds to wait for a reader, where readers block writers
_LIMIT = 1 << 30  # bytes of one value
_PARSING = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError, MemoryError)
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "lustre", "gpfs", "beegfs", "ceph",
                      "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse"})  # fmt: skip


def row_bytes(row: torch.Tensor) -> memoryview:
    """Return the bytes of a row."""
    return row.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def row_digest(row: torch.Tensor) -> str:
    """Return the SHA-256 of a row's dtype, shape and bytes."""
    return io.sha256(digest_header(dtype_name(row.dtype), row.shape), row_bytes(row))


def digest_header(dtype: str, shape: Iterable[int]) -> bytes:
    """Return the bytes that a row's SHA-256 covers before its content."""
    return f"{dtype}{list(shape)}".encode()


def dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def seal(identity: str, *parts: Any) -> str:
    """Return the SHA-256 of an entry of a record, in hexadecimal."""
    return io.sha256(json.dumps([identity, *parts]).encode())


class LostRecordError(HansaError):
    """The files of a record were deleted or moved while it was open."""

    exit_code = 1


class Head(NamedTuple):
    """The end of a record: its rounds and their chained digest; the generation of rows and the sum of their seals."""

    rounds: int = 0
    chain: str = ""
    generation: int = 0
    sum: int = 0

    def sealed(self, identity: str) -> str:
        """Return the stored text of the head of a record, with its seal."""
        return json.dumps([*self, seal(identity, *self)])


class RowEntry(NamedTuple):
    """A row of the database, its checksums, and its offset in the row file if it is there.

    ``born`` is the generation that wrote it; ``sha`` covers the content, ``seal`` all of the entry and the record.
    """

    id: int
    kind: str
    client: int
    name: str
    born: int
    dtype: str
    shape: tuple[int, ...]
    offset: int | None
    crc: int
    sha: str
    seal: str = ""

    def sealed(self, identity: str) -> RowEntry:
        """Return the entry with its seal in a record."""
        return self._replace(seal=seal(identity, *self[1:10]))

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return _nbytes(self.dtype, self.shape)

    def __str__(self) -> str:
        if self.kind == "client":
            return f"client {self.client}, row {self.name!r} of round {self.born - 1}"
        return f"{self.kind} {self.client}, {self.name!r}"


def _nbytes(dtype: str, shape: Iterable[int]) -> int:
    size: int = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return size


class Database:
    """The database of a run, open for writing (one process, which holds the folder's lock) or for reading."""

    def __init__(self, folder: Path | str, *, writing: bool = False, durable: bool = True, shared: bool = True) -> None:
        """Open a database that exists.

        Args:
            folder: The folder of the record.
            writing: Whether to write; otherwise the folder need not be writable.
            durable: Whether commits survive a loss of power.
            shared: Whether others read while this process writes.
        """
        self.path = Path(folder) / DATABASE
        self.row_path = self.path.with_name(ROWS)
        self.durable, self.writing, self._shared = durable, writing, shared
        self._usable, self._version = True, -1
        self._copied: TemporaryDirectory[str] | None = None
        self._process = os.getpid()
        self._verified: set[str] = set()  # seals of rows that this process wrote or checked by SHA-256
        self._row_file = -1  # open from the first large row of a transaction to its commit
        self._used: dict[int, int] = {}  # the slots of the row file: size by offset
        self._gaps: list[tuple[int, int]] | None = None  # the free offsets and lengths
        self._freed: list[int] = []  # the slots to reuse after the commit
        self._open_connection: sqlite3.Connection | None = None
        if not self.path.is_file():
            raise DamagedFileError(f"{self.path} is missing. Restore it.")
        try:
            with self.checked():
                version = self.execute("PRAGMA user_version").fetchone()[0]
                tables = self.execute("SELECT sql FROM sqlite_schema ORDER BY name").fetchall()
                if version != FORMAT or tables != [(text,) for text in _SCHEMA]:  # others may have views and triggers
                    raise DamagedFileError(
                        f"{self.path} is damaged, or of another version: its format is {version}, here {FORMAT}, or "
                        "its tables are not those of a run. Restore it."
                    )
                self.identity, head = self.execute("SELECT record, head FROM about").fetchone()
                self.head = self.parse_head(head)
                self._inode = os.stat(self.path).st_ino
            if writing:
                self.find_slots()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, folder: Path | str, **options: bool) -> Self:
        """Open the database of a folder for writing; create it if there is none, but not if it was lost."""
        path = Path(folder) / DATABASE
        if not os.path.lexists(path):
            if os.path.lexists(path.with_name(ROWS)):
                raise DamagedFileError(f"{path} is missing. Restore it from a backup.")
            cls._write(path, secrets.token_hex(16), Head(), {})
            cls._install(path)
        return cls(folder, writing=True, **options)

    @staticmethod
    def _write(path: Path, identity: str, head: Head, content: Mapping[str, Iterable[tuple[Any, ...]]]) -> None:
        """Write a database with some content under a temporary name."""
        aside = path.with_name(ASIDE)
        for name in (ASIDE, ASIDE + "-journal"):
            io.remove(path.with_name(name))
        with _translated_errors(aside), closing(sqlite3.connect(aside, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA synchronous={io.SYNCHRONOUS}")
            connection.execute(f"PRAGMA user_version={FORMAT}")
            connection.execute("BEGIN")
            for statement in sorted(_SCHEMA, key=lambda text: "INDEX" in text):
                connection.execute(statement)
            for table, rows in {"about": [(identity, head.sealed(identity))], **content}.items():
                for row in rows:
                    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
            io.commit(connection)

    @staticmethod
    def _install(path: Path) -> None:
        """Replace a database by that under the temporary name, to which no old log must be applied."""
        for name in LOGS:
            io.remove(path.with_name(name), durable=True)
        io.rename(path.with_name(ASIDE), path)

    # --- connections ----------------------------------------------------------------------------------------------

    @property
    def _connection(self) -> sqlite3.Connection:
        """The connection; after `close` another one, for reading."""
        if os.getpid() != self._process:
            raise HansaError(f"{self.path}: opened by another process. Open it again in this one.")
        if self._open_connection is None:
            self._open_connection = self._connect()
            _connections.add(self._open_connection)
        return self._open_connection

    def _connect(self) -> sqlite3.Connection:
        with _translated_errors(self.path):
            wal = self.writing and self._shared and not _is_network_file(self.path)
            try:
                return self._open(self.path, "WAL" if wal else "DELETE" if self.writing else None)
            except sqlite3.OperationalError as error:
                if wal:  # a file system without shared memory
                    return self._open(self.path, "DELETE")
                # the log of a killed run in a read-only folder has no index: read a copy
                if self.writing or error.sqlite_errorcode & 0xFF not in _UNREADABLE:
                    raise
            self._copied = TemporaryDirectory(prefix="hansa-record-")
            copy = Path(self._copied.name) / DATABASE
            for name in (DATABASE, *LOGS):
                if not name.endswith("-shm"):
                    with suppress(FileNotFoundError):
                        shutil.copyfile(self.path.with_name(name), copy.with_name(name))
            return self._open(copy)

    def _open(self, path: Path, journal: str | None = None) -> sqlite3.Connection:
        """Open a file for writing with a kind of journal, or for reading, and read its log."""
        uri_path, mode = quote(os.fsencode(path.absolute())), "ro" if journal is None and path == self.path else "rw"
        connection = sqlite3.connect(
            f"file:{uri_path}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=_WAIT
        )
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LIMIT)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "temp_store=MEMORY"):
                connection.execute(f"PRAGMA {pragma}")
            if journal is None:
                connection.execute("PRAGMA query_only=ON")
            else:
                mode_in_use = connection.execute(f"PRAGMA journal_mode={journal}").fetchone()[0]
                level = io.SYNCHRONOUS if self.durable else "OFF"
                # a rollback journal is deleted to commit, and FULL does not sync its folder
                level = "EXTRA" if level == "FULL" and mode_in_use != "wal" else level
                connection.execute(f"PRAGMA synchronous={level}")
                connection.execute("PRAGMA journal_size_limit=67108864")
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            return connection
        except BaseException:
            connection.close()
            raise

    def check_pages(self) -> None:
        """Refuse a database whose pages are damaged."""
        with self.checked():
            (answer,) = self.execute("PRAGMA quick_check(1)").fetchone()
            if answer != "ok":
                raise ValueError(answer)

    def check_present(self) -> None:
        """Refuse to continue if the files were deleted or replaced, since writes would go to unlinked files."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.stat(self.path).st_ino == self._inode:
                return
        raise LostRecordError(
            f"{self.path.parent}: deleted, moved or replaced while the run was active; nothing more can be saved. "
            "Start the run again, or resume it where it is now."
        )

    def close(self) -> None:
        """Close the database: roll back what was not committed and leave one plain file, which can still be read."""
        connection = self._open_connection
        if connection is None or os.getpid() != self._process:
            return
        self._open_connection = None
        _connections.discard(connection)
        self._usable = False
        self._close_row_file()
        try:
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if self.writing:
                    connection.execute("PRAGMA busy_timeout=2000")
                    connection.execute("PRAGMA journal_mode=DELETE")
        finally:
            self.writing = False
            connection.close()
            if self._copied is not None:
                self._copied.cleanup()
                self._copied = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_open_connection"):
            self.close()

    # --- transactions ---------------------------------------------------------------------------------------------

    def execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        """Execute one statement; errors are those of sqlite3, which `checked` translates."""
        return self._connection.execute(statement, tuple(values))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Add the path to errors of SQLite and of parsing."""
        with _translated_errors(self.path, _PARSING):
            yield

    @contextmanager
    def writing_rows(self) -> Iterator[None]:
        """Write within the transaction of the round. After an error the database must be reopened."""
        if not self._usable:
            raise HansaError(f"{self.path.parent}: a write failed, or the record was closed. Open it again.")
        try:
            with _translated_errors(self.path):
                if not self._connection.in_transaction:
                    self.execute("BEGIN IMMEDIATE")
                yield
        except BaseException:
            self._usable = False
            raise

    def commit(self) -> None:
        """Make all writes durable: first the row file, then the database."""
        with self.writing_rows():
            if self._row_file >= 0 and self.durable:
                with io.naming(self.row_path):
                    io.sync(self._row_file)
            self._close_row_file()
            io.commit(self._connection)
            for offset in self._freed:
                del self._used[offset]
                self._gaps = None
            self._freed = []

    def set_head(self, **changes: Any) -> None:
        """Change the head within the transaction."""
        self.head = self.head._replace(**changes)
        self.execute("UPDATE about SET head = ?", [self.head.sealed(self.identity)])

    def parse_head(self, text: str) -> Head:
        """Parse the text of a head; raise `ValueError` and the like if it is damaged."""
        head = Head(*json.loads(text)[:4])
        if head.sealed(self.identity) != text:
            raise ValueError("its head was changed")
        return head

    # --- rows -----------------------------------------------------------------------------------------------------

    def put(self, kind: str, client: int, name: str, born: int, row: torch.Tensor, sha: str | None = None) -> RowEntry:
        """Write a row: into the database, or into a free slot of the row file. ``sha`` is its `row_digest`."""
        data = row_bytes(row)
        dtype, shape = dtype_name(row.dtype), tuple(row.shape)
        large = len(data) >= LARGE
        offset = self._write_row(data) if large else None
        sha = row_digest(row) if sha is None else sha
        entry = RowEntry(0, kind, client, name, born, dtype, shape, offset, crc32(data), sha)
        entry = entry.sealed(self.identity)
        values = (*entry[1:6], json.dumps(shape), *entry[7:], None if large else bytes(data))
        cursor = self.execute(
            "INSERT INTO vectors (kind, client, name, born, dtype, shape, place, crc, sha, seal, content) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        self._verified.add(entry.seal)
        return entry._replace(id=cursor.lastrowid or 0)

    def delete(self, condition: str, values: Iterable[Any] = ()) -> None:
        """Delete the rows that a condition selects. Their slots are reused after the commit."""
        statement = f"DELETE FROM vectors WHERE {condition} RETURNING place, seal"
        for offset, seal in self.execute(statement, values).fetchall():
            self._verified.discard(seal)
            if offset is not None:
                self._freed.append(offset)

    def entries(self, condition: str, values: Iterable[Any] = ()) -> list[RowEntry]:
        """Return the rows that a condition selects."""
        entries = []
        with self.checked():
            columns = "id, kind, client, name, born, dtype, shape, place, crc, sha, seal"
            for *fields, seal in self.execute(f"SELECT {columns} FROM vectors WHERE {condition} ORDER BY id", values):
                fields[6] = tuple(json.loads(fields[6]))
                entry = RowEntry(*fields).sealed(self.identity)
                if entry.seal != seal or entry.dtype not in DTYPES:
                    raise ValueError(f"{entry}: its seal does not match")
                entries.append(entry)
        return entries

    def get(self, entry: RowEntry, into: torch.Tensor | None = None, *, quick: bool = False) -> torch.Tensor:
        """Read a row, checked by SHA-256; with ``quick`` by CRC-32 if this process has checked or written it before."""
        flat = torch.empty(entry.numel(), dtype=getattr(torch, entry.dtype)) if into is None else into
        view, crc, sha = row_bytes(flat), 0, None
        if not quick or entry.seal not in self._verified:
            sha = hashlib.sha256(digest_header(entry.dtype, entry.shape))
        with self._open_row(entry) as file:
            for start in range(0, len(view), PIECE):
                block = view[start : start + PIECE]
                file.readinto(block)
                if sha is None:
                    crc = crc32(block, crc)
                else:
                    sha.update(block)
        if crc != entry.crc if sha is None else sha.hexdigest() != entry.sha:
            raise self._damaged(entry, f"its {'CRC-32' if sha is None else 'SHA-256'} does not match")
        self._verified.add(entry.seal)
        return flat if into is not None else flat.reshape(entry.shape)

    def dot(self, entries: Sequence[RowEntry], vectors: torch.Tensor, stop: Event) -> torch.Tensor:
        """Return <row_i, vector_j> of float32 rows of the row file, checked as by `get` with ``quick``."""
        for entry in entries:
            if entry.seal not in self._verified:
                self.get(entry)
        with self._open_rows(entries) as file:
            offsets = [entry.offset or 0 for entry in entries]
            products, crcs = kernels.file_inner_products(file.fileno(), offsets, vectors, stop)
        for entry, crc in zip(entries, crcs, strict=True):
            if crc != entry.crc:
                raise self._damaged(entry, "its CRC-32 does not match")
        return products

    def _open_row(self, entry: RowEntry) -> FileIO | BytesIO:
        """Return the content of a row as a file at its start."""
        if entry.offset is not None:
            file = self._open_rows([entry])
            file.seek(entry.offset)
            return file
        with self.checked():
            content = self.execute("SELECT content FROM vectors WHERE id = ?", [entry.id]).fetchone()
        if content is None or not isinstance(content[0], bytes) or len(content[0]) != entry.nbytes:
            raise self._damaged(entry, "its content is missing")
        return BytesIO(content[0])

    def _open_rows(self, entries: Iterable[RowEntry]) -> FileIO:
        """Open the row file; refuse one that ends before the end of a row."""
        try:
            file = FileIO(self.row_path)
        except FileNotFoundError:
            row = next(iter(entries))
            raise DamagedFileError(f"{row}: its file {self.row_path} is missing. {REMEDY}") from None
        size = os.fstat(file.fileno()).st_size
        for entry in entries:
            if (missing := (entry.offset or 0) + entry.nbytes - size) > 0:
                file.close()
                present = max(0, entry.nbytes - missing)
                raise self._damaged(entry, f"the file ends after {present} of {entry.nbytes} bytes")
        return file

    def _damaged(self, entry: RowEntry, reason: str) -> DamagedFileError:
        """Return the error for a damaged row."""
        location = str(self.path)
        if entry.offset is not None:
            location = f"{self.row_path}, bytes {entry.offset} to {entry.offset + entry.nbytes}"
        return DamagedFileError(f"{entry} is damaged: {reason} ({location}). {REMEDY}")

    # --- the row file ---------------------------------------------------------------------------------------------

    def _write_row(self, data: memoryview) -> int:
        """Write a row into the first gap of the row file that is large enough; return its offset."""
        size = -(-len(data) // _PAGE) * _PAGE
        if self._gaps is None:
            self._gaps, end = [], 0
            for offset, length in sorted(self._used.items()):
                self._gaps += [(end, offset - end)] if offset > end else []
                end = max(end, offset + length)
            self._gaps.append((end, 1 << 62))
        place = next(place for place, (_, length) in enumerate(self._gaps) if length >= size)
        offset, length = self._gaps[place]
        self._gaps[place : place + 1] = [(offset + size, length - size)] if length > size else []
        self._used[offset] = size
        with io.naming(self.row_path):
            if self._row_file < 0:
                created = not self.row_path.exists()
                self._row_file = io.open_file(self.row_path)
                if created:
                    io.sync_folder(self.row_path.parent)
            io.write_at(self._row_file, offset, data)
        return offset

    def _close_row_file(self) -> None:
        if self._row_file >= 0:
            os.close(self._row_file)
        self._row_file = -1

    def find_slots(self) -> None:
        """Find the slots of the row file that are in use, if another process has changed the database since."""
        with self.checked():
            version = self.execute("PRAGMA data_version").fetchone()[0]
            if version == self._version:
                return
            self._version = version
            used = self.execute("SELECT place, dtype, shape FROM vectors WHERE place IS NOT NULL").fetchall()
            sizes = {offset: _nbytes(dtype, json.loads(shape)) for offset, dtype, shape in used}
            self._used = {offset: -(-size // _PAGE) * _PAGE for offset, size in sizes.items()}
            self._gaps = None


_UNREADABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)


@contextmanager
def _translated_errors(path: Path, parsing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Translate errors of SQLite and of parsing into errors with the path and a remedy."""
    try:
        with io.naming(path):
            yield
    except HansaError:
        raise
    except tuple[type[Exception], ...]((sqlite3.Error, *parsing)) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if code == sqlite3.SQLITE_IOERR:
            raise OSError(errno.EIO, str(error), str(path)) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise HansaError(f"{path}: in use by another process. Wait for it.") from error
        if code in _UNREADABLE:
            raise HansaError(f"{path}: cannot be opened: {error}. Check the permissions of its folder.") from error
        raise DamagedFileError(f"{path} is damaged: {str(error)[:200]}. {REMEDY}") from error


def _is_network_file(path: Path) -> bool:
    """Return whether a file is on a network file system, by the mount table of Linux."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    type_of_mount = {fields[1]: fields[2] for line in lines if len(fields := line.split()) > 2}
    parents = [str(parent) for parent in path.absolute().parents]
    return next((type_of_mount[parent] in _NETWORK for parent in parents if parent in type_of_mount), False)


_connections: set[sqlite3.Connection] = set()


def _abandon_connections() -> None:
    """Keep a forked process from closing the connections of its parent, which would merge and delete the log."""
    for connection in _connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    _connections.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_connections)
