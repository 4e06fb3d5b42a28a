"""What a run leaves on disk: its configuration, who held which data, every round's numbers, the model, checkpoints.

=======================  =======================================================================
config.yaml              the resolved configuration; ``hansa run config.yaml`` repeats the run
partition.safetensors    who held which samples
environment.json         versions and machine
metrics.jsonl            a sealed line of JSON a round
clients.columns          what every client did in every round, in sealed columns
summary.json             how it ended, in a few numbers
model.safetensors        the model after the last round
checkpoint/, clients/    all that is needed to go on exactly where the run stopped
.hansa-run               that this is a run, and digests of what its continuation depends on
.hansa-lock              held while the run lives, by whom
=======================  =======================================================================
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hansa import __version__, data
from hansa.config import Config, composition, load, to_text
from hansa.core import native
from hansa.core.errors import HansaError
from hansa.runs import client_record, metrics, metrics_log
from hansa.runs.client_columns import ClientColumns
from hansa.runs.folder_lock import (
    CHECKPOINT,
    CLIENTS,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    MARKER,
    METRICS,
    MODEL,
    NAMES,
    PARTITION,
    RECORD,
    SUMMARY,
    Claim,
    read_marker,
    write_marker,
)
from hansa.runs.provenance import bindings
from hansa.runs.store import Damaged, io

if TYPE_CHECKING:
    import torch

    from hansa.runs.driver import Record, Run

__all__ = [
    "CHECKPOINT",
    "CLIENTS",
    "CONFIG",
    "ENVIRONMENT",
    "FAILED",
    "FINISHED",
    "LOCK",
    "MARKER",
    "METRICS",
    "MODEL",
    "NAMES",
    "PARTITION",
    "RECORD",
    "STOPPED",
    "SUMMARY",
    "UNFINISHED",
    "RunFolder",
    "arithmetic",
    "environment",
    "slug",
]

log = logging.getLogger("hansa")

FINISHED, STOPPED, FAILED, UNFINISHED = "finished", "stopped", "failed", "unfinished"


class RunFolder:
    """The folder of one run, there or yet to be made."""

    def __init__(self, path: Path | str) -> None:
        self._claim = Claim(Path(path))
        self.seal = metrics_log.FIRST

    @classmethod
    def holding(cls, path: Path | str) -> RunFolder:
        """The folder of a run, given by its own path or by that of a file of ours in it, such as config.yaml."""
        path = Path(path)
        inside = path.name in NAMES and path.is_file() and (path.parent / CONFIG).is_file()
        return cls(path.parent if inside else path)

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._claim.path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        """Whether a run has been begun here."""
        return (self / CONFIG).is_file()

    @property
    def config(self) -> Config:
        """The configuration that the run was made with, as it was written: no code is run that it names."""
        if not self.exists:
            raise HansaError(f"{self}: no run here, for there is no {CONFIG}.")
        return load(self / CONFIG, building=False)

    @property
    def marker(self) -> dict[str, Any] | None:
        """What the run is bound to; None in folders of hansa 0.1."""
        return read_marker(self.path)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of all closed rounds."""
        return metrics_log.read_history(self / METRICS, must=self._seals) if (self / METRICS).is_file() else []

    @property
    def numbers(self) -> metrics_log.Columns:
        """The numbers of all closed rounds, without lists of clients: little memory, however many rounds."""
        found = (self / METRICS).is_file()
        return metrics_log.Columns.of_file(self / METRICS, must=self._seals) if found else metrics_log.Columns()

    def clients(self, *columns: str) -> ClientColumns:
        """What every client did in every round, all columns or those named; none in folders of hansa 0.1."""
        return client_record.read(self / RECORD, *columns)

    def by_client(self) -> ClientColumns:
        """The same as one row a client, in little memory."""
        return client_record.read_by_client(self / RECORD)

    @property
    def _seals(self) -> bool:
        facts = self.marker
        return facts is not None and bool(facts.get("seals"))

    @property
    def summary(self) -> dict[str, Any]:
        """How the run stands: its numbers as the metrics give them, and what was noted beside them when it ended."""
        return self.summary_of(self.numbers)

    def summary_of(self, found: metrics_log.Columns) -> dict[str, Any]:
        """The summary, from numbers that have been read already."""
        derived = metrics.summarize(found, self.config.evaluate.target)
        if notes := (self.marker or {}).get("accepted"):
            derived["accepted_changes"] = [f"{', '.join(n['changed'])} after round {n['round']}" for n in notes]
        if not (self / SUMMARY).is_file():
            return {"status": UNFINISHED, **derived}
        stored = _read_json(self / SUMMARY)
        told = metrics_log.plain(derived)
        wrong = [name for name, value in told.items() if name in stored and stored[name] != value]
        if stored.get("metrics_seal", found.seal) != found.seal:
            wrong.insert(0, "metrics_seal")
        if wrong:
            log.warning(
                "%s does not agree with %s in %s: shown is what the metrics say",
                self / SUMMARY, METRICS, ", ".join(wrong[:5]),
            )  # fmt: skip
        return {**stored, **derived}

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and versions that the run was made with."""
        return _read_json(self / ENVIRONMENT) if (self / ENVIRONMENT).is_file() else {}

    def check(self, *, overwrite: bool = False) -> None:
        """Refuse early, before anything is built, what `claim` would refuse."""
        self._claim.check(overwrite=overwrite)

    def claim(self, *, overwrite: bool = False, numbered: bool = False) -> None:
        """Take the folder for a new run, and hold it: with ``numbered`` under the next free name, with ``overwrite``
        also where a run of ours is, which is put aside until `settled`."""
        if numbered:
            self._claim.take_numbered()
        else:
            self._claim.take(overwrite=overwrite)

    def hold(self) -> None:
        """Hold the folder of a run that is to go on."""
        self._claim.hold()

    def settled(self) -> None:
        """The new run can be taken up: what it replaced is removed."""
        self._claim.done()

    def withdraw(self) -> None:
        """The new run did not come about: the folder is as it was before `claim`."""
        self._claim.withdraw()

    def release(self) -> None:
        """Let others have the folder."""
        self._claim.release()

    def begin(self, config: Config, run: Run) -> None:
        """Write down what is known before the first round; the configuration comes when the run can be taken up."""
        held = getattr(run.task, "data", None)
        self.bind(run, bindings(run))
        _write_json(self / ENVIRONMENT, environment())
        if isinstance(held, data.FederatedData):
            data.save_split(self / PARTITION, held.split, held.targets, str(config.data.partition), _drawable(held))

    def bind(self, run: Run, bound: Mapping[str, str], accepted: Sequence[Mapping[str, Any]] = ()) -> None:
        """Mark the folder as this run's, with what it depends on and the changes of that which were accepted."""
        facts = {"run": run.id, "bound": dict(bound), "accepted": [dict(each) for each in accepted], "seals": True}
        write_marker(self.path, facts)

    def write_config(self, config: Config) -> None:
        """The resolved configuration, led by the composition that it stands for."""
        remarks = composition(config).remarks if config.python is None else []
        io.write_file(self / CONFIG, to_text(config, remarks).encode())

    def record(self, run: Run, record: Record) -> None:
        """A callback that appends a round's numbers, sealed, durable before the next round begins."""
        line, self.seal = metrics_log.sealed(record, self.seal)
        io.append(self / METRICS, (line + "\n").encode())

    def seals(self) -> list[str]:
        """The seals of the rounds whose numbers are undamaged, from the first on."""
        found: list[str] = []
        with suppress(HansaError):
            found.extend(line.seal for line in self._lines())
        return found

    def rewind(self, round: int, seal: str | None = None) -> list[dict[str, Any]]:
        """Forget the numbers of rounds after this one, which are about to be run again; return those kept. ``seal`` is
        what their last line must carry."""
        kept = list(islice(self._lines(), round))
        if len(kept) != round:
            raise HansaError(
                f"{self / METRICS}: expected the rounds 1 to {round}, found {len(kept)} of them. Restore the file, or "
                "go on from an older checkpoint: `hansa resume --fallback`."
            )
        if seal is not None and kept and kept[-1].seal != seal:
            raise Damaged(
                f"{self / METRICS}: not the numbers that led to the checkpoint of round {round}. Restore the file, or "
                "go on from an older checkpoint: `hansa resume --fallback`."
            )
        self.seal, written = metrics_log.FIRST, []
        for line in kept:
            text, self.seal = metrics_log.sealed(line.record, self.seal)
            written.append(text + "\n")
        io.write_file(self / METRICS, "".join(written).encode())
        io.remove(self / SUMMARY)
        return [line.record for line in kept]

    def _lines(self) -> Iterator[metrics_log.Line]:
        return metrics_log.lines(self / METRICS, must=self._seals) if (self / METRICS).is_file() else iter(())

    def finish(self, run: Run, status: str, target: float | None = None) -> dict[str, Any]:
        """Write the model, and the summary of what the metrics say."""
        from safetensors.torch import save

        run.client_record.sync()
        numbers = self.numbers
        model = save(_tensors(run), {"run": f"{run.id} after round {run.state.round}"})
        found = {
            "status": status,
            **metrics.summarize(numbers, target),
            "lost_by_reason": dict(sorted(numbers.reasons.items())),
            "parameters": run.params.numel(),
            "clients": run.task.population.count,
            "model_sha256": io.sha256(model),
            "metrics_seal": numbers.seal,
        }
        # one fact alone, since several would be written in no fixed order
        io.write_file(self / MODEL, model)
        _write_json(self / SUMMARY, found)
        return found

    def read_model(self) -> bytes:
        """The file of the model, as it was written."""
        content = (self / MODEL).read_bytes()
        stored = _read_json(self / SUMMARY) if (self / SUMMARY).is_file() else {}
        if stored.get("model_sha256", io.sha256(content)) != io.sha256(content):
            raise Damaged(f"{self / MODEL} is damaged: its SHA-256 is not the one in {SUMMARY}. Restore it.")
        return content


