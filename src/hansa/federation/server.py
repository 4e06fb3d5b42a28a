"""The server of a federation: engines whose clients are at sites, the runs with them, and replays without them.

With asynchronous rounds the server aggregates updates as they arrive, and no step waits for a slow site. A site
executes one job at a time. When it answers, the server sends it the next client's job at once, with the newest version
of the model. The order of arrivals depends on the machines; it is part of the run's record, and with it the run can be
replayed exactly in simulation (`hansa replay`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from hansa import __version__
from hansa.algorithm import Algorithm
from hansa.compress import ServerBroadcast
from hansa.config import Config, allow_code, build, build_algorithm, to_yaml
from hansa.config.sections import EngineSection, EvaluateSection
from hansa.core.errors import HansaError, invalid_argument
from hansa.core.keys import Key
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors.arithmetic import fingerprint
from hansa.data import FederatedData, Schema
from hansa.data.csv_folder import federate_tables, read_tables, schema_template
from hansa.engine.requests import LoadMemory, single_orders, unchanged
from hansa.federation.messages import (
    EVALUATION_REPLY,
    REFUSAL,
    REPORTS,
    EnrollingTransport,
    EnrollmentReply,
    EnrollmentRequest,
    MemoryVersion,
    ProtocolError,
    Refusal,
    RoundOrders,
    RoundReports,
    RunOver,
    SiteConnections,
    SiteEvaluationReply,
    SiteEvaluationRequest,
    Transport,
    numeric_platform,
    refuse,
    with_texts,
)
from hansa.federation.schema_agreement import agree_schema, draft_schema, row_choice
from hansa.federation.site import model_digest
from hansa.federation.site_metrics import check_reply, combine_replies
from hansa.pace import synchronous
from hansa.pace.events import RecordedClock, oldest_version
from hansa.rounds import OpenedRound, ServerState, wire_format
from hansa.rounds.messages import Broadcast, DroppedClient, Report, WorkOrder
from hansa.rounds.validation import sender_of
from hansa.runs.driver import Run
from hansa.runs.experiment import Experiment, build_run, open_run
from hansa.runs.folder import IfExists, RunFolder
from hansa.runs.metrics import PARTS
from hansa.runs.preprocessing import PREPROCESSING, read_preprocessing
from hansa.runs.store import ClientStore, io
from hansa.training import TaskLike

log = logging.getLogger("hansa")

SITES = "sites.json"
"""The file of a run folder with what the sites reported of their clients."""
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
        self.refusals: Counter[str] = Counter()  # of what is not an answer, by reason
        self.unresponsive: set[str] = set()
        self.combined_by: dict[str, str] = {}  # how each metric was last combined over the sites
        self.left_out: dict[str, str] = {}  # the sites without numbers in the last evaluation, and why
        self.sites = {name: tuple(clients) for name, clients in sites.items()}
        self._bytes: dict[str, dict[str, int]] = {}
        self._site_of = site_of_clients(sites, task.population.count)
        self._trainer = task.trainer(dtype, device)
        self._opened: OpenedRound | None = None
        self._sent: Mapping[str, ServerBroadcast] = {}
        self._oldest = 0

    def round_opened(self, opened: OpenedRound, oldest: int = 0) -> None:
        """Receive the broadcasts of a round, and the oldest round that the server could resume from."""
        self._opened, self._oldest = opened, oldest_version(opened.state.pace, oldest)

    def site_columns(self) -> dict[str, Any]:
        """Return columns since the last call: bytes to, from and inside each site, counted by whole frames; how metrics
        were combined over sites; and seconds by part, of each site and of the slowest one."""
        sites: dict[str, dict[str, float]] = {name: {**self._bytes[name]} for name in sorted(self._bytes)}
        details = {"combined_by": self.combined_by, "left_out": self.left_out}
        columns: dict[str, Any] = {"sites": sites, **{name: value for name, value in details.items() if value}}
        take = getattr(self.transport, "take_seconds", None)
        if take is not None and (site_seconds := take()):
            for name, seconds in site_seconds.items():
                sites.setdefault(name, {}).update(seconds._asdict())
            slowest = max(site_seconds.values(), key=lambda parts: parts.seconds)
            columns |= {name: getattr(slowest, name) for name in PARTS}
        self._bytes, self.combined_by, self.left_out = {}, {}, {}
        return columns

    def run(self, orders: Sequence[WorkOrder], load_memory: LoadMemory = unchanged) -> Iterator[Report]:
        """Yield reports as sites answer; the reporters of silent sites are dropped.

        Asynchronous steps have orders of several versions: a site is sent those of one version after another.
        """
        assert self._opened is not None
        for version in sorted({order.round for order in orders}):
            batch = [order for order in orders if order.round == version]
            self._sent = self._opened.broadcasts if version == self._opened.state.round else self._in_full(batch)
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
                self.refusals[f"by the site: {refusal.reason}"] += 1
                return pending.pop(site), refusal
            answer = kind.from_bytes(data, limit=self.limit)
            _check_answer(site, answer, pending[site])
        except HansaError as error:
            reason, detail = getattr(error, "reason", "malformed"), getattr(error, "detail", error)
            self._refused(str(reason), str(detail))
            return None
        if isinstance(answer, RoundReports) and answer.need:
            broadcasts = dict(pending[site].broadcasts)
            for channel in answer.need:
                broadcasts[channel] = self._whole(channel, self._sent[channel].vector, broadcasts[channel].version)
            pending[site] = replace(pending[site], broadcasts=broadcasts)
            self._send(site, pending[site].to_bytes())
            return None
        return pending.pop(site), answer

    def _refused(self, reason: str, detail: str) -> None:
        """Count a refusal, and log it."""
        self.refusals[reason] += 1
        log.warning("refused (%s): %s", reason, wire_format.sentence(detail))

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

    def _in_full(self, orders: Sequence[WorkOrder]) -> dict[str, ServerBroadcast]:
        """Return the broadcasts of orders of an older version, which are the vectors themselves."""
        receivers, broadcasts = [client for order in orders for client in order.reporters], {}
        for name, held in orders[0].broadcasts.items():
            if isinstance(vector := held.packets[0].content, torch.Tensor):
                sent = self._whole(name, vector, held.version)
                packets, bases = dict.fromkeys(receivers, sent.packets), dict.fromkeys(receivers, sent.base)
                broadcasts[name] = ServerBroadcast(vector, packets, bases, sent.version)
        return broadcasts

    def _whole(self, channel: str, vector: Vector, version: int) -> Broadcast:
        """Return a broadcast of all that a channel sends of a vector."""
        return Broadcast.whole(vector, version, self.algorithm.channels[channel].downlink)

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
            name: self._whole(name, vectors[name], order.round + 1) for name in (MODEL, BUFFERS) if name in vectors
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
                self._refused(error.reason, error.detail)
                self.left_out[site] = wire_format.sentence(error.detail)
                continue
            replies[site] = answer
            if answer.kept_back:
                self.left_out[site] = "fewer test rows than its policy permits to report"
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
        self._clock, self._origin = clock, math.nan  # until the first step
        self._load: LoadMemory = unchanged
        self._requests: dict[str, RoundOrders] = {}
        self._jobs: set[int] = set()
        self._ended: deque[int] = deque()
        self._reports: dict[int, Report] = {}

    def begin_step(self, state: ServerState, load_memory: LoadMemory, oldest: int) -> None:
        """Prepare for a server step; time goes on from that of the state."""
        self._load, self._oldest = load_memory, oldest_version(state.pace, oldest)
        if math.isnan(self._origin):
            self._origin = self._clock() - float(state.pace.get("now", 0.0))

    def round_opened(self, opened: OpenedRound, oldest: int = 0) -> None:
        """Receive a round whose updates have arrived."""
        self._opened = opened

    def start_job(self, order: WorkOrder) -> None:
        """Send one client's order to its site."""
        (client,) = order.clients
        site = self._site_of[client]
        assert site not in self._requests, f"site {site} is at work"
        self._sent = self._in_full([order])
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
    run, now = request.run, request.round
    refuse(answer.run != run, "run", f"site {site} answered for run {answer.run!r}")
    refuse(answer.round != now, "round", f"site {site} answered for round {answer.round}, this is {now}")
    if isinstance(answer, SiteEvaluationReply):
        other = answer.digest != getattr(request, "digest", None)
        refuse(other, "round", f"site {site} evaluated another model than that of round {now}")
        return
    assert isinstance(request, RoundOrders)
    if answer.need:
        unneeded = set(answer.need) - {name for name, sent in request.broadcasts.items() if sent.base is not None}
        refuse(unneeded, "need", f"site {site} asks for channels {sorted(unneeded)}, which it cannot need in full")
        return
    answered, asked = [report.cohort for report in answer.reports], [order.cohort for order in request.orders]
    refuse(answered != asked, "cohorts", f"site {site} answered for cohorts {answered}, expected {asked}")
    uploaded: set[int] = set()
    for report, order in zip(answer.reports, request.orders, strict=True):
        senders = [sender_of(client) for client in report.clients]
        named, cohort = [*senders, *(dropped.client for dropped in report.dropped)], f"cohort {order.cohort}"
        unknown = sorted({*named, *report.peer_bytes} - set(order.clients))
        refuse(unknown, "clients", f"site {site} reports clients {unknown[:5]} beside {cohort}")
        refuse(len(named) > len(set(named)), "clients", f"site {site} reports a client of {cohort} twice")
        unasked = set(report.info) - {"consensus"} or report.memory or report.trained > len(order.clients)
        refuse(unasked, "report", f"site {site} reports what was not requested of {cohort}")
        exchanged = sum(report.peer_bytes.values())
        refuse(exchanged > MAX_PEER_BYTES, "report", f"site {site} reports {exchanged} bytes within {cohort}")
        uploaded.update(senders)
    kept = answer.updated - uploaded
    refuse(kept, "kept", f"site {site} updated memory of clients {sorted(kept)[:5]} without uploads")


