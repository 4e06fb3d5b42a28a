"""The engines of a federation: its clients are at sites, whose rounds are synchronous or asynchronous.

With asynchronous rounds the server aggregates updates as they arrive, and no step waits for a slow site. A site
executes one job at a time. When it answers, the server sends it the next client's job at once, with the newest version
of the model. The order of arrivals depends on the machines; it is part of the run's record, and with it the run can be
replayed exactly in simulation (`hansa replay`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from hansa.algorithm import Algorithm
from hansa.compress import ServerBroadcast
from hansa.config import Config
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.types import BUFFERS, MODEL, Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.engine.requests import LoadMemory, single_orders, unchanged
from hansa.federation.messages import (
    EVALUATION_REPLY,
    REFUSAL,
    REPORTS,
    MemoryVersion,
    ProtocolError,
    Refusal,
    Refusals,
    RoundOrders,
    RoundReports,
    SiteEvaluationReply,
    SiteEvaluationRequest,
    with_texts,
)
from hansa.federation.site_metrics import check_reply, combine_replies
from hansa.federation.transport import Transport
from hansa.pace import synchronous
from hansa.pace.events import oldest_version
from hansa.rounds import OpenedRound, ServerState, wire_format
from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder
from hansa.rounds.validation import sender_of
from hansa.runs.metrics import PARTS
from hansa.training import TaskLike

log = logging.getLogger("hansa")

VERSION_ROW = "federation/stamp"
"""The row in the server's store for each client: the accepted version of its memory at the site."""


Answer = TypeVar("Answer", RoundReports, SiteEvaluationReply)
Where: TypeAlias = Literal["server", "sites", "both"]
"""Where the model is evaluated: on the test rows of the server, of the sites, or both."""


