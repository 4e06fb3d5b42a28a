"""The agent of a site: it owns the model, the data and the memory of the site's clients, and answers frames.

It does not depend on the transport and validates every frame.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from hansa import __version__
from hansa.config import Config, allow_code, build, build_algorithm, from_yaml
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.data import FederatedData, Schema, SchemaMisfitError
from hansa.data.csv_folder import federate_tables
from hansa.data.schema import Table
from hansa.federation import MemoryStore, Refusals, Site
from hansa.federation.exchange_log import Exchange, ExchangeLog
from hansa.federation.messages import (
    BATCH,
    ENROLLMENT,
    OVER,
    EnrollmentReply,
    EnrollmentRequest,
    ProtocolError,
    Refusal,
    RunOver,
    check_protocol,
    code_of,
    frame_digest,
    known,
    pack_batch,
    unpack_batch,
)
from hansa.federation.policy import USAGE, Policy, Usage
from hansa.federation.schema_agreement import SCHEMA, SchemaRequest, answer_request, misfit, row_choice
from hansa.rounds import wire_format
from hansa.runs.driver import Run
from hansa.runs.preprocessing import PREPROCESSING, Preprocessing, write_preprocessing
from hansa.runs.store import io
from hansa.training import random_state

log = logging.getLogger("hansa")

MAX_POPULATION = 10_000_000  # clients of a federation


@dataclass(frozen=True, slots=True)
class DataSource:
    """The source of a site's data: ``load`` returns it for a configuration. ``shared``: the configuration names the
    data, and all sites load the same. ``tables``: the site's own tables, one per client, which the schema of the
    federation encodes."""

    load: Callable[[Config], FederatedData]
    shared: bool = False
    tables: Callable[[Schema], Sequence[Table]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SiteData(FederatedData):
    """A site's view of data: clients are numbered as in the federation, and only the rows of ``own`` ones are there."""

    own: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, data: FederatedData, clients: Sequence[int], population: int, *, shared: bool) -> SiteData:
        """Make the view from data whose i-th client is client ``clients[i]`` of the federation; ``shared`` data has all
        of its clients."""
        if data.population != (expected := population if shared else len(clients)):
            raise HansaError(f"{data.name}: has {data.population} clients, the federation expects {expected} here.")
        rows = {client: data.rows(client if shared else place) for place, client in enumerate(clients)}
        placeholder = torch.zeros(1, dtype=torch.int64)  # a client of another site: every client needs a sample
        parts = [rows.get(client, placeholder) for client in range(population)]
        offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
        return cls(
            data.inputs, data.targets, torch.cat(parts), offsets, data.test_inputs, data.test_targets, data.classes,
            data.name, encoding=data.encoding, own=frozenset(rows),
        )  # fmt: skip

    def rows(self, client: int) -> torch.Tensor:
        if client not in self.own:
            raise HansaError(f"{self.name}: client {client} is not at this site.")
        return FederatedData.rows(self, client)

    def samples(self, client: int) -> int:
        return int(self.sizes[client])

    def own_label_counts(self) -> dict[int, tuple[int, ...]]:
        """Return the label counts of each own client."""
        counts = FederatedData.label_counts(self)
        return {client: tuple(counts[client].tolist()) for client in sorted(self.own)}


