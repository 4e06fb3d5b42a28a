"""The server of a federation: it enrolls the sites, then runs an experiment with them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hansa.config import Config, allow_code, build, to_yaml
from hansa.config.sections import EngineSection
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.federation import Federation
from hansa.federation.agent import model_digest
from hansa.federation.data_views import ServerData
from hansa.federation.enrollment import EnrollmentReply, EnrollmentRequest, Refusal, numeric_platform
from hansa.federation.transport import EnrollingTransport, SiteConnections
from hansa.runs.driver import Run
from hansa.runs.experiment import Experiment, build_run
from hansa.runs.folder import RunFolder
from hansa.runs.provenance import hansa_version
from hansa.runs.store import ClientStore, io

log = logging.getLogger("hansa")

SITES = "sites.json"


class Server:
    """The server of one configuration.

    Args:
        config: A configuration with ``engine: {kind: flower, sites: ...}``.
        connections: The connections to the sites.
    """

    def __init__(self, config: Config, connections: SiteConnections) -> None:
        if config.engine.kind != "flower":
            raise HansaError("engine: a federation needs kind: flower, with sites: {NAME: number of clients, ...}.")
        self.config, self.connections = config, connections
        self.sites = clients_by_site(config.engine)
        self.population = sum(map(len, self.sites.values()))
        self.enrolled: dict[str, EnrollmentReply] = {}
        self.transport: EnrollingTransport | None = None
        self.engine: Federation | None = None
        _check_evaluation(config)

    def new(self, path: Path | str, **options: Any) -> Experiment:
        """Enroll all sites and start a run in a folder."""
        self.enroll_sites()
        experiment = Experiment.new(self.config, path, run_factory=self._run, **options)
        facts = {"samples": self._samples(), "labels": None if (labels := self._labels()) is None else labels.tolist()}
        io.write_sealed(experiment.folder / SITES, facts)
        return experiment

    def resume(self, path: Path | str, **options: Any) -> Experiment:
        """Resume a run from its last checkpoint; the sites may reconnect at any time."""
        folder = RunFolder.containing(path)
        facts = io.read_sealed(folder / SITES)
        labels = None if facts["labels"] is None else torch.tensor(facts["labels"])
        run_factory = partial(self._run, known=([int(count) for count in facts["samples"]], labels))
        return Experiment.resume(folder.path, run_factory=run_factory, **options)

    def enroll_sites(self) -> None:
        """Ask every site which data it has, and wait until all have replied."""
        enrollments = {name: self._enrollment(name).to_bytes() for name in self.sites}
        transport = EnrollingTransport(self.connections, enrollments, self._on_enrolled, deadline=math.inf)
        for name in self.sites:
            transport.send(name, b"")
        for name, answer in transport.receive():
            refusal = Refusal.from_bytes(answer)
            raise HansaError(f"site {name} does not take part: {refusal.reason}: {refusal.detail}")

    def _on_enrolled(self, site: str, reply: EnrollmentReply) -> None:
        """Check an enrollment reply. The first one of a site is kept, later ones must agree with it."""
        clients = self.sites[site]
        if reply.version != hansa_version():
            raise HansaError(f"site {site} has hansa {reply.version}, the server {hansa_version()}")
        if set(reply.samples) != set(clients) or min(reply.samples.values(), default=0) < 1:
            raise HansaError(
                f"site {site} reports clients {sorted(reply.samples)}, expected {list(clients)} with samples"
            )
        if reply.labels is not None and any(
            sum(reply.labels.get(client, ())) != reply.samples[client] for client in clients
        ):
            raise HansaError(f"site {site} reports label counts that do not add up to its samples")
        known = self.enrolled.get(site)
        if known is not None and (dict(known.samples), known.model) != (dict(reply.samples), reply.model):
            raise HansaError(f"site {site} has other samples or another model than when the run started")
        if known is None and dict(reply.arithmetic) != numeric_platform():
            log.warning(
                "site %s computes with %s, the server with %s: results will not equal a simulation bit for bit",
                site, dict(reply.arithmetic), numeric_platform(),
            )  # fmt: skip
        self.enrolled[site] = reply

    def _enrollment(self, site: str, run: Run | None = None) -> EnrollmentRequest:
        text = to_yaml(self.config.model_copy(update={"engine": EngineSection(), "seeds": None}))
        mixing = None if run is None else run.algorithm.local.mixing
        clusters = None if mixing is None else tuple(tuple(group) for group in mixing.cluster_lists())
        run_id = "" if run is None else run.id
        return EnrollmentRequest(site, hansa_version(), text, self.sites[site], self.population, run_id, clusters)

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
        known: tuple[Sequence[int], torch.Tensor | None] | None = None,
    ) -> Run:
        samples, labels = (self._samples(), self._labels()) if known is None else known
        data = ServerData.from_counts(build.load_data(config), samples, labels)
        run = build_run(config, data, store, done, self._engine)
        expected = model_digest(run.task.start(Key(config.seed), run.dtype))
        for name, reply in self.enrolled.items():
            if reply.model != expected:
                raise HansaError(f"site {name} builds another initial model from this configuration than the server.")
        for name, clients in self.sites.items():
            first = EnrollmentReply("", hansa_version(), {client: samples[client] for client in clients}, expected)
            self.enrolled.setdefault(name, first)
        enrollments = {name: self._enrollment(name, run).to_bytes() for name in self.sites}
        deadline = config.engine.deadline
        self.transport = EnrollingTransport(self.connections, enrollments, self._on_enrolled, deadline=deadline)
        return run

    def _engine(self, *arguments: Any) -> Federation:
        assert self.transport is not None
        self.engine = Federation(
            *arguments, transport=self.transport, sites=self.sites, attempts=1, enough=self.config.engine.enough,
            where=self.config.evaluate.where,
        )  # fmt: skip
        return self.engine


def clients_by_site(engine: EngineSection) -> dict[str, tuple[int, ...]]:
    """Return the clients of each site: numbers are assigned in the order of the sites, lists are used as given.

    >>> clients_by_site(EngineSection(kind="flower", sites={"north": 2, "south": 1}))
    {'north': (0, 1), 'south': (2,)}
    """
    sites: dict[str, tuple[int, ...]] = {}
    first = 0
    for name, clients in (engine.sites or {}).items():
        sites[name] = tuple(range(first, first + clients)) if isinstance(clients, int) else tuple(sorted(clients))
        first += len(sites[name])
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
