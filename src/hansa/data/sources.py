"""The data folder, errors that name a data file, and the known data sets: files, download addresses, licences."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs

from hansa.core.errors import HansaError, suggestion


class DataError(HansaError):
    """A data file, folder or array has the wrong content.

    >>> issubclass(DataError, HansaError)
    True
    """


class MissingFileError(DataError):
    """A data file does not exist.

    >>> issubclass(MissingFileError, DataError)
    True
    """


def invalid_file(path: Path | str, expected: object, actual: object, remedy: str = "") -> DataError:
    """Return the error for a file with the wrong content.

    >>> invalid_file("raw/train", "60000 images", "12")
    DataError('raw/train: expected 60000 images, found 12.')
    """
    return DataError(f"{path}: expected {expected!s:.400}, found {actual!s:.400}.{' ' + remedy if remedy else ''}")


def missing_file(path: Path | str, remedy: str) -> MissingFileError:
    """Return the error for a file that does not exist; the remedy says where to get it.

    >>> missing_file("raw/train", "Run `hansa data get mnist`.")
    MissingFileError('raw/train: no such file. Run `hansa data get mnist`.')
    """
    return MissingFileError(f"{path}: no such file. {remedy}")


def read_asset(name: str, digest: str) -> bytes:
    """Return a file that is shipped with the package, after a check of its SHA-256."""
    path = resources.files("hansa.data") / "assets" / name
    content = path.read_bytes()
    if (actual := hashlib.sha256(content).hexdigest()) != digest:
        raise invalid_file(str(path), f"SHA-256 {digest}", actual, "Reinstall hansa.")
    return content


def data_folder(folder: Path | str | None = None) -> Path:
    """Return the folder that holds the data sets. It need not exist yet.

    Args:
        folder: The folder to use; by default ``HANSA_DATA``, or else the platform's cache folder.

    >>> data_folder("my/data").name
    'data'
    """
    if folder is not None:
        return Path(folder).expanduser()
    variable = os.environ.get("HANSA_DATA")
    return Path(variable).expanduser() if variable else platformdirs.user_cache_path("hansa") / "data"


def ensure_writable(folder: Path) -> Path:
    """Create the folder if needed. Raise now, not after the download, if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(f"{folder}: is not writable ({error.strerror or error}). Set HANSA_DATA to another.") from error
    return folder


def spreadsheet_text(text: str) -> str:
    """Return a text for a cell of a CSV file: what a spreadsheet would run as a formula gets an apostrophe in front.

    >>> spreadsheet_text("=1+1"), spreadsheet_text("north")
    ("'=1+1", 'north')
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at its publisher; with ``unpack`` it is an archive of the data files."""

    path: str
    urls: tuple[str, ...]
    size: int
    sha256: str
    unpack: bool = False


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that a reader reads.

    ``sha256`` is of its contents, independent of compression and file names: the uncompressed bytes of an idx file, the
    pixels and then the labels (a byte each) of a CIFAR batch.
    """

    path: str
    sha256: str
    train: bool


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Description of a data set.

    Args:
        name: Name of the data set.
        title: One line about it.
        layout: Format of the files, which selects the reader.
        folder: Where its files are, below the data folder.
        shape: Shape of one input.
        classes: Number of classes.
        licence: Licence of the data.
        homepage: Its web page.
        files: The files that the reader reads.
        downloads: The files at the publisher.
        mean: Mean of each channel, for the normalisation.
        std: Standard deviation of each channel.
        class_names: Names of the classes.
        instructions: How to get a data set that cannot be downloaded.

    >>> DATASETS["cifar10"].classes
    10
    """

    name: str
    title: str
    layout: str
    folder: str
    shape: tuple[int, ...]
    classes: int
    licence: str
    homepage: str
    files: tuple[DataFile, ...] = ()
    downloads: tuple[RemoteFile, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()
    instructions: str = ""

    @property
    def remedy(self) -> str:
        """How to get its files."""
        return self.instructions or f"Run `hansa data get {self.name}`, or set HANSA_DATA to where its files are."


def dataset_info(name: str | DatasetInfo, also: Iterable[str] = ()) -> DatasetInfo:
    """Return the description of a data set.

    Args:
        name: Its name, or the description itself.
        also: Further names to suggest in the error message.

    >>> dataset_info("cifar10").classes
    10
    """
    if isinstance(name, DatasetInfo):
        return name
    if name not in DATASETS:
        raise DataError(f"no data set {name!r}. {suggestion(name, [*DATASETS, *also])}")
    return DATASETS[name]


def _idx(
    name: str,
    title: str,
    folder: str,
    mirrors: tuple[str, ...],
    contents: tuple[str, ...],
    packed: tuple[tuple[int, str], ...],
    **facts: Any,
) -> DatasetInfo:
    """Return a data set of four idx files, with the SHA-256 of each, and size and SHA-256 of its .gz."""
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    files, downloads = [], []
    for file, digest, (size, packed_digest) in zip(names, contents, packed, strict=True):
        files.append(DataFile(f"{folder}/{file}", digest, file.startswith("train")))
        urls = tuple(f"{mirror}{file}.gz" for mirror in mirrors)
        downloads.append(RemoteFile(f"{folder}/{file}.gz", urls, size, packed_digest))
    return DatasetInfo(
        name, title, "idx", folder, (1, 28, 28), 10, files=tuple(files), downloads=tuple(downloads), **facts
    )


def _cifar(
    name: str, title: str, folder: str, contents: dict[str, str], archive: tuple[str, int, str], **facts: Any
) -> DatasetInfo:
    """Return a data set of CIFAR's Python version, with the SHA-256 of each batch, and of its archive."""
    files = [DataFile(f"{folder}/{file}", digest, not file.startswith("test")) for file, digest in contents.items()]
    url = f"https://www.cs.toronto.edu/~kriz/{archive[0]}"
    download = RemoteFile(archive[0], (url,), *archive[1:], unpack=True)
    licence = "none stated; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    return DatasetInfo(
        name, title, "cifar", folder, (3, 32, 32), licence=licence, files=tuple(files), downloads=(download,),
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html", **facts,
    )  # fmt: skip