MAX_PEER_BYTES = 1 << 50  # of a cohort in a round; larger counts are not plausible


@dataclass(frozen=True, slots=True, eq=False)
class ServerData(FederatedData):
    """The server's view: each client's number of samples, the test set if there is one, and no client's rows.
    ``counts`` has the numbers of samples; ``labels`` has label counts if all sites permit them."""

    counts: torch.Tensor | None = None
    labels: torch.Tensor | None = None

    @classmethod
    def from_counts(cls, data: FederatedData, samples: Sequence[int], labels: torch.Tensor | None = None) -> ServerData:
        """Make the view from the server's own data (used for its test set and one example) and the sites' counts."""
        index, offsets = torch.zeros(len(samples), dtype=torch.int64), torch.arange(len(samples) + 1)
        return cls(
            data.inputs, data.targets, index, offsets, data.test_inputs, data.test_targets, data.classes, data.name,
            encoding=data.encoding, counts=torch.tensor(samples), labels=labels,
        )  # fmt: skip

    @property
    def sizes(self) -> torch.Tensor:
        return self.counts  # type: ignore[return-value]

    def rows(self, client: int) -> torch.Tensor:
        raise HansaError(f"{self.name}: the samples of client {client} are at its site and cannot be read here.")

    def samples(self, client: int) -> int:
        return int(self.sizes[client])

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    def label_counts(self) -> torch.Tensor:
        if self.labels is None:
            raise HansaError(
                f"{self.name}: no label counts: list the clusters, or set label_counts: true in all policies."
            )
        return self.labels


