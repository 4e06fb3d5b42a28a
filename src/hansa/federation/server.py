"""The server's side: an engine whose clients are at sites. Driver, presets, metrics and checkpoints stay the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, Protocol, TypeAlias

import torch

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.engine.requests import Recall, as_it_is
from hansa.federation.enrollment import REFUSED, Refused
from hansa.federation.messages import Exam, Marks, NotOurs, Refusals, RoundOrders, RoundReports, Stamp
from hansa.rounds import OpenedRound, wire_format
from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder
from hansa.rounds.validation import sender
from hansa.training import TaskLike

log = logging.getLogger("hansa")

STAMP = "federation/stamp"
"""The row that the server keeps of every client: which version of its memory at the site is the admitted one."""


class Transport(Protocol):
    """Carries frames to sites and back. Who answered is what the transport knows (a key, a certificate), never what the
    frame says."""

    def send(self, site: str, data: bytes) -> None: ...

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """What has come since, waiting for it as long as the transport finds right; nothing means a time-out."""
        ...


Where: TypeAlias = Literal["server", "sites", "both"]
"""Where the model is evaluated: on the server's own test rows, on those of the sites, or on both."""


@dataclass(slots=True)
class SiteBytes:
    """What one site was sent and sent back, whole frames, and what its clients sent each other, which never left it."""

    down_bytes: int = 0
    up_bytes: int = 0
    peer_bytes: int = 0


