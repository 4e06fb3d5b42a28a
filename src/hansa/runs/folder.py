"""The folder of a run: configuration, partition, metrics, model, checkpoints.

=======================  =======================================================================
config.yaml              the resolved configuration; ``hansa run config.yaml`` repeats the run
preprocessing.json       what inputs pass through before the model: schema of tables, normalisations
partition.safetensors    the samples of every client
environment.json         versions and machine
run.db, run.rows         the record: rounds, clients and the checkpoints for exact resumption
metrics.jsonl            one line of JSON per round, written for other programs and never read
summary.json             the final metrics
model.safetensors        the model after the last round
.hansa-run               marks a run folder; digests of what resuming depends on; method and citations, for commands
                         that import no code
.hansa-id                if the run names code: its random id, by which the user's own runs are recognised
.hansa-lock              locked while the run is active; names the process
=======================  =======================================================================
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hansa import __version__, data
from hansa.config import Config, ConfigError, code_names, load, to_yaml
from hansa.core import native
from hansa.core.citations import citations
from hansa.core.errors import HansaError
from hansa.runs import metrics
from hansa.runs import trust as trust_module
from hansa.runs.client_columns import ClientColumns
from hansa.runs.columns import MetricFacts
from hansa.runs.folder_lock import (
    CONFIG,
    ENVIRONMENT,
    MARKER,
    METRICS,
    MODEL,
    NAMES,
    PARTITION,
    PREPROCESSING,
    SUMMARY,
    FolderLock,
    read_marker,
    write_marker,
)
from hansa.runs.metrics import RunHistory
from hansa.runs.preprocessing import Preprocessing, write_preprocessing
from hansa.runs.provenance import provenance_of
from hansa.runs.record import Checkpoint, RunRecord, to_line, to_plain_json
from hansa.runs.store import DamagedFileError, io

if TYPE_CHECKING:
    import torch

    from hansa.runs.driver import Run
    from hansa.runs.options import Record

log = logging.getLogger("hansa")
T = TypeVar("T")

FINISHED, STOPPED, FAILED, UNFINISHED = "finished", "stopped", "failed", "unfinished"


class RunFolder:
    """The folder of one run, existing or to be created."""

    def __init__(self, path: Path | str) -> None:
        self.lock = FolderLock(Path(path))
        self.record: RunRecord | None = None  # open while this process executes the run

    @classmethod
    def containing(cls, path: Path | str) -> RunFolder:
        """Return the run folder of a path, which may also be a file in it, such as config.yaml."""
        path = Path(path)
        inside = path.name in NAMES and path.is_file() and (path.parent / CONFIG).is_file()
        return cls(path.parent if inside else path)

    @property
    def path(self) -> Path:
        """The path."""
        return self.lock.path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        """Whether a run has been started here."""
        return (self / CONFIG).is_file()

    @property
    def config(self) -> Config:
        """The configuration of the run as written; no code that it names is run."""
        if not self.exists:
            raise HansaError(f"{self}: not a run folder: {CONFIG} is missing.")
        try:
            return load(self / CONFIG, building=False)
        except ConfigError:
            if (self / MARKER).exists():
                read_marker(self.path)  # a run of another version is refused as such
            raise

    @property
    def marker(self) -> dict[str, Any]:
        """What was recorded when the run was started: what resuming depends on, and what is known of the method without
        importing code. A run of another format is refused."""
        return read_marker(self.path)

    def _read(self, read: Callable[[RunRecord], T], otherwise: T) -> T:
        """Return what a function reads from the record; ``otherwise`` if no run has been started here."""
        if self.exists:
            read_marker(self.path)  # refuses other formats
        elif not RunRecord.exists(self.path):
            return otherwise
        with RunRecord(self.path) as record:
            return read(record)

    @property
    def facts(self) -> MetricFacts:
        """What the run recorded about its metrics when it started."""
        return MetricFacts.from_json(self.marker.get("metrics") if (self / MARKER).exists() else None)

    @property
    def history(self) -> RunHistory:
        """The records of all closed rounds."""
        return self._history(lists=True)

    @property
    def metrics(self) -> RunHistory:
        """The records of all closed rounds without their lists, such as those of clients, and the record's digest."""
        return self._history(lists=False)

    def _history(self, *, lists: bool) -> RunHistory:
        history = RunHistory((), self.facts)

        def read(record: RunRecord) -> None:
            for each in record.rounds():
                kept = {name: value for name, value in each.record.items() if lists or not isinstance(value, list)}
                history.append(kept)
                history.digest = each.digest

        self._read(read, None)
        return history

    def clients(self, *columns: str) -> ClientColumns:
        """Return the client record, all columns or those named."""
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
        read_marker(self.path)  # refuses other formats
        with RunRecord(self.path) as record:
            return record.load_checkpoint()

    @property
    def client_names(self) -> list[str]:
        """The names of clients by number, such as hospitals or files; none if they have no names."""
        return [str(name) for name in self.marker.get("client_names", [])] if self.exists else []

    @property
    def data_facts(self) -> dict[str, str]:
        """The name of the data, and digests of its rows and of its partition, to compare runs by."""
        marker = self.marker
        facts = {"name": marker.get("data"), **{name: marker["bound"].get(name) for name in ("data", "partition")}}
        return {name: str(value) for name, value in facts.items() if value is not None}

    def citations(self) -> list[str]:
        """Return the citation keys that the run recorded."""
        return [str(key) for key in self.marker["cites"]]

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the metrics, with the fields recorded when the run ended."""
        return self.summary_of(self.metrics)

    def summary_of(self, history: RunHistory) -> dict[str, Any]:
        """Return the summary, from metrics that have been read already."""
        derived = metrics.summarize(history, self.config.evaluate.target)
        if notes := self.marker["accepted"]:
            derived["accepted_changes"] = [f"{', '.join(n['changed'])} after round {n['round']}" for n in notes]
        if not (self / SUMMARY).is_file():
            return {"status": UNFINISHED, **derived}
        stored = _read_json(self / SUMMARY)
        expected = to_plain_json({"record_digest": history.digest, **derived})
        if differing := [name for name, value in expected.items() if stored.get(name, value) != value]:
            log.warning(
                "%s does not agree with the record in %s: the record is used", self / SUMMARY, ", ".join(differing[:5])
            )
        return {**stored, **derived}

    def require_trust(self, *, trust: bool = False) -> None:
        """Refuse a folder that names code unless it is on the list of this user's runs or ``trust`` is set."""
        config = self.config
        if config.python is None:
            trust_module.require_trust(self.path, code_names(config), trust=trust)

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and versions of the run."""
        return _read_json(self / ENVIRONMENT) if (self / ENVIRONMENT).is_file() else {}

    def write_start(self, config: Config, run: Run) -> None:
        """Write the files known before the first round; the configuration follows when the run can be resumed."""
        federated = getattr(run.task, "data", None)
        self.write_marker(run, provenance_of(run))
        _write_json(self / ENVIRONMENT, environment())
        if (record := Preprocessing.of_task(run.task, config)) is not None:
            write_preprocessing(self / PREPROCESSING, record)
        if config.python is None:
            trust_module.remember(self.path, code_names(config))
        if isinstance(federated, data.FederatedData):
            counts, name = _label_counts(federated), str(config.data.partition)
            data.save_split(self / PARTITION, federated.split, federated.targets, name, counts)

    def write_marker(self, run: Run, provenance: Mapping[str, str], accepted: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write the marker: what resuming the run depends on, the changes that were accepted, and what looking commands
        need to know without importing code."""
        marker = {
            "run": run.id,
            "bound": dict(provenance),
            "accepted": [dict(each) for each in accepted],
            "composition": repr(run.algorithm),
            "cites": citations(run.algorithm),
            "metrics": run.history.facts.to_json(),
        }
        federated = getattr(run.task, "data", None)
        if federated is not None:
            marker["data"] = str(getattr(federated, "name", type(federated).__name__))
            marker["client_names"] = list(getattr(federated, "client_names", ()))
        write_marker(self.path, marker)

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration, with the composition as a comment on top."""
        comments = [f"composition: {self.marker['composition']}"] if config.python is None else []
        io.write_file(self / CONFIG, to_yaml(config, comments).encode())

    def append_record(self, run: Run, record: Record) -> None:
        """Add the record of a round and its clients; `commit` makes it durable."""
        assert self.record is not None
        self.record.check_present()
        self.record.add_round(record, run.client_record.newest)

    def commit(self, records: Sequence[Record]) -> None:
        """Make the rounds that were added durable, and append their records to the metrics."""
        assert self.record is not None
        self.record.commit()
        if records:
            io.append(self / METRICS, "".join(to_line(record) + "\n" for record in records).encode())

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Go back to the checkpoint of a round and return the records of the rounds before it."""
        assert self.record is not None
        records = self.record.rewind(round)
        io.write_file(self / METRICS, *((to_line(record) + "\n").encode() for record in records))
        io.remove(self / SUMMARY)
        return records

    def write_results(self, run: Run, status: str, target: float | None = None) -> dict[str, Any]:
        """Write the model and the summary."""
        from safetensors.torch import save

        from hansa.core.devices import device_name

        history = self.metrics
        model = save(_tensors(run), {"run": f"{run.id} after round {run.state.round}"})
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
            "record_digest": history.digest,
        }
        io.write_file(self / MODEL, model)
        _write_json(self / SUMMARY, summary)
        return summary

    def read_model(self) -> bytes:
        """Return the content of the model file, checked against its SHA-256."""
        content = (self / MODEL).read_bytes()
        stored = _read_json(self / SUMMARY) if (self / SUMMARY).is_file() else {}
        if stored.get("model_sha256", io.sha256(content)) != io.sha256(content):
            raise DamagedFileError(f"{self / MODEL} is damaged: its SHA-256 is not the one in {SUMMARY}. Restore it.")
        return content


