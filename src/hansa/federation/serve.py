"""The server of a federation: it meets the sites, then carries out an experiment whose engine asks them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hansa.config import Config, build, to_text
from hansa.config.sections import EngineSection
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.federation import Federation
from hansa.federation.agent import model
from hansa.federation.data_views import ServerData
from hansa.federation.enrollment import Charge, Hello, Refused, arithmetic
from hansa.federation.flower_transport import Charged, Post
from hansa.runs.driver import Run
from hansa.runs.experiment import Experiment, living_run
from hansa.runs.folder import RunFolder
from hansa.runs.provenance import hansa_version
from hansa.runs.store import ClientStore, io

log = logging.getLogger("hansa")

SITES = "sites.json"


class Server:
    """The server's side of one configuration over a post."""

    def __init__(self, config: Config, post: Post) -> None:
        if config.engine.kind != "flower":
            raise HansaError("engine: a federation needs kind: flower, with sites: {NAME: number of clients, ...}.")
        self.config, self.post = config, post
        self.sites = placed(config.engine)
        self.population = sum(map(len, self.sites.values()))
        self.hellos: dict[str, Hello] = {}
        self.transport: Charged | None = None
        self.engine: Federation | None = None
        _refuse_what_looks_into_clients(config)

    def new(self, path: Path | str, **options: Any) -> Experiment:
        """Meet all sites, and begin a run in its folder."""
        self.meet()
        made = Experiment.new(self.config, path, make=self._run, **options)
        facts = {"samples": self._samples(), "labels": None if (labels := self._labels()) is None else labels.tolist()}
        io.write_sealed(made.folder / SITES, facts)
        return made

    def resumed(self, path: Path | str, **options: Any) -> Experiment:
        """Take a run up at its last checkpoint; the sites may come back when they like."""
        folder = RunFolder.holding(path)
        facts = io.read_sealed(folder / SITES)
        labels = None if facts["labels"] is None else torch.tensor(facts["labels"])
        make = partial(self._run, known=([int(count) for count in facts["samples"]], labels))
        return Experiment.resumed(folder.path, make=make, **options)

    def meet(self) -> None:
        """Ask every site what it holds, and wait until all have answered."""
        charges = {name: self._charge(name).to_bytes() for name in self.sites}
        meeting = Charged(self.post, charges, self._greeted, deadline=math.inf)
        for name in self.sites:
            meeting.send(name, b"")
        for name, answer in meeting.receive():
            refusal = Refused.from_bytes(answer)
            raise HansaError(f"site {name} does not take part: {refusal.reason}: {refusal.detail}")

    def _greeted(self, site: str, hello: Hello) -> None:
        """Check a hello; the first one is remembered, later ones must agree with it."""
        clients = self.sites[site]
        if hello.version != hansa_version():
            raise HansaError(f"site {site} has hansa {hello.version}, the server {hansa_version()}")
        if set(hello.samples) != set(clients) or min(hello.samples.values(), default=0) < 1:
            raise HansaError(f"site {site} tells samples of clients {sorted(hello.samples)}, it has {list(clients)}")
        if hello.labels is not None and any(
            sum(hello.labels.get(client, ())) != hello.samples[client] for client in clients
        ):
            raise HansaError(f"site {site} tells label counts that are not those of its samples")
        known = self.hellos.get(site)
        if known is not None and (dict(known.samples), known.model) != (dict(hello.samples), hello.model):
            raise HansaError(f"site {site} holds other samples or another model than when the run was begun")
        if known is None and dict(hello.arithmetic) != arithmetic():
            log.warning(
                "site %s computes with %s, the server with %s: results will not be those of a simulation to the last "
                "bit", site, dict(hello.arithmetic), arithmetic(),
            )  # fmt: skip
        self.hellos[site] = hello

    def _charge(self, site: str, run: Run | None = None) -> Charge:
        text = to_text(self.config.model_copy(update={"engine": EngineSection(), "seeds": None}))
        mixing = None if run is None else run.algorithm.local.mixing
        clusters = None if mixing is None else tuple(tuple(group) for group in mixing.resolved())
        told = "" if run is None else run.id
        return Charge(site, hansa_version(), text, self.sites[site], self.population, told, clusters)

    def _samples(self) -> list[int]:
        counts = {client: count for hello in self.hellos.values() for client, count in hello.samples.items()}
        return [counts[client] for client in range(self.population)]

    def _labels(self) -> torch.Tensor | None:
        told = [hello.labels for hello in self.hellos.values()]
        if any(labels is None for labels in told):
            return None
        counts = {client: row for labels in told if labels is not None for client, row in labels.items()}
        return torch.tensor([counts[client] for client in range(self.population)])

    def _run(
        self,
        config: Config,
        store: ClientStore | None,
        done: int,
        known: tuple[Sequence[int], torch.Tensor | None] | None = None,
    ) -> Run:
        samples, labels = (self._samples(), self._labels()) if known is None else known
        held = ServerData.of(build.federated(config), samples, labels)
        run = living_run(config, held, store, done, self._engine)
        expected = model(run.task.start(Key(config.seed), run.dtype))
        for name, hello in self.hellos.items():
            if hello.model != expected:
                raise HansaError(f"site {name} makes another model of this configuration than the server does.")
        for name, clients in self.sites.items():
            first = Hello("", hansa_version(), {client: samples[client] for client in clients}, expected)
            self.hellos.setdefault(name, first)
        charges = {name: self._charge(name, run).to_bytes() for name in self.sites}
        self.transport = Charged(self.post, charges, self._greeted, deadline=config.engine.deadline)
        return run

    def _engine(self, *parts: Any) -> Federation:
        assert self.transport is not None
        asked = self.config.engine
        self.engine = Federation(
            *parts, transport=self.transport, sites=self.sites, attempts=1, enough=asked.enough,
            where=self.config.evaluate.where,
        )  # fmt: skip
        return self.engine


def placed(engine: EngineSection) -> dict[str, tuple[int, ...]]:
    """Who is where: numbers of clients are dealt in the order of the sites, lists are taken as they are.

    >>> placed(EngineSection(kind="flower", sites={"north": 2, "south": 1}))
    {'north': (0, 1), 'south': (2,)}
    """
    found: dict[str, tuple[int, ...]] = {}
    first = 0
    for name, clients in (engine.sites or {}).items():
        found[name] = tuple(range(first, first + clients)) if isinstance(clients, int) else tuple(sorted(clients))
        first += len(found[name])
    everybody = sorted(client for clients in found.values() for client in clients)
    if not everybody or everybody != list(range(len(everybody))):
        raise HansaError("engine.sites: expected every client, numbered from 0, at exactly one site.")
    return found


def _refuse_what_looks_into_clients(config: Config) -> None:
    asked = config.evaluate
    looks: Mapping[str, bool] = {
        "train": asked.train, "local_mean": asked.local_mean, "compression": asked.compression,
        "heterogeneity": asked.heterogeneity, "per_client": bool(asked.per_client),
        "personalise": asked.personalise is not None,
    }  # fmt: skip
    for word, wanted in looks.items():
        if wanted:
            raise HansaError(f"evaluate.{word}: needs clients' data or memory, which stay at the sites. Leave it out.")
