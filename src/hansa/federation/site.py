"""A site: it owns its clients' data and memory, trains them when ordered, and answers. It trusts no byte it is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from hansa.algorithm import Algorithm
from hansa.compress import PacketError
from hansa.errors import HansaError
from hansa.federation.exchange import NotOurs, RoundOrders, RoundReports, Stamp
from hansa.federation.memory import RamVersions, Versions
from hansa.rounds import client_round
from hansa.rounds.messages import Delivery, Lost, Order, Report
from hansa.tasks import TaskLike, generators
from hansa.types import MODEL, Vector, Vectors
from hansa.vectors.fingerprint import fingerprint


@dataclass(slots=True)
class Refusals:
    """What was refused, counted by reason, and the last detail of each."""

    counts: Counter[str] = field(default_factory=Counter)
    last: dict[str, str] = field(default_factory=dict)

    def note(self, reason: str, detail: str) -> None:
        self.counts[reason] += 1
        self.last[reason] = detail


class Site:
    """One place with some of the clients: ``handle`` turns a frame of orders into a frame of reports.

    It may be told the same twice, or be built anew in between: a stamp names the memory that a client builds upon, so
    equal orders have equal answers. ``limit`` bounds a frame before it is parsed.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        clients: Collection[int],
        dtype: torch.dtype = torch.float32,
        *,
        run: str | None = None,
        versions: Versions | None = None,
        limit: int | None = None,
    ) -> None:
        self.algorithm, self.task, self.clients = algorithm, task, frozenset(clients)
        self.run, self.limit, self.dtype = run, limit, dtype
        self.versions: Versions = RamVersions() if versions is None else versions
        self.refusals = Refusals()
        self._shell = task.shell(dtype, torch.device("cpu"))
        self._held: dict[str, dict[int, Vector]] = {}

    def handle(self, data: bytes) -> bytes | None:
        """The answer to a frame, or None where it was refused; a refused frame changes nothing."""
        try:
            told = RoundOrders.from_bytes(data, limit=self.limit)
            self._check(told)
        except NotOurs as refusal:
            self.refusals.note(refusal.reason, refusal.detail)
            return None
        except HansaError as error:
            self.refusals.note("malformed", str(error))
            return None
        with generators.exact_arithmetic():
            return self._answer(told).to_bytes()

    def _check(self, told: RoundOrders) -> None:
        if self.run is not None and told.run != self.run:
            raise NotOurs("run", f"orders of run {told.run!r}, this site takes part in {self.run!r}")
        if set(told.mail) != set(self.algorithm.channels):
            raise NotOurs("channels", f"mail on {sorted(told.mail)}, expected {sorted(self.algorithm.channels)}")
        for order in told.orders:
            if (order.run, order.round) != (told.run, told.round):
                raise NotOurs("round", f"an order of round {order.round} among those of round {told.round}")
            foreign = sorted(set(order.clients) - self.clients)
            if foreign:
                raise NotOurs("clients", f"client {foreign[0]} is not at this site")
            missing = sorted(set(order.reporters) - set(told.stamps))
            if missing:
                raise NotOurs("stamps", f"no word of what client {missing[0]} builds upon")
            if not order.work.steps >= 1 or not order.work.batch_size >= 1:
                raise NotOurs("work", f"an order of {order.work.steps} steps of {order.work.batch_size}")

    def _answer(self, told: RoundOrders) -> RoundReports:
        got, need = self._unpacked(told)
        if need:
            return RoundReports(told.run, told.round, need=tuple(need))
        mail = {name: Delivery.whole(vector, told.mail[name].version) for name, vector in got.items()}
        kept: set[int] = set()
        reports = tuple(self._train(replace(order, mail=mail), told, kept) for order in told.orders)
        return RoundReports(told.run, told.round, reports, kept=frozenset(kept))

    def _unpacked(self, told: RoundOrders) -> tuple[Vectors, list[str]]:
        """What the mail comes to; and the channels on which it does not come to what it must."""
        got: Vectors = {}
        need = []
        for name, sent in told.mail.items():
            try:
                base = None if sent.base is None else self._base(name, sent.base, told)
                got[name] = self.algorithm.channels[name].downlink.apply(base, sent.packets)
                if fingerprint(got[name]) != told.digests.get(name):
                    raise PacketError(f"channel {name!r}: the mail does not make what the server has.")
            except PacketError as error:
                if sent.base is None:
                    self.refusals.note("mail", str(error))
                need.append(name)
        if not need:
            for name, vector in got.items():
                self._hold(name, told.mail[name].version, vector)
        return got, need

    def _base(self, name: str, version: int, told: RoundOrders) -> Vector:
        held = self._held.get(name, {})
        if version in held:
            return held[version]
        if version != 0 or not told.orders:
            raise PacketError(f"channel {name!r}: version {version} is not held here.")
        start = self.task.start(told.orders[0].key, self.dtype)  # version 0 is made from the public seed, not sent
        return start.get(name, torch.zeros_like(start[MODEL]))

    def _hold(self, name: str, version: int, vector: Vector) -> None:
        """Keep a version to build upon, and of the others the newest."""
        held = self._held.setdefault(name, {})
        held[version] = vector.clone()
        for old in sorted(held)[:-_KEPT_VERSIONS]:
            del held[old]

    def _train(self, order: Order, told: RoundOrders, kept: set[int]) -> Report:
        memory: dict[int, Vectors] = {}
        for client in order.reporters:
            stamp = told.stamps[client]
            rows = {} if stamp is None else self.versions.get(client, stamp)
            if rows is None:
                lost = (
                    f"the site does not hold version {stamp} of client {client}'s memory, which the order builds upon"
                )
                return Report(order.cohort, lost=tuple(Lost(c, "memory", lost) for c in order.reporters))
            memory[client] = rows
        try:
            report = client_round(self.algorithm, replace(order, memory=memory), self._shell, self.task.population)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            return Report(order.cohort, lost=tuple(Lost(c, "failed", detail) for c in order.reporters))
        for upload in report.uploads:
            client, fresh = upload.client, report.memory.get(upload.client, {})
            if fresh:
                self.versions.put(client, Stamp.of(upload), {**memory[client], **fresh})
                kept.add(client)
            self.versions.prune(client, told.stamps[client], told.keep_from)
        return replace(report, memory={})


_KEPT_VERSIONS = 8  # broadcasts that a site can still build upon; beyond them it is sent the whole vector
