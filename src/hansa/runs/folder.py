"""The folder of a run: configuration, partition, metrics, model, checkpoints.

=======================  =======================================================================
config.yaml              the resolved configuration; ``hansa run config.yaml`` repeats the run
preprocessing.json       the preprocessing of inputs: schema of tables, normalisations
partition.safetensors    the samples of every client
environment.json         versions and machine
run.db, run.rows         the record: rounds, clients and the checkpoints for exact resumption
metrics.jsonl            one line of JSON per round, written for other programs and never read
summary.json             the final metrics
model.safetensors        the model after the last round
frozen.safetensors       its frozen weights, if they are large: one copy on disk for the runs of a study
.hansa-run               marks a run folder; digests that resuming depends on; method and citations, for commands
                         that import no code
.hansa-id                if the run names code: its random id, which identifies the user's own runs
.hansa-lock              locked while the run is active; names the process
=======================  =======================================================================

``mkdir`` reserves a name and a lock reserves its folder before anything else is written. To replace a run, its files
are renamed into ``.replaced``, the configuration first and the marker last; they are removed when the new run can be
resumed. After a crash at any point, the next process finds a complete run, new or old. Other files are never moved.

Several seeds of one method have a folder with ``group.yaml``, the configuration with all its seeds, which ``hansa run``
accepts, and a run folder for each: ``seed-0``, ``seed-1``, ...
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from hansa import __version__, data
from hansa.config import Config, ConfigError, code_names, load, to_yaml
from hansa.config.import_path import is_trusted
from hansa.core import native
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.protocols import citations
from hansa.runs import metrics
from hansa.runs.client_columns import ClientColumns
from hansa.runs.columns import MetricFacts, RunHistory
from hansa.runs.preprocessing import PREPROCESSING, Preprocessing, write_preprocessing
from hansa.runs.provenance import provenance_of
from hansa.runs.record import Checkpoint, RunRecord, to_plain_json
from hansa.runs.store import DamagedFileError, io
from hansa.runs.store.database import DATABASE, FILES
from hansa.runs.store.io import FileLock
from hansa.runs.trust import IDENTITY, UntrustedFolderError, is_listed, list_path, remember

if TYPE_CHECKING:
    import torch

    from hansa.runs.driver import Run

log = logging.getLogger("hansa")
T = TypeVar("T")
IfExists: TypeAlias = Literal["resume", "replace", "new", "refuse"]
"""What happens if a folder holds a run: ``resume`` continues it if it has the same settings, ``replace`` replaces it,
``new`` takes the next free name, folder-2, folder-3, ..., and ``refuse`` is an error."""

CONFIG = "config.yaml"
PARTITION = "partition.safetensors"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
FROZEN = "frozen.safetensors"
FROZEN_BYTES = 1 << 20
"""Frozen weights of at least this size are in a file of their own."""
MARKER = ".hansa-run"
NAMES = (
    CONFIG, IDENTITY, PREPROCESSING, PARTITION, METRICS, *FILES, SUMMARY, MODEL, FROZEN, ENVIRONMENT,
    MARKER,
)  # fmt: skip
"""The files of a run in order of removal: the first makes the folder a run, the last identifies it as Hansa's."""

LOCK = ".hansa-lock"
REPLACED = ".replaced"
FORMAT = 5
"""Format of run folders. Others are refused."""
GROUP = "group.yaml"
MAX_FILES = 2000
"""How many files and folders of a folder are looked at."""
MAX_BYTES = 1 << 29
"""Run folders with larger files, besides the model and the record, are named and not read."""
FINISHED, STOPPED, FAILED, UNFINISHED = "finished", "stopped", "failed", "unfinished"


@dataclass
class AcceptedChange:
    """A resume with other data, model or code: after which round, the kinds that changed, and their digests before."""

    round: int
    changed: list[str]
    before: dict[str, str | None] = field(default_factory=dict)


@dataclass
class Marker:
    """The facts recorded at the start of a run: provenance that resuming depends on (``bound``), and the method and
    citations, for commands that import no code."""

    format: int
    run: str
    bound: dict[str, str]
    accepted: list[AcceptedChange]
    cites: list[str]
    composition: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    client_names: list[str] = field(default_factory=list)


