"""The server of a federation: it enrolls the sites, then runs an experiment with them, or replays one without them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hansa import __version__
from hansa.algorithm import Algorithm
from hansa.config import Config, allow_code, build, build_algorithm, to_yaml
from hansa.config.sections import EngineSection, EvaluateSection
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.data import FederatedData
from hansa.data.csv_folder import federate_tables, read_tables, schema_template
from hansa.federation import Federation
from hansa.federation.messages import EnrollmentReply, EnrollmentRequest, Refusal, RunOver, numeric_platform
from hansa.federation.schema_agreement import agree_schema, draft_schema, row_choice
from hansa.federation.server import LiveFederation, check_pace
from hansa.federation.site import model_digest
from hansa.federation.transport import EnrollingTransport, SiteConnections
from hansa.pace.events import RecordedClock
from hansa.rounds.messages import DroppedClient, Report, WorkOrder
from hansa.runs.driver import Run
from hansa.runs.experiment import Experiment, IfExists, build_run, open_run
from hansa.runs.folder import RunFolder
from hansa.runs.preprocessing import PREPROCESSING, read_preprocessing
from hansa.runs.store import ClientStore, io

log = logging.getLogger("hansa")

SITES = "sites.json"


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
        self.transport: EnrollingTransport | None = None
        self.engine: Federation | None = None
        _check_evaluation(config)

    def new(self, path: Path | str, if_exists: IfExists = "refuse") -> Experiment:
        """Enroll all sites and start a run in a folder."""
        self.enroll_sites()
        experiment = open_run(self.config, path, if_exists, run_factory=self._run)
        self._write_facts(experiment.folder)
        return experiment

    def resume(self, path: Path | str, **options: Any) -> Experiment:
        """Resume a run from its last checkpoint; the sites may reconnect at any time.

        Reports that the server had not written when it died are requested again."""
        folder = RunFolder.containing(path)
        saved = clients_by_site(folder.config.engine)
        if saved != self.sites:
            old, new = (
                ", ".join(f"{name}: {list(clients)}" for name, clients in sites.items())
                for sites in (saved, self.sites)
            )
            raise HansaError(
                f"{folder}: engine.sites: the run has {old}, requested {new}. The memory of a client is at its site: a "
                "run keeps its sites and their clients. Start another run for others."
            )
        if self.schema is not None and (stored := read_preprocessing(folder / PREPROCESSING)) is not None:
            self.schema = None if stored[0].encoding is None else stored[0].encoding.schema
        if not (folder / SITES).is_file():
            self.enroll_sites()
            self._write_facts(folder)
        facts = io.read_sealed(folder / SITES)
        labels = None if facts["labels"] is None else torch.tensor(facts["labels"])
        run_factory = partial(self._run, counts=([int(count) for count in facts["samples"]], labels))
        return open_run(None, folder.path, "resume", run_factory=run_factory, **options)

    @allow_code()
    def check(self) -> None:
        """Build the server's own parts before it waits for sites: algorithm, data, model, loss, metrics."""
        check_pace(self.config, build_algorithm(self.config))
        if self.schema is None or not self.schema.is_open:
            own_data = self._own_data(self.config)
        else:
            own_data = schema_template(self.schema)
            if self.config.data.folder is not None:
                read_tables(self.config.data.folder, self.schema)
        data = ServerData.from_counts(own_data, [1] * self.population)
        build.build_task(self.config, data).start(Key(self.config.seed), build.torch_dtype(self.config))

    def finish(self, seconds: float = 15.0) -> None:
        """Tell the sites that the run is over; unreachable sites continue to wait."""
        transport = EnrollingTransport(self.connections, dict.fromkeys(self.sites, b""), deadline=seconds)
        for name in self.sites:
            transport.send(name, RunOver().to_bytes())
        while transport.receive():
            pass

    def _write_facts(self, folder: RunFolder) -> None:
        labels = self._labels()
        facts = {"samples": self._samples(), "labels": None if labels is None else labels.tolist()}
        io.write_sealed(folder / SITES, facts)

    def enroll_sites(self) -> None:
        """Ask every site for its data and wait until all have replied, after agreeing on open means and deviations of
        tables."""
        if self.schema is not None and self.schema.is_open:
            self.schema = agree_schema(self.connections, list(self.sites), self.schema, self.config)
        enrollments = {name: self._enrollment(name).to_bytes() for name in self.sites}
        transport = EnrollingTransport(self.connections, enrollments, self._on_enrolled, deadline=math.inf)
        for name in self.sites:
            transport.send(name, b"")
        for name, reply in transport.receive():
            refusal = Refusal.from_bytes(reply)
            detail = transport.rejected.get(name, f"{refusal.reason}: {refusal.detail}")
            raise HansaError(f"site {name} does not take part: {detail}")

    def _on_enrolled(self, site: str, reply: EnrollmentReply) -> None:
        """Check an enrollment reply. The first one of a site is stored; later ones must agree with it."""
        clients = self.sites[site]
        if reply.version != __version__:
            raise HansaError(f"site {site} has hansa {reply.version}, the server {__version__}")
        if set(reply.samples) != set(clients) or min(reply.samples.values(), default=0) < 1:
            raise HansaError(f"site {site} reports clients {sorted(reply.samples)}, expected {list(clients)}")
        if reply.labels is not None and (
            any(sum(reply.labels.get(client, ())) != reply.samples[client] for client in clients)
            or len({len(counts) for counts in reply.labels.values()} | self._label_numbers()) > 1
        ):
            raise HansaError(f"site {site} reports label counts that do not add up to its samples, or of other labels")
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

    def _label_numbers(self) -> set[int]:
        """Return the numbers of labels that sites have reported; a single one if they agree."""
        return {len(counts) for reply in self.enrolled.values() for counts in (reply.labels or {}).values()}

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

    def _samples(self) -> list[int]:
        counts = {client: count for reply in self.enrolled.values() for client, count in reply.samples.items()}
        return [counts[client] for client in range(self.population)]

    def _labels(self) -> torch.Tensor | None:
        by_site = [reply.labels for reply in self.enrolled.values()]
        if any(labels is None for labels in by_site):
            return None
        counts = {client: row for labels in by_site if labels is not None for client, row in labels.items()}
        return torch.tensor([counts[client] for client in range(self.population)])

    @allow_code()
    def _run(
        self,
        config: Config,
        store: ClientStore | None,
        done: int,
        counts: tuple[Sequence[int], torch.Tensor | None] | None = None,
    ) -> Run:
        samples, labels = (self._samples(), self._labels()) if counts is None else counts
        self.config = config.model_copy(update={"engine": self.config.engine})  # that of the folder, if it is resumed
        own_data = self._own_data(config)
        for name, reply in self.enrolled.items():
            self._check_schema(name, reply.schema, "" if own_data.schema is None else own_data.schema.sha256)
        data = ServerData.from_counts(own_data, samples, labels)
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
        run.site_of = {client: name for name, clients in self.sites.items() for client in clients}
        deadline = self.config.engine.deadline
        self.transport = EnrollingTransport(self.connections, enrollments, self._on_enrolled, deadline=deadline)
        return run

    def _own_data(self, config: Config) -> FederatedData:
        """Return the server's data: for tables the schema only, or its own files with test rows."""
        if self.schema is None:
            return build.load_data(config)
        if config.data.folder is None:
            return schema_template(self.schema)
        return federate_tables(
            self.schema, read_tables(config.data.folder, self.schema), *row_choice(config, self.schema)
        )

    def _engine(self, *arguments: Any) -> Federation:
        assert self.transport is not None
        kind = LiveFederation if arguments[0].pace.asynchronous else Federation
        self.engine = kind(
            *arguments, transport=self.transport, sites=self.sites, enough=self.config.engine.enough,
            where=self.config.evaluate.where,
        )  # fmt: skip
        return self.engine


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
    all_clients = sorted(client for clients in sites.values() for client in clients)
    if not all_clients or all_clients != list(range(len(all_clients))):
        raise HansaError("engine.sites: expected every client, numbered from 0, at exactly one site.")
    return sites


def _check_evaluation(config: Config) -> None:
    section = config.evaluate
    options: Mapping[str, bool] = {
        "train": section.train, "local_mean": section.local_mean, "compression": section.compression,
        "heterogeneity": section.heterogeneity, "per_client": bool(section.per_client),
        "personalise": section.personalise is not None,
    }  # fmt: skip
    for name, requested in options.items():
        if requested:
            raise HansaError(f"evaluate.{name}: needs clients' data or memory, which stay at the sites. Leave it out.")


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
    state, meta = folder.load_checkpoint()
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
