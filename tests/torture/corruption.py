"""Files damaged in every way a disk or a hand can: each is noticed and named, or changes nothing that is read.

A record is damaged many times, and a tenth as often a stopped run, which is then resumed: it names the damage, or
comes to the very result of the run that nobody damaged.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hansa.config import from_preset
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.runs.client_columns import encode_clients
from hansa.runs.experiment import open_run
from hansa.runs.folder import RunFolder
from hansa.runs.record import RunRecord
from hansa.runs.store import DiskStore
from hansa.runs.store.database import DATABASE, ROWS
from torture.disks import Hasty, use_disk

KINDS = ("truncation", "zeroed page", "bit flip", "swapped pages", "stale", "missing", "another's", "grown")
PAGE = 4096
CLIENTS, ROUNDS = 9, 14


def rows(seed: int, round: int) -> dict[int, dict[str, torch.Tensor]]:
    draw = Key(seed).child("rows", round).numpy()
    chosen = range(CLIENTS) if round < 2 else draw.choice(CLIENTS, size=4, replace=False)
    return {
        int(client): {
            "uplink/model/residual": torch.from_numpy(draw.normal(size=18_000)).float(),
            "solver/control": torch.from_numpy(draw.normal(size=30)).bfloat16(),
        }
        for client in chosen
    }


def make(folder: Path, seed: int, stale: Path | None = None) -> None:
    """A record of some rounds; and a copy of it as it was some rounds before its end."""
    folder.mkdir()
    with use_disk(Hasty()):
        RunRecord.create(folder).close()
        for round in range(ROUNDS):
            with RunRecord(folder, writing=True) as record:
                DiskStore(record).commit(round, rows(seed, round))
                clients = np.array(sorted(rows(seed, round)))
                losses = Key(seed).child(round).numpy().normal(size=len(clients))
                block = encode_clients({"client": clients, "loss": losses})
                record.add_round({"round": round + 1, "loss": losses.sum()}, block)
                if round % 3 == 2:
                    record.save_checkpoint(
                        {"x": losses.tolist(), "m": torch.full((20_000,), float(round))}, {"round": round + 1}
                    )
                record.commit()
            if stale is not None and round == ROUNDS - 4:
                shutil.copytree(folder, stale)


def survey(folder: Path) -> list[Any]:
    """All that can be read of a record, or the error."""
    with RunRecord(folder) as record:
        found: list[Any] = [each for each, _ in record.rounds()]
        found += record.client_blocks()
        store = DiskStore(record)
        store.verify()
        found += [store.generation, store.digest()]
        for round in record.checkpoint_rounds():
            record.check_checkpoint(round)
            state = record.load_checkpoint(round).state
            found += [state["x"], state["m"].tolist()]
        record.check_pages()
        return found


def attempt(act: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result, or what the refusal says."""
    try:
        return act(), None
    except HansaError as error:
        return None, str(error)