class Server:
    """The server of one configuration.

    Args:
        config: A configuration with ``engine: {kind: flower, sites: ...}``.
        connections: The connections to the sites; only `check` needs none.
    """

    def __init__(self, config: Config, connections: SiteConnections | None = None) -> None:
        if config.engine.kind != "flower":
            raise HansaError("engine: a federation needs kind: flower, with sites: {NAME: number of clients, ...}.")
        self.config = config
        self.connections: SiteConnections = connections  # type: ignore[assignment]
        self.sites = clients_by_site(config.engine)
        self.population = sum(map(len, self.sites.values()))
        self.schema = draft_schema(config)
        self.enrolled: dict[str, EnrollmentReply] = {}
        self.facts: dict[str, Any] = {}  # the samples and labels of all clients, as the sites reported them
        self.transport: EnrollingTransport | None = None
        for name in ("train", "local_mean", "compression", "heterogeneity", "per_client", "personalise"):
            if getattr(config.evaluate, name):
                problem = "needs clients' data or memory, which stay at the sites. Leave it out."
                raise HansaError(f"evaluate.{name}: {problem}")

    def new(self, path: Path | str, if_exists: IfExists = "refuse") -> Experiment:
        """Enroll all sites and start a run in a folder."""
        self.enroll_sites()
        experiment = open_run(self.config, path, if_exists, run_factory=self._run)
        io.write_sealed(experiment.folder / SITES, self.facts)
        return experiment

    def resume(self, path: Path | str, **options: Any) -> Experiment:
        """Resume a run from its last checkpoint; the sites may reconnect at any time.

        Reports that the server had not written when it died are requested again."""
        folder = RunFolder.containing(path)
        saved = clients_by_site(folder.config.engine)
        if saved != self.sites:
            raise HansaError(
                f"{folder}: engine.sites: the run has {saved}, requested {self.sites}. The memory of a client is at "
                "its site: a run keeps its sites and their clients. Start another run for others."
            )
        if self.schema is not None and (stored := read_preprocessing(folder / PREPROCESSING)) is not None:
            self.schema = None if stored[0].encoding is None else stored[0].encoding.schema
        if not (folder / SITES).is_file():
            self.enroll_sites()
            io.write_sealed(folder / SITES, self.facts)
        self.facts = io.read_sealed(folder / SITES)
        return open_run(None, folder.path, "resume", run_factory=self._run, **options)

    @allow_code()
    def check(self) -> None:
        """Build the server's own parts before it waits for sites: algorithm, data, model, loss, metrics."""
        check_pace(self.config, build_algorithm(self.config))
        own_data = self._own_data(self.config, None if self.schema is None else self.schema.provisional())
        data = ServerData.from_counts(own_data, [1] * self.population)
        build.build_task(self.config, data).start(Key(self.config.seed), build.torch_dtype(self.config))

    def finish(self, seconds: float = 15.0) -> None:
        """Tell the sites that the run is over; unreachable sites continue to wait."""
        transport = EnrollingTransport(self.connections, dict.fromkeys(self.sites, b""), deadline=seconds)
        for name in self.sites:
            transport.send(name, RunOver().to_bytes())
        while transport.receive():
            pass

    def enroll_sites(self) -> None:
        """Ask every site for its data and wait until all have replied, after agreeing on open means and deviations of
        tables."""
        if self.schema is not None and self.schema.is_open:
            self.schema = agree_schema(self.connections, list(self.sites), self.schema, self.config)
        enrollments = {name: self._enrollment(name).to_bytes() for name in self.sites}
        transport = EnrollingTransport(self.connections, enrollments, self._on_enrolled, deadline=math.inf)
        transport.ask_all(dict.fromkeys(self.sites, b""))
        replies = self.enrolled.values()
        samples = {client: count for reply in replies for client, count in reply.samples.items()}
        labels = {client: list(counts) for reply in replies for client, counts in reply.labels.items()}
        clients = range(self.population)
        complete = len(labels) == self.population
        self.facts = {
            "samples": [samples[client] for client in clients],
            "labels": [labels[client] for client in clients] if complete else None,
        }

    def _on_enrolled(self, site: str, reply: EnrollmentReply) -> None:
        """Check an enrollment reply. The first one of a site is stored; later ones must agree with it."""
        clients = self.sites[site]
        if reply.version != __version__:
            raise HansaError(f"site {site} has hansa {reply.version}, the server {__version__}")
        if set(reply.samples) != set(clients) or min(reply.samples.values(), default=0) < 1:
            raise HansaError(f"site {site} reports clients {sorted(reply.samples)}, expected {list(clients)}")
        if reply.labels:
            sums = {client: sum(reply.labels.get(client, ())) for client in clients}
            replies = (reply, *self.enrolled.values())
            numbers = {len(counts) for answer in replies for counts in answer.labels.values()}
            if sums != dict(reply.samples) or len(numbers) > 1:
                raise HansaError(
                    f"site {site} reports label counts that do not add up to its samples, or of other labels"
                )
        self._check_schema(site, reply.schema)
        earlier = self.enrolled.get(site)
        if earlier is not None and (dict(earlier.samples), earlier.model) != (dict(reply.samples), reply.model):
            raise HansaError(f"site {site} has other samples or another model than when the run started")
        if earlier is None and dict(reply.arithmetic) != numeric_platform():
            log.warning(
                "site %s computes with %s, the server with %s: results will not equal a simulation bit for bit",
                site, dict(reply.arithmetic), numeric_platform(),
            )  # fmt: skip
        self.enrolled[site] = reply

    def _check_schema(self, site: str, digest: str, server_digest: str = "") -> None:
        """Refuse a site whose schema differs from that of the server or of another site."""
        server_digest = server_digest if self.schema is None else self.schema.sha256
        digests = {f"site {name}": reply.schema for name, reply in self.enrolled.items() if name != site}
        for party, party_digest in {"the server": server_digest, **digests}.items():
            if party_digest and digest and digest != party_digest:
                raise HansaError(
                    f"site {site} encodes its table by the schema {digest[:12]}, {party} by {party_digest[:12]}: the "
                    "same model inputs would mean different things. Give the server one schema (`hansa data "
                    "schema`, then data.options.schema), and join with --data FOLDER."
                )

    def _enrollment(self, site: str, run: Run | None = None) -> EnrollmentRequest:
        section = self.config.data
        if self.schema is not None:  # it is a separate field
            options = {name: value for name, value in section.options.items() if name != "schema"}
            section = section.model_copy(update={"options": options})
        update = {"engine": EngineSection(), "data": section, **dict.fromkeys(("seeds", "profile", "links", "faults"))}
        text = to_yaml(self.config.model_copy(update=update))
        mixing = None if run is None else run.algorithm.local.mixing
        clusters = None if mixing is None else tuple(tuple(group) for group in mixing.cluster_lists())
        run_id = "" if run is None else run.id
        schema = "" if self.schema is None else self.schema.to_json()
        return EnrollmentRequest(
            site, __version__, text, self.sites[site], self.population, run_id, clusters, schema=schema
        )

    @allow_code()
    def _run(self, config: Config, store: ClientStore | None, done: int) -> Run:
        samples, labels = self.facts["samples"], self.facts["labels"]
        self.config = config.model_copy(update={"engine": self.config.engine})  # that of the folder, if it is resumed
        own_data = self._own_data(config, self.schema)
        for name, reply in self.enrolled.items():
            self._check_schema(name, reply.schema, "" if own_data.schema is None else own_data.schema.sha256)
        data = ServerData.from_counts(own_data, samples, None if labels is None else torch.tensor(labels))
        run = build_run(config, data, store, done, self._engine)
        run.one_by_one = True
        expected = model_digest(run.task.start(Key(config.seed), run.dtype))
        for name, reply in self.enrolled.items():
            if reply.model != expected:
                raise HansaError(
                    f"site {name} builds the initial model {reply.model[:12]} from this configuration, the server "
                    f"{expected[:12]}: their data have other shapes or classes. For tables, give the server a schema "
                    "(data.options.schema) and join with --data FOLDER."
                )
        for name, clients in self.sites.items():
            reply = EnrollmentReply("", __version__, {client: samples[client] for client in clients}, expected)
            self.enrolled.setdefault(name, reply)
        enrollments = {name: self._enrollment(name, run).to_bytes() for name in self.sites}
        run.site_of = site_of_clients(self.sites, self.population)
        deadline = self.config.engine.deadline
        self.transport = EnrollingTransport(self.connections, enrollments, self._on_enrolled, deadline=deadline)
        return run

    def _own_data(self, config: Config, schema: Schema | None) -> FederatedData:
        """Return the server's data: for tables the schema only, or its own files with test rows."""
        if schema is None:
            return build.load_data(config)
        if config.data.folder is None:
            return schema_template(schema)
        return federate_tables(schema, read_tables(config.data.folder, schema), *row_choice(config, schema))

    def _engine(self, *arguments: Any) -> Federation:
        assert self.transport is not None
        kind = LiveFederation if arguments[0].pace.asynchronous else Federation
        where, enough = self.config.evaluate.where, self.config.engine.enough
        return kind(*arguments, transport=self.transport, sites=self.sites, where=where, enough=enough)


