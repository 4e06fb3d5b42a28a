"""A site: it owns the data and the memory of its clients, trains them, and answers. It validates all received data.

A refused frame is counted by reason and changes nothing:

==============  ===========================================================================
reason          what is wrong
==============  ===========================================================================
``oversize``    more bytes than this site accepts
``truncated``   the lengths in it do not match its size
``damaged``     its digest does not match
``version``     another version of the format or of the protocol
``inflated``    it would unpack to far more than its size
``malformed``   anything else that is not a message
``run``         another run
``round``       orders of several rounds, or memory released for future rounds
``channels``    broadcasts on other channels than the algorithm has
``clients``     orders for clients of other sites, or for one client twice
``stamps``      the memory version of a client is missing
``work``        orders without steps or samples
``rounds``      a round after the last one that this site permits
``steps``       more local steps than this site permits
``model``       broadcasts of another model, or that do not decode to what the server has
==============  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from hansa.algorithm import Algorithm
from hansa.compress import PacketError, decode
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.federation.client_memory import MemoryStore, RamMemoryStore
from hansa.federation.messages import (
    EVALUATION,
    MemoryVersion,
    ProtocolError,
    Refusals,
    RoundOrders,
    RoundReports,
    SiteEvaluationReply,
    SiteEvaluationRequest,
)
from hansa.federation.policy import MetricDisclosure
from hansa.federation.reasons import without_details
from hansa.rounds import client_round, wire_format
from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder
from hansa.training import TaskLike, random_state
from hansa.training.scoring import compute_site_metrics, summed_hits


class Site:
    """One site of a federation: `handle` turns a frame of orders into a frame of reports.

    Equal orders have equal answers, also if repeated or after a restart, since they name the memory versions.

    Args:
        algorithm: The algorithm of the run.
        task: The task with the site's data.
        clients: The clients of this site.
        dtype: The dtype of the model.
        run: The run that this site joins; None accepts any.
        memory_store: Where the clients' memory is stored; None keeps it in RAM.
        limit: The largest accepted frame in bytes.
        rounds: The most rounds.
        steps: The most local steps of an order.
        test_rows: The fewest test rows whose sums are reported, and the fewest rows of a class in a metric or sketch.
        metrics: What is reported of metrics that are not sums: "none", their "value", or also a "sketch" that the
            server can pool.
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
        limit: int | None = None,
        rounds: int | None = None,
        steps: int | None = None,
        test_rows: int = 1,
        metrics: MetricDisclosure = "value",
    ) -> None:
        self.algorithm, self.task, self.clients = algorithm, task, frozenset(clients)
        self.rounds, self.steps, self.test_rows, self.metrics = rounds, steps, test_rows, metrics
        self.run, self.limit, self.dtype = run, limit, dtype
        self.memory_store: MemoryStore = RamMemoryStore() if memory_store is None else memory_store
        self.refusals = Refusals()
        self._trainer = task.trainer(dtype, torch.device("cpu"))
        self._received: dict[str, dict[int, Vector]] = {}
        self.kept_back: dict[str, str] = {}  # what the last answer does not say, and why; for the site only
        start = task.start(Key(0), dtype)
        self._dims = {name: start.get(name, start[MODEL]).numel() for name in algorithm.channels}

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
                request = SiteEvaluationRequest.from_bytes(data, limit=self.limit)
            else:
                request = RoundOrders.from_bytes(data, limit=self.limit)
        except HansaError as error:
            raise ProtocolError(getattr(error, "reason", "malformed"), str(error)) from error
        if self.run is not None and request.run != self.run:
            raise ProtocolError("run", f"orders of run {request.run!r}, expected {self.run!r}")
        with random_state.fixed_arithmetic():
            if isinstance(request, SiteEvaluationRequest):
                return self._evaluate(request).to_bytes()
            self._check(request)
            return self._answer(request).to_bytes()

    def _check(self, request: RoundOrders) -> None:
        if self.rounds is not None and request.round >= self.rounds:
            raise ProtocolError("rounds", f"orders of round {request.round + 1}, the site permits {self.rounds}")
        if set(request.broadcasts) != set(self.algorithm.channels):
            raise ProtocolError(
                "channels", f"broadcasts on {sorted(request.broadcasts)}, expected {sorted(self.algorithm.channels)}"
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
            if self.steps is not None and order.work.steps > self.steps:
                raise ProtocolError("steps", f"an order of {order.work.steps} steps, the site permits {self.steps}")
            if not order.work.steps >= 1 or not order.work.batch_size >= 1:
                raise ProtocolError(
                    "work", f"an order of {order.work.steps} steps with batches of {order.work.batch_size}"
                )

    def _check_clients(self, order: WorkOrder, seen: set[int]) -> None:
        unknown = sorted(set(order.clients) - self.clients)
        if unknown:
            raise ProtocolError("clients", f"client {unknown[0]} is not at this site")
        if not {*order.reporters, *order.absent} <= set(order.clients) or not order.reporters:
            raise ProtocolError("clients", f"cohort {order.cohort}: reporters {order.reporters} of {order.clients}")
        if order.attack is not None:
            raise ProtocolError("clients", f"cohort {order.cohort}: an attack, which only simulations have")
        repeated = seen.intersection(order.clients)
        if repeated or len(set(order.clients)) < len(order.clients):
            raise ProtocolError("clients", f"cohort {order.cohort}: a client is ordered twice")
        seen.update(order.clients)

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
        start = self.task.start(request.orders[0].key, self.dtype)  # version 0 follows from the public seed
        return start.get(name, torch.zeros_like(start[MODEL]))

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
        try:
            orders = [replace(order, memory=memory)]
            (report,) = client_round(self.algorithm, orders, self._trainer, self.task.population)
        except Exception as error:
            return _drop_all(order, "failed", f"{type(error).__name__}: {error}")
        for upload in report.uploads:
            client, new_rows = upload.client, report.memory.get(upload.client, {})
            if new_rows:
                self.memory_store.put(
                    client, MemoryVersion.of_upload(upload), {**memory[client], **new_rows}, request.versions[client]
                )
                updated.add(client)
            self.memory_store.prune(client, request.versions[client], request.keep_from)
        return replace(report, memory={})

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
        if task.main_test_rows < self.test_rows:  # sums over few rows would say much of each
            self.kept_back["sums"] = f"{task.main_test_rows} test rows, the policy has {self.test_rows}"
            return reply
        with random_state.preserve_rng():
            scores = [self._trainer.evaluate(vectors, *piece) for piece in pieces]  # type: ignore[attr-defined]
            score = task.sum_scores(scores)
        hits = summed_hits(score, task.main_test_rows)
        requested = {} if self.metrics == "none" else getattr(task, "metrics", {})
        if self.metrics == "none":
            self.kept_back = dict.fromkeys(getattr(task, "metrics", {}), "the policy has metrics: none")
        own = compute_site_metrics(score, requested, self.test_rows, sketch=self.metrics == "sketch")
        self.kept_back |= own.kept_back
        return replace(
            reply,
            rows=task.main_test_rows,
            loss=score.loss_sum,
            weight=score.weight,
            hits=None if hits is None else hits[0],
            labels=None if hits is None else hits[1],
            metrics=own.values,
            sketches=own.sketches,
        )


def _drop_all(order: WorkOrder, reason: str, detail: str) -> Report:
    """Return a report that drops all reporters of a cohort."""
    return Report(
        order.cohort,
        dropped=tuple(DroppedClient(client, reason, wire_format.sentence(detail)) for client in order.reporters),
    )


_MAX_VERSIONS = 8  # received versions that a site keeps; if the base is missing, it is sent the full vector