class Federation:
    """An engine that sends each site one frame of orders per round.

    The clients of a site that does not answer are dropped from the round. An unresponsive site still receives frames,
    but a round does not wait for it alone until it answers again. Evaluation at the sites returns sums:
    ``sites_test_loss``, ``sites_test_rows``, and ``sites_test_accuracy`` if the task counts hits. A loss that needs all
    rows at once is computed at each site, and averaged by the sites' numbers of rows. Further metrics are computed at
    each site, and pooled or averaged (`hansa.federation.site_metrics`). The numbers of each site have its name
    (``north/test_accuracy``), with the worst site and the deviation (``sites_test_accuracy_worst``, ``_std``).

    Args:
        algorithm: The algorithm of the run.
        task: The task of the run.
        dtype: The dtype of the model.
        device: The device for the server's own evaluation.
        transport: Carries frames to sites and back.
        sites: The clients of each site.
        limit: The largest accepted frame in bytes.
        where: The test rows that the model is evaluated on: ``"server"``, ``"sites"`` or ``"both"``.
        enough: Close a round when this many sites have answered; None waits for all.
    """

    has_sites = True

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        dtype: torch.dtype,
        device: torch.device,
        *,
        transport: Transport,
        sites: Mapping[str, Sequence[int]],
        limit: int | None = None,
        where: Where = "server",
        enough: int | None = None,
    ) -> None:
        self.algorithm, self.task = algorithm, task
        self.transport: Any = transport  # what an `EnrollingTransport` has beside its protocol is optional
        self.limit, self.where, self.enough = limit, where, enough
        if where not in ("server", "sites", "both"):
            raise invalid_argument("Federation", "where", where, "'server', 'sites' or 'both'")
        self.refusals = Refusals()
        self.unresponsive: set[str] = set()
        self.combined_by: dict[str, str] = {}  # how each metric was last combined over the sites
        self.left_out: dict[str, str] = {}  # the sites without numbers in the last evaluation, and why
        self.sites = {name: tuple(clients) for name, clients in sites.items()}
        self._bytes: dict[str, dict[str, int]] = {}
        self._site_of = {client: name for name, clients in sites.items() for client in clients}
        self._trainer = task.trainer(dtype, device)
        self._opened: OpenedRound | None = None
        self._sent: Mapping[str, ServerBroadcast] = {}
        self._oldest = 0
        missing = sorted(set(range(task.population.count)) - set(self._site_of))
        if missing:
            raise HansaError(f"client {missing[0]} is at no site: every client of the population needs one.")
        if sum(len(clients) for clients in self.sites.values()) > len(self._site_of):
            raise HansaError("a client is at two sites, or twice at one: expected each at one.")

    def round_opened(self, opened: OpenedRound, oldest: int = 0) -> None:
        """Receive the broadcasts of a round, and the oldest round that the server could resume from."""
        self._opened, self._oldest = opened, oldest_version(opened.state.pace, oldest)

    def site_bytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes to, from and inside each site since the last call."""
        counts, self._bytes = self._bytes, {}
        return {name: dict(counts[name]) for name in sorted(counts)}

    def site_columns(self) -> dict[str, Any]:
        """Return how metrics were combined over sites, and the seconds of the last round by part: for each site and for
        the slowest one."""
        details = {"combined_by": self.combined_by, "left_out": self.left_out}
        columns: dict[str, Any] = {name: value for name, value in details.items() if value}
        take = getattr(self.transport, "take_seconds", None)
        if take is not None and (site_seconds := take()):
            columns["sites"] = {name: site_seconds[name]._asdict() for name in sorted(site_seconds)}
            slowest = max(site_seconds.values(), key=lambda parts: parts.seconds)
            columns |= {name: getattr(slowest, name) for name in PARTS}
        self.combined_by, self.left_out = {}, {}
        return columns

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        """Yield reports as sites answer; the reporters of silent sites are dropped.

        Asynchronous steps have orders of several versions: a site is sent those of one version after another.
        """
        assert self._opened is not None
        for version in sorted({order.round for order in orders}):
            batch = [order for order in orders if order.round == version]
            self._sent = self._opened.broadcasts if version == self._opened.state.round else _in_full(batch)
            pending = {site: self._round_orders(part, load_memory) for site, part in self._by_site(batch).items()}
            for site, request, answer in self._exchange(pending, RoundReports):
                yield from self._accept(site, request, answer)
            self.unresponsive |= set(pending)
            for site, request in pending.items():
                yield from _dropped(request, "silent", f"site {site} did not answer")

    def _exchange(
        self, pending: dict[str, Any], kind: type[Answer], data: bytes = b""
    ) -> Iterator[tuple[str, Any, Answer | Refusal]]:
        """Send each pending site its request, or the same ``data``, and yield the answers with their requests until
        there is none to wait for. Sites that have not answered remain pending."""
        count = len(pending)
        for site, request in pending.items():
            self._send(site, data or request.to_bytes())
        while self._must_wait(pending, count) and (frames := self.transport.receive()):
            for site, frame in frames:
                if (answered := self._receive(site, frame, pending, kind)) is not None:
                    yield site, answered[0], answered[1]

    def _must_wait(self, pending: Collection[str], count: int) -> bool:
        """Whether to wait for more of the ``count`` sites."""
        if not pending or (self.enough is not None and count - len(pending) >= self.enough):
            return False
        return bool(set(pending) - self.unresponsive) or len(pending) == count

    def _send(self, site: str, data: bytes) -> None:
        self._count(site, "down_bytes", len(data))
        self.transport.send(site, data)

    def _receive(
        self, site: str, data: bytes, pending: dict[str, Any], kind: type[Answer]
    ) -> tuple[Any, Answer | Refusal] | None:
        """Return a site's request, which is no longer pending, and the answer; None if the frame is refused here, is a
        duplicate, or asks for full broadcasts."""
        self._count(site, "up_bytes", len(data))
        self.unresponsive.discard(site)
        try:
            name = wire_format.kind_of(data)
            if site not in pending or name in {REPORTS, EVALUATION_REPLY} - {kind.kind}:
                raise ProtocolError("unasked", f"site {site} was not asked for this, or has answered")
            if name == REFUSAL:
                refusal = Refusal.from_bytes(data, limit=self.limit)
                detail = getattr(self.transport, "rejected", {}).get(site, refusal.detail)
                self.refusals.record(f"by the site: {refusal.reason}", f"site {site}: {detail}")
                return pending.pop(site), refusal
            answer = kind.from_bytes(data, limit=self.limit)
            _check_answer(site, answer, pending[site])
        except HansaError as error:
            reason, detail = getattr(error, "reason", "malformed"), getattr(error, "detail", error)
            self.refusals.record(str(reason), str(detail))
            return None
        if isinstance(answer, RoundReports) and answer.need:
            broadcasts = dict(pending[site].broadcasts)
            for channel in answer.need:
                broadcasts[channel] = Broadcast.whole(self._sent[channel].vector, broadcasts[channel].version)
            pending[site] = replace(pending[site], broadcasts=broadcasts)
            self._send(site, pending[site].to_bytes())
            return None
        return pending.pop(site), answer

    def _accept(self, site: str, request: RoundOrders, answer: RoundReports | Refusal) -> tuple[Report, ...]:
        """Return a site's reports, with the server's texts and the new versions of its clients' memory."""
        if isinstance(answer, Refusal):
            return _dropped(request, "refused", f"site {site}: {answer.reason}: {answer.detail}")
        self._count(site, "peer_bytes", sum(sum(report.peer_bytes.values()) for report in answer.reports))
        reports = [replace(report, dropped=with_texts(site, report.dropped)) for report in answer.reports]
        return tuple(_with_versions(report, answer.updated) for report in reports)

    def _count(self, site: str, direction: str, count: int) -> None:
        """Count the bytes of whole frames to and from a site, and those that its clients sent each other."""
        self._bytes.setdefault(site, dict.fromkeys(("down_bytes", "up_bytes", "peer_bytes"), 0))[direction] += count

    def _by_site(self, orders: Sequence[WorkOrder]) -> dict[str, list[WorkOrder]]:
        by_site: dict[str, list[WorkOrder]] = {}
        for order in (single for batch in orders for single in single_orders(batch)):
            sites = {self._site_of[client] for client in order.clients}
            if len(sites) > 1:
                raise HansaError(
                    f"cohort {order.cohort} spans sites {', '.join(sorted(sites))}: clients that gossip must be at one "
                    "site. Give the clusters as lists, each within a site."
                )
            by_site.setdefault(sites.pop(), []).append(order)
        return by_site

    def _round_orders(self, orders: Sequence[WorkOrder], load_memory: LoadMemory) -> RoundOrders:
        """Return a site's request. The broadcasts of its client that needs the fewest bytes serve all."""
        versions: dict[int, MemoryVersion | None] = {}
        for order in orders:
            memory = load_memory(order).memory
            for client in order.reporters:
                row = memory.get(client, {}).get(VERSION_ROW)
                versions[client] = None if row is None else MemoryVersion.from_row(row)
        broadcasts = {}
        for name, sent in self._sent.items():
            client = min(versions, key=sent.nbytes)
            broadcasts[name] = Broadcast(sent.version, sent.bases[client], tuple(sent.packets(client)))
        digests = {name: fingerprint(sent.vector) for name, sent in self._sent.items()}
        first_order = orders[0]
        oldest = min(self._oldest, first_order.round)
        return RoundOrders(first_order.run, first_order.round, oldest, broadcasts, tuple(orders), versions, digests)

    def evaluate(self, vectors: Vectors) -> dict[str, float]:
        """Evaluate the model on the test rows of the server, of the sites, or both."""
        metrics = {} if self.where == "sites" else self.task.evaluate(self._trainer, vectors)
        return metrics if self.where == "server" else {**metrics, **self._evaluate_at_sites(vectors)}

    def _evaluate_at_sites(self, vectors: Vectors) -> dict[str, float]:
        """Combine the sums of the sites. One that is silent, that refuses, or whose sums cannot be true is left out
        with a warning."""
        assert self._opened is not None
        order = self._opened.orders[0]
        broadcasts = {
            name: Broadcast.whole(vectors[name], order.round + 1) for name in (MODEL, BUFFERS) if name in vectors
        }
        request = SiteEvaluationRequest(order.run, order.round, broadcasts, fingerprint(vectors[MODEL]))
        waiting, replies = dict.fromkeys(sorted(self.sites), request), {}
        self.left_out = {}
        for site, _, answer in self._exchange(waiting, SiteEvaluationReply, request.to_bytes()):
            if isinstance(answer, Refusal):
                self.left_out[site] = f"{answer.reason}: {answer.detail}"
                continue
            try:
                check_reply(site, answer, self.task)
            except ProtocolError as error:
                self.refusals.record(error.reason, error.detail)
                self.left_out[site] = wire_format.sentence(error.detail)
                continue
            replies[site] = answer
            if answer.kept_back:
                self.left_out[site] = FEW_ROWS
        self.left_out |= dict.fromkeys(waiting, "did not answer")
        for site, reason in sorted(self.left_out.items()):
            log.warning("round %d: evaluated without site %s: %s", order.round + 1, site, reason)
        results = combine_replies(replies, self.task)
        self.combined_by = results.combined_by
        return results.metrics

    def close(self) -> None:
        return None