def clients_by_site(engine: EngineSection) -> dict[str, tuple[int, ...]]:
    """Return the clients of each site: numbers are assigned in the order of the sites, lists are used as given.

    >>> clients_by_site(EngineSection(kind="flower", sites={"north": 2, "south": 1}))
    {'north': (0, 1), 'south': (2,)}
    """
    sites: dict[str, tuple[int, ...]] = {}
    start = 0
    for name, clients in (engine.sites or {}).items():
        sites[name] = tuple(range(start, start + clients)) if isinstance(clients, int) else tuple(sorted(clients))
        start += len(sites[name])
    site_of_clients(sites, sum(map(len, sites.values())))
    return sites


def site_of_clients(sites: Mapping[str, Iterable[int]], population: int) -> dict[int, str]:
    """Return the site of each client, or raise unless each is at exactly one."""
    expected = Counter(range(population))
    placed = Counter(client for clients in sites.values() for client in clients)
    wrong = sorted((expected - placed) + (placed - expected))
    if wrong or not population:
        raise HansaError(f"engine.sites: expected each client, numbered from 0, at exactly one site; not {wrong[:5]}")
    return {client: name for name, clients in sites.items() for client in clients}


# ---- replay in simulation: the recorded order of arrivals gives the same bits


@dataclass(frozen=True, slots=True)
class Replay:
    """A replayed run, and whether its vectors equal those of the recorded run, channel by channel."""

    run: Run
    equal: dict[str, bool]

    @property
    def exact(self) -> bool:
        """Whether all vectors are equal to the bit."""
        return all(self.equal.values())