def check_readable(folder: Path) -> None:
    """Refuse a run folder with files that cannot be read to their end: pipes, devices, or more than `MAX_BYTES`.

    The model is not read by most commands, and the record has readers with bounds of their own, so these may be larger.
    """
    for inner in (folder, *(each for each in subfolders(folder) if each.name.startswith("seed-"))):
        for name in (*NAMES, GROUP):
            try:
                status = (inner / name).stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                raise HansaError(f"{inner}: {name} is not a regular file.")
            if status.st_size > MAX_BYTES and not name.startswith(("model.", "frozen.", "run.")):
                raise HansaError(f"{inner}: {name} has {status.st_size:,} bytes; at most {MAX_BYTES:,} are read.")


def subfolders(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder by name, of its first `MAX_FILES` files and folders; none if it is not readable."""
    try:
        inside = islice(folder.iterdir(), MAX_FILES)
        yield from sorted(each for each in inside if each.is_dir() and not each.name.startswith("."))
    except OSError:  # deleted, or not readable
        return


class RunFolder:
    """The folder of one run, existing or to be created."""

    name = CONFIG
    """The file that makes it the folder of a run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: FileLock | None = None

    @classmethod
    def containing(cls, path: Path | str) -> RunFolder:
        """Return the run folder of a path, which may also be a file in it, such as config.yaml, to be looked at."""
        path = Path(path)
        inside = path.name in NAMES and path.is_file() and (path.parent / CONFIG).is_file()
        check_readable(folder := path.parent if inside else path)
        return cls(folder)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    def check_free(self, *, overwrite: bool = False) -> None:
        """Refuse a folder that is not empty; with ``overwrite`` it may have runs. Changes nothing."""
        if self.exists and not overwrite:
            raise HansaError(f"{self}: already holds a run. `hansa resume {self}` resumes it, --overwrite replaces it.")
        if self.exists and self.name == CONFIG:  # refuse to replace what Hansa did not write
            try:
                io.read_sealed(self / MARKER)
            except DamagedFileError as error:
                raise HansaError(
                    f"{self}: has a {CONFIG} but no {MARKER}. Remove it by hand, or choose another folder."
                ) from error
        elif not self.exists and os.path.lexists(self.path) and not self._is_unfinished_start():
            kind = "run folder" if self.name == CONFIG else "group of runs"
            raise HansaError(f"{self}: not empty, and not a {kind}. Choose another folder.")

    def _is_unfinished_start(self) -> bool:
        """Return whether the folder has at most files of runs killed before they wrote their configuration."""
        if not self.path.is_dir():
            return False
        files = {*os.listdir(self.path)} - {GROUP + io.TEMPORARY_SUFFIX}
        names = {name.removesuffix(io.TEMPORARY_SUFFIX) for name in files}
        own = {*NAMES, LOCK, REPLACED}
        return not names or (any(name.startswith(".hansa") for name in names) and names <= own)

    @property
    def exists(self) -> bool:
        """Whether the folder has a configuration."""
        return (self / self.name).is_file()

    @property
    def config(self) -> Config:
        """The configuration, without importing code that it names."""
        if not self.exists:
            raise HansaError(f"{self}: not a run folder: {self.name} is missing.")
        try:
            return load(self / self.name, building=False)
        except ConfigError:
            if (self / MARKER).exists():
                _ = self.marker  # refuses other formats
            raise

    def require_trust(self, *, trust: bool = False) -> None:
        """Refuse a folder that names code unless it is on the list of this user's runs or ``trust`` is set."""
        if (config := self.config).python is not None or trust or is_trusted():
            return
        if (names := code_names(config)) and not is_listed(self.path, names):
            raise UntrustedFolderError(
                f"{self}: is not on the list of runs that you created here, {list_path()}, and names code that would "
                f"be imported: {', '.join(names)}. If you trust it: --trust, in Python trust=True."
            )

    @property
    def marker(self) -> Marker:
        """The facts recorded at the start. Other formats are refused with the version that wrote them."""
        try:
            marker = TypeAdapter(Marker).validate_python(io.read_sealed(self / MARKER))
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise DamagedFileError(f"{self / MARKER} is damaged: {where[:60] or 'its content'}. Restore it.") from error
        if marker.format != FORMAT:
            version = marker.bound.get("version")
            raise HansaError(
                f"{self}: written by Hansa {version} (format {marker.format}); this is Hansa {__version__}, which "
                f"reads format {FORMAT}. Use Hansa {version} for it, or start a new run."
            )
        return marker

    def _read(self, read: Callable[[RunRecord], T], otherwise: T) -> T:
        """Return the result of a function of the record, or ``otherwise`` if there is no run."""
        if self.exists:
            _ = self.marker  # refuses other formats
        elif not (self / DATABASE).is_file():
            return otherwise
        with RunRecord(self.path) as record:
            return read(record)

    @property
    def facts(self) -> MetricFacts:
        """The facts about its metrics that the run recorded at the start."""
        return MetricFacts.from_json(self.marker.metrics if (self / MARKER).exists() else None)

    @property
    def history(self) -> RunHistory:
        """The records of all closed rounds."""
        return self._history(lists=True)

    @property
    def metrics(self) -> RunHistory:
        """The records of all closed rounds without list columns, and the digest of the record."""
        return self._history(lists=False)

    def _history(self, *, lists: bool) -> RunHistory:
        history = RunHistory((), self.facts)

        def read(record: RunRecord) -> None:
            for row, digest in record.rounds():
                history.append({name: value for name, value in row.items() if lists or not isinstance(value, list)})
                history.digest = digest

        self._read(read, None)
        return history

    def clients(self, *columns: str) -> ClientColumns:
        """Return the client record: the named columns, by default all."""
        return self._read(lambda record: record.client_columns(*columns), ClientColumns()).named(self.client_names)

    def by_client(self) -> ClientColumns:
        """Return one row per client, in little memory."""
        return self._read(RunRecord.by_client, ClientColumns()).named(self.client_names)

    @property
    def checkpoint_rounds(self) -> list[int]:
        """The rounds from which the run can be resumed."""
        return self._read(RunRecord.checkpoint_rounds, [])

    def load_checkpoint(self) -> Checkpoint:
        """Return the newest checkpoint."""
        _ = self.marker  # refuses other formats
        with RunRecord(self.path) as record:
            return record.load_checkpoint()

    @property
    def client_names(self) -> list[str]:
        """The names of clients by number, such as hospitals or files, if they have names."""
        return self.marker.client_names if self.exists else []

    @property
    def data_facts(self) -> dict[str, str]:
        """The name of the data and digests of its rows and partition, for comparing runs."""
        marker = self.marker
        facts = {"name": marker.data, **{name: marker.bound.get(name) for name in ("data", "partition")}}
        return {name: value for name, value in facts.items() if value is not None}

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the metrics, with the fields recorded when the run ended."""
        return self.summary_of(self.metrics)

    def summary_of(self, history: RunHistory) -> dict[str, Any]:
        """Return the summary for a history that has been read already."""
        derived = metrics.summarize(history, self.config.evaluate.target)
        if notes := self.marker.accepted:
            derived["accepted_changes"] = [f"{', '.join(note.changed)} after round {note.round}" for note in notes]
        if not (self / SUMMARY).is_file():
            return {"status": UNFINISHED, **derived}
        stored = io.read_json(self / SUMMARY)
        if stored.get("config_digest", "") not in ("", seedless_digest(self.config)):
            log.warning("%s is not the configuration that the run ended with: it was changed or cut", self / CONFIG)
        expected = to_plain_json({"record_digest": history.digest, **derived})
        if differing := [name for name, value in expected.items() if stored.get(name, value) != value]:
            log.warning("%s contradicts the record in %s: the record is used", self / SUMMARY, ", ".join(differing[:5]))
        return {**stored, **derived}

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and versions of the run."""
        return io.read_json(self / ENVIRONMENT) if (self / ENVIRONMENT).is_file() else {}

    def write_start(self, config: Config, run: Run) -> None:
        """Write the files known before the first round; the configuration follows when the run can be resumed."""
        federated = getattr(run.task, "data", None)
        self.write_marker(run, provenance_of(run))
        io.write_json(self / ENVIRONMENT, environment())
        if (record := Preprocessing.of_task(run.task, config)) is not None:
            write_preprocessing(self / PREPROCESSING, record)
        if config.python is None:
            remember(self.path, code_names(config))
        if isinstance(federated, data.FederatedData):
            counts, name = _label_counts(federated), str(config.data.partition)
            data.save_split(self / PARTITION, federated.split, federated.targets, name, counts)

    def write_marker(self, run: Run, provenance: dict[str, str], accepted: Sequence[AcceptedChange] = ()) -> None:
        """Write the marker of a run, with its provenance and accepted changes."""
        federated = getattr(run.task, "data", None)
        marker = Marker(
            format=FORMAT,
            run=run.id,
            bound=provenance,
            accepted=list(accepted),
            cites=citations(run.algorithm),
            composition=repr(run.algorithm),
            metrics=asdict(run.history.facts),
            data=None if federated is None else str(getattr(federated, "name", type(federated).__name__)),
            client_names=list(getattr(federated, "client_names", ())),
        )
        io.write_sealed(self / MARKER, asdict(marker))

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration, with the composition as a comment on top."""
        comments = [f"composition: {self.marker.composition}"] if config.python is None else []
        io.write_file(self / CONFIG, to_yaml(config, comments).encode())

    def write_results(self, run: Run, status: str, target: float | None = None) -> dict[str, Any]:
        """Write the model and the summary."""
        from safetensors.torch import save

        from hansa.core.devices import device_name

        history = self.metrics
        tensors = _tensors(run)
        frozen = {name: tensors[name] for name in getattr(run.task, "frozen", ()) if name in tensors}
        if sum(each.nbytes for each in frozen.values()) < FROZEN_BYTES:
            frozen = {}
        tensors = {name: each for name, each in tensors.items() if name not in frozen}
        base = save(frozen) if frozen else b""
        model = save(tensors, {"run": f"{run.id} after round {run.state.round}"})
        summary = {
            "status": status,
            **metrics.summarize(history, target),
            "lost_by_reason": dict(sorted(metrics.drop_reasons(history).items())),
            **(metrics.federation_summary(run, history) if run.site_of else {}),
            "parameters": run.params.numel(),
            "clients": run.task.population.count,
            "devices": run.training_devices,
            "server_device": device_name(run.server_device),
            "model_sha256": io.sha256(model),
            **({"frozen_sha256": io.sha256(base)} if base else {}),
            "record_digest": history.digest,
            "config_digest": seedless_digest(self.config) if self.exists else "",
        }
        if base:
            self._write_frozen(base)
        io.write_file(self / MODEL, model)
        io.write_json(self / SUMMARY, to_plain_json(summary))
        return summary

    def _write_frozen(self, content: bytes) -> None:
        """Write the frozen weights, or link the equal file of a run beside this one: the disk holds them once."""
        if (self / FROZEN).is_file() and (self / FROZEN).read_bytes() == content:
            return
        beside, link = self.path.parent, self / (FROZEN + io.TEMPORARY_SUFFIX)
        studies = (beside, *(subfolders(beside.parent) if (beside / GROUP).is_file() else ()))
        for other in (run / FROZEN for study in studies for run in subfolders(study)):
            with suppress(OSError):  # not readable, on another file system, or one without links
                same = not other.is_symlink() and other.stat().st_size == len(content)
                if same and other.read_bytes() == content:
                    os.link(other, link)
                    io.rename(link, self / FROZEN)
                    return
        io.write_file(self / FROZEN, content)

    def read_model(self) -> list[bytes]:
        """Return the contents of the model file, and of that of its frozen weights if they have one, checked against
        their SHA-256."""
        stored = io.read_json(self / SUMMARY) if (self / SUMMARY).is_file() else {}
        contents = []
        for name, key in ((MODEL, "model_sha256"), (FROZEN, "frozen_sha256")):
            if name == FROZEN and key not in stored and not (self / name).is_file():
                continue
            if not (self / name).is_file():
                raise DamagedFileError(
                    f"{self / name} is missing. Restore it, or copy it from a run of the same study."
                )
            content = (self / name).read_bytes()
            if stored.get(key, io.sha256(content)) != io.sha256(content):
                raise DamagedFileError(
                    f"{self / name} is damaged: its SHA-256 is not the one in {SUMMARY}. Restore it."
                )
            contents.append(content)
        return contents

    # --- locking and replacing ------------------------------------------------------------------------------------

    @contextmanager
    def starting(self, if_exists: IfExists = "refuse") -> Iterator[None]:
        """Create and lock the folder for a new run, which replaces that in it at the end; an error undoes it all."""
        if if_exists == "new":
            self.path, created = io.create_numbered(self.path), True
        else:
            io.make_folder(self.path.parent.absolute())
            created = io.create_folder(self.path.absolute())
        self._lock = FileLock(self / LOCK)
        try:
            self._recover()
            self.check_free(overwrite=if_exists == "replace")
        except BaseException:
            self.release()
            raise
        try:
            if self.exists:
                io.make_folder((self / REPLACED).absolute())
                for name in NAMES:
                    io.remove(self.path / (name + io.TEMPORARY_SUFFIX))
                    if os.path.lexists(self / name):
                        io.rename(self / name, self / REPLACED / name)
            else:
                self._clear()
            yield
            io.remove(self / REPLACED)
        except BaseException:
            self._roll_back(created)
            raise

    def acquire_existing(self) -> None:
        """Lock the folder of a run to resume."""
        if not any((self / name).exists() for name in (CONFIG, REPLACED)):
            raise HansaError(f"{self.path}: not a run folder: {CONFIG} is missing.")
        self._lock = FileLock(self / LOCK)
        self._recover()

    def _roll_back(self, created: bool) -> None:
        if not self._recover():
            self._clear()
        if created:
            io.remove(self / LOCK)
            io.remove(self.path)
        self.release()

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _recover(self) -> bool:
        """Finish or undo an interrupted replacement; return whether there was one."""
        replaced = self / REPLACED
        if not replaced.is_dir():
            return False
        if not self.exists:
            if os.path.lexists(replaced / MARKER):  # the old run is complete: the other files are of the new one
                self._clear()
            for name in reversed(NAMES):
                if os.path.lexists(replaced / name):
                    io.rename(replaced / name, self / name)
        io.remove(replaced)
        return True

    def _clear(self) -> None:
        for name in NAMES:
            io.remove(self.path / (name + io.TEMPORARY_SUFFIX))
            io.remove(self / name)


def environment() -> dict[str, Any]:
    """Return package versions and a description of the machine."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "native kernels": native.instruction_set() or "none",
        **({"git commit": commit} if (commit := _git_commit(Path.cwd())) else {}),
        "packages": {"hansa": __version__, **_versions()},
    }