def hurt(path: Path, kind: str, stale: Path, other: Path, draw: np.random.Generator) -> None:
    """Damage one file."""
    before = path.read_bytes()
    after = bytearray(before)
    at = int(draw.integers(len(before)))
    start = at // PAGE * PAGE
    if kind == "missing":
        path.unlink()
        return
    if kind == "truncation":
        del after[at:]
    elif kind == "zeroed page":
        end = min(start + PAGE, len(after))
        after[start:end] = bytes(end - start)
    elif kind == "bit flip":
        after[at] ^= 1 << int(draw.integers(8))
    elif kind == "swapped pages":
        second = int(draw.integers(len(before) // PAGE)) * PAGE
        after[start : start + PAGE], after[second : second + PAGE] = (
            before[second : second + PAGE],
            before[start : start + PAGE],
        )
    elif kind == "stale":
        after = bytearray((stale / path.name).read_bytes())
    elif kind == "another's":
        after = bytearray((other / path.name).read_bytes())
    elif kind == "grown":
        after += draw.bytes(int(draw.integers(1, 2 * PAGE)))
    path.write_bytes(after)


def damage_records(place: Path, count: int, seed: int) -> Counter[str]:
    """Damage a record; returns how often that was named, and how often it changed nothing that is read."""
    whole, stale, other = place / "whole", place / "stale", place / "other"
    make(whole, 3, stale)
    make(other, 4)
    truth, past, theirs = survey(whole), survey(stale), survey(other)
    seen: Counter[str] = Counter()
    for trial in range(count):
        draw = Key(seed).child("damage", trial).numpy()
        name, kind = (DATABASE, ROWS)[trial % 2], KINDS[trial // 2 % len(KINDS)]
        shutil.copyfile(whole / name, place / "kept")
        hurt(whole / name, kind, stale, other, draw)
        found, error = attempt(lambda: survey(whole))
        if error is None:
            if found == truth:
                seen[f"{name}, {kind}: read as it was"] += 1
            else:  # a whole database of another time or run cannot be told from its own without the run's summary
                assert kind in ("stale", "another's"), f"{name}, {kind}: read otherwise"
                assert name == DATABASE
                assert found in (past, theirs), f"{name}, {kind}: read otherwise"
                seen[f"{name}, {kind}: read as another record"] += 1
        else:
            assert DATABASE in error or ROWS in error, error
            seen[f"{name}, {kind}: named"] += 1
        shutil.copyfile(place / "kept", whole / name)
    assert survey(whole) == truth
    return seen


SMALL = ("data.name=synthetic", "data.clients=6", "local.steps=1", "workers=1", "checkpoint={every: 2, keep: 3}")
CASES = {"fedavg": ("faults={before: 0.3}",), "scaffold": ("sample={participation: 0.5}",)}


def untimed(folder: Path) -> list[dict[str, Any]]:
    """The history without what a clock says; NaN as text, so that it equals itself."""
    return [{name: repr(v) for name, v in record.items() if name != "seconds"} for record in RunFolder(folder).history]


def damage_runs(place: Path, count: int, seed: int) -> Counter[str]:
    """Damage a stopped run and resume it; where that is refused, fall back."""
    expected, other = {}, {}
    for case, words in CASES.items():
        config = from_preset(case, [*SMALL, *words, "rounds=9"])
        open_run(config, place / f"whole {case}").execute()
        expected[case] = untimed(place / f"whole {case}")
        open_run(config, place / case).execute(stopped=False, callbacks=[lambda run, _: run.state.round == 7])
        other[case] = place / f"whole {case}"
    seen: Counter[str] = Counter()
    for trial in range(count):
        draw = Key(seed).child("run", trial).numpy()
        case, kind = list(CASES)[trial % 2], KINDS[trial // 2 % len(KINDS)]
        folder = place / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place / case, folder)
        hurt(folder / DATABASE, kind, place / case, other[case], draw)
        outcome = "went on, exactly"
        _, error = attempt(lambda folder=folder: open_run(None, folder).execute())  # type: ignore[misc]
        if error is not None:
            assert DATABASE in error or "past the requested" in error, error
            outcome = "refused, then fell back exactly"
            _, error = attempt(lambda folder=folder: open_run(None, folder, fallback=True).execute())  # type: ignore[misc]
        if error is not None:
            assert any(words in error for words in (DATABASE, "no checkpoint", "past the requested")), error
            seen["refused, and nothing to fall back to"] += 1
            continue
        assert untimed(folder) == expected[case], f"trial {trial}, {kind}: another history"
        seen[outcome] += 1
    return seen


def run(count: int, place: Path, seed: int = 0) -> Counter[str]:
    """Damage a record ``count`` times, and a run a tenth as often."""
    logging.getLogger("hansa").setLevel(logging.ERROR)  # falling back is asked for a thousand times here
    try:
        with use_disk(Hasty()):
            seen = damage_records(place, count, seed)
            return seen + damage_runs(place, max(1, count // 10), seed)
    finally:
        logging.getLogger("hansa").setLevel(logging.NOTSET)
