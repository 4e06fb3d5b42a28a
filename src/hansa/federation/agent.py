"""The agent of a site: a long-lived process that owns the model, the data and the memory of the site's clients, and
answers frames. How they reach it is not its concern; it believes none of them."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hansa import data
from hansa.config import Config, algorithm, build, from_text
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.federation import DiskVersions, Refusals, Site
from hansa.federation.data_views import SiteData
from hansa.federation.enrollment import CHARGE, REFUSED, SEVERAL, Charge, Hello, Refused, apart, digest, several
from hansa.federation.messages import NotOurs, checked
from hansa.federation.policy import Policy
from hansa.rounds import wire_format
from hansa.runs.driver import Run
from hansa.runs.provenance import hansa_version
from hansa.runs.store import io

POPULATION = 10_000_000  # clients of a federation, at most


@dataclass(frozen=True, slots=True)
class Source:
    """Where a site's data comes from: ``of`` gives it, for a configuration; ``shared`` where the configuration names it
    and the federation's other sites have theirs from the same place."""

    of: Callable[[Config], data.FederatedData]
    shared: bool = False


class Agent:
    """Answers frames for one site. What it must not lose is in ``folder``: versions of its clients' memory, charges."""

    def __init__(self, site: str, source: Source, folder: Path | str, policy: Policy | None = None) -> None:
        self.site, self.source, self.folder = site, source, Path(folder)
        self.policy = Policy() if policy is None else policy
        self.refusals = Refusals()
        self.rounds = 0
        self._sites: dict[str, Site] = {}
        self._lock = threading.Lock()
        self._last: tuple[str, bytes] = ("", b"")
        io.make_folder(self.folder)

    def handle(self, data: bytes) -> bytes:
        """The answer to a frame, or to several in one: reports, a hello, or a refusal with its reason."""
        with self._lock:
            name = digest(data)
            if name != self._last[0]:  # the same again has the same answer, and is not worked for again
                self._last = (name, self._answers(data))
            return self._last[1]

    def _answers(self, data: bytes) -> bytes:
        try:
            if wire_format.kind_of(data) == SEVERAL:
                return several([self._answer(part) for part in apart(data, limit=self.policy.message)])
        except wire_format.FrameError as error:
            return self._refused(NotOurs(error.reason, str(error)))
        return self._answer(data)

    def _answer(self, data: bytes) -> bytes:
        try:
            kind = wire_format.kind_of(data)
            if kind == CHARGE:
                return self._charged(data)
            head = checked(wire_format.unpack(data, kind, limit=self.policy.message).head)
            answer = self._site(str(head.get("run"))).answer(data)
            self.rounds += 1
            return answer
        except NotOurs as refusal:
            return self._refused(refusal)
        except wire_format.FrameError as error:
            return self._refused(NotOurs(error.reason, str(error)))
        except HansaError as error:
            return self._refused(NotOurs("failed", str(error)))

    def _refused(self, refusal: NotOurs) -> bytes:
        self.refusals.note(refusal.reason, refusal.detail)
        return Refused(refusal.reason, refusal.detail).to_bytes()

    def _charged(self, data: bytes) -> bytes:
        charge = Charge.from_bytes(data, limit=self.policy.message)
        site, hello = self._built(charge, digest(data))
        if charge.run:
            folder = self._folder(charge.run)
            io.make_folder(folder)
            io.write_file(folder / CHARGE, data)
            self._sites = {charge.run: site}
        return hello.to_bytes()

    def _site(self, run: str) -> Site:
        """The site as this run's charge made it, in this life or an earlier one."""
        if run not in self._sites:
            path = self._folder(run) / CHARGE
            if not path.is_file():
                raise NotOurs(CHARGE, f"no charge was given for run {run!r}")
            stored = path.read_bytes()
            site, _ = self._built(Charge.from_bytes(stored), digest(stored))
            self._sites = {run: site}
        return self._sites[run]

    def _folder(self, run: str) -> Path:
        if not re.fullmatch("[0-9a-f]{1,64}", run):
            raise NotOurs("run", f"{run[:80]!r} names no run")
        return self.folder / run

    def _built(self, charge: Charge, name: str) -> tuple[Site, Hello]:
        self._check(charge)
        try:
            config = from_text(charge.config, source="charge")
            held = self._held(config, charge)
            task = build.task(config, held)
            method = algorithm(config)
            mixing = method.local.mixing
            if mixing is not None and charge.clusters is not None:
                method = method.with_local(mixing=replace(mixing, clusters=charge.clusters))
            elif mixing is not None:  # an enquiry: who gossips with whom is known when all have answered
                method = method.with_local(mixing=replace(mixing, clusters=[list(range(charge.population))]))
            dtype = build.dtype(config)
            start = task.start(Key(config.seed), dtype)
            labels = held.own_label_counts() if self.policy.label_counts and held.classes is not None else None
            hello = Hello(
                name, hansa_version(), {client: held.samples(client) for client in charge.clients}, model(start), labels
            )
            bound = method if not charge.run else Run(method, task, seed=config.seed, dtype=dtype).algorithm
            versions = DiskVersions(self._folder(charge.run) / "memory") if charge.run else None
        except NotOurs:
            raise
        except HansaError as error:
            raise NotOurs("config", str(error)) from error
        rules = {"limit": self.policy.message, "rounds": self.policy.rounds, "steps": self.policy.steps}
        return Site(bound, task, charge.clients, versions=versions, run=charge.run, dtype=dtype, **rules), hello

    def _check(self, charge: Charge) -> None:
        if charge.site != self.site:
            raise NotOurs("site", f"a charge for site {charge.site!r}, this is {self.site!r}")
        if charge.version != hansa_version():
            raise NotOurs("version", f"the server has hansa {charge.version}, this site {hansa_version()}")
        clients = charge.clients
        if not 1 <= charge.population <= POPULATION or not _rising(clients) or clients[-1] >= charge.population:
            raise NotOurs("clients", f"{len(clients)} clients of {charge.population} are no site's")
        self.policy.check(charge.config, of_config=self.source.shared)

    def _held(self, config: Config, charge: Charge) -> SiteData:
        held = self.source.of(config)
        make = SiteData.among if self.source.shared else SiteData.of
        return make(held, charge.clients, charge.population)


def model(start: Vectors) -> str:
    """A digest of the first model: two parties that have different ones would not learn together."""
    return "".join(fingerprint(start[name]).hex() for name in sorted(start))


def _rising(clients: Sequence[int]) -> bool:
    return bool(clients) and clients[0] >= 0 and all(a < b for a, b in itertools.pairwise(clients))


__all__ = ["REFUSED", "Agent", "Source", "model"]
