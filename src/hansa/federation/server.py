"""The server's side: an engine whose clients are at sites. Driver, presets, metrics and checkpoints stay the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from hansa.algorithm import Algorithm
from hansa.engine.request import Recall, as_it_is
from hansa.errors import HansaError
from hansa.federation.exchange import NotOurs, RoundOrders, RoundReports, Stamp
from hansa.federation.site import Refusals
from hansa.rounds import Opened
from hansa.rounds.messages import Delivery, Lost, Order, Report
from hansa.tasks import TaskLike
from hansa.types import Vectors
from hansa.vectors.fingerprint import fingerprint

STAMP = "federation/stamp"
"""The row that the server keeps of every client: which version of its memory at the site is the admitted one."""


class Transport(Protocol):
    """Carries frames to sites and back. Who answered is what the transport knows (a key, a certificate), never what the
    frame says."""

    def send(self, site: str, data: bytes) -> None: ...

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """What has come since, waiting for it as long as the transport finds right; nothing means a time-out."""
        ...


class Federation:
    """An engine over a transport: each site is asked once a round, and asked again while it is silent, ``attempts``
    times; then its reporters are lost to the round. ``keep_from`` says how far back the server may have to go."""

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
        keep_from: Callable[[], int] = lambda: 0,
    ) -> None:
        self.algorithm, self.task, self.transport = algorithm, task, transport
        self.attempts, self.limit, self.keep_from = attempts, limit, keep_from
        self.refusals = Refusals()
        self._home = {client: name for name, clients in sites.items() for client in clients}
        self._shell = task.shell(dtype, device)
        self._opened: Opened | None = None
        homeless = sorted(set(range(task.population.count)) - set(self._home))
        if homeless:
            raise HansaError(f"client {homeless[0]} is at no site: every client of the population needs one.")

    def opened(self, opened: Opened) -> None:
        """Hear the round's broadcasts."""
        self._opened = opened

    def run(self, orders: Sequence[Order], recall: Recall = as_it_is) -> Iterator[Report]:
        """Reports as sites answer; a site that stays silent costs its reporters the round."""
        told = {name: self._told(mine, recall) for name, mine in self._by_site(orders).items()}
        for _ in range(self.attempts):
            for name, message in told.items():
                self.transport.send(name, message.to_bytes())
            while told:
                arrived = self.transport.receive()
                if not arrived:
                    break
                for name, data in arrived:
                    reports = self._heard(name, data, told)
                    if reports is not None:
                        yield from reports
            if not told:
                return
        for name, message in told.items():
            for order in message.orders:
                lost = [Lost(client, "silent", f"site {name} did not answer") for client in order.reporters]
                yield Report(order.cohort, lost=tuple(lost))

    def _by_site(self, orders: Sequence[Order]) -> dict[str, list[Order]]:
        found: dict[str, list[Order]] = {}
        for order in orders:
            homes = {self._home[client] for client in order.clients}
            if len(homes) > 1:
                raise HansaError(
                    f"cohort {order.cohort} spans sites {', '.join(sorted(homes))}: clients that gossip must be at one "
                    "site. Give the clusters as lists that follow the sites."
                )
            found.setdefault(homes.pop(), []).append(order)
        return found

    def _told(self, orders: Sequence[Order], recall: Recall) -> RoundOrders:
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
        return RoundOrders(first.run, first.round, self.keep_from(), mail, tuple(orders), stamps, digests)

    def _mail(self, receivers: Sequence[int]) -> dict[str, Delivery]:
        """What a site must be sent: the message of the client there that needs the fewest bytes makes it for all."""
        assert self._opened is not None
        mail = {}
        for name, made in self._opened.broadcasts.items():
            client = min(receivers, key=made.nbytes)
            mail[name] = Delivery(made.version, made.bases[client], tuple(made.packets(client)))
        return mail

    def _heard(self, site: str, data: bytes, told: dict[str, RoundOrders]) -> tuple[Report, ...] | None:
        """A site's reports; None where the frame was refused, came twice, or asks for more mail."""
        try:
            answer = RoundReports.from_bytes(data, limit=self.limit)
            asked = told.get(site)
            if asked is None:
                raise NotOurs("unasked", f"site {site} was not asked, or has answered")
            self._check(site, answer, asked)
        except NotOurs as refusal:
            self.refusals.note(refusal.reason, refusal.detail)
            return None
        except HansaError as error:
            self.refusals.note("malformed", str(error))
            return None
        if answer.need:
            assert self._opened is not None
            whole = {
                name: Delivery.whole(self._opened.broadcasts[name].vector, sent.version)
                if name in answer.need
                else sent
                for name, sent in asked.mail.items()
            }
            told[site] = replace(asked, mail=whole)
            self.transport.send(site, told[site].to_bytes())
            return None
        del told[site]
        return tuple(_stamped(report, answer.kept) for report in answer.reports)

    def _check(self, site: str, answer: RoundReports, asked: RoundOrders) -> None:
        if answer.run != asked.run:
            raise NotOurs("run", f"site {site} answered for run {answer.run!r}")
        if answer.round != asked.round:
            raise NotOurs("round", f"site {site} answered for round {answer.round}, this is {asked.round}")
        if answer.need:
            unknown = set(answer.need) - set(asked.mail)
            if unknown:
                raise NotOurs("need", f"site {site} asks for channel {sorted(unknown)[0]!r}, which there is not")
            return
        mine = {order.cohort for order in asked.orders}
        cohorts = [report.cohort for report in answer.reports]
        if sorted(cohorts) != sorted(mine):
            raise NotOurs("cohorts", f"site {site} answered for cohorts {cohorts}, asked were {sorted(mine)}")
        own = {client for order in asked.orders for client in order.clients}
        for report in answer.reports:
            for client in (*(upload.client for upload in report.uploads), *(lost.client for lost in report.lost)):
                if client not in own:
                    raise NotOurs("clients", f"site {site} speaks for client {client}, who is elsewhere")

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        return self.task.evaluate(self._shell, vectors)

    def close(self) -> None:
        return None


def _stamped(report: Report, kept: Collection[int]) -> Report:
    """The report with what the server remembers of each client: the stamp of its memory, which counts once the round
    has closed with the upload admitted. A client that kept nothing new still builds upon what it had."""
    stamps = {upload.client: {STAMP: Stamp.of(upload).row()} for upload in report.uploads if upload.client in kept}
    return replace(report, memory=stamps)