def environment() -> dict[str, Any]:
    """Return package versions and a description of the machine."""
    packages = {"hansa": __version__}
    for name in ("torch", "numpy", "scipy", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed as a package"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "native kernels": native.instruction_set() or "none",
        "packages": packages,
    }


def arithmetic_description(
    devices: Sequence[torch.device] = (), deterministic: bool = True, server: torch.device | None = None
) -> str:
    """Describe the platform, which the last bits of a result depend on: the devices on which clients train, and that of
    the server."""
    from hansa.core.devices import available_devices

    names = available_devices()
    kinds = sorted({f", {device.type} ({names.get(device, '?')})" for device in devices if device.type != "cpu"})
    if server is not None and server.type != "cpu":
        kinds.append(f", server on {server.type} ({names.get(server, '?')})")
    if kinds and not deterministic:
        kinds.append(", not deterministic")
    native_set = native.instruction_set() or "none"
    return f"torch {version('torch')}, {platform.machine()}, native kernels: {native_set}{''.join(kinds)}"


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
    state: Mapping[str, torch.Tensor] = run.model.state_dict() if hasattr(run.task, "module") else {"x": run.params}
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: damaged: not JSON ({str(error)[:200]}).") from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path}: damaged: expected a mapping, found {str(content)[:60]!r}.")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    io.write_file(path, (json.dumps(to_plain_json(content), indent=2, allow_nan=False) + "\n").encode())
