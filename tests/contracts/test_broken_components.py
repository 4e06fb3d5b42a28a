"""A check is worth what it notices: each promise is broken by a part made for that."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from compress.ternary import ternary
from hansa import gossip, local, sample
from hansa import server as servers
from hansa.aggregate import mean, median
from hansa.aggregate.base import Combined
from hansa.compress import Coder, Packet, decode, direct, error_feedback, identity, memoryless, replica, sign, top_k
from hansa.gossip.weights import as_sparse
from hansa.local import Correction, SolverResult, Work
from hansa.testing import ContractError, check

RANDOM = np.random.randint
CALLS: list[int] = []
"""Hidden state: one entry a call."""


def broken(real: Any, **parts: Any) -> Any:
    """The component with some of its methods or traits replaced."""
    made = type(type(real).__name__, (type(real),), parts)
    return made(**{field.name: getattr(real, field.name) for field in fields(real)})


def server(**parts: Any) -> Any:
    return broken(servers.momentum(), **parts)


def update(step: Any) -> Any:
    """A server transform of this step."""
    return server(update=lambda self, delta, state, ctx: (step(delta), state))


def combine(vector: Any = None, **changed: Any) -> Any:
    """An aggregator of this vector, or the mean with some fields of its result changed."""

    def change(self: Any, updates: Any, state: Any, ctx: Any) -> Any:
        if vector is not None:
            return Combined(vector(updates), state, {})
        found = mean().combine(updates, state, ctx)
        return found._replace(**{name: value(updates) for name, value in changed.items()})

    return broken(mean(), combine=change)


def choose(chosen: Any) -> Any:
    return broken(sample.everyone(), select=lambda self, round, population, key: chosen())


def draw(steps: Any, batch: Any = 1, **parts: Any) -> Any:
    return broken(local.fixed(2), draw=lambda self, client, samples, batch_size, key: Work(steps, batch), **parts)


SHORT = broken(
    mean(),
    combine=lambda self, updates, state, ctx: Combined(mean().combine(updates, state, ctx).vector[:-1], state, {}),
)
LINK, REPLICA, RING = error_feedback(sign()), replica(top_k(0.5)), gossip.ring()


def send(before: Any) -> Any:
    """An uplink that does something to x first."""
    return broken(LINK, send=lambda self, x, memory, key: LINK.send(before(x), memory, key))


def receive(change: Any) -> Any:
    return broken(LINK, receive=lambda self, packet, *, dim, dtype: change(packet, dim, dtype))


def broadcast(change: Any, **state: Any) -> Any:
    """A downlink that does something to x after its broadcast, and adds to its state."""

    def changed(self: Any, x: Any, state_before: Any, clients: Any, round: Any, key: Any) -> Any:
        made, after = REPLICA.broadcast(x, state_before, clients, round, key)
        change(x)
        return made, {**after, **state}

    return broken(REPLICA, broadcast=changed)


def finish(result: Any, **parts: Any) -> Any:
    return broken(local.sgd(), finish=lambda self, change, steps, lr, got, memory: result(change), **parts)


def weights(matrix: Any, **parts: Any) -> Any:
    return broken(RING, weights=lambda self, n: as_sparse(matrix(n)), **parts)


def activity(active: Any) -> Any:
    return broken(gossip.everyone(), draw=lambda self, round, step, clients, key: active(clients))


def assign(groups: Any) -> Any:
    return broken(gossip.equal(3), assign=lambda self, population, key, labels: groups)


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


class nameless:
    def init(self, x):
        return {}

    def update(self, delta, state, ctx):
        return delta, state


@dataclass(frozen=True, slots=True)
class badly_cited(nameless):
    cites: ClassVar[tuple[str, ...]] = ("nobody1999",)


BROKEN: list[tuple[Any, str]] = [
    (nameless(), "its repr has a memory address"),
    (badly_cited(), "cites 'nobody1999'"),
    (server(init=lambda self, x: [x]), "expected a dict"),
    (server(init=lambda self, x: {"m": torch.zeros_like(x), "seen": {1, 2}}), r"state.seen='set'.: expected tensors"),
    (update(lambda delta: delta.add_(1)), "update modifies its arguments"),
    (update(lambda delta: delta * (CALLS.append(1) or len(CALLS))), "another result the second time"),
    (update(lambda delta: delta + 0 * torch.rand(())), "draws from a global generator"),
    (update(lambda delta: delta.double() if delta.dtype == torch.float32 else delta.float()), "gives torch.float64"),
    (update(lambda delta: delta * torch.nan), "NaN or infinity"),
    (broken(mean(), min_updates=-1), "declares min_updates = -1"),
    (broken(mean(), momentum_storage="tape"), "declares momentum_storage = 'tape'"),
    (broken(median(), weights="sizes"), "expected 'uniform'"),
    (combine(lambda updates: updates[0].vector * torch.nan), "NaN or infinity"),
    (combine(lambda updates: updates[0].vector), "order in which updates arrive"),
    (combine(lambda updates: updates[0].vector.zero_()), "combine modifies its arguments"),
    (broken(mean(), combine=lambda self, updates, state, ctx: (updates[0].vector, state)), r"expected Combined\(...\)"),
    (combine(rows=lambda updates: {10**6: {"x": updates[0].vector}}), "which are not clients"),
    (combine(state=lambda updates: {"seen": {1}}), "expected tensors, numbers, strings"),
    (SHORT, r"\(28,\)"),
    (choose(lambda: [0, 1]), "expected a tuple"),
    (choose(tuple), "selects no client"),
    (choose(lambda: (0, 12)), "expected clients 0 to 11"),
    (choose(lambda: (2, 1)), "not ascending"),
    (choose(lambda: (1, 1)), "one twice"),
    (choose(lambda: (int(RANDOM(3)),)), "draws from a global generator"),
    (compressor("long"), "max_nbytes says"),
    (compressor("random"), "draws from a global generator"),
    (compressor("zero"), r"C\(0\) is not 0"),
    (compressor("in place"), "encode modifies its arguments"),
    (compressor("unreadable"), "does not read its own packet"),
    (compressor("lax"), "declared 0.01"),
    (other_kind("kind"), "its kind is 'top_k'"),
    (other_kind("finite"), "encodes a vector with nan"),
    (other_kind("crash"), "expected a PacketError"),
    (other_kind("contraction"), "declared 0.01"),
    (broken(LINK, memory=()), r"keeps the rows \['residual'\], declares \[\]"),
    (send(lambda x: x.mul_(0)), "send modifies its arguments"),
    (send(lambda x: x * (CALLS.append(1) or len(CALLS))), "another result the second time"),
    (receive(lambda packet, dim, dtype: decode(packet, sign())), "receives a packet of another size"),
    (
        receive(
            lambda packet, dim, dtype: (
                LINK.receive(packet, dim=dim, dtype=dtype) if packet.kind == "sign" else torch.zeros(dim, dtype=dtype)
            )
        ),
        "a packet of another kind",
    ),
    (
        receive(lambda packet, dim, dtype: LINK.receive(packet, dim=dim, dtype=dtype).half()),
        "receive gives torch.float16",
    ),
    (broadcast(lambda x: x.add_(1)), "broadcast modifies its arguments"),
    (broadcast(lambda x: None, odd={1}), "expected tensors, numbers, strings"),
    (
        broken(
            REPLICA, acknowledge=lambda self, state, clients, round: REPLICA.acknowledge(state, [0, 1, 2, 3], round)
        ),
        "holds another vector",
    ),
    (broken(REPLICA, apply=lambda self, held, packets: REPLICA.apply(held, packets) + 1e-3), "holds another vector"),
    (broken(local.sgd(), correction=lambda self, got, memory: Correction(prox_weight=0.5)), "but it declares 0.0"),
    (finish(lambda change: SolverResult({}, {"row": change.mul_(2)})), "finish modifies its arguments"),
    (finish(lambda change: SolverResult({}, {"row": change})), r"keeps the rows \['row'\], declares \[\]"),
    (finish(lambda change: SolverResult({}, {"row": change[None]}), memory=("row",)), r"\(1, 23\)"),
    (finish(lambda change: SolverResult({}, {}), channels=("control",)), r"reports on \[\], declares \['control'\]"),
    (finish(lambda change: SolverResult({"control": change}, {})), r"reports on \['control'\], declares \[\]"),
    (draw(0), "gives 0 steps"),
    (draw(1.5), "gives 1.5 steps"),
    (draw(1, batch=50), "a batch of 50 to a client with 1 samples"),
    (draw(2, common=3), "common = 3 for all"),
    (weights(lambda n: np.full((n, n), 2 / n)), "sum"),
    (weights(np.eye), "connected"),
    (broken(RING, averages=True), "W is not 11'/n"),
    (activity(lambda clients: [clients[0]]), "depends on the order of the cohort"),
    (activity(lambda clients: sorted(clients, reverse=True)), "not ascending"),
    (activity(lambda clients: [99]), r"draw gives \[99\]"),
    (assign([list(range(12)), []]), "cluster 1 is empty"),
    (assign([list(range(11))]), "expected each client"),
]


@pytest.mark.parametrize(("wrong", "told"), BROKEN, ids=[told for _, told in BROKEN])
def test_a_broken_part_is_told_by_the_promise_it_breaks(wrong, told) -> None:
    with pytest.raises(ContractError, match=told):
        check(wrong)


def test_the_parts_made_for_this_are_right_where_nothing_is_broken() -> None:
    for real in (servers.momentum(), mean(), LINK, REPLICA, local.sgd(), local.fixed(2), RING, gossip.equal(3)):
        check(broken(real))
    for part in (compressor(""), other_kind(""), choose(lambda: (0, 3)), memoryless(ternary()), direct()):
        check(part)
    assert Packet.of(torch.ones(2)).kind == identity().kind