class Agent:
    """Answers frames for one site.

    Args:
        site: The name of the site.
        source: The source of its data.
        folder: Durable storage of client memory and enrollments.
        policy: The site's policy.
    """

    def __init__(self, site: str, source: DataSource, folder: Path | str, policy: Policy | None = None) -> None:
        self.site, self.source, self.folder = site, source, Path(folder)
        self.policy = Policy() if policy is None else policy
        self.refusals = Refusals()
        self.rounds = 0
        self.over = False  # whether the server has no more work
        self._sites: dict[str, Site] = {}
        self._lock = threading.Lock()
        self._last: tuple[str, bytes] = ("", b"")
        io.make_folder(self.folder)
        self.usage = Usage(self.folder / USAGE)
        self.exchange_log = ExchangeLog(self.folder / "exchanges.jsonl")
        self._round: int | None = None
        self._refused = self._kept_back = ""

    def handle(self, data: bytes) -> bytes:
        """Return the answer to a frame, or to a batch of frames: reports, an enrollment reply or a refusal."""
        with self._lock:
            digest = frame_digest(data)
            if digest != self._last[0]:  # a repeated frame has the same answer
                self._last = (digest, self._answer_all(data))
            return self._last[1]

    def _answer_all(self, data: bytes) -> bytes:
        try:
            if wire_format.kind_of(data) == BATCH:
                parts = unpack_batch(data, limit=self.policy.message)
                return pack_batch([self._answer(part) for part in parts])
        except wire_format.FrameError:
            pass  # it is refused as one
        return self._answer(data)

    def _answer(self, data: bytes) -> bytes:
        """Return the answer to one frame, and enter both into the log of exchanges."""
        start, self._round, self._refused, self._kept_back = time.monotonic(), None, "", ""
        answer = self._answer_part(data)
        try:
            kind = wire_format.kind_of(data)
        except wire_format.FrameError:
            kind = "not a message"
        with suppress(OSError):  # of a full disk
            now, seconds = datetime.now(UTC).isoformat(timespec="seconds"), round(time.monotonic() - start, 3)
            sent, decision = wire_format.kind_of(answer), (self._refused, wire_format.sentence(self._kept_back))
            self.exchange_log.add(Exchange(now, kind, len(data), sent, len(answer), seconds, self._round, *decision))
        return answer

    def _answer_part(self, data: bytes) -> bytes:
        try:
            kind = wire_format.kind_of(data)
            if kind == ENROLLMENT:
                return self._enroll(data)
            if kind == OVER:
                RunOver.from_bytes(data, limit=self.policy.message)
                self.over = True
                return RunOver().to_bytes()
            if kind == SCHEMA:
                return self._summarize(data)
            head = check_protocol(wire_format.unpack(data, kind, limit=self.policy.message).head)
            self._round = head.get("round") if isinstance(head.get("round"), int) else None
            site = self._site(str(head.get("run")))
            answer = site.answer(data)
            self._kept_back = "; ".join(f"{name}: {why}" for name, why in site.kept_back.items())
            self.rounds += 1
            return answer
        except ProtocolError as refusal:
            return self._refuse(refusal)
        except Exception as error:  # of the data, the model, the disk, a decoder
            log.debug("an answer failed", exc_info=error)
            return self._refuse(ProtocolError(code_of(error), f"{type(error).__name__}: {error}"))

    def _refuse(self, refusal: ProtocolError) -> bytes:
        """Record a refusal with its details here, and return what is sent of it: its codes."""
        self.refusals.record(refusal.reason, refusal.detail)
        self._refused = f"{refusal.reason}: {wire_format.sentence(refusal.detail)}"
        return Refusal(known(refusal.reason), refusal.misfit, refusal.column).to_bytes()

    def _summarize(self, data: bytes) -> bytes:
        """Answer the server's question about the tables, before the enrollment."""
        request = SchemaRequest.from_bytes(data, limit=self.policy.message)
        if request.site != self.site:
            raise ProtocolError("site", f"a question for site {request.site!r}, this is {self.site!r}")
        if self.source.tables is None:
            raise ProtocolError("no-tables", "this site has no tables: its data is not a folder of CSV files")
        return answer_request(request, self.source.tables, self.policy.table).to_bytes()

    def _enroll(self, data: bytes) -> bytes:
        request = EnrollmentRequest.from_bytes(data, limit=self.policy.message)
        site, reply = self._build_site(request, frame_digest(data))
        if request.run:
            folder = self._folder(request.run)
            io.make_folder(folder)
            io.write_file(folder / ENROLLMENT, data)
            record = Preprocessing.of_task(site.task, from_yaml(request.config, building=False))
            if record is not None and (encoding := record.encoding) is not None:  # for predictions at this site
                counts = {
                    client: {column: cells._asdict() for column, cells in columns.items()}
                    for client, columns in encoding.counts.items()
                }
                write_preprocessing(folder / PREPROCESSING, record, cell_counts=counts)
            self._sites = {request.run: site}
        return reply.to_bytes()

    def _site(self, run: str) -> Site:
        """Return the site of a run, built again from its stored enrollment after a restart."""
        if run not in self._sites:
            path = self._folder(run) / ENROLLMENT
            if not path.is_file():
                raise ProtocolError(ENROLLMENT, f"this site is not enrolled in run {run!r}")
            stored = path.read_bytes()
            site, _ = self._build_site(EnrollmentRequest.from_bytes(stored), frame_digest(stored))
            self._sites = {run: site}
        return self._sites[run]

    def _folder(self, run: str) -> Path:
        if not re.fullmatch("[0-9a-f]{1,64}", run):
            raise ProtocolError("run", f"{run[:80]!r} is not a run")
        return self.folder / run

    @allow_code()  # the policy has checked every name
    def _build_site(self, request: EnrollmentRequest, digest: str) -> tuple[Site, EnrollmentReply]:
        self._check(request)
        stage = "config"
        try:
            config = from_yaml(request.config, source="enrollment")
            stage = "site-data"
            own = self._encode_tables(config, request.schema)
            data = SiteData.of(own, request.clients, request.population, shared=self.source.shared)
            stage = "model"
            self._check_size(config, data)
            task = build.build_task(config, data)
            stage = "config"
            method = build_algorithm(config)
            mixing = method.local.mixing
            if mixing is not None and request.clusters is not None:
                method = method.with_local(mixing=replace(mixing, clusters=request.clusters))
            elif mixing is not None:  # the clusters are known once all sites have replied
                method = method.with_local(mixing=replace(mixing, clusters=[list(range(request.population))]))
            dtype = build.torch_dtype(config)
            start = task.start(Key(config.seed), dtype)
            labels = data.own_label_counts() if self.policy.label_counts and data.classes is not None else None
            samples = {client: data.samples(client) for client in request.clients}
            schema = "" if data.schema is None else data.schema.sha256
            reply = EnrollmentReply(digest, __version__, samples, model_digest(start), labels, schema=schema)
            algorithm = method if not request.run else Run(method, task, seed=config.seed, dtype=dtype).algorithm
            memory = MemoryStore(self._folder(request.run) / "memory") if request.run else None
        except (ProtocolError, OSError):
            raise
        except SchemaMisfitError as error:
            raise misfit(error, request.schema) from None
        except Exception as error:
            raise ProtocolError(stage, f"{type(error).__name__}: {error}") from error
        numbers = request.clients if self.source.shared else range(len(request.clients))
        site = Site(
            algorithm, task, request.clients, dtype, memory_store=memory, run=request.run, policy=self.policy,
            key=Key(config.seed), rounds=config.rounds, usage=self.usage,
            owners=dict(zip(request.clients, numbers, strict=True)),
        )  # fmt: skip
        site.check_rows()
        return site, reply

    def _check_size(self, config: Config, data: FederatedData) -> None:
        """Refuse a model of more parameters than the policy permits, before memory is allocated for it."""
        make = build.model_factory(config, data)
        try:
            with torch.device("meta"), random_state.preserve_rng():
                model = make()
        except Exception:
            if config.model.factory is None:
                raise
            return  # a model of the site's own code, which its operator has listed, may need real tensors
        entries = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        if entries > self.policy.parameters:
            problem = f"a model of {entries:,} parameters and buffer entries"
            raise ProtocolError("parameters", f"{problem}, the site's policy permits {self.policy.parameters:,}")

    def _check(self, request: EnrollmentRequest) -> None:
        if request.site != self.site:
            raise ProtocolError("site", f"an enrollment for site {request.site!r}, this is {self.site!r}")
        if request.version != __version__:
            raise ProtocolError("version", f"the server has hansa {request.version}, this site {__version__}")
        clients = request.clients
        increasing = bool(clients) and clients[0] >= 0 and all(a < b for a, b in itertools.pairwise(clients))
        valid = increasing and clients[-1] < request.population
        if not 1 <= request.population <= MAX_POPULATION or not valid:
            raise ProtocolError("clients", f"expected increasing numbers below {request.population}, got {clients[:5]}")
        self.policy.check(request.config, data_from_config=self.source.shared)

    def _encode_tables(self, config: Config, text: str) -> FederatedData:
        """Return the site's data; tables are encoded by the schema of the enrollment, never alone."""
        source = self.source
        if not text:
            if source.tables is not None:
                raise ProtocolError("no-schema", "tables need data.options.schema in the server's configuration")
            return source.load(config)
        schema = Schema.from_json(text)
        if source.tables is not None:
            return federate_tables(schema, source.tables(schema), *row_choice(config, schema))
        if source.shared:
            options = {**config.data.options, "schema": schema.to_dict()}
            config = config.model_copy(update={"data": config.data.model_copy(update={"options": options})})
        data = source.load(config)
        shape = tuple(data.shape)
        if (data.schema is None or data.schema.sha256 != schema.sha256) and shape != (len(schema.inputs),):
            raise ProtocolError("schema", f"inputs of shape {shape}, the schema has {len(schema.inputs)}")
        return data


def model_digest(start: Vectors) -> str:
    """Return the digest of the initial model, which all parties must share."""
    return "".join(fingerprint(start[name]).hex() for name in sorted(start))
