"""The file of a run: one SQLite database, and beside it a file of large rows that the database points into.

============  ==========================================================================================
about         the identity of the record, and its head: rounds, generation, and running digests of both
rounds        one record a round as JSON, and the SHA-256 of its client columns
clients       the client columns of a round
vectors       rows of clients, and tensors of checkpoints: content, or its place in the row file
checkpoints   the server's state as JSON; its tensors are vectors
============  ==========================================================================================

SQLite does not notice a changed value, so everything has a SHA-256 that covers the identity of the record, the key and
the content. Rounds are chained; the head has the sum of the seals of all live rows, so that none can be missing.

A round is one transaction. Rows of the row file are synced before it commits; a slot that a kept checkpoint needs is
never written. A write-ahead log lets others read while the run goes on; on network file systems, which cannot share the
index of that log, it is a rollback journal. Closing the database leaves one plain file. No connection crosses a fork.
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
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from hansa.core.errors import HansaError
from hansa.core.vectors.fingerprint import checksum
from hansa.runs.store import io
from hansa.runs.store.base import DTYPES, dtype_name, hash_header, row_bytes, row_digest
from hansa.runs.store.io import DamagedFileError
from hansa.runs.store.row_file import RowEntry, RowFile

DATABASE, ROWS = "run.db", "run.rows"
FILES = (
    DATABASE, DATABASE + "-wal", DATABASE + "-shm", DATABASE + "-journal", f"{DATABASE}{io.TEMPORARY_SUFFIX}-journal",
    ROWS,
)  # fmt: skip
"""Every file that a record may consist of."""

FORMAT = 1
LARGE = 1 << 16  # bytes from which a row is kept in the row file
REMEDY = "Restore it, or use an older checkpoint: `hansa resume --fallback`."

_APPLICATION = 0x48414E53
_SCHEMA = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "CREATE TABLE checkpoints (round INTEGER PRIMARY KEY, meta TEXT, state TEXT, digest BLOB)",
    "CREATE TABLE clients (round INTEGER PRIMARY KEY, content BLOB)",
    "CREATE TABLE rounds (round INTEGER PRIMARY KEY, record TEXT, clients BLOB, digest BLOB)",
    "CREATE TABLE vectors (id INTEGER PRIMARY KEY, kind TEXT, client INTEGER, name TEXT, born INTEGER, died INTEGER, "
    "dtype TEXT, shape TEXT, place INTEGER, crc INTEGER, sha BLOB, seal BLOB, content BLOB)",
)
_COLUMNS = "id, kind, client, name, born, died, dtype, shape, place, crc, sha, seal"
_WAIT = 600.0  # seconds to wait for a reader, where readers block writers
_LIMIT = 1 << 30  # bytes of one value
_PARSING = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError, MemoryError)
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "lustre", "gpfs", "beegfs", "ceph",
                      "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse"})  # fmt: skip


class Head(NamedTuple):
    """The end of a record: its rounds and their chained digest; the generation of rows and the sum of their seals."""

    rounds: int
    chain: bytes
    generation: int
    sum: int


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
        self.durable, self.writing, self._shared = durable, writing, shared
        self.usable, self._writing_rows, self._version = True, False, -1
        self._copied: TemporaryDirectory[str] | None = None
        self._lock = threading.RLock()
        self._process = os.getpid()
        if not self.path.is_file():
            raise DamagedFileError(f"{self.path} is missing. Restore it.")
        self._open_connection: sqlite3.Connection | None = None
        self._hold(self._connect_writer() if writing else self._connect_reader())
        try:
            self._check_schema()
            with self.checked():
                about = dict(self.execute("SELECT name, value FROM about").fetchall())
                self.identity = _text(about["record"])
                self._head = self._parse_head(_text(about["head"]))
                self._inode = os.stat(self.path).st_ino
            self.rows = RowFile(self.path.with_name(ROWS), writing=writing)
            if writing:
                self.reserve_slots()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, folder: Path | str) -> None:
        """Create the empty database of a new record, complete or not at all."""
        path = Path(folder) / DATABASE
        for name in FILES:
            io.remove(path.with_name(name))
        cls._write_new(path, secrets.token_hex(16), Head(0, b"", 0, 0), {})

    @staticmethod
    def _write_new(
        path: Path,
        identity: str,
        head: Head,
        content: Mapping[str, Iterable[tuple[Any, ...]]],
        old: Database | None = None,
    ) -> None:
        """Write a database with this content, in the place of an ``old`` one, which is closed."""
        aside = path.with_name(path.name + io.TEMPORARY_SUFFIX)
        for suffix in ("", "-journal"):
            io.remove(aside.with_name(aside.name + suffix))
        with _named(aside):
            connection = sqlite3.connect(aside, isolation_level=None)
            try:
                connection.execute(f"PRAGMA synchronous={io.synchronous()}")
                connection.execute(f"PRAGMA application_id={_APPLICATION}")
                connection.execute(f"PRAGMA user_version={FORMAT}")
                connection.execute("BEGIN")
                for statement in _SCHEMA:
                    connection.execute(statement)
                about = [("record", identity), ("head", _format_head(identity, head))]
                for table, rows in {"about": about, **content}.items():
                    for row in rows:
                        connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
                io.commit(connection, aside)
            finally:
                connection.close()
        if old is not None:
            old.close()
        for suffix in ("-wal", "-shm", "-journal"):  # a log of the old database must not be applied to the new one
            io.remove(path.with_name(path.name + suffix), sync=True)
        io.rename(aside, path)

    def salvage(self, head: Head, content: Mapping[str, tuple[str, list[Any]]]) -> None:
        """Write the database anew with the rows that conditions select, table by table, and close it."""
        with _named(self.path):
            tables = {
                table: (tuple(row) for row in self.execute(f"SELECT * FROM {table} WHERE {where}", values))
                for table, (where, values) in content.items()
            }
            self._write_new(self.path, self.identity, head, tables, self)

    def _hold(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        self._open_connection = _connections[id(connection)] = connection
        return connection

    @property
    def _connection(self) -> sqlite3.Connection:
        """The connection; after `close` another one, for reading."""
        if os.getpid() != self._process:
            raise HansaError(f"{self.path}: opened by another process. Open it again in this one.")
        return self._open_connection or self._hold(self._connect_reader())

    @property
    def head(self) -> Head:
        """The head; while a round is written it includes that round."""
        return self._head

    def _connect_writer(self) -> sqlite3.Connection:
        with _named(self.path):
            connection = self._open("rw")
            try:
                mode = "WAL" if self._shared and not _is_network_file(self.path) else "DELETE"
                try:
                    found = connection.execute(f"PRAGMA journal_mode={mode}").fetchone()[0]
                    connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                except sqlite3.OperationalError:  # a file system without shared memory
                    connection.close()
                    connection = self._open("rw")
                    found = connection.execute("PRAGMA journal_mode=DELETE").fetchone()[0]
                level = io.synchronous() if self.durable else "OFF"
                # a rollback journal is deleted to commit, and FULL does not sync its folder
                connection.execute(f"PRAGMA synchronous={'EXTRA' if level == 'FULL' and found != 'wal' else level}")
                connection.execute("PRAGMA journal_size_limit=67108864")
                return connection
            except BaseException:
                connection.close()
                raise

    def _connect_reader(self) -> sqlite3.Connection:
        connection = None
        with _named(self.path):
            try:
                connection = self._open("ro")
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                return connection
            except sqlite3.OperationalError as error:
                if connection is not None:
                    connection.close()
                # the log of a killed run in a folder that cannot be written to has no index: read a copy
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                    raise
            self._copied = TemporaryDirectory(prefix="hansa-record-")
            copy = Path(self._copied.name) / DATABASE
            for suffix in ("", "-wal", "-journal"):
                with suppress(FileNotFoundError):
                    shutil.copyfile(self.path.with_name(DATABASE + suffix), copy.with_name(DATABASE + suffix))
            return self._open("rw", copy)

    def _open(self, mode: str, path: Path | None = None) -> sqlite3.Connection:
        where = quote(os.fsencode((path or self.path).absolute()))
        connection = sqlite3.connect(
            f"file:{where}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=_WAIT
        )
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LIMIT)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "temp_store=MEMORY"):
            connection.execute(f"PRAGMA {pragma}")
        if not self.writing:
            connection.execute("PRAGMA query_only=ON")
        return connection

    def _check_schema(self) -> None:
        """Refuse everything but our tables: a foreign file may have views and triggers."""
        with self.checked():
            application = self.execute("PRAGMA application_id").fetchone()[0]
            version = self.execute("PRAGMA user_version").fetchone()[0]
            found = [text for (text,) in self.execute("SELECT sql FROM sqlite_schema ORDER BY name").fetchall()]
        if application != _APPLICATION:
            raise DamagedFileError(f"{self.path} is damaged: not the record of a run. Restore it.")
        if version != FORMAT:
            raise HansaError(f"{self.path}: has format {version}; this Hansa reads format {FORMAT}.")
        if tuple(found) != _SCHEMA:
            raise DamagedFileError(f"{self.path} is damaged: its tables are not those of a run. Restore it.")

    def check_pages(self) -> None:
        """Refuse a database whose pages are damaged."""
        with self.checked():
            (answer,) = self.execute("PRAGMA quick_check(1)").fetchone()
        if answer != "ok":
            raise DamagedFileError(f"{self.path} is damaged: {str(answer)[:200]}. {REMEDY}")

    def check_present(self) -> None:
        """Refuse to go on if the files were deleted or replaced; the system would write to files without a name."""
        try:
            same = os.stat(self.path).st_ino == self._inode
        except FileNotFoundError:
            same = False
        if not same:
            folder = self.path.parent
            raise HansaError(
                f"{folder}: deleted or replaced while the run was active; what was recorded in it is lost. "
                "Start the run again."
            )

    # --- transactions ---------------------------------------------------------------------------------------------

    def execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        """Execute one statement; errors are those of sqlite3, which `checked` translates."""
        with self._lock:
            return self._connection.execute(statement, tuple(values))

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Name the file in errors of SQLite and in errors of what is parsed."""
        with _named(self.path):
            try:
                yield
            except _PARSING as error:
                if isinstance(error, HansaError):
                    raise
                raise DamagedFileError(f"{self.path} is damaged: {str(error)[:200]}. {REMEDY}") from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read one state of the database, whatever is written meanwhile."""
        if self._connection.in_transaction:
            yield
            return
        with self.checked():
            self.execute("BEGIN")
            try:
                about = dict(self.execute("SELECT name, value FROM about").fetchall())
                self._head = self._parse_head(_text(about["head"]))
                yield
            finally:
                with suppress(sqlite3.Error):
                    self.execute("ROLLBACK")

    @contextmanager
    def writing_rows(self) -> Iterator[None]:
        """Write within the transaction of the round. After an error only reopening can tell what reached the disk."""
        if self._writing_rows:
            yield
            return
        self.check_usable()
        self.usable, self._writing_rows = False, True
        try:
            with _named(self.path), self._lock:
                if not self._connection.in_transaction:
                    self.execute("BEGIN IMMEDIATE")
                yield
        finally:
            self._writing_rows = False
        self.usable = True

    def check_usable(self) -> None:
        """Refuse to write after a write that failed."""
        if not self.usable:
            raise HansaError(f"{self.path.parent}: an earlier write failed or the record was closed. Open it again.")

    def set_head(self, **changes: Any) -> None:
        """Change the head within the transaction."""
        self._head = self._head._replace(**changes)
        self.execute("UPDATE about SET value = ? WHERE name = 'head'", [_format_head(self.identity, self._head)])

    @property
    def is_mine(self) -> bool:
        """Whether this process opened the database, and has not closed it."""
        return os.getpid() == self._process and self._open_connection is not None

    def see_others(self) -> None:
        """Find the slots that other processes have used, within the transaction that will use more."""
        version = self.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self._version = version
            self.reserve_slots()

    def commit(self) -> None:
        """Make everything that was written durable: first the row file, then the database."""
        with self.writing_rows():
            if self.durable:
                self.rows.sync()
            io.commit(self._connection, self.path)
            self.rows.release_freed()

    def close(self) -> None:
        """Close the database: what was not committed is undone, and one plain file remains. It can still be read."""
        connection = self._open_connection
        if connection is None or os.getpid() != self._process:
            return
        self._open_connection = None
        del _connections[id(connection)]
        self.usable = False
        try:
            if hasattr(self, "rows"):
                self.rows.close()
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if self.writing:
                    connection.execute("PRAGMA busy_timeout=2000")
                    io.settle(connection)
        finally:
            self.writing = False
            connection.close()
            if self._copied is not None:
                self._copied.cleanup()
                self._copied = None

    def __del__(self) -> None:
        if hasattr(self, "_open_connection"):
            self.close()

    def _parse_head(self, text: str) -> Head:
        rounds, chain, generation, total, seal = text.split(" ")
        head = Head(int(rounds), bytes.fromhex(chain), int(generation), int(total, 16))
        if _format_head(self.identity, head).rpartition(" ")[2] != seal:
            raise DamagedFileError(f"{self.path} is damaged: its head was changed. {REMEDY}")
        return head

    # --- rows -----------------------------------------------------------------------------------------------------

    def put(self, kind: str, client: int, name: str, born: int, row: Tensor, sha: str | None = None) -> RowEntry:
        """Write a row: into the database, or into a free slot of the row file. ``sha`` is its `row_digest`."""
        data = row_bytes(row)
        dtype, shape = dtype_name(row.dtype), tuple(row.shape)
        crc, digest = checksum(data), bytes.fromhex(row_digest(row) if sha is None else sha)
        large = len(data) >= LARGE
        place = self.rows.put(data) if large else None
        entry = RowEntry(0, kind, client, name, born, dtype, shape, place, crc, digest)
        cursor = self.execute(
            "INSERT INTO vectors (kind, client, name, born, dtype, shape, place, crc, sha, seal, content) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (kind, client, name, born, dtype, json.dumps(shape), place, crc, entry.sha, self.seal(entry),
             None if large else bytes(data)),
        )  # fmt: skip
        return entry._replace(id=cursor.lastrowid or 0)

    def delete(self, entries: Iterable[RowEntry]) -> None:
        """Delete rows. Their slots are used again after the commit."""
        for entry in entries:
            self.execute("DELETE FROM vectors WHERE id = ?", [entry.id])
            self.rows.forget(entry)

    def seal(self, entry: RowEntry) -> bytes:
        """Return the SHA-256 over the record, the key and the content of a row."""
        key = [self.identity, *entry[1:9]]
        return hashlib.sha256(json.dumps(key).encode() + entry.sha).digest()

    def entries(self, where: str, values: Iterable[Any] = ()) -> list[tuple[RowEntry, int | None]]:
        """Return the rows that a condition selects, each with the generation in which it was replaced."""
        found = []
        with self.checked():
            for fields in self.execute(f"SELECT {_COLUMNS} FROM vectors WHERE {where} ORDER BY id", values):
                number, kind, client, name, born, died, dtype, shape, place, crc, sha, seal = fields
                entry = RowEntry(number, kind, client, name, born, dtype, tuple(json.loads(shape)), place, crc, sha)
                if self.seal(entry) != seal or dtype not in DTYPES:
                    raise DamagedFileError(f"{self.path} is damaged: {entry}: its seal does not match. {REMEDY}")
                found.append((entry, None if died is None else int(died)))
        return found

    def get(self, entry: RowEntry, into: Tensor | None = None, *, quick: bool = False) -> Tensor:
        """Read a row, checked by SHA-256; with ``quick`` by CRC-32 if its SHA-256 has been checked before."""
        if entry.place is not None:
            return self.rows.get(entry, into, quick=quick)
        with self.checked():
            found = self.execute("SELECT content FROM vectors WHERE id = ?", [entry.id]).fetchone()
        content = None if found is None else found[0]
        if not isinstance(content, bytes) or len(content) != entry.nbytes:
            raise self.damaged(entry, "its content is missing")
        if quick and self.rows.is_verified(entry):
            if checksum(content) != entry.crc:
                raise self.damaged(entry, "its CRC-32 does not match")
        elif hashlib.sha256(hash_header(entry.dtype, entry.shape) + content).digest() != entry.sha:
            raise self.damaged(entry, "its SHA-256 does not match")
        self.rows.mark_verified(entry)
        flat = torch.empty(entry.length, dtype=DTYPES[entry.dtype]) if into is None else into
        row_bytes(flat)[:] = content
        return flat if into is not None else flat.reshape(entry.shape)

    def damaged(self, entry: RowEntry, why: str) -> DamagedFileError:
        """Return the error for a row that is not what was written."""
        return DamagedFileError(f"{entry} is damaged: {why} ({self.path}). {REMEDY}")

    def seals(self, entries: Iterable[RowEntry]) -> int:
        """Return the sum of the seals of rows."""
        return sum(int.from_bytes(self.seal(entry), "big") for entry in entries) % (1 << 256)

    def reserve_slots(self) -> None:
        """Find the slots of the row file that are in use."""
        with self.checked():
            used = self.execute("SELECT place, dtype, shape FROM vectors WHERE place IS NOT NULL").fetchall()
            sizes = [torch.Size(json.loads(shape)).numel() * DTYPES[dtype].itemsize for _, dtype, shape in used]
            self.rows.reserve((place, size) for (place, _, _), size in zip(used, sizes, strict=True))


def _format_head(identity: str, head: Head) -> str:
    text = f"{head.rounds} {head.chain.hex()} {head.generation} {head.sum:x}"
    return f"{text} {io.sha256(f'{identity} {text}'.encode())}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {type(value).__name__}")
    return value


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Translate errors of SQLite: what happened to which file, and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if code == sqlite3.SQLITE_IOERR:
            raise OSError(errno.EIO, str(error), str(path)) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise HansaError(f"{path}: in use by another process. Wait for it.") from error
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise HansaError(f"{path}: cannot be opened: {error}. Check the permissions of its folder.") from error
        raise DamagedFileError(f"{path} is damaged: {str(error)[:200]}. {REMEDY}") from error


def _is_network_file(path: Path) -> bool:
    """Return whether a file is on a network file system, as far as Linux says so."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    kinds = {fields[1]: fields[2] for line in lines if len(fields := line.split()) > 2}
    places = [str(place) for place in path.absolute().parents]
    return next((kinds[place] in _NETWORK for place in places if place in kinds), False)


_connections: dict[int, sqlite3.Connection] = {}


def _abandon_connections() -> None:
    """Let a forked process never close the connections of its parent, which would fold and delete the log."""
    for connection in _connections.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    _connections.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_connections)
