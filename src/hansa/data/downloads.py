"""Downloads that resume, enforce a minimum transfer rate, are verified by SHA-256 and appear only when complete."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import ssl
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hansa.data.files import DataError, data_folder, ensure_writable, invalid_file
from hansa.data.hospital_tables import write_hospital_tables
from hansa.data.loading import check_files
from hansa.data.sources import DatasetInfo, RemoteFile, dataset_info

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes received so far, and the total number of bytes."""

MIN_BYTES_PER_SECOND = 8 * 1024
"""A slower connection is dropped. The largest data set takes six hours at this rate."""

_BLOCK = 1 << 18
_TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)


class _InterruptedTransferError(Exception):
    """The connection broke: keep the received bytes and request the rest again."""


class SlowTransferError(Exception):
    """A connection stays below the minimum rate."""


def download(
    name: str | DatasetInfo,
    folder: Path | str | None = None,
    progress: Progress | None = None,
    *,
    retries: int = 5,
    timeout: float = 30.0,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """Download a data set from its official address. Files that are present and correct are not downloaded again.

    Args:
        name: Name of the data set, or its `DatasetInfo`.
        folder: The data folder; see `data_folder` for the default.
        progress: Called with (file name, bytes received, total bytes).
        retries: Attempts without progress before an address is given up.
        timeout: Seconds within which a response must begin, and over which the minimum rate is measured.
        pause: Called with the seconds to wait between attempts.

    >>> from hansa.data import is_present
    >>> is_present("fashion-mini")  # embedded: nothing to download
    True
    """
    info = dataset_info(name) if isinstance(name, str) else name
    root = data_folder(folder)
    if info.layout == "tables":  # embedded, and of use as files too
        ensure_writable(root)
        write_hospital_tables(root / info.folder)
        return root
    if info.layout == "embedded" or all(status.state == "ok" for status in check_files(info, root)):
        return root
    if not info.downloads:
        raise DataError(f"{info.name}: cannot be downloaded. {info.instructions}")
    ensure_writable(root)
    for remote in info.downloads:
        target = root / remote.path
        if not (target.is_file() and target.stat().st_size == remote.size and file_digest(target) == remote.sha256):
            fetch(remote, target, progress, retries=retries, timeout=timeout, pause=pause)
        if remote.unpack:
            _unpack(target, root, [file.path for file in info.files])
            target.unlink()
    problems = [status.detail for status in check_files(info, root) if status.state != "ok"]
    if problems:
        raise DataError(problems[0])
    return root


def fetch(
    remote: RemoteFile,
    target: Path,
    progress: Progress | None = None,
    *,
    retries: int = 5,
    timeout: float = 30.0,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Download one file, trying each address in turn."""
    ensure_writable(target.parent)
    problems = []
    for url in remote.urls:
        try:
            _fetch_from(url, remote, target, progress, retries, timeout, pause)
            return
        except DataError as error:
            problems.append(f"{url}: {error}")
    raise DataError(f"{target.name}: no address provided it.\n  " + "\n  ".join(problems))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_from(
    url: str,
    remote: RemoteFile,
    target: Path,
    progress: Progress | None,
    retries: int,
    timeout: float,
    pause: Callable[[float], None],
) -> None:
    part = target.with_name(target.name + ".part")
    failures, from_scratch, furthest, began = 0, not part.is_file(), _size(part), time.monotonic()
    while True:
        if _size(part) < remote.size:
            try:
                _transfer(url, remote, part, progress, timeout)
            except _InterruptedTransferError as error:
                # only new bytes at the minimum rate count as progress: a server that restarts for ever, or breaks off
                # after every byte, must be given up
                gained, elapsed = _size(part) - furthest, time.monotonic() - began
                failures = 0 if gained > 0 and gained >= MIN_BYTES_PER_SECOND * elapsed else failures + 1
                furthest, began = max(furthest, _size(part)), began + elapsed
                if failures > retries:
                    raise invalid_file(target.name, f"{remote.size} bytes", f"{_size(part)} after {error}") from None
                pause(min(30.0, 0.5 * 2**failures))
                continue
        digest = file_digest(part)
        if digest == remote.sha256 and _size(part) == remote.size:
            os.replace(part, target)
            _validator_path(part).unlink(missing_ok=True)
            return
        size = _size(part)
        _discard(part)
        if from_scratch:
            expected = f"SHA-256 {remote.sha256} ({remote.size} bytes)"
            raise invalid_file(target.name, expected, f"{digest} ({size} bytes)", "It was removed.")
        from_scratch = True  # the old partial file may be wrong: try once more without it


def _transfer(url: str, remote: RemoteFile, part: Path, progress: Progress | None, timeout: float) -> None:
    """Request the missing bytes and append them. If the server sends the whole file, start over."""
    if not url.startswith(("http://", "https://")):
        raise DataError("expected an http or https address")
    offset = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "hansa", "Accept-Encoding": "identity"})
    if offset:
        request.add_header("Range", f"bytes={offset}-")
        if _validator_path(part).is_file():
            request.add_header("If-Range", _validator_path(part).read_text())
    try:
        with open_url(request, timeout) as response:
            resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {offset}-"
            )
            if response.status == 206 and not resumed:
                _discard(part)
                raise _InterruptedTransferError(f"a wrong range ({response.headers.get('Content-Range')})")
            _save_validator(part, response.headers)
            received, rate = offset if resumed else 0, TransferRate(timeout)
            with open(part, "ab" if resumed else "wb") as file:
                while block := response.read1(_BLOCK):
                    received += len(block)
                    rate.add(len(block))
                    if received > remote.size:
                        file.close()
                        _discard(part)
                        raise invalid_file(part.name.removesuffix(".part"), f"{remote.size} bytes", "more")
                    file.write(block)
                    if progress is not None:
                        progress(part.name.removesuffix(".part"), received, remote.size)
                file.flush()
                os.fsync(file.fileno())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the partial file does not belong to this file
            _discard(part)
            raise _InterruptedTransferError("the server does not have this range") from None
        if error.code in _TRANSIENT_STATUS:
            raise _InterruptedTransferError(f"HTTP {error.code} {error.reason}") from None
        raise DataError(f"HTTP {error.code} {error.reason}") from None
    except SlowTransferError as error:
        raise _InterruptedTransferError(f"a connection that is too slow: {error}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
        raise _InterruptedTransferError(f"{getattr(error, 'reason', None) or error or type(error).__name__}") from None
    if received < remote.size:
        raise _InterruptedTransferError("the connection ended early")


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _validator_path(part: Path) -> Path:
    """The file beside a partial download with the tag for If-Range."""
    return part.with_name(part.name + ".tag")


def _save_validator(part: Path, headers: http.client.HTTPMessage) -> None:
    tag = headers.get("ETag")
    strong = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
    if strong:
        _validator_path(part).write_text(strong)
    else:
        _validator_path(part).unlink(missing_ok=True)


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _validator_path(part).unlink(missing_ok=True)


def _unpack(archive: Path, root: Path, wanted: list[str]) -> None:
    """Extract the wanted members of a tar file. No other path is ever written to."""
    remaining = set(wanted)
    try:
        with tarfile.open(archive) as tar:
            for item in tar:
                content = tar.extractfile(item) if item.name in remaining and item.isfile() else None
                if content is None:
                    continue
                target = root / item.name
                ensure_writable(target.parent)
                part = target.with_name(target.name + ".part")
                with open(part, "wb") as file:
                    while block := content.read(_BLOCK):
                        file.write(block)
                os.replace(part, target)
                remaining.discard(item.name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise invalid_file(archive, "a whole tar archive", error) from None
    if remaining:
        raise invalid_file(archive, f"members {', '.join(wanted)}", f"none named {', '.join(sorted(remaining))}")


class TransferRate:
    """Checks that every window of a transfer reaches the minimum rate.

    >>> clock = iter([0.0, 1.0, 2.5, 5.0])
    >>> rate = TransferRate(2.0, clock=lambda: next(clock))
    >>> rate.add(100), rate.add(10**6)
    (None, None)
    >>> rate.add(100)
    Traceback (most recent call last):
    hansa.data.downloads.SlowTransferError: 40 bytes a second, expected at least 8192
    """

    def __init__(
        self, window: float, minimum: int = MIN_BYTES_PER_SECOND, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.window, self.minimum, self.clock = window, minimum, clock
        self.began, self.received = clock(), 0

    def add(self, count: int) -> None:
        """Count received bytes; raise `SlowTransferError` at the end of a window that was too slow."""
        self.received += count
        elapsed = self.clock() - self.began
        if elapsed < self.window:
            return
        if self.received < self.minimum * elapsed:
            raise SlowTransferError(f"{self.received / elapsed:.0f} bytes a second, expected at least {self.minimum}")
        self.began, self.received = self.began + elapsed, 0


class _DeadlineConnection(http.client.HTTPConnection):
    """A connection whose response headers must be complete within the timeout, not only each byte of them."""

    def getresponse(self) -> http.client.HTTPResponse:
        watchdog = threading.Timer(float(self.timeout or 30.0), _shut_down, (self.sock,))
        watchdog.daemon = True
        watchdog.start()
        try:
            return super().getresponse()
        finally:
            watchdog.cancel()


class _DeadlineTLSConnection(_DeadlineConnection, http.client.HTTPSConnection):
    pass


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_DeadlineConnection, request)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_DeadlineTLSConnection, request, context=getattr(self, "_context", None))


def open_url(request: urllib.request.Request, timeout: float) -> Any:
    """Like ``urllib.request.urlopen``, with a deadline for the response headers."""
    return urllib.request.build_opener(_HTTPHandler, _HTTPSHandler).open(request, timeout=timeout)


def _shut_down(sock: socket.socket | None) -> None:
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already closed
            return
