"""Records of runs that tests write themselves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hansa import __version__
from hansa.core.types import State
from hansa.runs.client_columns import encode_clients
from hansa.runs.folder import FORMAT, MARKER
from hansa.runs.record import RunRecord, to_line
from hansa.runs.store import io


def through_disk(folder: Path, state: State) -> State:
    """A state as a checkpoint gives it back."""
    io.make_folder(folder)
    with RunRecord.create(folder) as record:
        record.save_checkpoint(state, {"round": 0})
        record.commit()
    with RunRecord(folder) as record:
        return record.load_checkpoint().state


def begin_record(folder: Path) -> None:
    """A run folder with a marker and an empty record."""
    io.make_folder(folder)
    io.write_sealed(
        folder / MARKER,
        {"format": FORMAT, "run": "made by a test", "bound": {"version": __version__}, "accepted": [], "cites": []},
    )
    RunRecord.create(folder).close()


def add_rounds(folder: Path, records: Iterable[dict[str, Any]]) -> None:
    """Add rounds to a record."""
    with RunRecord(folder, writing=True) as record:
        for each in records:
            record.add_round(each, encode_clients())
            record.commit()
            io.append(folder / "metrics.jsonl", (to_line(each) + "\n").encode())
