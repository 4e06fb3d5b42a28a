"""A site: it owns the data and the memory of its clients, trains them, and answers. It validates all received data.

A refused frame changes nothing, and is counted by its code (`hansa.federation.messages.REASONS`).
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.algorithm import Algorithm
from hansa.compress import PacketError, decode
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.federation.messages import (
    EVALUATION,
    MemoryVersion,
    ProtocolError,
    Refusals,
    RoundOrders,
    RoundReports,
    SiteEvaluationReply,
    SiteEvaluationRequest,
    without_details,
)
from hansa.federation.policy import Policy, Usage
from hansa.local.work import is_set_by_samples
from hansa.rounds import client_round, wire_format
from hansa.rounds.messages import Broadcast, Report, WorkOrder
from hansa.rounds.wire_format import Blobs
from hansa.runs.store import DamagedFileError, io
from hansa.runs.store.database import Database, RowEntry
from hansa.training import TaskLike, random_state
from hansa.training.evaluation import compute_site_metrics
from hansa.training.execution_mode import without_native


class MemoryStore:
    """A site's memory of clients by version, in a database as that of a run. Several processes may use it.

    Args:
        folder: The folder, created if it is absent; one for each run. None is a temporary one.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp() if folder is None else folder)
        self._durable = folder is not None
        if not self._durable:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        io.make_folder(self.folder)
        Database.ensure(self.folder)
        self._opened: Database | None = None

    @property
    def _database(self) -> Database:
        """The database, opened once in each process."""
        if self._opened is None or not self._opened.is_mine:
            self._opened = Database(self.folder, writing=True, durable=self._durable, shared=False)
            weakref.finalize(self, self._opened.close)  # also before the interpreter ends
        return self._opened

    def get(self, client: int, version: MemoryVersion) -> dict[str, Tensor] | None:
        """Return the rows of a version, or None if it is not stored."""
        try:
            _, entry = self.versions(client).get(version, (None, None))
            if entry is None:
                return None
            frame = wire_format.unpack(self._database.get(entry).numpy().tobytes(), "memory")
            return wire_format.read_tensors(frame.head.get("rows"), frame)
        except (wire_format.FrameError, DamagedFileError) as error:
            raise HansaError(
                f"{self.folder}: the memory of client {client} is damaged ({error}). Restore it from a backup, or "
                f"restart the server with --forget {client}."
            ) from error

    def put(
        self, client: int, version: MemoryVersion, rows: Mapping[str, Tensor], parent: MemoryVersion | None = None
    ) -> None:
        """Store a version that was made from ``parent``; durable when this returns."""
        blobs = Blobs()
        head = {"rows": blobs.tensors(rows)}
        content = torch.frombuffer(bytearray(wire_format.pack("memory", head, blobs.blobs)), dtype=torch.uint8)
        name = " ".join(str(named) for named in (version, parent) if named is not None)
        with self._writing() as database:
            if version in (known := self.versions(client)):
                database.delete("id = ?", [known[version][1].id])
            database.put("memory", client, name, version.round, content)

    def prune(self, client: int, named: MemoryVersion | None, keep_from: int) -> None:
        """Delete the versions that no server can name any more, given the version that it named last.

        The named version was accepted, and so were its ancestors. A server that resumes, at the earliest from round
        ``keep_from``, names the newest ancestor from before that round, or a newer one. All other versions from before
        that round were never accepted or are older. If that newest ancestor is not known, nothing is deleted.
        """
        versions, newest = self.versions(client), named
        while newest is not None and newest.round >= keep_from:
            newest = versions[newest][0] if newest in versions else None
        old = [version for version in versions if version != newest and version.round < keep_from]
        if newest is not None and old:
            with self._writing() as database:
                for version in old:
                    database.delete("id = ?", [versions[version][1].id])

    def clients(self) -> list[int]:
        """Return the clients that have a version."""
        return sorted({entry.client for entry in self._database.entries("kind = 'memory'")})

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
            database.see_others()
            yield database
            database.commit()


