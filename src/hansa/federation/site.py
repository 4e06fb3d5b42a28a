"""A site: it owns its clients' data and memory, trains them when ordered, and answers. It trusts no byte it is sent.

A frame is refused, counted by reason, and changes nothing:

==============  ===========================================================================
reason          what is wrong
==============  ===========================================================================
``oversize``    more bytes than this site takes
``truncated``   the lengths in it do not come to its own
``damaged``     its digest is another
``version``     of another version of the format or of the protocol
``inflated``    it would unpack to far more than it is
``malformed``   anything else that is no message
``run``         of another run
``round``       its parts are not of one round, or it lets go of rounds to come
``channels``    mail on other channels than the method has
``clients``     orders for clients that are elsewhere, or for one twice
``stamps``      it does not say what a client builds upon
``work``        orders of no work
``rounds``      of a round beyond those that this site takes part in
``steps``       of more steps than this site does in a round
``model``       mail for another model, or that does not make what the server says it makes
==============  ===========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch

from hansa.algorithm import Algorithm
from hansa.compress import PacketError, decode
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.engine.requests import Divisible
from hansa.federation.client_memory import RamVersions, Versions
from hansa.federation.messages import Exam, Marks, NotOurs, Refusals, RoundOrders, RoundReports, Stamp
from hansa.rounds import client_round, wire_format
from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder
from hansa.training import TaskLike, random_state


class Site:
    """One place with some of the clients: ``handle`` turns a frame of orders into a frame of reports.

    It may be told the same twice, or be built anew in between: a stamp names the memory that a client builds upon, so
    equal orders have equal answers. ``limit`` bounds a frame before it is parsed, ``rounds`` and ``steps`` what is
    asked.
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
        rounds: int | None = None,
        steps: int | None = None,
    ) -> None:
        self.algorithm, self.task, self.clients = algorithm, task, frozenset(clients)
        self.rounds, self.steps = rounds, steps
        self.run, self.limit, self.dtype = run, limit, dtype
        self.versions: Versions = RamVersions() if versions is None else versions
        self.refusals = Refusals()
        self._shell = task.shell(dtype, torch.device("cpu"))
        self._held: dict[str, dict[int, Vector]] = {}
        start = task.start(Key(0), dtype)
        self._dims = {name: start.get(name, start[MODEL]).numel() for name in algorithm.channels}

    def handle(self, data: bytes) -> bytes | None:
        """The answer to a frame, or None where it was refused; a refused frame changes nothing."""
        try:
            return self.answer(data)
        except NotOurs as refusal:
            self.refusals.note(refusal.reason, refusal.detail)
            return None

    def answer(self, data: bytes) -> bytes:
        """The answer to a frame; `NotOurs` where it is refused."""
        try:
            told: Exam | RoundOrders
            if wire_format.kind_of(data) == "exam":
                told = Exam.from_bytes(data, limit=self.limit)
            else:
                told = RoundOrders.from_bytes(data, limit=self.limit)
        except HansaError as error:
            raise NotOurs(getattr(error, "reason", "malformed"), str(error)) from error
        if self.run is not None and told.run != self.run:
            raise NotOurs("run", f"orders of run {told.run!r}, this site takes part in {self.run!r}")
        with random_state.exact_arithmetic():
            if isinstance(told, Exam):
                return self._examined(told).to_bytes()
            self._check(told)
            return self._answer(told).to_bytes()

    def _check(self, told: RoundOrders) -> None:
        if self.rounds is not None and told.round >= self.rounds:
            raise NotOurs("rounds", f"orders of round {told.round + 1}, at most {self.rounds} are taken")
        if set(told.mail) != set(self.algorithm.channels):
            raise NotOurs("channels", f"mail on {sorted(told.mail)}, expected {sorted(self.algorithm.channels)}")
        if told.keep_from > told.round:
            raise NotOurs("round", f"round {told.round} lets go of rounds before {told.keep_from}")
        seen: set[int] = set()
        for order in told.orders:
            if (order.run, order.round) != (told.run, told.round):
                raise NotOurs("round", f"an order of round {order.round} among those of round {told.round}")
            self._check_clients(order, seen)
            missing = sorted(set(order.reporters) - set(told.stamps))
            if missing:
                raise NotOurs("stamps", f"no word of what client {missing[0]} builds upon")
            if self.steps is not None and order.work.steps > self.steps:
                raise NotOurs("steps", f"an order of {order.work.steps} steps, at most {self.steps} are taken")
            if not order.work.steps >= 1 or not order.work.batch_size >= 1:
                raise NotOurs("work", f"an order of {order.work.steps} steps of {order.work.batch_size}")

    def _check_clients(self, order: WorkOrder, seen: set[int]) -> None:
        foreign = sorted(set(order.clients) - self.clients)
        if foreign:
            raise NotOurs("clients", f"client {foreign[0]} is not at this site")
        if not {*order.reporters, *order.absent} <= set(order.clients) or not order.reporters:
            raise NotOurs("clients", f"cohort {order.cohort}: reporters {order.reporters} of {order.clients}")
        twice = seen.intersection(order.clients)
        if twice or len(set(order.clients)) < len(order.clients):
            raise NotOurs("clients", f"cohort {order.cohort}: a client is ordered twice")
        seen.update(order.clients)

    def _answer(self, told: RoundOrders) -> RoundReports:
        got, need = self._unpacked(told)
        if need:
            return RoundReports(told.run, told.round, need=tuple(need))
        mail = {name: Broadcast.whole(vector, told.mail[name].version) for name, vector in got.items()}
        kept: set[int] = set()
        reports = tuple(self._train(replace(order, broadcasts=mail), told, kept) for order in told.orders)
        return RoundReports(told.run, told.round, reports, kept=frozenset(kept))

    def _unpacked(self, told: RoundOrders) -> tuple[Vectors, list[str]]:
        """What the mail comes to; and the channels on which it does not come to what it must, for want of a base."""
        got: Vectors = {}
        need = []
        for name, sent in told.mail.items():
            self._check_fit(name, sent)
            try:
                base = None if sent.base is None else self._base(name, sent.base, told)
                got[name] = self.algorithm.channels[name].downlink.apply(base, sent.packets)
                if fingerprint(got[name]) != told.digests.get(name):
                    raise PacketError(f"channel {name!r}: the mail does not make what the server has.")
            except Exception as error:  # of a decoder, perhaps a user's own
                if sent.base is None:
                    raise NotOurs("model", f"{type(error).__name__}: {error}") from error
                need.append(name)
        if not need:
            for name, vector in got.items():
                self._hold(name, told.mail[name].version, vector)
        return got, need

    def _check_fit(self, name: str, sent: Broadcast) -> None:
        """Packets for another model are not opened: what they would unpack to is theirs to say, memory is ours."""
        for packet in sent.packets:
            try:
                packet.expect(dim=self._dims[name], dtype=self.dtype)
            except PacketError as error:
                raise NotOurs("model", f"channel {name!r}: {error} The site has another model.") from error

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

    def _train(self, order: WorkOrder, told: RoundOrders, kept: set[int]) -> Report:
        memory: dict[int, Vectors] = {}
        for client in order.reporters:
            stamp = told.stamps[client]
            rows = {} if stamp is None else self.versions.get(client, stamp)
            if rows is None:
                why = f"the site does not hold version {stamp} of client {client}'s memory, which the order builds upon"
                return _all_lost(order, "memory", f"{why}. Restore it, or have the server forget client {client}.")
            memory[client] = rows
        try:
            report = client_round(self.algorithm, replace(order, memory=memory), self._shell, self.task.population)
        except Exception as error:
            return _all_lost(order, "failed", f"{type(error).__name__}: {error}")
        for upload in report.uploads:
            client, fresh = upload.client, report.memory.get(upload.client, {})
            if fresh:
                self.versions.put(client, Stamp.of(upload), {**memory[client], **fresh}, told.stamps[client])
                kept.add(client)
            self.versions.prune(client, told.stamps[client], told.keep_from)
        return replace(report, memory={})

    def _examined(self, exam: Exam) -> Marks:
        """The sums over this site's own test rows; of no rows there are none."""
        names = {MODEL, BUFFERS} & set(self.algorithm.channels)
        if set(exam.mail) != names:
            raise NotOurs("channels", f"an exam on {sorted(exam.mail)}, expected {sorted(names)}")
        vectors = {}
        for name, sent in exam.mail.items():
            self._check_fit(name, sent)
            if len(sent.packets) != 1:
                raise NotOurs("model", f"channel {name!r}: {len(sent.packets)} packets, an exam has one whole vector")
            try:
                vectors[name] = decode(sent.packets[0], dim=self._dims[name], dtype=self.dtype, kind="whole")
            except PacketError as error:
                raise NotOurs("model", f"channel {name!r}: {error}") from error
        if fingerprint(vectors[MODEL]) != exam.digest:
            raise NotOurs("model", "the mail does not make the model that is to be examined")
        marks = Marks(exam.run, exam.round, exam.digest)
        if not isinstance(self.task, Divisible) or not (pieces := self.task.pieces()):
            return marks
        with random_state.kept():
            scores = [self._shell.evaluate(vectors, *piece) for piece in pieces]  # type: ignore[attr-defined]
        hits = [score.hits for score in scores if score.hits is not None]
        return replace(
            marks,
            rows=sum(stop - start for start, stop in pieces),
            loss=math.fsum(score.loss for score in scores),
            weight=math.fsum(score.weight for score in scores),
            hits=math.fsum(hits) if len(hits) == len(scores) else None,
        )


def _all_lost(order: WorkOrder, reason: str, detail: str) -> Report:
    """Nobody of a cohort reports, for one reason."""
    return Report(
        order.cohort,
        dropped=tuple(DroppedClient(client, reason, wire_format.sentence(detail)) for client in order.reporters),
    )


_KEPT_VERSIONS = 8  # broadcasts that a site can still build upon; beyond them it is sent the whole vector
