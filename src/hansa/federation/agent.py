"""The agent of a site: it owns the model, the data and the memory of the site's clients, and answers frames.

It does not depend on the transport and validates every frame.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hansa.config import Config, allow_code, build, build_algorithm, from_yaml
from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import Vectors
from hansa.core.vectors.fingerprint import fingerprint
from hansa.data import FederatedData
from hansa.federation import DiskMemoryStore, Refusals, Site
from hansa.federation.data_views import SiteData
from hansa.federation.enrollment import (
    BATCH,
    ENROLLMENT,
    REFUSAL,
    EnrollmentReply,
    EnrollmentRequest,
    Refusal,
    frame_digest,
    pack_batch,
    unpack_batch,
)
from hansa.federation.messages import ProtocolError, check_protocol
from hansa.federation.policy import Policy
from hansa.rounds import wire_format
from hansa.runs.driver import Run
from hansa.runs.provenance import hansa_version
from hansa.runs.store import io

MAX_POPULATION = 10_000_000  # clients of a federation


@dataclass(frozen=True, slots=True)
class DataSource:
    """The source of a site's data: ``load`` returns it for a configuration. ``shared``: the configuration names the
    data, and all sites load the same."""

    load: Callable[[Config], FederatedData]
    shared: bool = False


class Agent:
    """Answers frames for one site.

    Args:
        site: The name of the site.
        source: The source of its data.
        folder: Durable storage of client memory and enrollments.
        policy: The site's policy.
    """

    def __init__(self, site: str, source: DataSource, folder: Path | str, policy: Policy | None = None) -> None:
        self.site, self.source, self.folder = site, source, Path(folder)
        self.policy = Policy() if policy is None else policy
        self.refusals = Refusals()
        self.rounds = 0
        self._sites: dict[str, Site] = {}
        self._lock = threading.Lock()
        self._last: tuple[str, bytes] = ("", b"")
        io.make_folder(self.folder)

    def handle(self, data: bytes) -> bytes:
        """Return the answer to a frame, or to a batch of frames: reports, an enrollment reply or a refusal."""
        with self._lock:
            digest = frame_digest(data)
            if digest != self._last[0]:  # a repeated frame has the same answer
                self._last = (digest, self._answer_all(data))
            return self._last[1]

    def _answer_all(self, data: bytes) -> bytes:
        try:
            if wire_format.kind_of(data) == BATCH:
                return pack_batch([self._answer(part) for part in unpack_batch(data, limit=self.policy.message)])
        except wire_format.FrameError as error:
            return self._refuse(ProtocolError(error.reason, str(error)))
        return self._answer(data)

    def _answer(self, data: bytes) -> bytes:
        try:
            kind = wire_format.kind_of(data)
            if kind == ENROLLMENT:
                return self._enroll(data)
            head = check_protocol(wire_format.unpack(data, kind, limit=self.policy.message).head)
            answer = self._site(str(head.get("run"))).answer(data)
            self.rounds += 1
            return answer
        except ProtocolError as refusal:
            return self._refuse(refusal)
        except wire_format.FrameError as error:
            return self._refuse(ProtocolError(error.reason, str(error)))
        except HansaError as error:
            return self._refuse(ProtocolError("failed", str(error)))

    def _refuse(self, refusal: ProtocolError) -> bytes:
        self.refusals.record(refusal.reason, refusal.detail)
        return Refusal(refusal.reason, refusal.detail).to_bytes()

    def _enroll(self, data: bytes) -> bytes:
        request = EnrollmentRequest.from_bytes(data, limit=self.policy.message)
        site, reply = self._build_site(request, frame_digest(data))
        if request.run:
            folder = self._folder(request.run)
            io.make_folder(folder)
            io.write_file(folder / ENROLLMENT, data)
            self._sites = {request.run: site}
        return reply.to_bytes()

    def _site(self, run: str) -> Site:
        """Return the site of a run, built again from its stored enrollment after a restart."""
        if run not in self._sites:
            path = self._folder(run) / ENROLLMENT
            if not path.is_file():
                raise ProtocolError(ENROLLMENT, f"this site is not enrolled in run {run!r}")
            stored = path.read_bytes()
            site, _ = self._build_site(EnrollmentRequest.from_bytes(stored), frame_digest(stored))
            self._sites = {run: site}
        return self._sites[run]

    def _folder(self, run: str) -> Path:
        if not re.fullmatch("[0-9a-f]{1,64}", run):
            raise ProtocolError("run", f"{run[:80]!r} is not a run")
        return self.folder / run

    @allow_code()  # the policy has checked every name
    def _build_site(self, request: EnrollmentRequest, digest: str) -> tuple[Site, EnrollmentReply]:
        self._check(request)
        try:
            config = from_yaml(request.config, source="enrollment")
            data = self._load_data(config, request)
            task = build.build_task(config, data)
            method = build_algorithm(config)
            mixing = method.local.mixing
            if mixing is not None and request.clusters is not None:
                method = method.with_local(mixing=replace(mixing, clusters=request.clusters))
            elif mixing is not None:  # the clusters are known once all sites have replied
                method = method.with_local(mixing=replace(mixing, clusters=[list(range(request.population))]))
            dtype = build.torch_dtype(config)
            start = task.start(Key(config.seed), dtype)
            labels = data.own_label_counts() if self.policy.label_counts and data.classes is not None else None
            samples = {client: data.samples(client) for client in request.clients}
            reply = EnrollmentReply(digest, hansa_version(), samples, model_digest(start), labels)
            algorithm = method if not request.run else Run(method, task, seed=config.seed, dtype=dtype).algorithm
            memory = DiskMemoryStore(self._folder(request.run) / "memory") if request.run else None
        except ProtocolError:
            raise
        except HansaError as error:
            raise ProtocolError("config", str(error)) from error
        rules = {"limit": self.policy.message, "rounds": self.policy.rounds, "steps": self.policy.steps}
        return Site(algorithm, task, request.clients, memory_store=memory, run=request.run, dtype=dtype, **rules), reply

    def _check(self, request: EnrollmentRequest) -> None:
        if request.site != self.site:
            raise ProtocolError("site", f"an enrollment for site {request.site!r}, this is {self.site!r}")
        if request.version != hansa_version():
            raise ProtocolError("version", f"the server has hansa {request.version}, this site {hansa_version()}")
        clients = request.clients
        valid = _strictly_increasing(clients) and clients[-1] < request.population
        if not 1 <= request.population <= MAX_POPULATION or not valid:
            raise ProtocolError("clients", f"expected increasing numbers below {request.population}, got {clients[:5]}")
        self.policy.check(request.config, data_from_config=self.source.shared)

    def _load_data(self, config: Config, request: EnrollmentRequest) -> SiteData:
        make = SiteData.from_all if self.source.shared else SiteData.from_own
        return make(self.source.load(config), request.clients, request.population)


def model_digest(start: Vectors) -> str:
    """Return the digest of the initial model, which all parties must share."""
    return "".join(fingerprint(start[name]).hex() for name in sorted(start))


def _strictly_increasing(clients: Sequence[int]) -> bool:
    return bool(clients) and clients[0] >= 0 and all(a < b for a, b in itertools.pairwise(clients))


__all__ = ["REFUSAL", "Agent", "DataSource", "model_digest"]