class Federation:
    """An engine over a transport: each site is asked once a round, and asked again while it is silent, ``attempts``
    times; then its reporters are lost to the round. A round's orders say how far back the server may have to go: sites
    keep what they need for that.

    A site that stayed silent is a suspect: it is asked like the others, but nobody waits for it alone, until it answers
    again. With ``enough`` a round closes as soon as so many sites have answered, whoever they are.

    ``where`` says on whose test rows the model is evaluated. At the sites it is sums that come back, folded in the
    order of the sites' names: ``sites_test_loss``, ``sites_test_accuracy`` where the task counts hits, of
    ``sites_test_rows`` rows.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        dtype: torch.dtype,
        device: torch.device,
        *,
        transport: Transport,
        sites: Mapping[str, Sequence[int]],
        attempts: int = 5,
        limit: int | None = None,
        keep_from: Callable[[], int] | None = None,
        where: Where = "server",
        enough: int | None = None,
    ) -> None:
        self.algorithm, self.task, self.transport = algorithm, task, transport
        self.attempts, self.limit, self.keep_from, self.where = attempts, limit, keep_from, where
        if where not in ("server", "sites", "both"):
            raise invalid_argument("Federation", "where", where, "'server', 'sites' or 'both'")
        self.enough = enough
        self.refusals = Refusals()
        self.suspects: set[str] = set()
        self.sites = {name: tuple(clients) for name, clients in sites.items()}
        self._bytes: dict[str, SiteBytes] = {}
        self._home = {client: name for name, clients in sites.items() for client in clients}
        self._shell = task.shell(dtype, device)
        self._opened: OpenedRound | None = None
        self._oldest = 0
        homeless = sorted(set(range(task.population.count)) - set(self._home))
        if homeless:
            raise HansaError(f"client {homeless[0]} is at no site: every client of the population needs one.")
        if sum(len(clients) for clients in self.sites.values()) > len(self._home):
            raise HansaError("a client is at two sites, or twice at one: expected each at one.")

    def opened(self, opened: OpenedRound, oldest: int = 0) -> None:
        """Hear the round's broadcasts, and the oldest round that the server could go back to."""
        self._opened = opened
        self._oldest = oldest if self.keep_from is None else self.keep_from()

    def site_bytes(self) -> dict[str, dict[str, int]]:
        """What travelled to and from each site since this was last asked, and what stayed inside."""
        found, self._bytes = self._bytes, {}
        return {name: asdict(found[name]) for name in sorted(found)}

    def run(self, orders: Sequence[WorkOrder], recall: Recall = as_it_is) -> Iterator[Report]:
        """Reports as sites answer; a site that stays silent costs its reporters the round."""
        told = {name: self._told(mine, recall) for name, mine in self._by_site(orders).items()}
        asked = len(told)
        for _ in range(self.attempts):
            for name, message in told.items():
                self._send(name, message.to_bytes())
            while self._waits(told, asked) and (arrived := self.transport.receive()):
                for name, data in arrived:
                    reports = self._heard(name, data, told)
                    if reports is not None:
                        yield from reports
            if not self._waits(told, asked):
                break
        self.suspects |= set(told)
        for name, message in told.items():
            yield from _lost(message, "silent", f"site {name} did not answer")

    def _waits(self, told: Collection[str], asked: int) -> bool:
        """Whether somebody is still to answer for whom it is worth waiting."""
        if not told or (self.enough is not None and asked - len(told) >= self.enough):
            return False
        return bool(set(told) - self.suspects) or len(told) == asked

    def _send(self, site: str, data: bytes) -> None:
        self._bytes.setdefault(site, SiteBytes()).down_bytes += len(data)
        self.transport.send(site, data)

    def _by_site(self, orders: Sequence[WorkOrder]) -> dict[str, list[WorkOrder]]:
        found: dict[str, list[WorkOrder]] = {}
        for order in orders:
            homes = {self._home[client] for client in order.clients}
            if len(homes) > 1:
                raise HansaError(
                    f"cohort {order.cohort} spans sites {', '.join(sorted(homes))}: clients that gossip must be at one "
                    "site. Give the clusters as lists that follow the sites."
                )
            found.setdefault(homes.pop(), []).append(order)
        return found

    def _told(self, orders: Sequence[WorkOrder], recall: Recall) -> RoundOrders:
        stamps: dict[int, Stamp | None] = {}
        for order in orders:
            remembered = recall(order).memory
            for client in order.reporters:
                row = remembered.get(client, {}).get(STAMP)
                stamps[client] = None if row is None else Stamp.from_row(row)
        first = orders[0]
        receivers = [client for order in orders for client in order.reporters]
        assert self._opened is not None
        digests = {name: fingerprint(made.vector) for name, made in self._opened.broadcasts.items()}
        mail = self._mail(receivers)
        return RoundOrders(first.run, first.round, self._oldest, mail, tuple(orders), stamps, digests)

    def _mail(self, receivers: Sequence[int]) -> dict[str, Broadcast]:
        """What a site must be sent: the message of the client there that needs the fewest bytes makes it for all."""
        assert self._opened is not None
        mail = {}
        for name, made in self._opened.broadcasts.items():
            client = min(receivers, key=made.nbytes)
            mail[name] = Broadcast(made.version, made.bases[client], tuple(made.packets(client)))
        return mail

    def _heard(self, site: str, data: bytes, told: dict[str, RoundOrders]) -> tuple[Report, ...] | None:
        """A site's reports; None where the frame was refused, came twice, or asks for more mail."""
        self._bytes.setdefault(site, SiteBytes()).up_bytes += len(data)
        self.suspects.discard(site)
        try:
            if wire_format.kind_of(data) == REFUSED and site in told:
                refusal = self._refused(site, data)
                return _lost(told.pop(site), "refused", f"site {site}: {refusal.reason}: {refusal.detail}")
            if wire_format.kind_of(data) == "marks":
                raise NotOurs("unasked", f"site {site} answers an exam that is over")
            answer = RoundReports.from_bytes(data, limit=self.limit)
            asked = told.get(site)
            if asked is None:
                raise NotOurs("unasked", f"site {site} was not asked, or has answered")
            self._check(site, answer, asked)
        except HansaError as error:
            self.refusals.note_error(error)
            return None
        if answer.need:
            assert self._opened is not None
            whole = {
                name: Broadcast.whole(self._opened.broadcasts[name].vector, sent.version)
                if name in answer.need
                else sent
                for name, sent in asked.mail.items()
            }
            told[site] = replace(asked, mail=whole)
            self._send(site, told[site].to_bytes())
            return None
        del told[site]
        self._bytes[site].peer_bytes += sum(sum(report.peer_bytes.values()) for report in answer.reports)
        return tuple(_stamped(report, answer.kept) for report in answer.reports)

    def _check(self, site: str, answer: RoundReports, asked: RoundOrders) -> None:
        if answer.run != asked.run:
            raise NotOurs("run", f"site {site} answered for run {answer.run!r}")
        if answer.round != asked.round:
            raise NotOurs("round", f"site {site} answered for round {answer.round}, this is {asked.round}")
        if answer.need:
            unknown = [name for name in answer.need if name not in asked.mail]
            if unknown:
                raise NotOurs("need", f"site {site} asks for channel {unknown[0]!r}, which there is not")
            whole = [name for name in answer.need if asked.mail[name].base is None]
            if whole:
                raise NotOurs("need", f"site {site} asks for channel {whole[0]!r} again, which it was sent whole")
            return
        orders = {order.cohort: order for order in asked.orders}
        cohorts = [report.cohort for report in answer.reports]
        if sorted(cohorts) != sorted(orders):
            raise NotOurs("cohorts", f"site {site} answered for cohorts {cohorts}, asked were {sorted(orders)}")
        for report in answer.reports:
            _check_report(site, report, orders[report.cohort])
        uploaded = {sender(upload) for report in answer.reports for upload in report.uploads}
        if answer.kept - uploaded:
            raise NotOurs(
                "kept", f"site {site} kept a memory of client {min(answer.kept - uploaded)} without an upload"
            )

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        """What the model is worth, on the server's rows, on those of the sites, or on both."""
        found = {} if self.where == "sites" else self.task.evaluate(self._shell, vectors)
        return found if self.where == "server" else {**found, **self._examine(vectors)}

    def _examine(self, vectors: Vectors) -> dict[str, float]:
        """Each site's sums, folded in the order of their names; a site that stays silent is left out, and told of."""
        assert self._opened is not None
        order = self._opened.orders[0]
        mail = {name: Broadcast.whole(vectors[name], order.round + 1) for name in (MODEL, BUFFERS) if name in vectors}
        exam = Exam(order.run, order.round, mail, fingerprint(vectors[MODEL]))
        data, waiting, marks = exam.to_bytes(), set(self.sites), dict[str, Marks]()
        for _ in range(self.attempts):
            for name in sorted(waiting):
                self._send(name, data)
            while self._waits(waiting, len(self.sites)) and (arrived := self.transport.receive()):
                for name, reply in arrived:
                    found = self._marked(name, reply, exam, waiting)
                    if found is not None:
                        marks[name] = found
            if not self._waits(waiting, len(self.sites)):
                break
        if waiting:
            log.warning(
                "round %d: evaluated without site %s, which did not answer", order.round, ", ".join(sorted(waiting))
            )
        return _folded([marks[name] for name in sorted(marks)])

    def _marked(self, site: str, data: bytes, exam: Exam, waiting: set[str]) -> Marks | None:
        self._bytes.setdefault(site, SiteBytes()).up_bytes += len(data)
        self.suspects.discard(site)
        try:
            if wire_format.kind_of(data) == REFUSED and site in waiting:
                self._refused(site, data)
                waiting.discard(site)
                return None
            if wire_format.kind_of(data) == "reports" or site not in waiting:
                raise NotOurs("unasked", f"site {site} answers what is over")
            found = Marks.from_bytes(data, limit=self.limit)
            if (found.run, found.round, found.digest) != (exam.run, exam.round, exam.digest):
                raise NotOurs("round", f"site {site} marks another exam, of round {found.round}")
            if not found.weight >= 0 or not -1e-9 <= (found.hits or 0.0) <= found.rows * (1 + 1e-9):
                raise NotOurs("marks", f"site {site}: {found.hits} hits of {found.rows} rows, weight {found.weight}")
        except HansaError as error:
            self.refusals.note_error(error)
            return None
        waiting.discard(site)
        return found

    def _refused(self, site: str, data: bytes) -> Refused:
        """A site's own refusal, counted apart from ours."""
        refusal = Refused.from_bytes(data, limit=self.limit)
        self.refusals.note(f"by the site: {refusal.reason}", f"site {site}: {refusal.detail}")
        return refusal

    def close(self) -> None:
        return None


