"""Downloads of data sets by pooch: verified by SHA-256, tried again, complete before they appear."""

from __future__ import annotations

import os
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from hansa.data.csv_folder import write_hospital_tables
from hansa.data.files import DataError, data_folder, ensure_writable, invalid_file
from hansa.data.loading import check_files
from hansa.data.sources import DatasetInfo, RemoteFile, dataset_info

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes received so far, and the total number of bytes."""

MIN_BYTES_PER_SECOND = 8 * 1024
"""A slower transfer is given up. The largest data set takes six hours at this rate."""

_BLOCK = 1 << 18


def download(
    name: str | DatasetInfo,
    folder: Path | str | None = None,
    progress: Progress | None = None,
    *,
    retries: int = 3,
    timeout: float = 30.0,
) -> Path:
    """Download a data set from its official address. Files that are present and correct are not downloaded again.

    Args:
        name: Name of the data set, or its `DatasetInfo`.
        folder: The data folder; see `data_folder` for the default.
        progress: Called with (file name, bytes received, total bytes).
        retries: How often a failed transfer is repeated before an address is given up.
        timeout: Seconds of silence after which a transfer has failed, and after which its rate is measured.

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
        fetch(remote, root, progress, retries=retries, timeout=timeout)
        if remote.unpack:
            _unpack(root / remote.path, root, [file.path for file in info.files])
            (root / remote.path).unlink()
    problems = [status.detail for status in check_files(info, root) if status.state != "ok"]
    if problems:
        raise DataError(problems[0])
    return root


def fetch(
    remote: RemoteFile, root: Path, progress: Progress | None = None, *, retries: int = 3, timeout: float = 30.0
) -> Path:
    """Download one file to its path below a folder, trying each address in turn; a correct one is left alone.

    Args:
        remote: The file at its publisher.
        root: The folder.
        progress: Called with (file name, bytes received, total bytes).
        retries: How often a failed transfer is repeated before an address is given up.
        timeout: Seconds of silence after which a transfer has failed, and after which its rate is measured.
    """
    import pooch
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")
    target = root / remote.path
    ensure_writable(target.parent)
    problems = []
    for url in remote.urls:
        digests = {remote.path: f"sha256:{remote.sha256}"}
        store = pooch.create(root, "", registry=digests, urls={remote.path: url}, retry_if_failed=retries)
        meter, headers = _Meter(target.name, remote.size, timeout, progress), {"Accept-Encoding": "identity"}
        transfer = pooch.HTTPDownloader(meter, _Meter.CHUNK, timeout=timeout, headers=headers)
        try:
            store.fetch(remote.path, downloader=transfer)
            return target
        except (_BadTransferError, RequestException, ValueError, OSError) as error:
            problems.append(f"{url}: {error}")
    raise DataError(f"{target.name}: no address provided it.\n  " + "\n  ".join(problems))


class _BadTransferError(Exception):
    """A transfer that is too long or too slow, and is not repeated."""


class _Meter:
    """What pooch takes for a progress bar: reports progress, and stops a transfer that is too long or too slow."""

    CHUNK = 1 << 12

    def __init__(self, name: str, size: int, window: float, progress: Progress | None) -> None:
        self.name, self.size, self.window, self.progress = name, size, window, progress
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.received, self.began = 0, time.monotonic()

    def update(self, count: int) -> None:
        """Count received bytes."""
        self.received += count
        elapsed = time.monotonic() - self.began
        if self.received - self.CHUNK > self.size:
            raise _BadTransferError(f"more than the {self.size} bytes of the file")
        if elapsed > self.window and self.received < MIN_BYTES_PER_SECOND * elapsed:
            rate = f"{self.received / elapsed:.0f} bytes a second, expected at least {MIN_BYTES_PER_SECOND}"
            raise _BadTransferError(f"too slow: {rate}")
        if self.progress is not None:
            self.progress(self.name, min(self.received, self.size), self.size)

    @property
    def total(self) -> int:
        """Size of the file. Pooch sets it to what the server says when an attempt begins."""
        return self.size

    @total.setter
    def total(self, claimed: int) -> None:
        self.reset()

    def close(self) -> None:
        """Nothing is open."""


def _unpack(archive: Path, root: Path, members: list[str]) -> None:
    """Extract the named members of a tar file. No other path is ever written to."""
    remaining = set(members)
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
        raise invalid_file(archive, f"members {', '.join(members)}", f"none named {', '.join(sorted(remaining))}")
