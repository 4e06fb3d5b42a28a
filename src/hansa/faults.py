"""A fault plan for simulation: clients that vanish or misbehave, at given rates, as a function of the seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from hansa.algorithm import Algorithm
from hansa.compress import Packet
from hansa.errors import HansaError, fraction, positive
from hansa.keys import Key
from hansa.orders import Lost, Order, Report, Upload


@dataclass(frozen=True, slots=True)
class faults:
    """Chances, per client and round, of what goes wrong in real deployments; at most one befalls a client a round.

    Clients are lost ``before`` training, ``after`` it, or in mid-``upload``; or send an update that is ``nan``,
    ``scaled`` by ``factor``, sign-``flipped``, or ``stale``, made for the round before. Whether the door refuses it or
    the method withstands it is what one wants to see.

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

    def __post_init__(self) -> None:
        for name, rate in self._rates():
            fraction("faults", name, rate, "A chance per client and round.", above_zero=False)
        positive("faults", "factor", self.factor)
        total = sum(rate for _, rate in self._rates())
        if total > 1 + 1e-12:
            raise HansaError(f"faults: the chances sum to {total:.3g}; at most one fault befalls a client a round.")

    def _rates(self) -> list[tuple[str, float]]:
        return [(item.name, getattr(self, item.name)) for item in fields(self) if item.name != "factor"]

    def draw(self, key: Key, round: int, client: int) -> str:
        """What befalls a client in a round, or nothing."""
        coin = float(key.child("fault", round, client).numpy().random())
        for name, rate in self._rates():
            if coin < rate:
                return name
            coin -= rate
        return ""

    def strike_orders(self, orders: Sequence[Order]) -> tuple[list[Order], list[Lost]]:
        """The orders that reach somebody, without the clients lost before training."""
        left, lost = [], []
        for order in orders:
            gone = {client for client in order.clients if self.draw(order.key, order.round, client) == "before"}
            lost += [Lost(client, "lost", "before training") for client in order.reporters if client in gone]
            clients = tuple(client for client in order.clients if client not in gone)
            reporters = tuple(client for client in order.reporters if client not in gone)
            if reporters:
                left.append(replace(order, clients=clients, reporters=reporters) if gone else order)
        return left, lost

    def strike_reports(
        self, algorithm: Algorithm, orders: Sequence[Order], reports: Iterable[Report]
    ) -> Iterator[Report]:
        """The reports as they arrive, with uploads lost or spoilt on the way."""
        keys = {order.cohort: order for order in orders}
        for report in reports:
            order = keys[report.cohort]
            kept, lost = [], list(report.lost)
            for upload in report.uploads:
                fault = self.draw(order.key, order.round, upload.client)
                if fault in ("after", "upload"):
                    when = "after training" if fault == "after" else "during upload"
                    lost.append(Lost(upload.client, "lost", when))
                else:
                    kept.append(self._spoil(algorithm, upload, fault, order) if fault else upload)
            yield replace(report, uploads=tuple(kept), lost=tuple(lost))

    def _spoil(self, algorithm: Algorithm, upload: Upload, fault: str, order: Order) -> Upload:
        if fault == "stale":
            return replace(upload, round=upload.round - 1)
        if fault == "before":  # struck already
            return upload
        packets = {}
        for name, packet in upload.packets.items():
            link, like = algorithm.channels[name].uplink, order.got[name]
            vector = link.receive(packet, dim=like.numel(), dtype=like.dtype)
            if fault == "nan":
                packets[name] = Packet.of(torch.full_like(vector, torch.nan))
                continue
            wrong = vector * (self.factor if fault == "scaled" else -1.0)
            packets[name], _ = link.send(wrong, {}, order.key.child("fault", name, order.round, upload.client))
        return replace(upload, packets=packets)