class LiveFederation(Federation):
    """A federation whose sites do not wait for each other. It has the arguments of `Federation`.

    A site that does not answer within its deadline loses the job, and gets another one.
    """

    def __init__(self, *arguments: Any, clock: Callable[[], float] = time.monotonic, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clock, self._origin = clock, 0.0
        self._load: LoadMemory = unchanged
        self._requests: dict[str, RoundOrders] = {}
        self._jobs: set[int] = set()
        self._ended: deque[int] = deque()
        self._reports: dict[int, Report] = {}
        self._begun = False

    def begin_step(self, state: ServerState, load_memory: LoadMemory, oldest: int) -> None:
        """Prepare for a server step; time goes on from that of the state."""
        self._load, self._oldest = load_memory, oldest_version(state.pace, oldest)
        if not self._begun:
            self._begun, self._origin = True, self._clock() - float(state.pace.get("now", 0.0))

    def round_opened(self, opened: OpenedRound, oldest: int = 0) -> None:
        """Receive a round whose updates have arrived."""
        self._opened = opened

    def start_job(self, order: WorkOrder) -> None:
        """Send one client's order to its site."""
        (client,) = order.clients
        site = self._site_of[client]
        assert site not in self._requests, f"site {site} is at work"
        self._sent = _in_full([order])
        self._jobs.add(client)
        self._requests[site] = self._round_orders([order], self._load)
        self._send(site, self._requests[site].to_bytes())

    def has_job(self, client: int) -> bool:
        """Whether the client's job was sent and has not been used."""
        return client in self._jobs

    def lose_job(self, client: int) -> None:
        """End the client's job without an update."""
        self._jobs.add(client)
        self._end(client, _lost(client, "the server was restarted, and its update would be too old"))

    def group_of(self, client: int) -> str:
        """Return the client's site."""
        return self._site_of[client]

    def next_arrival(self) -> tuple[int, float]:
        """Wait for the next site to answer, or for the deadline of one that does not."""
        while not self._ended:
            for site, data in self.transport.receive():
                if (answered := self._receive(site, data, self._requests, RoundReports)) is not None:
                    request, answer = answered
                    self._end(request.orders[0].clients[0], self._accept(site, request, answer)[0])
            for site in [site for site in self._requests if site not in self.transport.waiting]:
                (client,) = self._requests.pop(site).orders[0].clients
                self._end(client, _lost(client, f"site {site} did not answer"))
        client = self._ended.popleft()
        self._jobs.discard(client)
        return client, self._clock() - self._origin

    def _end(self, client: int, report: Report) -> None:
        self._reports[client] = report
        self._ended.append(client)

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        """Yield the reports of arrived jobs."""
        for order in orders:
            yield from (self._reports.pop(client) for client in order.clients)


def check_pace(config: Config, algorithm: Algorithm) -> None:
    """Refuse paces and options that only simulations have."""
    pace = algorithm.pace
    if pace == synchronous():
        return
    if not pace.asynchronous:
        raise HansaError(
            f"pace: {pace!r}: rounds with sites take real time. engine.deadline and engine.enough say how long a round "
            "waits; or use pace: {kind: buffered, size: ...}."
        )
    if config.profile is not None:
        raise HansaError("profile: sites have their own speed. Leave it out.")
    if config.evaluate.where != "server":
        raise HansaError("evaluate.where: asynchronous sites are at work when the model changes. Use server.")


def _lost(client: int, detail: str) -> Report:
    return Report("", 0, b"", dropped=(DroppedClient(client, "silent", detail),))


def _in_full(orders: Sequence[WorkOrder]) -> dict[str, ServerBroadcast]:
    """Return the broadcasts of orders of an older version, which are the vectors themselves."""
    receivers = [client for order in orders for client in order.reporters]
    return {
        name: ServerBroadcast(vector, dict.fromkeys(receivers, whole.packets), dict.fromkeys(receivers), whole.version)
        for name, whole in orders[0].broadcasts.items()
        if isinstance(vector := whole.packets[0].content, torch.Tensor)
    }


def _dropped(message: RoundOrders, reason: str, detail: str) -> tuple[Report, ...]:
    """Return reports that drop all reporters of a site."""
    return tuple(Report.without(order, reason, detail) for order in message.orders)


def _with_versions(report: Report, updated: Collection[int]) -> Report:
    """Add the new memory versions to a report. The server stores them when the round closes with the upload accepted;
    a client that is not ``updated`` keeps its version."""
    versions = {
        client: {VERSION_ROW: MemoryVersion.of_upload(report, index).to_row()}
        for index, client in enumerate(report.clients)
        if client in updated
    }
    return replace(report, memory=versions)


def _check_answer(
    site: str, answer: RoundReports | SiteEvaluationReply, request: RoundOrders | SiteEvaluationRequest
) -> None:
    """Raise for an answer to another request, or with what was not requested."""
    if answer.run != request.run:
        raise ProtocolError("run", f"site {site} answered for run {answer.run!r}")
    if answer.round != request.round:
        raise ProtocolError("round", f"site {site} answered for round {answer.round}, this is {request.round}")
    if isinstance(answer, SiteEvaluationReply):
        if isinstance(request, SiteEvaluationRequest) and answer.digest != request.digest:
            raise ProtocolError("round", f"site {site} evaluated another model than that of round {request.round}")
        return
    assert isinstance(request, RoundOrders)
    if answer.need:
        relative = {name for name, sent in request.broadcasts.items() if sent.base is not None}
        if wrong := sorted(set(answer.need) - relative):
            raise ProtocolError("need", f"site {site} asks for channel {wrong[0]!r}, which it cannot need in full")
        return
    answered, asked = [report.cohort for report in answer.reports], [order.cohort for order in request.orders]
    if answered != asked:
        raise ProtocolError("cohorts", f"site {site} answered for cohorts {answered}, expected {asked}")
    for report, order in zip(answer.reports, request.orders, strict=True):
        _check_report(site, report, order)
    uploaded = {sender_of(client) for report in answer.reports for client in report.clients}
    if kept := answer.updated - uploaded:
        raise ProtocolError("kept", f"site {site} updated memory of clients {kept} without uploads")


def _check_report(site: str, report: Report, order: WorkOrder) -> None:
    """Raise if a cohort's report mentions clients of other cohorts or contains unrequested values."""
    senders = [sender_of(client) for client in report.clients]
    clients = [*senders, *(dropped.client for dropped in report.dropped)]
    unknown = sorted({*clients, *report.peer_bytes} - set(order.clients))
    if unknown:
        raise ProtocolError("clients", f"site {site} reports client {unknown[0]} beside cohort {order.cohort}")
    if len(clients) > len(set(clients)):
        raise ProtocolError("clients", f"site {site} reports a client of cohort {order.cohort} twice")
    peer_bytes = sum(report.peer_bytes.values())
    unasked = set(report.info) - {"consensus"} or report.memory or report.trained > len(order.clients)
    if unasked or peer_bytes > _MAX_PEER_BYTES:
        detail = f"what was not requested of cohort {order.cohort}, or {peer_bytes} bytes between its clients"
        raise ProtocolError("report", f"site {site} reports {detail}")


FEW_ROWS = "fewer test rows than its policy permits to report"
_MAX_PEER_BYTES = 1 << 50  # of a cohort in a round; larger counts are not plausible