def _leaf(name: str, title: str, **facts: Any) -> DatasetInfo:
    instructions = (
        f"It has no official download: create its files with LEAF (github.com/TalwalkarLab/leaf, data/{name}/"
        f"preprocess.sh -t sample) and put its train and test folders below {name}/ in the data folder."
    )
    return DatasetInfo(name, title, name, name, homepage="https://leaf.cmu.edu", instructions=instructions, **facts)


# fmt: off
_FASHION: dict[str, Any] = {
    "licence": "MIT, Zalando SE 2017",
    "homepage": "https://github.com/zalandoresearch/fashion-mnist",
    "mean": (0.2860,),
    "std": (0.3530,),
    "class_names": ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
                    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
}

_ENTRIES = (
    DatasetInfo(
        "fashion-mini", "Fashion-MNIST, a stratified 10,000 / 2,000 subset shipped with the package", "embedded", "",
        shape=(1, 28, 28), classes=10, **_FASHION,
    ),
    _idx(
        "fashion-mnist", "Fashion-MNIST (Xiao et al. 2017)", "FashionMNIST/raw",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        (
            (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        **_FASHION,
    ),
    _idx(
        "mnist", "MNIST (LeCun et al. 1998)", "MNIST/raw",
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        (
            (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        licence="CC BY-SA 3.0, Yann LeCun and Corinna Cortes", homepage="http://yann.lecun.com/exdb/mnist/",
        mean=(0.1307,), std=(0.3081,), class_names=tuple("0123456789"),
    ),
    _cifar(
        "cifar10", "CIFAR-10 (Krizhevsky 2009)", "cifar-10-batches-py",
        {
            "data_batch_1": "ba52cb2d72c412975d7556bb26bd094956f1c002d1937053f6f1252f2ac17114",
            "data_batch_2": "350ff9000489d02f2568c0dcf4912ffdbae9e50932147905fb1b8159ad54f0ac",
            "data_batch_3": "a2b8653fc457df407af6c38b7e0d1a12530f3b5f81fce9f81516efd065daf722",
            "data_batch_4": "133e6292c377755074c305db8a684d48d5397372cb0aba34f52b4335eab35d97",
            "data_batch_5": "eb08cdc11fd1267ef871cf4790f193684b3f556d13317be68f4eb374a078ea87",
            "test_batch": "9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
        },
        ("cifar-10-python.tar.gz", 170_498_071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
        classes=10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    _cifar(
        "cifar100", "CIFAR-100, fine labels (Krizhevsky 2009)", "cifar-100-python",
        {
            "train": "4e50520a1125d045fade68001374cf6c74e360819dc08b7ecffe4e6c79e9b419",
            "test": "dc66669533e5da36cbeb472b8e2af54edcb17f1d9736fdbd5fede79d08f46b2f",
        },
        ("cifar-100-python.tar.gz", 169_001_437, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
        classes=100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762),
    ),
    DatasetInfo(
        "heart-disease", "Heart disease, the tables of four hospitals (UCI), shipped with the package", "tables",
        "heart-disease", shape=(32,), classes=2, licence="CC BY 4.0; Janosi, Steinbrunn, Pfisterer, Detrano 1989",
        homepage="https://doi.org/10.24432/C52P4X", class_names=("0", "1"),
    ),
    _leaf(
        "femnist", "FEMNIST, by writer (LEAF, Caldas et al. 2018)", shape=(1, 28, 28), classes=62,
        licence="NIST Special Database 19, public domain; LEAF's scripts BSD-2-Clause", mean=(0.9637,), std=(0.1597,),
        class_names=tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"),
    ),
    _leaf(
        "shakespeare", "Shakespeare, next character, by role (LEAF, Caldas et al. 2018)", shape=(80,), classes=80,
        licence="public domain (Project Gutenberg); LEAF's scripts BSD-2-Clause",
    ),
)
# fmt: on

DATASETS: dict[str, DatasetInfo] = {entry.name: entry for entry in _ENTRIES}