PACKAGES = ("torchvision", "torchmetrics", "scikit-learn", "transformers", "peft", "timm", "monai", "torch-geometric",
            "lightning", "gpytorch", "opacus")  # fmt: skip
"""Packages of models and metrics; `environment` names those that are installed, beside those that Hansa can use."""


@cache
def _versions() -> dict[str, str]:
    """The versions of all installed packages that a result may depend on."""
    lines = [line for line in requires("hansa") or [] if not re.search("extra == .(dev|docs)", line)]
    required = [re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in lines]
    versions = {}
    for name in dict.fromkeys(["torch", "numpy", "scipy", "safetensors", *sorted(required), *PACKAGES]):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _git_commit(folder: Path) -> str | None:
    """The commit that is checked out in a folder or above it; files are read, since git would run what its
    configuration names."""

    def read(path: Path) -> str:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    with suppress(OSError, ValueError):
        top = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)
        git = top / ".git"
        if git.is_file():  # a worktree or a submodule
            git = top / read(git).removeprefix("gitdir:").strip()
        head, shared = read(git / "HEAD"), git / read(git / "commondir")
        ref = head.removeprefix("ref: ")
        if ref != head:
            packed = (line.split()[0] for line in read(shared / "packed-refs").splitlines() if line.endswith(f" {ref}"))
            head = read(shared / ref) or next(packed, "")
        return head if re.fullmatch("[0-9a-f]{40,64}", head) else None
    return None


