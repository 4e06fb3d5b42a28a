"""Data sets by name: embedded, generated, from tiny files in official layouts, from a server that breaks and lies."""

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
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.official_files import tiny_cifar, tiny_idx, write_idx
from hansa.core.errors import HansaError
from hansa.data import (
    DataError,
    Dataset,
    MissingFileError,
    check_files,
    data_folder,
    dataset_info,
    dataset_names,
    dirichlet,
    download,
    federate,
    is_present,
    load,
    synthetic,
    two_gaussians,
)
from hansa.data.loading import ASSET, ImageScaling, fetch
from hansa.data.sources import DATASETS, DatasetInfo, RemoteFile
from mistakes import refused

DRAW = np.random.default_rng(0)


@pytest.fixture(scope="module")
def embedded() -> Dataset:
    return load("fashion-mini")


def test_the_embedded_set_is_the_stratified_start_of_fashion_mnist(embedded: Dataset) -> None:
    data = embedded
    assert data.test_inputs is not None
    assert data.test_targets is not None
    assert torch.bincount(data.targets).tolist() == [1000] * 10
    assert torch.bincount(data.test_targets).tolist() == [200] * 10
    # the first labels of the official training and test files
    assert data.targets[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert data.test_targets[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    assert data.inputs.dtype == torch.float32
    assert abs(float(data.inputs.double().mean())) < 0.02
    assert abs(float(data.inputs.double().std()) - 1) < 0.02
    assets = resources.files("hansa.data") / "assets"
    assert len((assets / ASSET).read_bytes()) < 6_000_000
    notice = (assets / "FASHION-MNIST-LICENSE.txt").read_text(encoding="utf-8")
    assert "Copyright © 2017 Zalando SE" in notice


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_set_is_loaded_and_normalised(tmp_path: Path, packed: bool) -> None:
    entry = tiny_idx(tmp_path, packed)
    data = load(entry, tmp_path)
    assert data.inputs.shape == (3, 1, 28, 28)
    assert data.test_inputs is not None
    assert data.test_inputs.shape == (2, 1, 28, 28)
    raw = np.round((data.inputs.double().numpy() * 0.3081 + 0.1307) * 255)
    assert set(np.unique(raw)) <= set(range(10))
    assert [state.state for state in check_files(entry, tmp_path)] == ["ok"] * 4
    assert is_present(entry, tmp_path)


def test_a_cifar_set_is_loaded_in_the_order_of_its_batches(tmp_path: Path) -> None:
    entry = tiny_cifar(tmp_path, DRAW.integers(0, 256, (2, 3072), dtype=np.uint8), [3, 8])
    data = load(entry, tmp_path)
    assert data.inputs.shape == (10, 3, 32, 32)
    assert data.targets.tolist() == [3, 8] * 5
    assert data.test_inputs is not None
    assert data.test_inputs.shape == (2, 3, 32, 32)
    assert data.inputs.is_contiguous(memory_format=torch.channels_last)


def test_normalising_is_the_formula_channel_by_channel() -> None:
    images = DRAW.integers(0, 256, (1234, 3, 4, 5), dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = (images / 255 - np.reshape(mean, (1, 3, 1, 1))) / np.reshape(std, (1, 3, 1, 1))
    np.testing.assert_allclose(ImageScaling(mean, std).apply(images).numpy(), expected, rtol=2e-6, atol=2e-6)


def test_a_file_of_the_wrong_checksum_is_refused_with_both_sums(tmp_path: Path) -> None:
    entry = tiny_idx(tmp_path)
    path = tmp_path / entry.files[0].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=f"{path.name}: expected contents of SHA-256 {entry.files[0].sha256}, found "):
        load(entry, tmp_path)
    assert [state.state for state in check_files(entry, tmp_path)] == ["damaged", "ok", "ok", "ok"]
    write_idx(path, np.zeros((3, 28, 27), np.uint8))
    with pytest.raises(DataError, match="expected contents of SHA-256"):
        load(entry, tmp_path)


def test_a_missing_file_names_the_command_that_gets_it(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"train-images-idx3-ubyte: no such file\. Run `hansa data get mnist`"):
        load("mnist", tmp_path)
    assert {state.state for state in check_files("mnist", tmp_path)} == {"missing"}
    assert not is_present("mnist", tmp_path)
    assert is_present("fashion-mini", tmp_path)
    assert not is_present("femnist", tmp_path)
    assert {state.state for state in check_files("femnist", tmp_path)} == {"missing"}


test_names_and_options_that_are_not_known_are_refused = refused(
    (lambda: dataset_info("cifar-10"), "Did you mean cifar10"),
    (lambda: federate("two-gausians"), r"no data set 'two-gausians'\. Did you mean two-gaussians"),
    (lambda: load("fashion-mini", stride=2), r"takes the options .'downsample', 'normalize'., found .'stride'."),
    (lambda: federate("synthetic", gamma=2), "synthetic: .*gamma"),
    (lambda: federate("two-gaussians", dirichlet(0.3)), "has its own clients"),
)
test_a_downsampling_that_does_not_divide_the_image_is_refused = refused(
    *((value, "fashion-mini: downsample: .*divides 28 and 28") for value in (0, -2, 3, 2.0, True, "2")),
    by=lambda value: load("fashion-mini", downsample=value),
)


def test_every_registered_set_is_described() -> None:
    for entry in DATASETS.values():
        assert entry.licence
        assert entry.homepage.startswith("http")
        assert entry.downloads or entry.instructions or entry.layout in ("embedded", "tables")
        assert len(entry.mean) == len(entry.std) == (entry.shape[0] if len(entry.shape) == 3 else 0)
        for sha in [member.sha256 for member in entry.files] + [remote.sha256 for remote in entry.downloads]:
            assert len(sha) == 64
            assert int(sha, 16) >= 0
    assert set(dataset_names()) == {*DATASETS, "two-gaussians", "synthetic", "csv-folder"}


def test_the_data_folder_is_the_given_then_the_environments_then_the_platforms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANSA_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder(tmp_path / "other") == tmp_path / "other"
    monkeypatch.setenv("HANSA_DATA", "")
    assert data_folder().parts[-2:] == ("hansa", "data")


def test_blocks_of_pixels_are_averaged_where_that_is_asked_for() -> None:
    full, small = load("fashion-mini", normalize=False), load("fashion-mini", normalize=False, downsample=4)
    assert small.shape == (1, 7, 7)
    assert (float(full.inputs.min()), float(full.inputs.max())) == (0, 1)
    for whole, averaged in ((full.inputs, small.inputs), (full.test_inputs, small.test_inputs)):
        assert whole is not None
        assert averaged is not None
        assert len(averaged) == len(whole)
        assert float(averaged[3, 0, 2, 5]) == pytest.approx(float(whole[3, 0, 8:12, 20:24].mean()), abs=1e-6)
    assert torch.equal(small.targets, full.targets)
    normalised = load("fashion-mini", downsample=4)
    assert torch.allclose((small.inputs - 0.2860) / 0.3530, normalised.inputs, atol=1e-5)


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


@pytest.mark.parametrize(("study", "variance"), [(1, 1.0), (2, 0.5)])
def test_the_two_client_study_has_its_means_and_covariances(study: int, variance: float) -> None:
    data = two_gaussians(study, seed=3, points=20_000, dtype=torch.float64)
    for client, mean in ((0, [1.0, 0.0]), (1, [0.0, 1.0])):
        own = data.inputs[data.rows(client)]
        assert own.mean(0).tolist() == pytest.approx(mean, abs=0.03)
        covariance = torch.cov(own.T)
        assert covariance.flatten().tolist() == pytest.approx([variance, 0, 0, variance], abs=0.03)
        assert data.targets[data.rows(client)].unique().tolist() == [client]


def test_the_two_client_study_has_ten_points_each_and_is_seeded() -> None:
    first, again, other = (two_gaussians(1, seed) for seed in (0, 0, 1))
    assert first.sizes.tolist() == [10, 10]
    assert (first.classes, first.shape, first.test_inputs) == (2, (2,), None)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    with pytest.raises(HansaError, match=r"two_gaussians\(study=3\): expected 1 or 2"):
        two_gaussians(3)


def test_synthetic_features_have_the_falling_variances_of_the_paper() -> None:
    data = synthetic(1.0, 1.0, clients=40, seed=1, dtype=torch.float64)
    pooled = torch.cat([data.inputs[data.rows(i)] - data.inputs[data.rows(i)].mean(0) for i in range(40)])
    expected = torch.arange(1, 61, dtype=torch.float64) ** -1.2
    assert float((pooled.var(0) / expected - 1).abs().max()) < 0.1


def test_synthetic_centres_spread_with_beta() -> None:
    # a client's centre has mean B_k over its coordinates, B_k ~ N(0, beta)
    for beta in (0.0, 3.0):
        data = synthetic(0.0, beta, clients=200, seed=2, largest=60)
        centres = torch.stack([data.inputs[data.rows(i)].mean() for i in range(200)])
        assert float(centres.std()) == pytest.approx((beta**2 + 1 / 60) ** 0.5, rel=0.2, abs=0.05)


def agreement(iid: bool) -> float:
    """How well a linear model, fitted by least squares to one client, explains the others."""
    data = synthetic(1.0, 1.0, clients=6, seed=4, iid=iid, dtype=torch.float64)
    padded = torch.cat([data.inputs, torch.ones(len(data.inputs), 1)], 1)
    largest = int(data.sizes.argmax())
    own = data.rows(largest)
    labels = torch.nn.functional.one_hot(data.targets[own], 10).double()
    weights = torch.linalg.lstsq(padded[own], labels, driver="gelsd").solution
    others = torch.cat([data.rows(i) for i in range(6) if i != largest])
    return float(((padded[others] @ weights).argmax(1) == data.targets[others]).double().mean())


def test_clients_share_one_model_only_when_iid() -> None:
    assert agreement(iid=True) > 0.6
    assert agreement(iid=False) < 0.3


def test_synthetic_sizes_have_the_floor_the_cap_and_a_tenth_for_testing() -> None:
    data = synthetic(0.5, 0.5, clients=100, seed=0, largest=500)
    assert data.test_targets is not None
    assert int(data.sizes.min()) >= 45  # nine tenths of 50
    assert int(data.sizes.max()) == 450
    assert len(data.test_targets) == pytest.approx(len(data.targets) / 9, rel=0.03)
    more = synthetic(0.5, 0.5, clients=101, seed=0, largest=500)  # they leave the first ones as they are
    assert torch.equal(data.inputs[data.rows(99)], more.inputs[more.rows(99)])
