"""Asynchronous rounds over real sites: the server aggregates updates as they arrive, and no step waits for a slow site.

A site executes one job at a time. When it answers, the server sends it the next client's job at once, with the newest
version of the model. The order of arrivals depends on the machines; it is part of the run's record, and with it the run
can be replayed exactly in simulation (`hansa replay`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hansa.algorithm import Algorithm
from hansa.compress import ServerBroadcast
from hansa.config import Config
from hansa.core.errors import HansaError
from hansa.engine.requests import LoadMemory, unchanged
from hansa.federation.messages import RoundOrders
from hansa.federation.server import Federation
from hansa.pace import synchronous
from hansa.pace.events import oldest_version
from hansa.rounds import OpenedRound, ServerState
from hansa.rounds.messages import DroppedClient, Report, WorkOrder


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
        self._load = load_memory
        self._oldest = oldest_version(state.pace, oldest if self.keep_from is None else self.keep_from())
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
        self._sent = {
            name: ServerBroadcast(vector, {client: sent.packets}, {client: None}, sent.version)
            for name, sent in order.broadcasts.items()
            if isinstance(vector := sent.packets[0].content, torch.Tensor)
        }
        self._jobs.add(client)
        self._requests[site] = self._round_orders([order], self._load)
        self._send(site, self._requests[site].to_bytes())

    def has_job(self, client: int) -> bool:
        """Whether the client's job was sent and has not been used."""
        return client in self._jobs

    def lose_job(self, client: int) -> None:
        """Let the client's job end without an update."""
        self._jobs.add(client)
        self._end(client, _lost(client, "the server was restarted, and its update would be too old"))

    def group_of(self, client: int) -> str:
        """Return the client's site."""
        return self._site_of[client]

    def next_arrival(self) -> tuple[int, float]:
        """Wait for the next site to answer, or for the deadline of one that does not."""
        while not self._ended:
            frames = self.transport.receive()
            for site, data in frames:
                request = self._requests.get(site)
                reports = self._handle_reports(site, data, self._requests)
                if reports is not None and request is not None:
                    self._end(request.orders[0].clients[0], reports[0])
            waiting = getattr(self.transport, "waiting", None)
            for site in [
                site for site in self._requests if not frames or (waiting is not None and site not in waiting)
            ]:
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


def _lost(client: int, detail: str) -> Report:
    return Report("", 0, b"", dropped=(DroppedClient(client, "silent", detail),))


def check_pace(config: Config, algorithm: Algorithm) -> None:
    """Refuse paces and options that have no meaning where machines are real."""
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
        raise HansaError(
            f"evaluate.where: {config.evaluate.where}: asynchronous sites are at work when the model changes. "
            "Use server."
        )
