"""Downloads that can be trusted: resumed where they broke off, given up where they are slower than a least rate,
verified by SHA-256, renamed into place when whole."""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

from hansa.data.errors import DataError, damaged
from hansa.data.folder import data_folder, writable
from hansa.data.loading import check
from hansa.data.sources import Remote, Source, source
from hansa.data.transfer_limits import SLOWEST, Pace, TooSlow, open_url

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes that are there, and the bytes there will be."""

_BLOCK = 1 << 18
_PASSING = (408, 425, 429, 500, 502, 503, 504)


class _Broken(Exception):
    """A connection that broke: what has arrived is kept, and the rest is asked for again."""


def download(
    name: str | Source,
    folder: Path | str | None = None,
    progress: Progress | None = None,
    *,
    retries: int = 5,
    timeout: float = 30.0,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """Get a data set from its official address into the data folder; files that are there and right are left alone.

    >>> from hansa.data import present
    >>> present("fashion-mini")  # embedded: nothing to download
    True
    """
    entry = source(name) if isinstance(name, str) else name
    root = data_folder(folder)
    if entry.layout == "embedded" or all(state.state == "ok" for state in check(entry, root)):
        return root
    if not entry.remotes:
        raise DataError(f"{entry.name}: cannot be downloaded. {entry.how}")
    writable(root)
    for remote in entry.remotes:
        target = root / remote.path
        if not (target.is_file() and target.stat().st_size == remote.size and file_digest(target) == remote.sha256):
            fetch(remote, target, progress, retries=retries, timeout=timeout, pause=pause)
        if remote.unpack:
            _unpack(target, root, [member.path for member in entry.members])
            target.unlink()
    wrong = [state.detail for state in check(entry, root) if state.state != "ok"]
    if wrong:
        raise DataError(wrong[0])
    return root


def fetch(
    remote: Remote,
    target: Path,
    progress: Progress | None = None,
    *,
    retries: int = 5,
    timeout: float = 30.0,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """One file: each address in turn, each tried again while it makes progress or ``retries`` last."""
    writable(target.parent)
    problems = []
    for url in remote.urls:
        try:
            _from_one(url, remote, target, progress, retries, timeout, pause)
            return
        except DataError as problem:
            problems.append(f"{url}: {problem}")
    raise DataError(f"{target.name}: no address gave it.\n  " + "\n  ".join(problems))


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_one(
    url: str,
    remote: Remote,
    target: Path,
    progress: Progress | None,
    retries: int,
    timeout: float,
    pause: Callable[[float], None],
) -> None:
    part = target.with_name(target.name + ".part")
    failures, fresh, furthest, began = 0, not part.is_file(), _size(part), time.monotonic()
    while True:
        if _size(part) < remote.size:
            try:
                _transfer(url, remote, part, progress, timeout)
            except _Broken as problem:
                # only new ground counts as progress, and only at a least rate, or a server that starts over for ever
                # or breaks off at every byte would never be given up
                gained, passed = _size(part) - furthest, time.monotonic() - began
                failures = 0 if gained > 0 and gained >= SLOWEST * passed else failures + 1
                furthest, began = max(furthest, _size(part)), began + passed
                if failures > retries:
                    raise damaged(target.name, f"{remote.size} bytes", f"{_size(part)} after {problem}") from None
                pause(min(30.0, 0.5 * 2**failures))
                continue
        found = file_digest(part)
        if found == remote.sha256 and _size(part) == remote.size:
            os.replace(part, target)
            _validator(part).unlink(missing_ok=True)
            return
        size = _size(part)
        _forget(part)
        if fresh:
            expected = f"SHA-256 {remote.sha256} ({remote.size} bytes)"
            raise damaged(target.name, expected, f"{found} ({size} bytes)", "It was removed.")
        fresh = True  # an old beginning may be at fault: once more from nothing


def _transfer(url: str, remote: Remote, part: Path, progress: Progress | None, timeout: float) -> None:
    """Ask for what is missing of a file and append it; a server that sends the whole again is obeyed."""
    if not url.startswith(("http://", "https://")):
        raise DataError("expected an http or https address")
    have = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "hansa", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if _validator(part).is_file():
            request.add_header("If-Range", _validator(part).read_text())
    try:
        with open_url(request, timeout) as answer:
            resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if answer.status == 206 and not resumed:
                _forget(part)
                raise _Broken(f"a part that was not asked for ({answer.headers.get('Content-Range')})")
            _remember(part, answer.headers)
            done, pace = have if resumed else 0, Pace(timeout)
            with open(part, "ab" if resumed else "wb") as file:
                while block := answer.read1(_BLOCK):
                    done += len(block)
                    pace.note(len(block))
                    if done > remote.size:
                        file.close()
                        _forget(part)
                        raise damaged(part.name.removesuffix(".part"), f"{remote.size} bytes", "more")
                    file.write(block)
                    if progress is not None:
                        progress(part.name.removesuffix(".part"), done, remote.size)
                file.flush()
                os.fsync(file.fileno())
    except urllib.error.HTTPError as problem:
        problem.close()
        if problem.code == 416:  # the beginning that is here is not one of this file
            _forget(part)
            raise _Broken("the server has no such range") from None
        if problem.code in _PASSING:
            raise _Broken(f"HTTP {problem.code} {problem.reason}") from None
        raise DataError(f"HTTP {problem.code} {problem.reason}") from None
    except TooSlow as problem:
        raise _Broken(f"a connection that is too slow: {problem}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as problem:
        raise _Broken(f"{getattr(problem, 'reason', None) or problem or type(problem).__name__}") from None
    if done < remote.size:
        raise _Broken("the connection ended early")


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _validator(part: Path) -> Path:
    """Beside a beginning: the tag by which the server knows whether the file is still the same."""
    return part.with_name(part.name + ".tag")


def _remember(part: Path, headers: http.client.HTTPMessage) -> None:
    tag = headers.get("ETag")
    strong = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
    if strong:
        _validator(part).write_text(strong)
    else:
        _validator(part).unlink(missing_ok=True)


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _validator(part).unlink(missing_ok=True)


def _unpack(archive: Path, root: Path, wanted: list[str]) -> None:
    """Take the wanted members out of a tar file, and nothing else: no other path is ever written to."""
    remaining = set(wanted)
    try:
        with tarfile.open(archive) as tar:
            for item in tar:
                content = tar.extractfile(item) if item.name in remaining and item.isfile() else None
                if content is None:
                    continue
                target = root / item.name
                writable(target.parent)
                part = target.with_name(target.name + ".part")
                with open(part, "wb") as file:
                    while block := content.read(_BLOCK):
                        file.write(block)
                os.replace(part, target)
                remaining.discard(item.name)
    except (tarfile.TarError, EOFError, zlib.error) as problem:
        raise damaged(archive, "a whole tar archive", problem) from None
    if remaining:
        raise damaged(archive, f"members {', '.join(wanted)}", f"none named {', '.join(sorted(remaining))}")
