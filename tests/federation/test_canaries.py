"""Nothing of an error leaves a site but a code: errors of every kind with canary values, and every byte is searched.

`HANSA_TRIALS=2000 pytest tests/federation/test_canaries.py` is the long form.
"""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import hansa
from federation.problems import LocalSites
from hansa.config import allow_code, build, from_yaml
from hansa.core.errors import HansaError
from hansa.data import Schema, TableColumn
from hansa.data.csv_folder import read_tables
from hansa.federation import site as site_module
from hansa.federation.messages import REASONS, REFUSAL, Refusal, RoundReports, unpack_batch
from hansa.federation.policy import USAGE, Policy
from hansa.federation.server import Server
from hansa.federation.site import DataSource
from hansa.rounds import wire_format
from hansa.runs.store import io

TRIALS = int(os.environ.get("HANSA_TRIALS", "24"))
CANARY = "CanaryQzjx"
PARTS = ("Canary", "canary", "Qzjx")  # no part is hexadecimal: digests are
TEXT = """
name: trial
rounds: 2
data: {name: csv-folder, options: {schema: SCHEMA, test: 0.4}}
model:
  factory: "MODULE:Model"
  metrics: {auc: roc_auc, own_accuracy: {function: "MODULE:own_score", better: higher}}
algorithm: scaffold
local: {steps: 4, batch_size: 3}
checkpoint: {every: 1}
evaluate: {where: sites}
engine: {kind: flower, sites: {north: 1, south: 1}, deadline: 60}
"""
SCHEMA = Schema((
    TableColumn("age", "number"), TableColumn("ward", "category", categories=("icu", "surgery")),
    TableColumn("since", "date"), TableColumn("y", "target", categories=("no", "yes")),
))  # fmt: skip
FACTORIES = (f"{__name__}:Model", f"{__name__}:own_score")  # of this module, as it is loaded here
faults: dict[str, str] = {}
"""What goes wrong in the model of the site: the place, and the kind of exception."""


class CanaryError(Exception):
    """An exception of the site's own code."""


ERRORS = {error.__name__: error for error in (CanaryError, ValueError, OSError, KeyError, MemoryError, HansaError)}


def fail(place: str) -> None:
    if place in faults:
        raise ERRORS[faults[place]](f"{CANARY} in /data/{CANARY}/patients.csv, line 3: 'age' is '{CANARY}'")


def failing(place, function):
    """The function, which fails where a trial says so."""

    def call(*arguments, **options):
        fail(place)
        return function(*arguments, **options)

    return call


