"""A site: it owns the model, the data and the memory of its clients, trains them, and answers frames.

`Agent` answers all frames of a site, and `Site` those of one run. They validate all that they receive and do not depend
on the transport. A refused frame changes nothing, and is counted by its code (`hansa.federation.messages.REASONS`).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import re
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa import __version__
from hansa.algorithm import Algorithm
from hansa.compress import PacketError
from hansa.config import Config, allow_code, build, build_algorithm, from_yaml
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors.arithmetic import fingerprint
from hansa.data import FederatedData, Schema, SchemaMisfitError
from hansa.data.csv_folder import federate_tables
from hansa.data.schema import Table
from hansa.federation.exchange_log import REQUESTED, SENT, Exchange, ExchangeLog
from hansa.federation.messages import (
    BATCH,
    ENROLLMENT,
    EVALUATION,
    OVER,
    EnrollmentReply,
    EnrollmentRequest,
    MemoryVersion,
    ProtocolError,
    Refusal,
    RoundOrders,
    RoundReports,
    RunOver,
    SiteEvaluationReply,
    SiteEvaluationRequest,
    code_of,
    frame_digest,
    known_code,
    pack_batch,
    refuse,
    unpack_batch,
    without_details,
)
from hansa.federation.policy import USAGE, Policy, Usage
from hansa.federation.schema_agreement import SCHEMA, SchemaRequest, answer_request, misfit, row_choice
from hansa.local.work import is_set_by_samples
from hansa.rounds import client_round, wire_format
from hansa.rounds.messages import Broadcast, Report, WorkOrder
from hansa.rounds.wire_format import Blobs, check_protocol
from hansa.runs.driver import Run
from hansa.runs.preprocessing import PREPROCESSING, Preprocessing, write_preprocessing
from hansa.runs.store import DamagedFileError, io
from hansa.runs.store.database import DATABASE, Database, RowEntry
from hansa.training import TaskLike, random_state
from hansa.training.evaluation import compute_site_metrics
from hansa.training.execution_mode import without_native

log = logging.getLogger("hansa")

MAX_POPULATION = 10_000_000  # clients of a federation
TEST_ROWS = -1  # the owner of the site's test rows, in the counts of its budgets
MAX_VERSIONS = 8  # received versions of the model that a site keeps; it asks for the full vector if a base is missing


class MemoryStore:
    """A site's client memory by version, in a database like that of a run. Several processes may use it.

    Args:
        folder: The folder, created if it is absent; one for each run. None is a temporary one.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp() if folder is None else folder)
        self._durable = folder is not None
        if not self._durable:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        io.make_folder(self.folder)
        if not (self.folder / DATABASE).is_file():
            Database.create(self.folder, durable=self._durable, shared=False).close()

    @cached_property
    def _database(self) -> Database:
        database = Database(self.folder, writing=True, durable=self._durable, shared=False)
        weakref.finalize(self, database.close)  # also before the interpreter ends
        return database

    def get(self, client: int, version: MemoryVersion) -> dict[str, Tensor] | None:
        """Return the rows of a version, or None if it is not stored; damage is an error."""
        try:
            _, entry = self.versions(client).get(version, (None, None))
            if entry is None:
                return None
            frame = wire_format.unpack(self._database.get(entry).numpy().tobytes(), "memory")
            return wire_format.read_tensors(frame.head.get("rows"), frame)
        except (wire_format.FrameError, DamagedFileError) as error:
            remedy = f"Restore it from a backup, or restart the server with --forget {client}."
            detail = f"{self.folder}: the memory of client {client} is damaged ({error}). {remedy}"
            raise ProtocolError("memory", detail) from error

    def put(
        self, client: int, version: MemoryVersion, rows: Mapping[str, Tensor], parent: MemoryVersion | None = None
    ) -> None:
        """Store a version that was made from ``parent``; durable when this returns."""
        blobs = Blobs()
        head = {"rows": blobs.tensors(rows)}
        content = torch.frombuffer(bytearray(wire_format.pack("memory", head, blobs.blobs)), dtype=torch.uint8)
        name = " ".join(str(item) for item in (version, parent) if item is not None)
        with self._writing() as database:
            if version in (versions := self.versions(client)):
                database.delete("id = ?", [versions[version][1].id])
            database.put("memory", client, name, version.round, content)

    def prune(self, client: int, last_named: MemoryVersion | None, keep_from: int) -> None:
        """Delete the versions that the server can no longer request, given the last version that it requested.

        That version and its ancestors were accepted. A server that resumes, at the earliest from round ``keep_from``,
        requests the newest ancestor from before that round, or a newer one. All other versions from before that round
        were never accepted or are older. If that newest ancestor is unknown, nothing is deleted.
        """
        versions, newest = self.versions(client), last_named
        while newest is not None and newest.round >= keep_from:
            newest = versions[newest][0] if newest in versions else None
        obsolete = [version for version in versions if version != newest and version.round < keep_from]
        if newest is not None and obsolete:
            with self._writing() as database:
                for version in obsolete:
                    database.delete("id = ?", [versions[version][1].id])

    def versions(self, client: int) -> dict[MemoryVersion, tuple[MemoryVersion | None, RowEntry]]:
        """Return a client's versions, each with its parent and its place in the database."""
        versions: dict[MemoryVersion, tuple[MemoryVersion | None, RowEntry]] = {}
        for entry in self._database.entries("kind = 'memory' AND client = ?", [client]):
            version, *parent = map(MemoryVersion.parse, entry.name.split(" "))
            versions[version] = (parent[0] if parent else None), entry
        return versions

    @contextmanager
    def _writing(self) -> Iterator[Database]:
        """Write in one transaction, which is durable afterwards."""
        database = self._database
        database.check_present()
        with database.writing_rows():
            database.find_slots()
            yield database
            database.commit()