def arithmetic_of(run: Run) -> str:
    """Describe the platform that the last bits of a result depend on: torch, kernels, devices of clients and server."""
    from hansa.core.devices import available_devices

    names = available_devices()
    details = sorted({f", {device.type} ({names.get(device, '?')})" for device in run.devices if device.type != "cpu"})
    if (server := run.server_device).type != "cpu":
        details.append(f", server on {server.type} ({names.get(server, '?')})")
    if details and not run.deterministic:
        details.append(", not deterministic")
    native_set = native.instruction_set() or "none"
    return f"torch {version('torch')}, {platform.machine()}, native kernels: {native_set}{''.join(details)}"


def slug(title: str) -> str:
    """Return a title as the name of a folder.

    >>> slug("local.lr=0.1, FedAMS")
    'local.lr-0.1-fedams'
    """
    return re.sub(r"[^a-z0-9._]+", "-", title.lower())[:100].strip("-.") or "run"


def _label_counts(federated: data.FederatedData) -> list[list[int]] | None:
    """Return the label counts of the first clients, for the report; None for data without labels."""
    if not federated.labelled or federated.classes is None or federated.classes > 200:
        return None
    return federated.label_counts()[:400].tolist()


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    from hansa.training.modules import saved_tensors

    state = saved_tensors(run.model) if hasattr(run.task, "module") else {"x": run.params}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def parse_seeds(seeds: object, first: int = 0, where: str = "run") -> list[int]:
    """Return the seeds of a list or a count; 3 means three seeds from ``first``.

    >>> parse_seeds(3), parse_seeds(2, first=7), parse_seeds([5, 1])
    ([0, 1, 2], [7, 8], [5, 1])
    """
    if type(seeds) is int and seeds >= 1:
        return list(range(first, first + seeds))
    if isinstance(seeds, Iterable) and not isinstance(seeds, (str, bytes, Mapping)):
        seed_list = list(seeds)
        valid = all(type(seed) is int and seed >= 0 for seed in seed_list)
        if seed_list and valid and len(set(seed_list)) == len(seed_list):
            return seed_list
    raise invalid_argument(
        where, "seeds", seeds, "a number of seeds, or a list of different integers", "3 stands for seeds 0, 1, 2."
    )