@dataclass(frozen=True, slots=True)
class _RecordedLosses:
    """The updates that the recorded run did not accept, by client and version."""

    lost: frozenset[tuple[int, int]]

    def apply_to_orders(self, orders: Sequence[WorkOrder]) -> tuple[list[WorkOrder], list[DroppedClient]]:
        lost = [order for order in orders if (order.clients[0], order.round) in self.lost]
        dropped = [DroppedClient(order.clients[0], "lost", "in the recorded run") for order in lost]
        return [order for order in orders if order not in lost], dropped

    def apply_to_reports(
        self, algorithm: Algorithm, orders: Sequence[WorkOrder], reports: Iterable[Report]
    ) -> Iterator[Report]:
        yield from reports


@allow_code()
def replay_run(path: Path | str, *, trust: bool = False) -> Replay:
    """Run the recorded server steps of an asynchronous federation in simulation, with all data on this machine.

    Args:
        path: The run folder of the server.
        trust: Import code that the folder names even if this user did not create it on this machine.
    """
    folder = RunFolder.containing(path)
    folder.require_trust(trust=trust)
    config, history = folder.config, list(folder.history)
    if not history or any("arrivals" not in record for record in history):
        raise HansaError(f"{folder}: no recorded arrivals, as `hansa serve` with pace: buffered makes.")
    state, meta, _ = folder.load_checkpoint()
    steps = int(meta["round"])
    arrivals: dict[tuple[int, int], float] = {}
    lost: set[tuple[int, int]] = set()
    for record in history[:steps]:
        for client, version, seconds, admitted in record["arrivals"]:
            arrivals[int(client), int(version)] = float(seconds)
            if not admitted:
                lost.add((int(client), int(version)))
    site_of = {client: name for name, clients in clients_by_site(config.engine).items() for client in clients}
    changes: dict[str, Any] = {"engine": EngineSection(), "rounds": steps, "evaluate": EvaluateSection(every=0)}
    simulated = config.model_copy(update=changes)
    run = build_run(simulated, build.load_data(simulated))
    run.one_by_one = True  # as the sites did
    if run.task.population.count != len(site_of):
        raise HansaError(
            f"{folder}: {run.task.population.count} clients here, {len(site_of)} at all sites: all data is needed."
        )
    run.clock = RecordedClock(arrivals, site_of.__getitem__, run.task.population.samples, run.key)
    run.options = replace(run.options, faults=_RecordedLosses(frozenset(lost)))  # type: ignore[arg-type]
    run.advance(steps)
    recorded: dict[str, torch.Tensor] = state["server"]["vectors"]
    vectors = run.host_vectors
    return Replay(run, {name: torch.equal(vectors[name], vector) for name, vector in recorded.items()})
