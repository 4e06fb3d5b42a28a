"""Data sets by name: download, read, verify, normalise.

The embedded data set has the first 1,000 training and the first 200 test images of every class of Fashion-MNIST, in the
(shuffled) order of the official files. ``packaging/embedded_data.py`` builds it: a gzip stream of four .npy arrays.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hansa.core.errors import HansaError
from hansa.data.csv_folder import (
    HEART_ASSET,
    from_csv_folder,
    load_hospitals,
    read_hospital_tables,
    write_hospital_tables,
)
from hansa.data.federated import Dataset, FederatedData, partition_dataset
from hansa.data.partitions import Partition, dirichlet, natural
from hansa.data.readers import OwnedSamples, read_cifar, read_femnist, read_idx, read_shakespeare
from hansa.data.sources import (
    DATASETS,
    DataError,
    DataFile,
    DatasetInfo,
    MissingFileError,
    RemoteFile,
    data_folder,
    dataset_info,
    ensure_writable,
    invalid_file,
    read_asset,
)
from hansa.data.synthetic_data import synthetic, two_gaussians

if TYPE_CHECKING:
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_CHUNK = 500
ASSET = "fashion-mini.npy.gz"
ASSET_SHA256 = "159ebffb885221fb83a1c92845b44e4da0812fa0a907545f592059941a9d9b45"
SYNTHETIC_DATASETS: dict[str, Callable[..., FederatedData]] = {"two-gaussians": two_gaussians, "synthetic": synthetic}
CSV_FOLDER = "csv-folder"
"""The name of tables of one's own, whose rows already have owners."""


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The state of one file of a data set.

    Args:
        path: The file.
        state: "ok", "missing" or "damaged".
        detail: The error message.

    >>> FileStatus("train.bin", "missing").state
    'missing'
    """

    path: str
    state: str
    detail: str = ""


def load(name: str | DatasetInfo, folder: Path | str | None = None, **options: Any) -> Dataset:
    """Load a data set by name. Files are verified by SHA-256 if one is known; images are scaled and normalised.

    Args:
        name: Name of the data set, or its `DatasetInfo`.
        folder: The data folder; see `data_folder` for the default.
        **options: For images ``normalize=False`` keeps values from 0 to 1, for augmentations before the normalisation,
            and ``downsample=2`` averages blocks of 2 x 2 pixels; for tables ``test``.

    >>> data = load("fashion-mini")
    >>> tuple(data.inputs.shape), tuple(data.test_inputs.shape), data.classes
    ((10000, 1, 28, 28), (2000, 1, 28, 28), 10)
    """
    info, root = dataset_info(name), data_folder(folder)
    allowed = {"tables": {"test"}, "shakespeare": set[str]()}.get(info.layout, {"normalize", "downsample"})
    if not allowed.issuperset(options):
        raise HansaError(f"{info.name}: takes the options {sorted(allowed)}, found {sorted(options)}.")
    if info.layout == "tables":
        return load_hospitals(info.name, **options)
    if info.layout == "shakespeare":
        return _owned_dataset(info, read_shakespeare(root / info.folder, info.remedy), torch.from_numpy)
    scaling = image_scaling(info, **options)
    if info.layout == "femnist":
        return _owned_dataset(info, read_femnist(root / info.folder, info.remedy), scaling.apply)
    images, labels, test_images, test_labels = read_embedded() if info.layout == "embedded" else _read_files(root, info)
    return Dataset(
        name=info.name,
        inputs=scaling.apply(images.reshape(-1, *info.shape)),
        targets=torch.from_numpy(labels.astype(np.int64)),
        test_inputs=scaling.apply(test_images.reshape(-1, *info.shape)),
        test_targets=torch.from_numpy(test_labels.astype(np.int64)),
        classes=info.classes,
        class_names=info.class_names,
    )


def read_embedded() -> tuple[Bytes, ...]:
    """Return training images and labels, test images and labels of the embedded data set."""
    stream = io.BytesIO(gzip.decompress(read_asset(ASSET, ASSET_SHA256)))
    return tuple(np.load(stream, allow_pickle=False) for _ in range(4))


class ImageScaling(NamedTuple):
    """How the bytes of images become inputs: blocks of pixels are averaged, then (x / 255 - mean) / std.

    Args:
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        downsample: The side of the blocks; 1 leaves images as they are.

    >>> ImageScaling((0.5,), (0.25,)).apply(np.full((1, 1, 1, 2), 255, np.uint8)).tolist()
    [[[[2.0, 2.0]]]]
    >>> ImageScaling((0.0,), (1.0,), 2).apply(np.array([[[[0, 255], [255, 0]]]], np.uint8)).tolist()
    [[[[0.5]]]]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    downsample: int = 1

    def apply(self, images: Bytes) -> torch.Tensor:
        """Return images [n, C, H, W] of bytes as float32, channels-last in memory."""
        count, channels, height, width = images.shape
        rows = torch.empty(count, height // self.downsample, width // self.downsample, channels)
        shift, scale = torch.tensor(self.mean), torch.tensor(self.std)
        for start in range(0, count, _CHUNK):  # chunks that fit the cache: four times as fast
            block = rows[start : start + _CHUNK]
            values = torch.from_numpy(images[start : start + _CHUNK].astype(np.float32))
            if self.downsample > 1:
                values = torch.nn.functional.avg_pool2d(values, self.downsample)
            block.copy_(values.permute(0, 2, 3, 1))
            block.div_(255).sub_(shift).div_(scale)
        return rows.permute(0, 3, 1, 2)


def image_scaling(info: DatasetInfo, normalize: bool = True, downsample: int = 1) -> ImageScaling:
    """Return how an image data set is scaled with the given options of `load`.

    >>> image_scaling(DATASETS["fashion-mini"], normalize=False, downsample=2)
    ImageScaling(mean=(0.0,), std=(1.0,), downsample=2)
    """
    if not isinstance(normalize, bool):
        raise HansaError(f"{info.name}: normalize: {normalize!r}: expected true or false.")
    height, width = info.shape[1:]
    if type(downsample) is not int or downsample < 1 or height % downsample or width % downsample:
        expected = f"a number that divides {height} and {width}"
        raise HansaError(f"{info.name}: downsample: {downsample!r}: expected {expected}.")
    if not normalize:
        return ImageScaling((0.0,) * len(info.mean), (1.0,) * len(info.std), downsample)
    return ImageScaling(info.mean, info.std, downsample)


def federate(
    name: str,
    partition: Partition | None = None,
    clients: int | None = None,
    seed: int | None = None,
    folder: Path | str | None = None,
    **options: Any,
) -> FederatedData:
    """Load a data set by name and assign it to clients. Synthetic data sets have their own clients.

    Args:
        name: Name of the data set; `dataset_names` lists them.
        partition: How rows are assigned; by default natural owners if there are any, otherwise ``dirichlet(0.3)``.
        clients: Number of clients.
        seed: Seed of the partition or of the synthetic data; by default it follows the seed of the run. For files of
            your own, the seed of the choice of test rows, 0 by default.
        folder: The data folder; see `data_folder` for the default.
        **options: Further arguments of `load`, of the synthetic data set or of `from_csv_folder`.

    >>> federate("fashion-mini", clients=50).population
    50
    >>> federate("synthetic", clients=3, alpha=0.5, beta=0.5).population
    3
    """
    if name in SYNTHETIC_DATASETS or name == CSV_FOLDER:
        if (partition is not None and not isinstance(partition, natural)) or (name == CSV_FOLDER and clients):
            raise HansaError(f"{name}: has its own clients: leave out {partition or clients}.")
        try:
            if name == CSV_FOLDER:
                if folder is None:
                    raise HansaError("csv-folder: expected the folder of the files (data.folder).")
                return from_csv_folder(folder, seed=0 if seed is None else seed, **options)
            draw = partial(SYNTHETIC_DATASETS[name], **options if clients is None else {**options, "clients": clients})
            return draw(seed=seed) if seed is not None else draw(seed=0).following(draw)
        except TypeError as error:
            raise HansaError(f"{name}: {error}.") from None
    data = load(dataset_info(name, also=[*SYNTHETIC_DATASETS, CSV_FOLDER]), folder, **options)
    if partition is None:
        partition = natural() if data.groups is not None else dirichlet(0.3)
    return partition_dataset(data, partition, clients, seed)


def dataset_names() -> list[str]:
    """Return the names of all data sets that `federate` loads.

    >>> "cifar10" in dataset_names()
    True
    """
    return [*DATASETS, *SYNTHETIC_DATASETS, CSV_FOLDER]


def check_files(name: str | DatasetInfo, folder: Path | str | None = None) -> tuple[FileStatus, ...]:
    """Read every file of a data set, compare it with its SHA-256 if one is known, and return its state.

    Args:
        name: Name of the data set, or its `DatasetInfo`.
        folder: The data folder; see `data_folder` for the default.

    >>> check_files("fashion-mini")[0].state
    'ok'
    """
    info, root = dataset_info(name), data_folder(folder)
    if info.layout == "embedded":
        return (_check_file(ASSET, read_embedded),)
    if info.layout == "tables":
        return (_check_file(HEART_ASSET, read_hospital_tables),)
    if info.files:
        return tuple(_check_file(root / file.path, partial(_read_file, root, info, file)) for file in info.files)
    return (_check_file(root / info.folder, partial(load, info, folder)),)


def is_present(name: str | DatasetInfo, folder: Path | str | None = None) -> bool:
    """Return whether the files of a data set exist, without reading them.

    Args:
        name: Name of the data set, or its `DatasetInfo`.
        folder: The data folder; see `data_folder` for the default.

    >>> is_present("fashion-mini")
    True
    """
    info, root = dataset_info(name), data_folder(folder)
    if info.files:
        paths = [root / file.path for file in info.files]
        return all(path.is_file() or path.with_name(path.name + ".gz").is_file() for path in paths)
    path = root / info.folder
    return info.layout in ("embedded", "tables") or (path.is_dir() and any(path.iterdir()))


def _check_file(path: Path | str, read: Callable[[], object]) -> FileStatus:
    try:
        read()
    except MissingFileError as error:
        return FileStatus(str(path), "missing", str(error))
    except DataError as error:
        return FileStatus(str(path), "damaged", str(error))
    return FileStatus(str(path), "ok")


def _read_files(root: Path, info: DatasetInfo) -> list[Bytes]:
    """Return training images and labels, test images and labels of the files of a data set."""
    arrays: dict[bool, list[Bytes]] = {True: [], False: []}
    for file in info.files:
        arrays[file.train] += _read_file(root, info, file)
    return [np.concatenate(arrays[train][kind::2]) for train in (True, False) for kind in (0, 1)]


def _read_file(root: Path, info: DatasetInfo, file: DataFile) -> list[Bytes]:
    """Return the arrays of one file: images, labels, or both."""
    path = root / file.path
    if info.layout == "idx":
        *arrays, digest = read_idx(path, axes=3 if "images" in path.name else 1, remedy=info.remedy)
    else:
        *arrays, digest = read_cifar(path, info.remedy)
    if digest != file.sha256:
        raise invalid_file(path, f"contents of SHA-256 {file.sha256}", digest, info.remedy)
    return arrays


def _owned_dataset(info: DatasetInfo, samples: OwnedSamples, inputs: Callable[[Any], torch.Tensor]) -> Dataset:
    has_test = len(samples.test_targets) > 0
    return Dataset(
        name=info.name,
        inputs=inputs(samples.inputs),
        targets=torch.from_numpy(samples.targets),
        test_inputs=inputs(samples.test_inputs) if has_test else None,
        test_targets=torch.from_numpy(samples.test_targets) if has_test else None,
        classes=info.classes,
        groups=torch.from_numpy(samples.groups),
        group_names=samples.names,
        class_names=info.class_names,
        test_groups=torch.from_numpy(samples.test_groups) if has_test else None,
    )


# ---- downloads by pooch: verified by SHA-256, tried again, complete before they appear

Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes received so far, and the total number of bytes."""


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
        timeout: Seconds of silence after which a transfer has failed.

    >>> from hansa.data import is_present
    >>> is_present("fashion-mini")  # embedded: nothing to download
    True
    """
    info, root = dataset_info(name), data_folder(folder)
    if info.layout == "tables":  # embedded, and of use as files too
        write_hospital_tables(ensure_writable(root) / info.folder)
        return root
    if info.layout == "embedded" or all(status.state == "ok" for status in check_files(info, root)):
        return root
    if not info.downloads:
        raise DataError(f"{info.name}: cannot be downloaded. {info.instructions}")
    for remote in info.downloads:
        path = fetch(remote, ensure_writable(root), progress, retries=retries, timeout=timeout)
        if remote.unpack:
            _unpack(path, root, [file.path for file in info.files])
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
        timeout: Seconds of silence after which a transfer has failed.
    """
    import pooch
    from requests import RequestException

    pooch.get_logger().setLevel("WARNING")
    ensure_writable((root / remote.path).parent)
    problems = []
    for url in remote.urls:
        digests = {remote.path: f"sha256:{remote.sha256}"}
        store = pooch.create(root, "", registry=digests, urls={remote.path: url}, retry_if_failed=retries)
        meter = _Meter(Path(remote.path).name, remote.size, progress)
        headers = {"Accept-Encoding": "identity"}
        transfer = pooch.HTTPDownloader(meter, _Meter.CHUNK, timeout=timeout, headers=headers)
        try:
            return Path(store.fetch(remote.path, downloader=transfer))
        except (RequestException, ValueError, OSError, OverflowError) as error:
            problems.append(f"{url}: {error}")
    raise DataError(f"{remote.path}: no address provided it.\n  " + "\n  ".join(problems))


class _Meter:
    """What pooch takes for a progress bar: reports progress, and stops a transfer that is too long."""

    CHUNK = 1 << 12

    def __init__(self, name: str, size: int, progress: Progress | None) -> None:
        self.name, self.size, self.progress, self.received = name, size, progress, 0

    def reset(self) -> None:
        """Begin anew."""
        self.received = 0

    def update(self, count: int) -> None:
        """Count received bytes."""
        self.received += count
        if self.received - self.CHUNK > self.size:
            raise OverflowError(f"more than the {self.size} bytes of the file")  # not repeated
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
    """Extract the named members of a tar file, and remove it. No other path is ever written to."""
    try:
        with tarfile.open(archive) as tar:
            for item in tar:
                if item.name in members and (content := tar.extractfile(item)) is not None:
                    (ensure_writable((root / item.name).parent) / Path(item.name).name).write_bytes(content.read())
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise invalid_file(archive, "a whole tar archive", error) from None
    archive.unlink()