class Site:
    """One site of a federation: `handle` turns a frame of orders into a frame of reports.

    Equal orders have equal answers, even if repeated or after a restart, since they name the memory versions.

    Args:
        algorithm: The algorithm of the run.
        task: The task with the site's data.
        clients: The clients of this site.
        dtype: The dtype of the model.
        memory_store: Where the clients' memory is stored; None is a temporary folder.
        policy: What a server may request; None permits everything except frames over a gigabyte.
        key: The key of the run; None accepts any.
        rounds: The rounds of the run; None sets no limit.
        usage: Counts requested work; None counts in memory.
        owners: The site's own number of each client, for counting; None uses the numbers of the federation.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        clients: Collection[int],
        dtype: torch.dtype = torch.float32,
        *,
        memory_store: MemoryStore | None = None,
        policy: Policy | None = None,
        key: Key | None = None,
        rounds: int | None = None,
        usage: Usage | None = None,
        owners: Mapping[int, int] | None = None,
    ) -> None:
        self.algorithm, self.task, self.clients = algorithm, task, frozenset(clients)
        self.policy = Policy(test_rows=1, min_rows=1) if policy is None else policy
        self.usage = Usage(self.policy) if usage is None else usage
        self.owners = {client: client for client in clients} if owners is None else owners
        self.key, self.rounds, self.dtype = key, rounds, dtype
        self.memory_store = MemoryStore() if memory_store is None else memory_store
        self.refusals: Counter[str] = Counter()  # by reason
        self._trainer = without_native(task, algorithm).trainer(dtype, torch.device("cpu"))
        self._received: dict[str, dict[int, Vector]] = {}
        self._start: Vectors = {}
        self.kept_back: dict[str, str] = {}  # what the last answer omits, and why; for the site only
        start = task.start(Key(0), dtype)
        self._dims = {
            name: getattr(channel.downlink, "entries", start.get(name, start[MODEL]).numel())
            for name, channel in algorithm.channels.items()
        }

    def check_rows(self) -> None:
        """Refuse a run in which no client of the site can take part, if its work is known in advance."""
        local, samples = self.algorithm.local, self.task.population.samples
        if local.mixing is None and is_set_by_samples(local.steps):
            works = {client: local.draw_work(client, samples[client], Key(0)) for client in self.clients}
            largest = max(local.rows_of(work, samples[client]) for client, work in works.items())
            minimum = self.policy.min_rows
            detail = f"no update would be computed from more than {largest} rows, the policy has min_rows: {minimum}"
            refuse(largest < minimum, "rows", detail)

    def handle(self, data: bytes) -> bytes | None:
        """Return the answer to a frame, or None if it is refused; a refused frame changes nothing."""
        try:
            return self.answer(data)
        except ProtocolError as refusal:
            self.refusals[refusal.reason] += 1
            log.warning("refused (%s): %s", refusal.reason, wire_format.sentence(refusal.detail))
            return None

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a frame, or raise `ProtocolError`."""
        self.kept_back = {}
        try:
            kind = SiteEvaluationRequest if wire_format.kind_of(data) == EVALUATION else RoundOrders
            request: SiteEvaluationRequest | RoundOrders = kind.from_bytes(data, limit=self.policy.message)
        except HansaError as error:
            raise ProtocolError(getattr(error, "reason", "malformed"), str(error)) from error
        last_round = self.policy.rounds if self.rounds is None else min(self.rounds, self.policy.rounds)
        detail = f"a message of round {request.round + 1}, the last one is {last_round}"
        refuse(request.round >= last_round, "rounds", detail)
        with random_state.fixed_arithmetic():
            if isinstance(request, SiteEvaluationRequest):
                return self._evaluate(request).to_bytes()
            self._check(request)
            return self._answer(request).to_bytes()

    def _check(self, request: RoundOrders) -> None:
        """Refuse orders for others, and work that differs from the configuration, which also has the rates."""
        names, channels, round = [*request.broadcasts], [*self.algorithm.channels], request.round
        refuse(set(names) != set(channels), "channels", f"broadcasts on {names}, expected {channels}")
        refuse(request.keep_from > round, "round", f"round {round} releases memory up to round {request.keep_from}")
        ordered: set[int] = set()
        for order in request.orders:
            foreign = (order.run, order.round) != (request.run, round)
            refuse(foreign, "round", f"an order of round {order.round} among those of round {round}")
            self._check_clients(order, ordered)
            missing = sorted(set(order.reporters) - set(request.versions))
            refuse(missing, "stamps", f"no memory version for clients {missing[:5]}")
            steps, permitted = max(work.steps for work in order.works), self.policy.steps
            refuse(steps > permitted, "steps", f"an order of {steps} steps, the site permits {permitted}")
            refuse(order.mean, "work", f"cohort {order.cohort}: the mean of its models is of simulations only")
            if self.key is not None:
                refuse(order.key != self.key, "work", f"an order with key {order.key}, expected {self.key}")
            client, address = order.clients[0], order.key.child("work", order.round, order.clients[0])
            samples = max(self.task.population.samples[client] for client in order.clients)
            agreed = self.algorithm.local.draw_work(client, samples, address)
            differing = set(order.works) - {agreed}
            refuse(differing, "work", f"client {client}: an order of {differing}, the configuration has {agreed}")

    def _check_clients(self, order: WorkOrder, ordered: set[int]) -> None:
        clients, reporters, cohort = order.clients, order.reporters, f"cohort {order.cohort}"
        unknown = sorted(set(clients) - self.clients)
        refuse(unknown, "clients", f"clients {unknown[:5]} are not at this site")
        outside = {*reporters, *order.absent} - set(clients)
        refuse(outside or not reporters, "clients", f"{cohort}: reporters {reporters} of {clients}")
        simulated = order.attack is not None or order.absent
        refuse(simulated, "clients", f"{cohort}: an attack or a failure is of simulations only")
        refuse(clients != self._cohort(order), "clients", f"{cohort}: clients {clients}, expected a whole cluster")
        repeated = ordered.intersection(clients) or len(set(clients)) < len(clients)
        refuse(repeated, "clients", f"{cohort}: a client is ordered twice")
        ordered.update(clients)

    def _cohort(self, order: WorkOrder) -> tuple[int, ...]:
        """Return the clients of the cohort of an order."""
        mixing = self.algorithm.local.mixing
        if mixing is None:
            return order.reporters[:1] if order.cohort is None else ()
        clusters, number = mixing.cluster_lists(), order.cohort
        cluster = tuple(clusters[number]) if number is not None and number < len(clusters) else ()
        return tuple(sorted(set(order.reporters) & set(cluster))) if mixing.reporters_only else cluster

    def _answer(self, request: RoundOrders) -> RoundReports:
        vectors, need = self._decode(request)
        if need:
            return RoundReports(request.run, request.round, need=tuple(need))
        broadcasts = {
            name: Broadcast.whole(vector, request.broadcasts[name].version) for name, vector in vectors.items()
        }
        updated: set[int] = set()
        reports = tuple(
            self._train(replace(order, broadcasts=broadcasts), request, updated) for order in request.orders
        )
        reports = tuple(replace(report, dropped=without_details(report.dropped)) for report in reports)
        return RoundReports(request.run, request.round, reports, updated=frozenset(updated))

    def _decode(self, request: RoundOrders) -> tuple[Vectors, list[str]]:
        """Decode the broadcasts. Also return the channels whose base version is missing."""
        vectors: Vectors = {}
        need = []
        for name, broadcast in request.broadcasts.items():
            self._check_fit(name, broadcast)
            try:
                base = None if broadcast.base is None else self._base(name, broadcast.base, request.orders)
                vectors[name] = self.algorithm.channels[name].downlink.apply(base, broadcast.packets)
                if fingerprint(vectors[name]) != request.digests.get(name):
                    raise PacketError(f"channel {name!r}: the broadcast does not decode to the vector of the server.")
            except Exception as error:  # from a decoder, which may be user code
                if broadcast.base is None:
                    raise ProtocolError("model", f"{type(error).__name__}: {error}") from error
                need.append(name)
        if not need:
            for name, vector in vectors.items():
                self._store(name, request.broadcasts[name].version, vector)
        return vectors, need

    def _check_fit(self, name: str, broadcast: Broadcast) -> None:
        """Refuse packets of another model before decoding, since they could unpack to any size."""
        for packet in broadcast.packets:
            try:
                packet.check(dim=self._dims[name], dtype=self.dtype)
            except PacketError as error:
                raise ProtocolError("model", f"channel {name!r}: {error} The site has another model.") from error

    def _base(self, name: str, version: int, orders: Sequence[WorkOrder]) -> Vector:
        vectors = self._received.get(name, {})
        if version in vectors:
            return vectors[version]
        key = orders[0].key if orders else self.key
        if version != 0 or key is None:
            raise PacketError(f"channel {name!r}: version {version} is not known here.")
        if not self._start:  # version 0 follows from the public seed
            self._start = self.task.start(key, self.dtype)
        return self._start.get(name, torch.zeros_like(self._start[MODEL]))

    def _store(self, name: str, version: int, vector: Vector) -> None:
        """Store a version that later broadcasts may be relative to, and drop the oldest."""
        vectors = self._received.setdefault(name, {})
        vectors[version] = vector.clone()
        for version in sorted(vectors)[:-MAX_VERSIONS]:
            del vectors[version]

    def _train(self, order: WorkOrder, request: RoundOrders, updated: set[int]) -> Report:
        """Train a cohort, and store the new memory of its reporters before the report leaves."""
        try:
            memory = {client: self._memory(client, request.versions[client]) for client in order.reporters}
            self._charge(order, request)
            try:
                orders = [replace(order, memory=memory)]
                (report,) = client_round(self.algorithm, orders, self._trainer, self.task.population)
            except Exception as error:
                raise ProtocolError("failed", f"{type(error).__name__}: {error}") from error
            for index, client in enumerate(report.clients):
                parent, new_rows = request.versions[client], report.memory.get(client, {})
                try:
                    if new_rows:
                        version = MemoryVersion.of_upload(report, index)
                        self.memory_store.put(client, version, {**memory[client], **new_rows}, parent)
                        updated.add(client)
                    self.memory_store.prune(client, parent, request.keep_from)
                except HansaError as error:  # it is damaged: nothing leaves that was not stored
                    raise ProtocolError("memory", str(error)) from error
        except ProtocolError as error:
            updated.difference_update(order.reporters)
            return Report.without(order, error.reason, wire_format.sentence(error.detail))
        return replace(report, memory={})

    def _memory(self, client: int, version: MemoryVersion | None) -> Vectors:
        rows = {} if version is None else self.memory_store.get(client, version)
        if rows is None:
            problem = f"the site does not have version {version} of client {client}'s memory"
            raise ProtocolError("memory", f"{problem}. Restore it, or restart the server with --forget {client}.")
        return rows

    def _charge(self, order: WorkOrder, request: RoundOrders) -> None:
        """Count the training of a cohort by all that its result depends on, or raise if the policy forbids it."""
        for client in order.clients:
            rows = self.algorithm.local.rows_of(order.works[0], self.task.population.samples[client])
            detail = f"an update of client {client} is computed from {rows} rows, the policy has {self.policy.min_rows}"
            refuse(rows < self.policy.min_rows, "rows", detail)
        state = hashlib.sha256(repr((order.key, order.cohort, order.clients, order.reporters, order.works)).encode())
        state.update(repr([str(request.versions[client]) for client in order.reporters]).encode())
        for name in sorted(request.digests):
            state.update(name.encode() + request.digests[name])
        owners = [self.owners[client] for client in order.clients]
        self.usage.charge("training", owners, request.run, order.round, state.digest())

    def _evaluate(self, request: SiteEvaluationRequest) -> SiteEvaluationReply:
        """Return the sums over this site's test rows."""
        names = {MODEL, BUFFERS} & set(self.algorithm.channels)
        asked = sorted(request.broadcasts)
        refuse(set(asked) != names, "channels", f"an evaluation on {asked}, expected {sorted(names)}")
        vectors = {}
        for name, broadcast in request.broadcasts.items():
            self._check_fit(name, broadcast)
            count = len(broadcast.packets)
            refuse(count != 1, "model", f"channel {name!r}: {count} packets, expected one full vector")
            try:
                packet = broadcast.packets[0].check(kind="whole")
                base = None if broadcast.base is None else self._base(name, broadcast.base, ())
                vectors[name] = self.algorithm.channels[name].downlink.apply(base, (packet,))
            except Exception as error:  # from a decoder, which may be user code
                raise ProtocolError("model", f"channel {name!r}: {error}") from error
        other = fingerprint(vectors[MODEL]) != request.digest
        refuse(other, "model", "the broadcast does not decode to the model of the server")
        reply = SiteEvaluationReply(request.run, request.round, request.digest)
        task: Any = self.task
        if not hasattr(task, "sum_scores") or not (chunks := task.test_chunks()):
            return reply
        if task.main_test_rows < self.policy.test_rows:  # sums over few rows reveal much about each
            self.kept_back["sums"] = f"{task.main_test_rows} test rows, the policy has {self.policy.test_rows}"
            return replace(reply, kept_back=True)
        digest = b"".join(fingerprint(vectors[name]) for name in sorted(vectors))
        self.usage.charge("evaluation", [TEST_ROWS], request.run, request.round, digest)
        with random_state.preserve_rng():
            scores = [self._trainer.evaluate(vectors, *chunk) for chunk in chunks]  # type: ignore[attr-defined]
            score = task.sum_scores(scores)
        has_hits = score.correct is not None and math.isfinite(score.correct)  # outputs that are NaN have no hits
        metrics, disclosure = getattr(task, "metrics", {}), self.policy.metrics
        requested = {} if disclosure == "none" else metrics
        results = compute_site_metrics(score, requested, self.policy.test_rows, sketch=disclosure == "sketch")
        closed = dict.fromkeys(metrics.keys() - requested.keys(), "the policy has metrics: none")
        self.kept_back = {**closed, **results.kept_back}
        hits, labels = (score.correct, score.labels) if has_hits else (None, None)
        return replace(
            reply, rows=task.main_test_rows, loss=score.loss_sum, weight=score.weight, hits=hits, labels=labels,
            metrics=results.values, sketches=results.sketches,
        )  # fmt: skip


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
    """A site's view of data: clients are numbered as in the federation; only ``local_clients`` have rows."""

    local_clients: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, data: FederatedData, clients: Sequence[int], population: int, *, shared: bool) -> SiteData:
        """Return the view of data whose i-th client is client ``clients[i]`` of the federation; ``shared`` data has all
        clients of the federation."""
        if data.population != (expected := population if shared else len(clients)):
            raise HansaError(f"{data.name}: has {data.population} clients, the federation expects {expected} here.")
        rows = {client: data.rows(client if shared else index) for index, client in enumerate(clients)}
        placeholder = torch.zeros(1, dtype=torch.int64)  # for clients of other sites: every client needs a sample
        client_rows = [rows.get(client, placeholder) for client in range(population)]
        offsets = torch.tensor([0, *map(len, client_rows)]).cumsum(0)
        return cls(
            data.inputs, data.targets, torch.cat(client_rows), offsets, data.test_inputs, data.test_targets,
            data.classes, data.name, encoding=data.encoding, local_clients=frozenset(rows),
        )  # fmt: skip

    def rows(self, client: int) -> torch.Tensor:
        if client not in self.local_clients:
            raise HansaError(f"{self.name}: client {client} is not at this site.")
        return FederatedData.rows(self, client)

    def samples(self, client: int) -> int:
        return int(self.sizes[client])

    def local_label_counts(self) -> dict[int, tuple[int, ...]]:
        """Return the label counts of each own client."""
        counts = FederatedData.label_counts(self)
        return {client: tuple(counts[client].tolist()) for client in sorted(self.local_clients)}


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
        self.rounds = 0
        self.over = False  # whether the server has no more work
        self._sites: dict[str, Site] = {}
        self._last_exchange: tuple[str, bytes] = ("", b"")
        io.make_folder(self.folder)
        self.usage = Usage(self.policy, self.folder / USAGE)
        self.exchange_log = ExchangeLog(self.folder / "exchanges.jsonl")
        self._round: int | None = None
        self._kept_back = ""
        self._answers = {ENROLLMENT: self._enroll, SCHEMA: self._summarize, OVER: self._end}

    def handle(self, data: bytes) -> bytes:
        """Return the answer to a frame, or to a batch of frames: reports, an enrollment reply or a refusal."""
        digest = frame_digest(data)
        if digest != self._last_exchange[0]:  # a repeated frame has the same answer
            self._last_exchange = (digest, self._reply_to_all(data))
        return self._last_exchange[1]

    def _reply_to_all(self, data: bytes) -> bytes:
        try:
            if wire_format.kind_of(data) == BATCH:
                frames = unpack_batch(data, limit=self.policy.message)
                return pack_batch([self._answer(frame) for frame in frames])
        except wire_format.FrameError:
            pass  # refused as a single frame
        return self._answer(data)

    def _answer(self, data: bytes) -> bytes:
        """Return the answer to one frame and log both. The log has the details of a refusal, the answer only codes."""
        start, self._round, self._kept_back, kind, refused = time.monotonic(), None, "", "", ""
        try:
            kind = wire_format.kind_of(data)
            reply = self._answers.get(kind, self._answer_run)(data)
        except Exception as error:  # also of the data, the model, the disk, a decoder
            log.debug("a frame is refused", exc_info=error)
            fault = error if isinstance(error, ProtocolError) else None
            fault = fault or ProtocolError(code_of(error), f"{type(error).__name__}: {error}")
            refused = f"{fault.reason}: {wire_format.sentence(fault.detail)}"
            reply = Refusal(known_code(fault.reason), fault.misfit, fault.column).to_bytes()
        with suppress(OSError):  # of a full disk
            time_text, seconds = datetime.now(UTC).isoformat(timespec="seconds"), round(time.monotonic() - start, 3)
            asked, kept_back = REQUESTED.get(kind, "what is no message"), wire_format.sentence(self._kept_back)
            sent = (SENT[wire_format.kind_of(reply)], len(reply), seconds, self._round)
            self.exchange_log.add(Exchange(time_text, asked, len(data), *sent, refused, kept_back))
        return reply

    def _answer_run(self, data: bytes) -> bytes:
        """Answer orders or an evaluation of a run."""
        kind = wire_format.kind_of(data)
        head = check_protocol(wire_format.unpack(data, kind, limit=self.policy.message).head)
        self._round = head.get("round") if isinstance(head.get("round"), int) else None
        site = self._site(str(head.get("run")))
        reply = site.answer(data)
        self._kept_back = "; ".join(f"{name}: {reason}" for name, reason in site.kept_back.items())
        self.rounds += 1
        return reply

    def _end(self, data: bytes) -> bytes:
        RunOver.from_bytes(data, limit=self.policy.message)
        self.over = True
        return RunOver().to_bytes()

    def _summarize(self, data: bytes) -> bytes:
        """Answer the server's request for sums over the tables, before the enrollment."""
        request = SchemaRequest.from_bytes(data, limit=self.policy.message)
        refuse(request.site != self.site, "site", f"a question for site {request.site!r}, this is {self.site!r}")
        if self.source.tables is None:
            raise ProtocolError("no-tables", "this site has no tables: its data is not a folder of CSV files")
        reply = answer_request(request, self.source.tables, self.policy.table).to_bytes()
        digest = hashlib.sha256(repr((request.schema, request.test, request.seed)).encode())
        self.usage.charge("question", [TEST_ROWS], digest.hexdigest(), 0, digest.digest())
        return reply

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
        """Return the site of a run; after a restart, rebuild it from its stored enrollment."""
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
            dataset = self._encode_tables(config, request.schema)
            data = SiteData.of(dataset, request.clients, request.population, shared=self.source.shared)
            stage = "model"
            self._check_size(config, data)
            task = build.build_task(config, data)
            stage = "config"
            method = build_algorithm(config)
            if (mixing := method.local.mixing) is not None:  # clusters are known once all sites have replied
                clusters = request.clusters or [list(range(request.population))]
                method = method.with_local(mixing=replace(mixing, clusters=clusters))
            dtype = build.torch_dtype(config)
            start = task.start(Key(config.seed), dtype)
            labels = data.local_label_counts() if self.policy.label_counts and data.classes is not None else {}
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
            algorithm, task, request.clients, dtype, memory_store=memory, policy=self.policy,
            key=Key(config.seed), rounds=config.rounds, usage=self.usage,
            owners=dict(zip(request.clients, numbers, strict=True)),
        )  # fmt: skip
        site.check_rows()
        return site, reply

    def _check_size(self, config: Config, data: FederatedData) -> None:
        """Refuse a model with more parameters than the policy permits before allocating it."""
        factory = build.model_factory(config, data)
        try:
            with torch.device("meta"), random_state.preserve_rng():
                model = factory()
        except Exception:
            if config.model.factory is None:
                raise
            return  # a model of the site's own code, which its operator has listed, may need real tensors
        entries = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        maximum = self.policy.parameters
        detail = f"a model of {entries:,} parameters and buffer entries, the site's policy permits {maximum:,}"
        refuse(entries > maximum, "parameters", detail)

    def _check(self, request: EnrollmentRequest) -> None:
        refuse(request.site != self.site, "site", f"an enrollment for site {request.site!r}, this is {self.site!r}")
        other = request.version != __version__
        refuse(other, "version", f"the server has hansa {request.version}, this site {__version__}")
        clients, population = request.clients, request.population
        possible = 1 <= population <= MAX_POPULATION and clients and clients[0] >= 0 and clients[-1] < population
        valid = possible and all(a < b for a, b in itertools.pairwise(clients))
        refuse(not valid, "clients", f"expected increasing numbers below {population}, got {clients[:5]}")
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