def environment() -> dict[str, Any]:
    """Versions and machine, so that a number can be traced to where it was made."""

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


def arithmetic(devices: Sequence[torch.device] = ()) -> str:
    """What the last bits of a result depend on beside the configuration."""
    from hansa.core.devices import available

    names = available()
    kinds = sorted({f", {device.type} ({names.get(device, '?')})" for device in devices if device.type != "cpu"})
    native_set = native.instruction_set() or "none"
    return f"torch {version('torch')}, {platform.machine()}, native kernels: {native_set}{''.join(kinds)}"


def slug(title: str) -> str:
    """A title as the name of a folder, no longer than file systems bear.

    >>> slug("local.lr=0.1, FedAMS")
    'local.lr-0.1-fedams'
    """
    return re.sub(r"[^a-z0-9._]+", "-", title.lower())[:100].strip("-.") or "run"


def _drawable(held: data.FederatedData) -> list[list[int]] | None:
    """The labels of the first clients, for a picture of who holds what; None of data that has none."""
    if not held.labelled or held.classes is None or held.classes > 200:
        return None
    return held.label_counts()[:400].tolist()


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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: damaged: not JSON ({str(error)[:200]}).") from error
    if not isinstance(found, dict):
        raise Damaged(f"{path}: damaged: expected names and values, found {str(found)[:60]!r}.")
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    io.write_file(path, (json.dumps(metrics_log.plain(content), indent=2, allow_nan=False) + "\n").encode())