class Site:
    """One site of a federation: `handle` turns a frame of orders into a frame of reports.

    Equal orders have equal answers, also if repeated or after a restart, since they name the memory versions.

    Args:
        algorithm: The algorithm of the run.
        task: The task with the site's data.
        clients: The clients of this site.
        dtype: The dtype of the model.
        run: The run that this site joins; None accepts any.
        memory_store: Where the clients' memory is stored; None is a temporary folder.
        policy: What a server may ask for; None permits all but frames over a gigabyte.
        key: The key of the run; None accepts any.
        rounds: The rounds of the run; None knows of no last one.
        usage: Counts what was asked for; None counts in memory.
        owners: The site's own number of each client, by which it counts; None counts by the numbers of the federation.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        clients: Collection[int],
        dtype: torch.dtype = torch.float32,
        *,
        run: str | None = None,
        memory_store: MemoryStore | None = None,
        policy: Policy | None = None,
        key: Key | None = None,
        rounds: int | None = None,
        usage: Usage | None = None,
        owners: Mapping[int, int] | None = None,
    ) -> None:
        self.algorithm, self.task, self.clients = algorithm, task, frozenset(clients)
        self.policy = Policy(test_rows=1, min_rows=1) if policy is None else policy
        self.usage = Usage() if usage is None else usage
        self.owners = {client: client for client in clients} if owners is None else owners
        self.run, self.key, self.rounds, self.dtype = run, key, rounds, dtype
        self.memory_store = MemoryStore() if memory_store is None else memory_store
        self.refusals = Refusals()
        self._trainer = without_native(task, algorithm).trainer(dtype, torch.device("cpu"))
        self._received: dict[str, dict[int, Vector]] = {}
        self._start: Vectors = {}
        self.kept_back: dict[str, str] = {}  # what the last answer does not say, and why; for the site only
        start = task.start(Key(0), dtype)
        self._dims = {
            name: getattr(channel.downlink, "entries", start.get(name, start[MODEL]).numel())
            for name, channel in algorithm.channels.items()
        }

    def check_rows(self) -> None:
        """Refuse a run in which no client of the site can take part, as far as its work is known before."""
        local, samples = self.algorithm.local, self.task.population.samples
        if local.mixing is None and is_set_by_samples(local.steps):
            rows = {
                client: local.rows_of(local.draw_work(client, samples[client], Key(0)), samples[client])
                for client in self.clients
            }
            if max(rows.values()) < self.policy.min_rows:
                most = f"{max(rows.values())} rows, the policy has min_rows: {self.policy.min_rows}"
                raise ProtocolError("rows", f"no update would be computed from more than {most}")

    def handle(self, data: bytes) -> bytes | None:
        """Return the answer to a frame, or None if it is refused; a refused frame changes nothing."""
        try:
            return self.answer(data)
        except ProtocolError as refusal:
            self.refusals.record(refusal.reason, refusal.detail)
            return None

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a frame, or raise `ProtocolError`."""
        self.kept_back = {}
        try:
            request: SiteEvaluationRequest | RoundOrders
            if wire_format.kind_of(data) == EVALUATION:
                request = SiteEvaluationRequest.from_bytes(data, limit=self.policy.message)
            else:
                request = RoundOrders.from_bytes(data, limit=self.policy.message)
        except HansaError as error:
            raise ProtocolError(getattr(error, "reason", "malformed"), str(error)) from error
        if self.run is not None and request.run != self.run:
            raise ProtocolError("run", f"orders of run {request.run!r}, expected {self.run!r}")
        last = min(each for each in (self.rounds, self.policy.rounds) if each is not None)
        if request.round >= last:
            raise ProtocolError("rounds", f"a message of round {request.round + 1}, the last one is {last}")
        with random_state.fixed_arithmetic():
            if isinstance(request, SiteEvaluationRequest):
                return self._evaluate(request).to_bytes()
            self._check(request)
            return self._answer(request).to_bytes()

    def _check(self, request: RoundOrders) -> None:
        if set(request.broadcasts) != set(self.algorithm.channels):
            raise ProtocolError(
                "channels", f"broadcasts on {[*request.broadcasts]}, expected {[*self.algorithm.channels]}"
            )
        if request.keep_from > request.round:
            raise ProtocolError("round", f"round {request.round} releases memory up to round {request.keep_from}")
        seen: set[int] = set()
        for order in request.orders:
            if (order.run, order.round) != (request.run, request.round):
                raise ProtocolError("round", f"an order of round {order.round} among those of round {request.round}")
            self._check_clients(order, seen)
            missing = sorted(set(order.reporters) - set(request.versions))
            if missing:
                raise ProtocolError("stamps", f"no memory version for client {missing[0]}")
            self._check_work(order)

    def _check_work(self, order: WorkOrder) -> None:
        """Refuse other work than the configuration has, whose rates the site takes from there itself."""
        steps = max(work.steps for work in order.works)
        if steps > self.policy.steps:
            raise ProtocolError("steps", f"an order of {steps} steps, the site permits {self.policy.steps}")
        if order.mean:
            raise ProtocolError("work", f"cohort {order.cohort}: the mean of its models is of simulations only")
        if self.key is not None and order.key != self.key:
            raise ProtocolError("work", f"an order with key {order.key}, the configuration has {self.key}")
        first, address = order.clients[0], order.key.child("work", order.round, order.clients[0])
        most = max(self.task.population.samples[client] for client in order.clients)
        agreed = self.algorithm.local.draw_work(first, most, address)
        if set(order.works) != {agreed}:
            asked = next(work for work in order.works if work != agreed)
            raise ProtocolError("work", f"client {first}: an order of {asked}, the configuration has {agreed}")

    def _check_clients(self, order: WorkOrder, seen: set[int]) -> None:
        unknown = sorted(set(order.clients) - self.clients)
        if unknown:
            raise ProtocolError("clients", f"client {unknown[0]} is not at this site")
        if not {*order.reporters, *order.absent} <= set(order.clients) or not order.reporters:
            raise ProtocolError("clients", f"cohort {order.cohort}: reporters {order.reporters} of {order.clients}")
        if order.attack is not None or order.absent:
            raise ProtocolError("clients", f"cohort {order.cohort}: an attack or a failure is of simulations only")
        if order.clients != self._cohort(order):
            raise ProtocolError("clients", f"cohort {order.cohort}: clients {order.clients}, expected a whole cluster")
        repeated = seen.intersection(order.clients)
        if repeated or len(set(order.clients)) < len(order.clients):
            raise ProtocolError("clients", f"cohort {order.cohort}: a client is ordered twice")
        seen.update(order.clients)

    def _cohort(self, order: WorkOrder) -> tuple[int, ...]:
        """Return the clients that belong into the cohort of an order."""
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
        for name, sent in request.broadcasts.items():
            self._check_fit(name, sent)
            try:
                base = None if sent.base is None else self._base(name, sent.base, request)
                vectors[name] = self.algorithm.channels[name].downlink.apply(base, sent.packets)
                if fingerprint(vectors[name]) != request.digests.get(name):
                    raise PacketError(f"channel {name!r}: the broadcast does not decode to the vector of the server.")
            except Exception as error:  # from a decoder, which may be user code
                if sent.base is None:
                    raise ProtocolError("model", f"{type(error).__name__}: {error}") from error
                need.append(name)
        if not need:
            for name, vector in vectors.items():
                self._store(name, request.broadcasts[name].version, vector)
        return vectors, need

    def _check_fit(self, name: str, sent: Broadcast) -> None:
        """Refuse packets of another model before they are decoded: they could unpack to any size."""
        for packet in sent.packets:
            try:
                packet.check(dim=self._dims[name], dtype=self.dtype)
            except PacketError as error:
                raise ProtocolError("model", f"channel {name!r}: {error} The site has another model.") from error

    def _base(self, name: str, version: int, request: RoundOrders) -> Vector:
        vectors = self._received.get(name, {})
        if version in vectors:
            return vectors[version]
        if version != 0 or not request.orders:
            raise PacketError(f"channel {name!r}: version {version} is not known here.")
        if not self._start:  # version 0 follows from the public seed
            self._start = self.task.start(request.orders[0].key, self.dtype)
        return self._start.get(name, torch.zeros_like(self._start[MODEL]))

    def _store(self, name: str, version: int, vector: Vector) -> None:
        """Store a version that later broadcasts may be relative to, and drop the oldest."""
        vectors = self._received.setdefault(name, {})
        vectors[version] = vector.clone()
        for old in sorted(vectors)[:-_MAX_VERSIONS]:
            del vectors[old]

    def _train(self, order: WorkOrder, request: RoundOrders, updated: set[int]) -> Report:
        memory: dict[int, Vectors] = {}
        for client in order.reporters:
            version = request.versions[client]
            try:
                rows = {} if version is None else self.memory_store.get(client, version)
            except HansaError as error:  # it is damaged
                return _drop_all(order, "memory", str(error))
            if rows is None:
                problem = f"the site does not have version {version} of client {client}'s memory"
                remedy = f"Restore it, or restart the server with --forget {client}."
                return _drop_all(order, "memory", f"{problem}. {remedy}")
            memory[client] = rows
        if reason := self._too_few_rows(order):
            return _drop_all(order, "rows", reason)
        if reason := self._charge(order, request):
            return _drop_all(order, "budget", reason)
        try:
            orders = [replace(order, memory=memory)]
            (report,) = client_round(self.algorithm, orders, self._trainer, self.task.population)
        except Exception as error:
            return _drop_all(order, "failed", f"{type(error).__name__}: {error}")
        for place, client in enumerate(report.clients):
            new_rows = report.memory.get(client, {})
            try:
                if new_rows:
                    version, rows = MemoryVersion.of_upload(report, place), {**memory[client], **new_rows}
                    self.memory_store.put(client, version, rows, request.versions[client])
                    updated.add(client)
                self.memory_store.prune(client, request.versions[client], request.keep_from)
            except HansaError as error:  # it is damaged: nothing leaves that was not stored
                updated.difference_update(order.reporters)
                return _drop_all(order, "memory", str(error))
        return replace(report, memory={})

    def _too_few_rows(self, order: WorkOrder) -> str:
        """Return which client of a cohort has an update of too few rows, or nothing."""
        for client in order.clients:
            rows = self.algorithm.local.rows_of(order.works[0], self.task.population.samples[client])
            if rows < self.policy.min_rows:
                return (
                    f"an update of client {client} is computed from {rows} rows, the policy has {self.policy.min_rows}"
                )
        return ""

    def _charge(self, order: WorkOrder, request: RoundOrders) -> str:
        """Count the training of a cohort by all that its result depends on; return what forbids it, or nothing."""
        state = hashlib.sha256(repr((order.key, order.cohort, order.clients, order.reporters, order.works)).encode())
        state.update(repr([str(request.versions[client]) for client in order.reporters]).encode())
        for name in sorted(request.digests):
            state.update(name.encode() + request.digests[name])
        owners = [self.owners[client] for client in order.clients]
        limits = {"total": self.policy.trainings, "rounds": self.policy.rounds}
        return self.usage.charge("training", owners, request.run, order.round, state.digest(), **limits)

    def _evaluate(self, request: SiteEvaluationRequest) -> SiteEvaluationReply:
        """Return the sums over this site's test rows."""
        names = {MODEL, BUFFERS} & set(self.algorithm.channels)
        if set(request.broadcasts) != names:
            raise ProtocolError("channels", f"an evaluation on {sorted(request.broadcasts)}, expected {sorted(names)}")
        vectors = {}
        for name, sent in request.broadcasts.items():
            self._check_fit(name, sent)
            if len(sent.packets) != 1:
                raise ProtocolError("model", f"channel {name!r}: {len(sent.packets)} packets, expected one full vector")
            try:
                vectors[name] = decode(sent.packets[0], dim=self._dims[name], dtype=self.dtype, kind="whole")
            except PacketError as error:
                raise ProtocolError("model", f"channel {name!r}: {error}") from error
        if fingerprint(vectors[MODEL]) != request.digest:
            raise ProtocolError("model", "the broadcast does not decode to the model of the server")
        reply = SiteEvaluationReply(request.run, request.round, request.digest)
        task: Any = self.task
        if not hasattr(task, "sum_scores") or not (pieces := task.test_chunks()):
            return reply
        if task.main_test_rows < self.policy.test_rows:  # sums over few rows would say much of each
            self.kept_back["sums"] = f"{task.main_test_rows} test rows, the policy has {self.policy.test_rows}"
            return replace(reply, kept_back=True)
        digest = b"".join(fingerprint(vectors[name]) for name in sorted(vectors))
        limits = {"total": self.policy.evaluations, "rounds": self.policy.rounds}
        if reason := self.usage.charge("evaluation", [_ALL], request.run, request.round, digest, **limits):
            raise ProtocolError("budget", reason)
        with random_state.preserve_rng():
            scores = [self._trainer.evaluate(vectors, *piece) for piece in pieces]  # type: ignore[attr-defined]
            score = task.sum_scores(scores)
        counted = score.correct is not None and math.isfinite(score.correct)  # outputs that are NaN have no hits
        requested = {} if self.policy.metrics == "none" else getattr(task, "metrics", {})
        if self.policy.metrics == "none":
            self.kept_back = dict.fromkeys(getattr(task, "metrics", {}), "the policy has metrics: none")
        own = compute_site_metrics(score, requested, self.policy.test_rows, sketch=self.policy.metrics == "sketch")
        self.kept_back |= own.kept_back
        return replace(
            reply,
            rows=task.main_test_rows,
            loss=score.loss_sum,
            weight=score.weight,
            hits=score.correct if counted else None,
            labels=score.labels if counted else None,
            metrics=own.values,
            sketches=own.sketches,
        )


def _drop_all(order: WorkOrder, reason: str, detail: str) -> Report:
    """Return a report that drops all reporters of a cohort."""
    return Report.without(order, reason, wire_format.sentence(detail))


_ALL = -1  # the owner of the site's test rows
_MAX_VERSIONS = 8  # received versions that a site keeps; if the base is missing, it is sent the full vector
