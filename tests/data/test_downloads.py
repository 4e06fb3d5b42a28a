"""Downloads against a server on loopback that breaks, lies and forgets."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.official_files import tiny_cifar, tiny_idx
from hansa.data import DataError, check_files, download, load
from hansa.data.loading import fetch
from hansa.data.sources import DatasetInfo, RemoteFile

CONTENT = np.random.default_rng(0).bytes(700_000)


@dataclass
class Served:
    """What the server does and what it was asked."""

    files: dict[str, bytes] = field(default_factory=lambda: {"/file": CONTENT})
    cuts: list[int] = field(default_factory=list)  # bytes after which each coming answer breaks off
    refusals: list[int] = field(default_factory=list)  # status codes of the coming answers
    asked: list[str] = field(default_factory=list)
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def do_GET(self) -> None:
        served = self.served
        served.asked.append(self.path)
        self.close_connection = True
        status = served.refusals.pop(0) if served.refusals else 200 if self.path in served.files else 404
        content = served.files[self.path] if status == 200 else b"no"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = served.cuts.pop(0) if served.cuts and status == 200 else len(content)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[:cut])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Served()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"served": state}))
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def remote(served: Served, *paths: str) -> RemoteFile:
    urls = tuple(served.address + path for path in paths or ("/file",))
    return RemoteFile("file", urls, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def offered(served: Served, there: RemoteFile, path: str, content: bytes) -> RemoteFile:
    """A file of a data set, served by the test."""
    served.files[path] = content
    sha = hashlib.sha256(content).hexdigest()
    return replace(there, urls=(served.address + path,), size=len(content), sha256=sha)


def test_a_file_arrives_whole_with_progress_and_leaves_nothing_beside_it(tmp_path: Path, served: Served) -> None:
    seen: list[tuple[str, int, int]] = []
    what = replace(remote(served), path="deep/file")
    assert fetch(what, tmp_path, lambda *step: seen.append(step)).read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]
    assert seen[-1] == ("file", 700_000, 700_000)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    fetch(what, tmp_path)
    assert len(served.asked) == 1  # a correct file is left alone


def test_broken_connections_and_busy_servers_are_tried_again_or_leave_nothing(tmp_path: Path, served: Served) -> None:
    served.refusals, served.cuts = [503], [300_000]
    assert fetch(remote(served), tmp_path / "a").read_bytes() == CONTENT
    assert len(served.asked) == 3
    served.cuts = [123_456] * 9
    with pytest.raises(DataError, match="file: no address provided it"):
        fetch(remote(served), tmp_path / "b", retries=1)
    assert len(served.asked) == 5
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(CONTENT[:-1] + b"!", "hash of downloaded file"), (CONTENT * 9, "more than the 700000 bytes of the file")],
)
def test_other_content_is_refused_and_removed(tmp_path: Path, served: Served, content: bytes, message: str) -> None:
    served.files["/file"] = content
    with pytest.raises(DataError, match=message):
        fetch(remote(served), tmp_path, retries=0)
    assert len(served.asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_is_sought_at_the_next_address(tmp_path: Path, served: Served) -> None:
    fetch(remote(served, "/gone", "/file"), tmp_path, retries=0)
    assert served.asked == ["/gone", "/file"]
    (tmp_path / "file").unlink()
    urls = (f"{served.address}/gone", "http://127.0.0.1:1/file", "file:///etc/passwd")
    with pytest.raises(DataError, match=r"(?s)no address provided it\.\n  http.*/gone: 404.*refused.*No connection"):
        fetch(replace(remote(served), urls=urls), tmp_path, retries=0)


def tiny_set(tmp_path: Path, served: Served) -> DatasetInfo:
    """MNIST of a few rows, served gzipped by the test."""
    info, remotes = tiny_idx(tmp_path / "made", packed=True), []
    for member, there in zip(info.files, info.downloads, strict=True):
        made = (tmp_path / "made" / member.path).with_suffix(".gz")
        remotes.append(offered(served, there, f"/{made.name}", made.read_bytes()))
    return replace(info, downloads=tuple(remotes))


def test_a_whole_set_is_got_once_and_then_only_what_is_damaged(tmp_path: Path, served: Served) -> None:
    entry = tiny_set(tmp_path, served)
    root = download(entry, tmp_path / "data")
    assert load(entry, root).inputs.shape == (3, 1, 28, 28)
    assert {state.state for state in check_files(entry, root)} == {"ok"}
    download(entry, tmp_path / "data")
    assert len(served.asked) == 4
    (root / entry.downloads[2].path).write_bytes(b"broken")
    served.asked.clear()
    download(entry, tmp_path / "data")
    assert served.asked == ["/t10k-images-idx3-ubyte.gz"]
    assert {state.state for state in check_files(entry, root)} == {"ok"}


def tiny_archive(tmp_path: Path, served: Served, extra: dict[str, bytes]) -> DatasetInfo:
    """CIFAR-10 of one row a batch in a tar.gz, with further members."""
    info = tiny_cifar(tmp_path / "made", np.zeros((1, 3072), np.uint8), [4])
    files = extra | {member.path: (tmp_path / "made" / member.path).read_bytes() for member in info.files}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            item = tarfile.TarInfo(name)
            item.size = len(content)
            tar.addfile(item, io.BytesIO(content))
    return replace(info, downloads=(offered(served, info.downloads[0], "/archive", packed.getvalue()),))


def test_an_archive_gives_its_members_and_nothing_else(tmp_path: Path, served: Served) -> None:
    extra = {"../escaped": b"no", "/absolute": b"no", "cifar-10-batches-py/readme.html": b"no"}
    entry = tiny_archive(tmp_path, served, extra)
    root = download(entry, tmp_path / "data")
    assert load(entry, root).inputs.shape == (5, 3, 32, 32)
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert found == sorted(member.path for member in entry.files)
    assert not (tmp_path / "escaped").exists()
    more = replace(entry.files[0], path="cifar-10-batches-py/data_batch_6")
    with pytest.raises(DataError, match=r"cifar-10-batches-py/data_batch_6: no such file"):
        download(replace(entry, files=(*entry.files, more)), tmp_path / "data")


def test_a_set_without_an_address_says_how_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"femnist: cannot be downloaded\. It has no official download"):
        download("femnist", tmp_path)
    assert download("fashion-mini", tmp_path) == tmp_path


def test_a_folder_that_cannot_be_written_to_is_said_so_before_anything_is_asked_for(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = tiny_set(tmp_path, served)
    (tmp_path / "data").write_text("a file")
    with pytest.raises(DataError, match="is not writable"):
        download(entry, tmp_path / "data")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "no writing here")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(DataError, match=r"is not writable .*Set HANSA_DATA"):
        download(entry, tmp_path / "other")
    assert served.asked == []