def expand_seeds(config: Config) -> list[Config]:
    """Return a configuration for each seed, or the configuration itself if it has one seed.

    >>> from hansa.config import from_yaml
    >>> [config.seed for config in expand_seeds(from_yaml("seeds: [4, 2]"))]
    [4, 2]
    """
    if config.seeds is None:
        return [config]
    seeds = parse_seeds(config.seeds, config.seed, "config")
    return [config.model_copy(update={"seed": seed, "seeds": None}) for seed in seeds]


def settings_digest(config: Config, left_out: Iterable[str]) -> str:
    """Return a digest of the settings of a configuration, except for some keys."""
    settings = config.model_dump(mode="json", exclude_defaults=True, exclude=set(left_out))
    return io.sha256(json.dumps(settings, sort_keys=True).encode())


def seedless_digest(config: Config) -> str:
    """Return a digest of a configuration without seed, name, workers and checkpoints."""
    return settings_digest(config, ("seed", "seeds", "name", "workers", "checkpoint"))


class SeedGroupFolder(RunFolder):
    """The folder of a method's seeds, existing or to be created."""

    name = GROUP

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        super().__init__(path.parent if path.name == GROUP and path.is_file() else path)

    def run(self, seed: int) -> RunFolder:
        """Return the folder of a seed."""
        return RunFolder(self / f"seed-{seed}")

    @property
    def runs(self) -> list[RunFolder]:
        """The started runs, in the order of the seeds."""
        return [run for run in (self.run(seed_config.seed) for seed_config in expand_seeds(self.config)) if run.exists]

    def write_config(self, config: Config) -> None:
        """Write the configuration with its seeds, and with the earlier seeds if everything else is equal."""
        seeds = [seed_config.seed for seed_config in expand_seeds(config)]
        if self.exists and seedless_digest(self.config) == seedless_digest(config):
            seeds = sorted({*seeds, *(seed_config.seed for seed_config in expand_seeds(self.config))})
        io.make_folder(self.path.absolute())
        remember(self.path, code_names(config))
        io.write_file(self / GROUP, to_yaml(config.model_copy(update={"seed": 0, "seeds": seeds})).encode())