def _lost(message: RoundOrders, reason: str, detail: str) -> tuple[Report, ...]:
    """Reports that all reporters of a site are lost to the round."""
    return tuple(
        Report(order.cohort, dropped=tuple(DroppedClient(client, reason, detail) for client in order.reporters))
        for order in message.orders
    )


def _stamped(report: Report, kept: Collection[int]) -> Report:
    """The report with what the server remembers of each client: the stamp of its memory, which counts once the round
    has closed with the upload admitted. A client that kept nothing new still builds upon what it had."""
    stamps = {upload.client: {STAMP: Stamp.of(upload).row()} for upload in report.uploads if upload.client in kept}
    return replace(report, memory=stamps)


def _check_report(site: str, report: Report, order: WorkOrder) -> None:
    """A cohort's report says nothing of others: not in uploads, not in losses, not in what was sent to neighbours."""
    senders = [sender(upload) for upload in report.uploads]
    named = [*senders, *(lost.client for lost in report.dropped)]
    strangers = sorted({*named, *report.peer_bytes} - set(order.clients))
    if strangers:
        raise NotOurs("clients", f"site {site} speaks for client {strangers[0]}, who is not in cohort {order.cohort}")
    if len(named) > len(set(named)):
        raise NotOurs("clients", f"site {site} speaks twice for a client of cohort {order.cohort}")
    if set(report.info) - {"consensus"} or report.memory or report.trained > len(order.clients):
        raise NotOurs("report", f"site {site} reports what nobody asked of cohort {order.cohort}")
    if sum(report.peer_bytes.values()) > _MOST_PEER_BYTES:
        raise NotOurs("report", f"site {site} reports {sum(report.peer_bytes.values())} bytes between neighbours")


def _folded(marks: Sequence[Marks]) -> dict[str, float]:
    """Loss and accuracy over all sites' rows, from their sums in order."""
    rows, weight = sum(mark.rows for mark in marks), math.fsum(mark.weight for mark in marks)
    if not rows:
        log.warning("no site has test rows: there is nothing to evaluate at the sites")
        return {}
    found = {
        "sites_test_loss": math.fsum(mark.loss for mark in marks) / weight if weight else math.nan,
        "sites_test_rows": rows,
    }
    hits = [mark.hits for mark in marks if mark.rows]
    if all(hit is not None for hit in hits):
        found["sites_test_accuracy"] = math.fsum(hit for hit in hits if hit is not None) / rows
    return found


_MOST_PEER_BYTES = 1 << 50  # of a cohort in a round: more is no count of bytes