@hansa.component
class Model(nn.Module):
    """A model of the site's own, which fails where a trial says so."""

    def __init__(self) -> None:
        super().__init__()
        fail("init")
        self.layer = nn.Linear(len(SCHEMA.inputs), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad or torch.is_grad_enabled():
            fail("forward")
        return self.layer(x)


@hansa.component
def own_score(output: torch.Tensor, target: torch.Tensor) -> float:
    """A metric of the site's own, which fails where a trial says so."""
    fail("metric")
    return float((output.argmax(1) == target).double().mean())


class TableSites(LocalSites):
    """Sites with a CSV file each, in folders with the canary's name; only the server's log is captured."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        super().__init__(folder / f"sites of {CANARY}", policy=policy)
        self.files = folder / f"files of {CANARY}"
        self.files.mkdir(parents=True)
        self.faults: dict[str, str] = {}

    def source(self, site: str) -> DataSource:
        return DataSource(build.load_data, tables=lambda schema: read_tables(self.files / f"{site}.csv", schema))

    def send(self, site, ticket, data, ttl):
        logger = logging.getLogger("hansa")
        logger.disabled = True  # the site's own log may name anything
        if site == "north":
            faults.update(self.faults)
        try:
            super().send(site, ticket, data, ttl)
        finally:
            logger.disabled = False
            faults.clear()


def rows(draw: random.Random, count: int = 20) -> list[list[str]]:
    return [
        [f"{draw.uniform(20, 90):.1f}", draw.choice(("icu", "surgery")), f"2024-0{draw.randint(1, 9)}-11",
         draw.choice(("no", "yes"))]
        for _ in range(count)
    ]  # fmt: skip


def write(path: Path, header: list[str], table: list[list[str]]) -> None:
    path.write_text("\n".join(",".join(cells) for cells in [header, *table]) + "\n")


HEADER = ["age", "ward", "since", "y"]


def bad_table(draw: random.Random, path: Path) -> None:
    """A table with canary values: cells, headers, lines of other lengths, bytes that are no text, no file at all."""
    header, table = list(HEADER), rows(draw)
    kind = draw.choice(["cell", "cell", "cell", "header", "extra", "short", "long", "bytes", "quote", "empty", "none"])
    at = draw.randrange(len(table))
    if kind == "cell":
        table[at][draw.randrange(4)] = draw.choice([CANARY, f"{CANARY} 12", "", f"'{CANARY}'", "nan", f"1e999{CANARY}"])
    elif kind == "header":
        header[draw.randrange(4)] = CANARY
    elif kind == "extra":
        header.append(CANARY)
        table = [[*cells, CANARY] for cells in table]
        table[at][0] = draw.choice([CANARY, "50"])
    elif kind == "short":
        table[at] = [CANARY]
    elif kind == "long":
        table[at] = [*table[at], CANARY, CANARY]
    write(path, header, table)
    if kind == "bytes":
        path.write_bytes(path.read_bytes() + CANARY.encode() + b",\xff\xfe\x00,1,2\n")
    elif kind == "quote":
        path.write_text(path.read_text() + f'"{CANARY},1,2\n')
    elif kind == "empty":
        path.write_text(draw.choice(["", ",".join(HEADER) + "\n", f"{CANARY}\n"]))
    elif kind == "none":
        path.unlink()


def bad_disk(draw: random.Random, monkeypatch) -> None:
    """A disk that fails: whatever is written from some call on."""
    left, write_file = [draw.randrange(4)], io.write_file

    def fails(path, *arguments, **options):
        if f"sites of {CANARY}/north" not in str(path).replace(os.sep, "/"):
            return write_file(path, *arguments, **options)
        left[0] -= 1
        if left[0] < 0:
            raise OSError(draw.choice([5, 13, 28, 30]), f"no space for {CANARY}", str(path))
        return write_file(path, *arguments, **options)

    monkeypatch.setattr(io, "write_file", fails)


def damage_memory(draw: random.Random, sites: TableSites):
    """A callback that damages or removes the site's files after the first round."""

    def damage(run, record):
        files = sorted(path for path in (sites.folder / "north").rglob("*") if path.is_file() and path.name != USAGE)
        for path in draw.sample(files, draw.randint(1, len(files))):
            draw.choice([lambda path: path.unlink(), lambda path: path.write_bytes(CANARY.encode() * 9)])(path)
        sites.kill("north")

    return damage


POLICIES = [
    Policy(factories=(f"hospital.{CANARY}:Net",)),
    Policy(factories=FACTORIES, rounds=1),
    Policy(factories=FACTORIES, steps=1),
    Policy(factories=FACTORIES, message=1000),
]


PLACES = ("train", "init", "metric", "forward", "decode")


def searched(data: bytes) -> str:
    """Everything in a frame as text: the frame itself, and what it unpacks to, to any depth."""
    text = data.decode("latin-1")
    try:
        frame = wire_format.unpack(data, wire_format.kind_of(data))
    except HansaError:
        return text
    return text + json.dumps(frame.head) + "".join(searched(bytes(blob)) for blob in frame.blobs)


def codes_in(data: bytes) -> set[str]:
    """The codes of the refusals and dropped clients in an answer."""
    kind = wire_format.kind_of(data)
    if kind == "several":
        return set().union(*(codes_in(part) for part in unpack_batch(data)))
    if kind == REFUSAL:
        return {Refusal.from_bytes(data).reason}
    if kind == "reports":
        reports = RoundReports.from_bytes(data).reports
        assert not any(dropped.detail for report in reports for dropped in report.dropped)
        return {dropped.reason for report in reports for dropped in report.dropped}
    return set()


def trial(number: int, folder: Path, monkeypatch, caplog) -> tuple[str, set[str]]:
    """Run one federation whose site north has some error; return its kind, and the codes that left the site."""
    draw = random.Random(f"canary {number}")
    kind = ("table", "model", "disk", "memory", "policy", "table")[number % 6]
    sent = Policy(
        factories=FACTORIES, metrics=draw.choice(["none", "value", "sketch"]), test_rows=draw.randint(1, 3), min_rows=1
    )
    policy = POLICIES[number // 6 % len(POLICIES)] if kind == "policy" else sent
    sites = TableSites(folder, policy)
    for site in ("north", "south"):
        write(sites.files / f"{site}.csv", HEADER, rows(draw))
    text = TEXT.replace("SCHEMA", str(SCHEMA.save(folder / "schema.yaml"))).replace("MODULE", __name__)
    callbacks, said = [], ""
    if kind == "table":
        bad_table(draw, sites.files / "north.csv")
    elif kind == "model":
        fault = {PLACES[number // 6 % len(PLACES)]: draw.choice(sorted(ERRORS))}
        sites.faults = fault if "init" in fault else {}
        callbacks = [lambda run, record: sites.faults.update(fault)]
    elif kind == "disk":
        bad_disk(draw, monkeypatch)
    elif kind == "memory":
        callbacks = [damage_memory(draw, sites)]
    caplog.clear()
    try:
        with allow_code():
            experiment = Server(from_yaml(text), sites).new(folder / "run")
            experiment.execute(callbacks)
    except HansaError as error:
        said = str(error)
    answers = [answer for site, _, answer in sites.seen if site == "north"]
    assert answers, said
    codes = set().union(*map(codes_in, answers))
    assert codes <= set(REASONS), codes
    files = [path.read_bytes().decode("latin-1") for path in (folder / "run").rglob("*") if path.is_file()]
    for content in [*map(searched, answers), said, caplog.text, *files]:
        for part in PARTS:
            assert part not in content, (number, kind, content[max(0, content.index(part) - 300) :][:600])
    return kind, codes


def test_no_error_of_a_site_reveals_more_than_a_code(tmp_path, monkeypatch, caplog):
    by_kind: dict[str, set[str]] = {}
    caplog.set_level(logging.DEBUG, logger="hansa")
    for number in range(TRIALS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            for place, name in (("train", "client_round"), ("decode", "fingerprint")):
                patch.setattr(site_module, name, failing(place, getattr(site_module, name)))
            kind, codes = trial(number, folder, patch, caplog)
        by_kind.setdefault(kind, set()).update(codes)
    assert {"schema", "site-data"} <= by_kind["table"]
    assert {"model", "failed"} <= by_kind["model"]
    assert "disk" in by_kind["disk"]
    assert "memory" in by_kind["memory"]
    assert {"code", "rounds", "steps", "oversize"} <= by_kind["policy"]


@pytest.mark.parametrize("code", REASONS)
def test_every_code_has_a_text_of_the_server(code):
    again = Refusal.from_bytes(Refusal(code).to_bytes())
    assert (again.reason, again.detail) == (code, REASONS[code])


def test_a_refusal_cannot_carry_a_text():
    forged = wire_format.pack(
        REFUSAL, {"protocol": wire_format.PROTOCOL, "reason": CANARY, "misfit": CANARY, "column": CANARY}
    )
    assert CANARY not in repr(Refusal.from_bytes(forged))
