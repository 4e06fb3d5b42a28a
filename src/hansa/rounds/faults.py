"""A fault plan for simulation: clients that drop out or misbehave, at given rates, as a function of the seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from hansa.algorithm import Algorithm
from hansa.core.errors import HansaError, check_fraction, check_integer, check_positive, invalid_argument
from hansa.core.keys import Key
from hansa.gossip.robust import Attack, AttackKind
from hansa.rounds.messages import DroppedClient, Report, WorkOrder

SETTINGS = ("factor", "malicious", "attack", "attack_scale")
"""The arguments that are not probabilities."""


@dataclass(frozen=True, slots=True)
class faults:
    """Probabilities of faults per client and round; a client has at most one fault per round.

    Clients drop out ``before`` training, ``after`` it, or during the ``upload``; or send an update that is ``nan``,
    ``scaled`` by ``factor``, sign-``flipped``, or ``stale`` (made for the previous round). A gossiping client that
    drops out before training is absent from its cluster; one that drops out later has already exchanged with its
    neighbours. Faults are a function of the run's seed, on any engine.

    ``malicious`` clients attack their neighbours in every exchange of gossip, by reversing the change of their model
    since the start of the round ("flip") or by adding noise ("noise"), ``attack_scale`` times as large as that change
    (`hansa.gossip.Attack`). What they report to the server is not changed: combine with ``flipped``. The mixing rules
    `hansa.gossip.clipped` and `trimmed` are made against them.

    >>> faults(before=0.1, flipped=0.05).draw(Key(0), 3, 7) in ("", "before", "flipped")
    True
    """

    before: float = 0.0
    after: float = 0.0
    upload: float = 0.0
    nan: float = 0.0
    scaled: float = 0.0
    flipped: float = 0.0
    stale: float = 0.0
    factor: float = 1000.0
    malicious: tuple[int, ...] = ()
    attack: AttackKind = "flip"
    attack_scale: float = 1.0

    def __post_init__(self) -> None:
        clients = tuple(self.malicious)
        for client in clients:
            check_integer("faults", "malicious", client, "Clients by number.", minimum=0)
        if len(set(clients)) != len(clients):
            raise HansaError(f"faults(malicious={clients}): a client is listed twice.")
        object.__setattr__(self, "malicious", clients)
        Attack(clients, self.attack, self.attack_scale)
        for name, rate in self._rates():
            check_fraction("faults", name, rate, "A chance per client and round.", above_zero=False)
        check_positive("faults", "factor", self.factor)
        total = sum(rate for _, rate in self._rates())
        if total > 1 + 1e-12:
            raise HansaError(f"faults: the rates sum to {total:.3g}, expected at most 1: one fault a client and round.")

    def _rates(self) -> list[tuple[str, float]]:
        return [(item.name, getattr(self, item.name)) for item in fields(self) if item.name not in SETTINGS]

    def draw(self, key: Key, round: int, client: int) -> str:
        """Return the name of a client's fault in a round, or an empty string."""
        coin = float(key.child("fault", round, client).numpy().random())
        for name, rate in self._rates():
            if coin < rate:
                return name
            coin -= rate
        return ""

    def apply_to_orders(self, orders: Sequence[WorkOrder]) -> tuple[list[WorkOrder], list[DroppedClient]]:
        """Return the orders that still have a reporter, and the reporters that drop out before training."""
        remaining, dropped = [], []
        for order in orders:
            absent = [client for client in order.clients if self.draw(order.key, order.round, client) == "before"]
            dropped += [
                DroppedClient(client, "lost", "before training") for client in order.reporters if client in absent
            ]
            if absent and order.cohort is None:
                order = order.part([index for index, client in enumerate(order.clients) if client not in absent])
                absent = []
            reporters = tuple(client for client in order.reporters if client not in absent)
            if reporters:
                faulty = replace(order, reporters=reporters, absent=tuple(absent)) if absent else order
                clients = tuple(client for client in order.clients if client in self.malicious)
                attack = Attack(clients, self.attack, self.attack_scale) if clients else None
                remaining.append(replace(faulty, attack=attack) if attack else faulty)
        return remaining, dropped

    def check(self, algorithm: Algorithm, population: int) -> None:
        """Raise if malicious clients cannot attack: without gossip, or with compressed gossip."""
        if not self.malicious:
            return
        if max(self.malicious) >= population:
            expected = f"clients 0 to {population - 1}"
            raise invalid_argument("faults", "malicious", self.malicious, expected)
        mixing = algorithm.local.mixing
        if mixing is None or mixing.compressor is not None:
            expected = "a method whose clients gossip" if mixing is None else "gossip without a compressor"
            raise invalid_argument("faults", "malicious", self.malicious, expected, "The attack is on gossip messages.")

    def apply_to_reports(
        self, algorithm: Algorithm, orders: Sequence[WorkOrder], reports: Iterable[Report]
    ) -> Iterator[Report]:
        """Yield the reports with uploads dropped or corrupted."""
        for report in reports:
            key, dropped = orders[0].key, list(report.dropped)
            drawn_faults = [self.draw(key, report.round, client) for client in report.clients]
            sound = [index for index, fault in enumerate(drawn_faults) if not fault]
            faulty = []
            for index, fault in enumerate(drawn_faults):
                result = self._apply(algorithm, report.part([index]), fault, key) if fault else None
                if isinstance(result, DroppedClient):
                    dropped.append(result)
                elif result is not None:
                    faulty.append(result)
            if len(sound) < len(drawn_faults):
                report = replace(report.part(sound, clients_only=False), dropped=tuple(dropped))
            yield report
            yield from faulty

    def _apply(self, algorithm: Algorithm, report: Report, fault: str, key: Key) -> Report | DroppedClient:
        """Return the report of one client with its upload corrupted, or the client if nothing is sent."""
        (client,) = report.clients
        if fault in ("after", "upload"):
            return DroppedClient(client, "lost", "after training" if fault == "after" else "during upload")
        if fault == "stale":
            return replace(report, round=report.round - 1)
        scale = {"nan": math.nan, "scaled": self.factor, "flipped": -1.0}[fault]
        rows = {}
        for name, packet in report.packets(0).items():
            link = algorithm.channels[name].uplink
            corrupted = link.receive(packet, dim=packet.dim, dtype=packet.dtype) * scale
            try:
                sent, _ = link.send(corrupted, {}, key.child("fault", name, report.round, client))
            except HansaError as error:  # compressors refuse non-finite input: nothing was sent
                return DroppedClient(client, "non-finite", str(error))
            rows[name] = [sent]
        return replace(report, rows=rows)
