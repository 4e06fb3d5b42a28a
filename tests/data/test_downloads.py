"""Downloads against a server on loopback that breaks, lies and forgets."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.official_files import cifar_bytes, write_idx
from hansa.data import DataError, check_files, dataset_info, download, load
from hansa.data.downloads import fetch
from hansa.data.sources import DatasetInfo, RemoteFile

CONTENT = np.random.default_rng(0).bytes(700_000)


@dataclass
class Served:
    """What the server does and what it was asked."""

    files: dict[str, bytes] = field(default_factory=lambda: {"/file": CONTENT})
    ranges: bool = True
    tag: str | None = '"one"'
    cuts: list[int] = field(default_factory=list)  # bytes after which each coming answer breaks off
    refusals: list[int] = field(default_factory=list)  # status codes of the coming answers
    lying_start: int | None = None
    drip: float = 0.0  # seconds between single bytes of the contents
    slow_head: float = 0.0  # seconds between single bytes of the headers
    asked: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def do_GET(self) -> None:
        served = self.served
        served.asked.append({"path": self.path, "range": self.headers.get("Range"), "if": self.headers.get("If-Range")})
        self.close_connection = True
        if served.slow_head:
            with contextlib.suppress(ConnectionError):
                for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 10_000:
                    self.wfile.write(bytes([byte]))
                    time.sleep(served.slow_head)
            return
        if served.refusals:
            self.answer(served.refusals.pop(0), b"")
            return
        content = served.files.get(self.path)
        if content is None:
            self.answer(404, b"no")
            return
        wanted, unchanged = self.headers.get("Range"), self.headers.get("If-Range") in (None, served.tag)
        if not (served.ranges and wanted and unchanged):
            self.answer(200, content)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            self.answer(416, b"")
            return
        told = start if served.lying_start is None else served.lying_start
        self.answer(206, content[start:], ("Content-Range", f"bytes {told}-{len(content) - 1}/{len(content)}"))

    def answer(self, status: int, content: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if self.served.tag is not None:
            self.send_header("ETag", self.served.tag)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        cut = self.served.cuts.pop(0) if self.served.cuts and status in (200, 206) else len(content)
        with contextlib.suppress(ConnectionError):
            for place in range(cut if self.served.drip else 0):
                self.wfile.write(content[place : place + 1])
                time.sleep(self.served.drip)
            self.wfile.write(b"" if self.served.drip else content[:cut])

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


def remote(served: Served, *paths: str, content: bytes = CONTENT) -> RemoteFile:
    urls = tuple(served.address + path for path in paths or ("/file",))
    return RemoteFile("file", urls, len(content), hashlib.sha256(content).hexdigest())


def get(what: RemoteFile, target: Path, **options: Any) -> list[float]:
    pauses: list[float] = []
    fetch(what, target, pause=pauses.append, **options)
    return pauses


def test_a_file_arrives_whole_with_progress_and_leaves_nothing_beside_it(tmp_path: Path, served: Served) -> None:
    seen: list[tuple[str, int, int]] = []
    get(remote(served), tmp_path / "deep" / "file", progress=lambda *step: seen.append(step))
    assert (tmp_path / "deep" / "file").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]
    assert seen[-1] == ("file", 700_000, 700_000)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


def test_a_broken_connection_is_resumed_where_it_broke(tmp_path: Path, served: Served) -> None:
    served.cuts = [300_000, 100_000]
    pauses = get(remote(served), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [ask["range"] for ask in served.asked] == [None, "bytes=300000-", "bytes=400000-"]
    assert [ask["if"] for ask in served.asked] == [None, '"one"', '"one"']
    assert len(pauses) == 2


def test_a_connection_that_breaks_often_but_gets_on_is_never_given_up(tmp_path: Path, served: Served) -> None:
    served.cuts = [90_000] * 7
    get(remote(served), tmp_path / "file", retries=1)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert len(served.asked) == 8


def test_a_server_that_drips_is_given_up_though_no_single_byte_is_late(tmp_path: Path, served: Served) -> None:
    served.drip = 0.02
    began = time.monotonic()
    with pytest.raises(DataError, match=r"too slow: \d+ bytes a second, expected at least 8192"):
        get(remote(served), tmp_path / "file", retries=1, timeout=0.3)
    assert len(served.asked) == 2
    assert time.monotonic() - began < 10  # it would have taken hours


def test_a_server_that_breaks_off_after_every_byte_is_given_up(tmp_path: Path, served: Served) -> None:
    served.cuts = [1] * 100
    with pytest.raises(DataError, match="expected 700000 bytes, found 3 after"):
        fetch(remote(served), tmp_path / "file", retries=2, pause=lambda _: time.sleep(0.02))
    assert len(served.asked) == 3


def test_headers_that_never_end_are_given_up(tmp_path: Path, served: Served) -> None:
    served.slow_head = 0.02
    with pytest.raises(DataError, match="expected 700000 bytes, found 0 after"):
        get(remote(served), tmp_path / "file", retries=1, timeout=0.3)
    assert len(served.asked) == 2


def test_a_later_call_goes_on_with_what_an_earlier_one_left(tmp_path: Path, served: Served) -> None:
    served.cuts = [123_456, 0, 0]
    with pytest.raises(DataError, match="expected 700000 bytes, found 123456 after"):
        get(remote(served), tmp_path / "file", retries=1)
    assert (tmp_path / "file.part").stat().st_size == 123_456
    assert not (tmp_path / "file").exists()
    get(remote(served), tmp_path / "file")
    assert served.asked[-1]["range"] == "bytes=123456-"
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_the_whole_again(tmp_path: Path, served: Served) -> None:
    served.ranges, served.cuts = False, [300_000]
    get(remote(served), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_file_that_changed_on_the_server_is_started_anew(tmp_path: Path, served: Served) -> None:
    (tmp_path / "file.part").write_bytes(b"old beginning")
    (tmp_path / "file.part.tag").write_text('"zero"')
    get(remote(served), tmp_path / "file")
    assert served.asked[0]["range"] == "bytes=13-"  # asked, but If-Range let the server say no
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert not (tmp_path / "file.part.tag").exists()


def test_a_wrong_beginning_without_a_tag_is_thrown_away_and_fetched_once_more(tmp_path: Path, served: Served) -> None:
    served.tag = None
    (tmp_path / "file.part").write_bytes(b"x" * 1000)
    get(remote(served), tmp_path / "file")
    assert [ask["range"] for ask in served.asked] == ["bytes=1000-", None]
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("left", [700_000, 700_001, 900_000])
def test_a_part_as_long_as_the_file_or_longer_is_judged_by_its_checksum(
    tmp_path: Path, served: Served, left: int
) -> None:
    (tmp_path / "file.part").write_bytes((CONTENT + b"x" * 200_000)[:left])
    get(remote(served), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert len(served.asked) == (0 if left == 700_000 else 1)


def test_a_range_the_server_has_not_got_starts_over(tmp_path: Path, served: Served) -> None:
    served.files["/file"], served.tag = CONTENT[:1000], None
    (tmp_path / "file.part").write_bytes(b"x" * 1500)
    what = replace(remote(served, content=CONTENT[:1000]), size=2000)
    with pytest.raises(DataError, match=r"expected 2000 bytes, found 0 after the server does not have this range"):
        get(what, tmp_path / "file", retries=2)
    assert served.asked[0]["range"] == "bytes=1500-"
    assert served.asked[1]["range"] is None


def test_a_part_from_the_wrong_place_is_not_appended(tmp_path: Path, served: Served) -> None:
    served.lying_start = 5
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    get(remote(served), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert served.asked[-1]["range"] is None


def test_a_wrong_checksum_is_refused_with_both_sums_and_removed(tmp_path: Path, served: Served) -> None:
    wrong = CONTENT[:-1] + b"!"
    served.files["/file"] = wrong
    expected, found = hashlib.sha256(CONTENT).hexdigest(), hashlib.sha256(wrong).hexdigest()
    with pytest.raises(DataError, match=rf"file: expected SHA-256 {expected} \(700000 bytes\), found {found}"):
        get(remote(served), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_sends_more_than_the_file_is_stopped(tmp_path: Path, served: Served) -> None:
    served.files["/file"] = CONTENT + b"more"
    with pytest.raises(DataError, match="file: expected 700000 bytes, found more"):
        get(remote(served), tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_passing_refusals_are_waited_out_with_growing_pauses(tmp_path: Path, served: Served) -> None:
    served.refusals = [503, 429, 500]
    pauses = get(remote(served), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert pauses == [1.0, 2.0, 4.0]


def test_a_file_that_is_not_there_is_not_asked_for_again_but_sought_at_the_next_address(
    tmp_path: Path, served: Served
) -> None:
    assert get(remote(served, "/gone", "/file"), tmp_path / "file") == []
    assert [ask["path"] for ask in served.asked] == ["/gone", "/file"]
    with pytest.raises(DataError, match=r"no address provided it\.\n  http.*/gone: HTTP 404") as caught:
        get(remote(served, "/gone", "/lost"), tmp_path / "other")
    assert "/lost: HTTP 404" in str(caught.value)


def test_an_address_nobody_listens_at_is_given_up_in_words(tmp_path: Path, served: Served) -> None:
    what = replace(remote(served), urls=("http://127.0.0.1:1/file", "file:///etc/passwd"))
    with pytest.raises(DataError, match=r"(?s)expected 700000 bytes, found 0 after.*refused.*an http or https"):
        get(what, tmp_path / "file", retries=1, timeout=5)


def tiny_set(tmp_path: Path, served: Served) -> DatasetInfo:
    """MNIST of a few rows, served gzipped by the test."""
    members, remotes = [], []
    for member, there in zip(dataset_info("mnist").files, dataset_info("mnist").downloads, strict=True):
        shape = (3, 28, 28) if "images" in member.path else (3,)
        made = tmp_path / "made" / member.path
        digest = write_idx(made, np.random.default_rng(1).integers(0, 10, shape, dtype=np.uint8), packed=True)
        content = made.with_name(made.name + ".gz").read_bytes()
        name = "/" + made.name + ".gz"
        served.files[name] = content
        members.append(replace(member, rows=3, sha256=digest))
        remotes.append(
            replace(there, urls=(served.address + name,), size=len(content), sha256=hashlib.sha256(content).hexdigest())
        )
    return replace(dataset_info("mnist"), files=tuple(members), downloads=tuple(remotes))


def test_a_whole_set_is_got_once_and_then_left_alone(tmp_path: Path, served: Served) -> None:
    entry = tiny_set(tmp_path, served)
    root = download(entry, tmp_path / "data")
    assert load(entry, root).inputs.shape == (3, 1, 28, 28)
    assert {state.state for state in check_files(entry, root)} == {"ok"}
    before = len(served.asked)
    download(entry, tmp_path / "data")
    assert len(served.asked) == before == 4


def test_only_the_file_that_is_damaged_is_got_again(tmp_path: Path, served: Served) -> None:
    entry = tiny_set(tmp_path, served)
    root = download(entry, tmp_path / "data")
    (root / entry.downloads[2].path).write_bytes(b"broken")
    served.asked.clear()
    download(entry, tmp_path / "data")
    assert [ask["path"] for ask in served.asked] == ["/t10k-images-idx3-ubyte.gz"]
    assert {state.state for state in check_files(entry, root)} == {"ok"}


def tiny_archive(served: Served, extra: dict[str, bytes]) -> DatasetInfo:
    """CIFAR-10 of one row a batch in a tar.gz, with further members."""
    members, files = [], dict(extra)
    for member in dataset_info("cifar10").files:
        pixels = np.random.default_rng(2).integers(0, 256, (1, 3072), dtype=np.uint8)
        files[member.path] = cifar_bytes(pixels, [4])
        members.append(replace(member, rows=1, sha256=hashlib.sha256(pixels.tobytes() + b"\x04").hexdigest()))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            item = tarfile.TarInfo(name)
            item.size = len(content)
            tar.addfile(item, io.BytesIO(content))
    content = packed.getvalue()
    served.files["/archive"] = content
    there = replace(
        dataset_info("cifar10").downloads[0],
        urls=(served.address + "/archive",),
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    return replace(dataset_info("cifar10"), files=tuple(members), downloads=(there,))


def test_an_archive_gives_its_members_and_nothing_else(tmp_path: Path, served: Served) -> None:
    entry = tiny_archive(served, {"../escaped": b"no", "/absolute": b"no", "cifar-10-batches-py/readme.html": b"no"})
    root = download(entry, tmp_path / "data")
    assert load(entry, root).inputs.shape == (5, 3, 32, 32)
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert found == sorted(member.path for member in entry.files)
    assert not (tmp_path / "escaped").exists()


def test_an_archive_that_lacks_a_member_is_refused_by_name(tmp_path: Path, served: Served) -> None:
    entry = tiny_archive(served, {})
    more = replace(entry.files[0], path="cifar-10-batches-py/data_batch_6")
    with pytest.raises(DataError, match=r"none named cifar-10-batches-py/data_batch_6"):
        download(replace(entry, files=(*entry.files, more)), tmp_path / "data")


def test_a_set_without_an_address_says_how_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"femnist: cannot be downloaded\. It has no official download"):
        download("femnist", tmp_path)
    assert download("fashion-mini", tmp_path) == tmp_path


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_said_so_before_anything_is_asked_for(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    entry = tiny_set(tmp_path, served)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, "no writing here")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(
        DataError, match=r"data: the data folder is read-only .*Set HANSA_DATA to a folder you may write"
    ):
        download(entry, tmp_path / "data")
    assert served.asked == []


def test_a_folder_that_is_a_file_is_said_so(tmp_path: Path, served: Served) -> None:
    entry = tiny_set(tmp_path, served)
    (tmp_path / "data").write_text("a file")
    with pytest.raises(DataError, match="cannot be created"):
        download(entry, tmp_path / "data")
