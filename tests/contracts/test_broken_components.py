"""A check is worth what it notices: each promise is broken by a part made for that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from compress.ternary import ternary
from hansa.aggregate import mean
from hansa.aggregate.base import Combined
from hansa.compress import Coder, Packet, decode, direct, error_feedback, identity, memoryless, replica, sign, top_k
from hansa.gossip import Topology, ring
from hansa.gossip.weights import as_sparse
from hansa.local import Correction, SolverResult, Work
from hansa.testing import ContractError, check


@dataclass(frozen=True, slots=True)
class server:
    """A server transform with one thing wrong."""

    wrong: str
    box: list[int] = field(default_factory=list, repr=False)

    def init(self, x):
        if self.wrong == "list state":
            return [x]
        if self.wrong == "unplain state":
            return {"m": torch.zeros_like(x), "seen": {1, 2}}
        return {"m": torch.zeros_like(x)}

    def update(self, delta, state, ctx):
        m = state["m"].add_(delta) if self.wrong == "in place" else state["m"] + delta
        self.box.append(1)
        if self.wrong == "hidden state":
            m = m * len(self.box)
        if self.wrong == "global draw":
            m = m + 0 * torch.rand(())
        if self.wrong == "wide":
            m = m.double() if m.dtype == torch.float32 else m.float()
        if self.wrong == "nan":
            m = m / m
        return m, {"m": m}


@dataclass(frozen=True, slots=True)
class aggregator:
    wrong: str
    min_updates: Any = 1
    weights: Any = "uniform"
    momentum_storage: Any = "ram"

    def init(self, dim, population):
        return {}

    def combine(self, updates, state, ctx):
        if self.wrong == "needs two" and len(updates) < 2:
            return Combined(updates[0].vector * torch.nan, state, {})
        if self.wrong == "arrival order":
            return Combined(updates[0].vector, state, {})
        if self.wrong == "in place":
            return Combined(updates[0].vector.zero_(), state, {})
        if self.wrong == "tuple":
            return updates[0].vector, state
        found = mean().combine(updates, state, ctx)
        if self.wrong == "stranger's row":
            return found._replace(rows={10**6: {"x": updates[0].vector}})
        if self.wrong == "unplain state":
            return found._replace(state={"seen": {1}})
        return found._replace(vector=found.vector[:-1]) if self.wrong == "short" else found


@dataclass(frozen=True, slots=True)
class sampler:
    chosen: Any
    draws: bool = False

    def select(self, round, population, key):
        if self.draws:
            return (int(np.random.randint(3)),)  # noqa: NPY002
        return self.chosen


@dataclass(frozen=True, slots=True)
class compressor(Coder):
    wrong: str

    def payload(self, x, key):
        if self.wrong == "long":
            return [x, x]
        if self.wrong == "random":
            return [x * np.float32(torch.rand(()))]
        if self.wrong == "zero":
            return [x + 1]
        if self.wrong == "in place":
            x *= 0
        return [x]

    def read(self, payload, dim, dtype):
        if self.wrong == "unreadable":
            raise ValueError("lost the plan")
        if self.wrong == "lax":
            out = np.zeros(dim, dtype)
            found = np.frombuffer(payload, dtype, len(payload) // dtype.itemsize)[:dim]
            out[: found.size] = found / 2
            return out
        return np.frombuffer(payload, dtype)

    def max_payload(self, dim, itemsize):
        return dim * itemsize

    def contraction(self, dim):
        return 0.1 if self.wrong == "lax" else 0.0


@dataclass(frozen=True, slots=True)
class other_kind:
    """Wraps a compressor and lies about it."""

    wrong: str
    inner: Any = sign()  # noqa: RUF009

    @property
    def kind(self):
        return "top_k" if self.wrong == "kind" else self.inner.kind

    def encode(self, x, key):
        x = torch.nan_to_num(x) if self.wrong == "finite" else x
        return self.inner.encode(x, key)

    def parse(self, payload, dim, dtype):
        if self.wrong == "crash" and bytes(payload) == b"\xff" * len(payload):
            raise ZeroDivisionError("unforeseen")
        return self.inner.parse(payload, dim, dtype)

    def contraction(self, dim):
        return 0.1 if self.wrong == "contraction" else 1.0

    def max_nbytes(self, dim, dtype):
        return self.inner.max_nbytes(dim, dtype)


@dataclass(frozen=True, slots=True)
class uplink:
    wrong: str
    inner: Any = error_feedback(sign())  # noqa: RUF009
    box: list[int] = field(default_factory=list, repr=False)

    @property
    def memory(self):
        return () if self.wrong == "undeclared" else ("residual",)

    def send(self, x, memory, key):
        packet, kept = self.inner.send(x, memory, key)
        self.box.append(1)
        if self.wrong == "in place":
            x.zero_()
        if self.wrong == "hidden":
            packet, kept = self.inner.send(x * len(self.box), memory, key)
        return packet, kept

    def receive(self, packet, *, dim, dtype):
        if self.wrong == "any size":
            return decode(packet, sign())
        if self.wrong == "any kind" and packet.kind != "sign":
            return torch.zeros(dim, dtype=dtype)
        vector = self.inner.receive(packet, dim=dim, dtype=dtype)
        return vector.half() if self.wrong == "half" else vector


@dataclass(frozen=True, slots=True)
class downlink:
    """A replica that errs."""

    wrong: str
    inner: Any = replica(top_k(0.5))  # noqa: RUF009

    @property
    def compressor(self):
        return self.inner.compressor

    def init(self, x):
        return self.inner.init(x)

    def broadcast(self, x, state, clients, round, key):
        made, after = self.inner.broadcast(x, state, clients, round, key)
        if self.wrong == "in place":
            x.add_(1)
        return made, {**after, "odd": {1}} if self.wrong == "unplain" else after

    def acknowledge(self, state, clients, round):
        everybody = list(range(4)) if self.wrong == "believes all" else clients
        return self.inner.acknowledge(state, everybody, round)

    def apply(self, held, packets):
        vector = self.inner.apply(held, packets)
        return vector + 1e-3 if self.wrong == "drifts" else vector


@dataclass(frozen=True, slots=True)
class solver:
    wrong: str
    channels: Any = ()
    memory: Any = ()

    def correction(self, got, memory):
        return Correction(prox_weight=0.5) if self.wrong == "pull" else Correction()

    def finish(self, change, steps, lr, got, memory):
        if self.wrong == "in place":
            change.mul_(2)
        if self.wrong == "undeclared":
            return SolverResult({}, {"row": change})
        if self.wrong == "matrix":
            return SolverResult({}, {"row": change[None]})
        return SolverResult({"control": change} if self.wrong == "unreported" else {}, {})


@dataclass(frozen=True, slots=True)
class work:
    steps: Any
    batch: Any = 1
    common: Any = None

    def draw(self, client, samples, batch_size, key):
        return Work(self.steps, self.batch)


@dataclass(frozen=True, slots=True)
class topology(Topology):
    wrong: str
    averages: ClassVar[bool] = True

    def weights(self, n):
        if self.wrong == "stochastic":
            return as_sparse(np.full((n, n), 2 / n))
        if self.wrong == "disconnected":
            return as_sparse(np.eye(n))
        return ring().weights(n)


@dataclass(frozen=True, slots=True)
class activity:
    wrong: str

    def draw(self, round, step, clients, key):
        if self.wrong == "order":
            return [clients[0]]
        return sorted(clients, reverse=True) if self.wrong == "descending" else [99]


@dataclass(frozen=True, slots=True)
class clustering:
    groups: Any

    def assign(self, population, key, labels):
        return self.groups


class nameless:
    def init(self, x):
        return {}

    def update(self, delta, state, ctx):
        return delta, state


@dataclass(frozen=True, slots=True)
class badly_cited(nameless):
    cites: ClassVar[tuple[str, ...]] = ("nobody1999",)


BROKEN: list[tuple[Any, str]] = [
    (nameless(), "its repr has an address"),
    (badly_cited(), "cites 'nobody1999'"),
    (server("list state"), "expected a dict"),
    (server("unplain state"), r"state\['seen'\] is a set"),
    (server("in place"), "update changes what it is given"),
    (server("hidden state"), "another result the second time"),
    (server("global draw"), "draws from a global generator"),
    (server("wide"), "gives torch.float64"),
    (server("nan"), "NaN or infinity"),
    (aggregator("", min_updates=0), "declares min_updates = 0"),
    (aggregator("", momentum_storage="tape"), "declares momentum_storage = 'tape'"),
    (aggregator("", weights="sizes"), "expected 'uniform'"),
    (aggregator("needs two"), "NaN or infinity"),
    (aggregator("arrival order"), "order in which updates arrive"),
    (aggregator("in place"), "combine changes what it is given"),
    (aggregator("tuple"), r"expected Combined\(...\)"),
    (aggregator("stranger's row"), "who are no clients"),
    (aggregator("unplain state"), "is a set"),
    (aggregator("short"), r"\(28,\)"),
    (sampler([0, 1]), "expected a tuple"),
    (sampler(()), "chooses nobody"),
    (sampler((0, 12)), "expected clients 0 to 11"),
    (sampler((2, 1)), "not ascending"),
    (sampler((1, 1)), "one twice"),
    (sampler((), draws=True), "draws from a global generator"),
    (compressor("long"), "max_nbytes says"),
    (compressor("random"), "draws from a global generator"),
    (compressor("zero"), r"C\(0\) is not 0"),
    (compressor("in place"), "encode changes what it is given"),
    (compressor("unreadable"), "does not read its own packet"),
    (compressor("lax"), "declared 0.01"),
    (other_kind("kind"), "its kind is 'top_k'"),
    (other_kind("finite"), "encodes a vector with nan"),
    (other_kind("crash"), "expected a PacketError"),
    (other_kind("contraction"), "declared 0.01"),
    (uplink("undeclared"), r"keeps the rows \['residual'\], declares \[\]"),
    (uplink("in place"), "send changes what it is given"),
    (uplink("hidden"), "another result the second time"),
    (uplink("any size"), "receives a packet of another size"),
    (uplink("any kind"), "a packet of another kind"),
    (uplink("half"), "receive gives torch.float16"),
    (downlink("in place"), "broadcast changes what it is given"),
    (downlink("unplain"), "is a set"),
    (downlink("believes all"), "holds another vector"),
    (downlink("drifts"), "holds another vector"),
    (solver("pull"), "but it declares 0.0"),
    (solver("in place"), "finish changes what it is given"),
    (solver("undeclared"), r"keeps the rows \['row'\], declares \[\]"),
    (solver("matrix", memory=("row",)), r"\(1, 23\)"),
    (solver("", channels=("control",)), r"reports on \[\], declares \['control'\]"),
    (solver("unreported"), r"reports on \['control'\], declares \[\]"),
    (work(0), "gives 0 steps"),
    (work(1.5), "gives 1.5 steps"),
    (work(1, batch=50), "a batch of 50 to a client with 1 samples"),
    (work(2, common=3), "common = 3 for all"),
    (topology("stochastic"), "sum"),
    (topology("disconnected"), "connected"),
    (topology("averages"), "W is not 11'/n"),
    (activity("order"), "depends on the order of the cohort"),
    (activity("descending"), "not ascending"),
    (activity("stranger"), r"draw gives \[99\]"),
    (clustering([[0, 1], []]), "an empty cluster"),
    (clustering([list(range(11))]), "expected every client once"),
]


@pytest.mark.parametrize(("wrong", "told"), BROKEN, ids=[repr(wrong)[:60] for wrong, _ in BROKEN])
def test_a_broken_part_is_told_by_the_promise_it_breaks(wrong, told) -> None:
    with pytest.raises(ContractError, match=told):
        check(wrong)


def test_the_parts_made_for_this_are_right_where_nothing_is_broken() -> None:
    for made in (server, aggregator, compressor, other_kind, uplink, downlink, solver):
        check(made(""))
    for part in (sampler((0, 3)), work(2), clustering([list(range(12))]), memoryless(ternary()), direct()):
        check(part)
    assert Packet.of(torch.ones(2)).kind == identity().kind
