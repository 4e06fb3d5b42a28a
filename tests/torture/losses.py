"""Clients lost at any rate, before training, after it or in mid-upload: what each method promises still holds."""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hansa
from compress.ternary import ternary
from contracts.small import NAMES, OWN, small
from contracts.small import bowls as small_bowls
from hansa.aggregate.staleness import CACHED_UPDATE
from hansa.compress import direct, error_feedback, top_k
from hansa.core.types import CONTROL, MODEL
from hansa.engine import Serial
from hansa.engine.requests import single_orders, unchanged
from hansa.gossip import hypercube, ring
from hansa.rounds import client_round
from hansa.rounds.messages import Report, WorkOrder
from hansa.runs.driver import Run
from hansa.runs.store import ClientStore
from hansa.runs.store.database import row_digest
from torture.kill import sha
from torture.malformed import Upload

CLIENTS, DIM, ROUNDS = 8, 5, 8
RATES = (0.0, 0.2, 0.5, 0.7, 0.9)
DECENTRALIZED = ("dsgd", "choco_sgd", "gossip_pga", "dadam", "d_amsgrad")
CLUSTERED = ("ha_fed", "cafga")
CASES = {name: (name, {}) for name in NAMES} | {
    f"{name}, compressed": (name, {"compressor": top_k(0.4)}) for name in NAMES if name not in DECENTRALIZED
}
"""Every preset as it is; and with error feedback where there is an uplink to compress."""
MOMENTUM = "server/aware/momentum"


def bowls(seed: int) -> hansa.training.quadratic:
    return small_bowls(CLIENTS, DIM, seed)


def algorithm(case: str) -> hansa.Algorithm:
    name, words = CASES[case]
    more = {"reporters": 3} if name in CLUSTERED else {} if name in OWN else {"participation": 0.75}
    return small(name, local_lr=0.02, **more, **words)


class Recording(Serial):
    """A serial engine that also trains every cohort with plain uplinks, to know what compression was given."""

    def __init__(self, log: list[tuple[Report, Report]], *parts: Any) -> None:
        super().__init__(*parts)
        self.log, self.plain = log, self.algorithm
        for name in self.algorithm.channels:
            self.plain = self.plain.on(name, uplink=direct())

    def run(self, orders: Sequence[WorkOrder], recall: Any = unchanged) -> Iterator[Report]:
        self.log.clear()
        for order in [recall(single) for each in orders for single in single_orders(each)]:
            (report,) = client_round(self.algorithm, [order], self.trainer, self.task.population)
            (plain,) = client_round(self.plain, [order], self.trainer, self.task.population)
            self.log.append((report, plain))
            yield report


class Watch:
    """A callback that holds every round against the plan of losses and the promises of the method."""

    def __init__(self, run: Run, plan: hansa.rounds.faults, log: list[tuple[Report, Report]]) -> None:
        self.plan, self.log = plan, log
        self.produced = {name: torch.zeros(CLIENTS, DIM, dtype=torch.float64) for name in run.algorithm.channels}
        self.accepted = {name: torch.zeros(CLIENTS, DIM, dtype=torch.float64) for name in run.algorithm.channels}
        self.remember(run)
        self.counts: Counter[str] = Counter()

    def remember(self, run: Run) -> None:
        self.rows = hashes(run.store)
        self.server = [sha(part) for part in (run.state.vectors, run.state.server, run.state.aggregate)]

    def __call__(self, run: Run, record: dict[str, Any]) -> None:
        round = record["round"] - 1
        admitted = record["clients"]
        asked = work_of(run, round)
        assert admitted == [client for client, number in asked.items() if not self.plan.draw(run.key, number, client)]
        assert sorted(lost.client for when, lost in run.dropped_clients if when == record["round"]) == sorted(
            set(asked) - set(admitted)
        )
        now = hashes(run.store)
        for client in set(range(CLIENTS)) - set(admitted):
            assert now.get(client) == self.rows.get(client), f"the rows of client {client} changed without it"
        if not admitted:
            assert now == self.rows
            assert self.server == [sha(part) for part in (run.state.vectors, run.state.server, run.state.aggregate)]
            assert not record["moved"]
        self.keep_account(run, admitted)
        self.promises(run, record)
        self.remember(run)
        self.counts.update(rounds=1, lost=len(asked) - len(admitted), unmoved=not admitted)

    def keep_account(self, run: Run, admitted: list[int]) -> None:
        """What clients whose report was folded have produced so far, and what the server has got of it."""
        for report, plain in self.log:
            for upload, whole in zip(Upload.each(report), Upload.each(plain), strict=True):
                if upload.client in admitted:
                    for name, channel in run.algorithm.channels.items():
                        got = channel.uplink.receive(upload.packets[name], dim=DIM, dtype=torch.float64)
                        self.accepted[name][upload.client] += got
                        self.produced[name][upload.client] += whole.packets[name].content

    def promises(self, run: Run, record: dict[str, Any]) -> None:
        residual = {name: column(run, f"uplink/{name}/residual") for name in run.algorithm.channels}
        for name, channel in run.algorithm.channels.items():
            if isinstance(channel.uplink, error_feedback):  # nothing is lost on the way, only late
                near(self.accepted[name] + residual[name], self.produced[name])
        preset = run.algorithm.name
        if preset == "scaffold":  # c = mean c_i, but for what of the c_i is still on its way
            c, own = run.state.vectors[CONTROL], column(run, "solver/control")
            near(c + residual[CONTROL].mean(0), own.mean(0))
        if preset == "feddyn":  # h = mean h_i, likewise
            alpha = run.algorithm.local.solver.alpha  # type: ignore[attr-defined]
            near(run.state.server[MODEL]["h"] - alpha * residual[MODEL].mean(0), column(run, "solver/dual").mean(0))
        if preset in ("fedaware", "fedaware_yogi") and "weights" in record:
            self.simplex(run, record["weights"])
        if preset == "ca2fl" and run.state.aggregate[MODEL]["mean"].numel():  # h = mean h_i over all clients
            seen = run.store.clients(CACHED_UPDATE)
            near(run.state.aggregate[MODEL]["mean"], run.store.read_many(seen, CACHED_UPDATE).sum(0) / CLIENTS)
        if preset in DECENTRALIZED and record["clients"]:  # the model is the mean of the models that were heard of
            near(run.params, column(run, "local/row")[record["clients"]].mean(0))

    @staticmethod
    def simplex(run: Run, weights: dict[int, float]) -> None:
        """lambda >= 0, sum 1, and no other point of the simplex is shorter: <m_i, d> >= |d|^2 for every momentum."""
        seen = run.store.clients(MOMENTUM)
        momenta = run.store.read_many(seen, MOMENTUM)
        point = torch.tensor([weights.get(client, 0.0) for client in seen], dtype=torch.float64)
        assert set(weights) <= set(seen)
        assert float(point.min()) >= 0
        assert abs(float(point.sum()) - 1) < 1e-12
        direction = point @ momenta
        scale = float(momenta.square().sum(1).max())
        assert float((momenta @ direction).min()) >= float(direction.square().sum()) - 1e-9 * scale


def work_of(run: Run, round: int) -> dict[int, int]:
    """The clients whose work ended in a round, in order, with the round that they were asked in."""
    if not run.algorithm.pace.asynchronous:
        return dict.fromkeys(run.algorithm.sampler.select(round, run.task.population, run.key), round)
    rows = run.clients("round", "client", "staleness")
    mine = rows["round"] == round + 1
    ages = rows["staleness"][mine].astype(int).tolist()
    return {client: round - age for client, age in zip(rows["client"][mine].tolist(), ages, strict=True)}


def column(run: Run, name: str) -> torch.Tensor:
    """One row of every client, zeros for one that was never written."""
    rows = [run.store.read(client).get(name) for client in range(CLIENTS)]
    return torch.stack([torch.zeros(DIM, dtype=torch.float64) if row is None else row for row in rows])


def hashes(store: Any) -> dict[int, dict[str, str]]:
    """The SHA-256 of every row of every client, the server's own rows included."""
    return {client: {name: row_digest(row) for name, row in named.items()} for client, named in store._rows.items()}


def near(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def plan_of(rate: float) -> hansa.rounds.faults:
    return hansa.faults(before=rate / 3, after=rate / 3, upload=rate / 3)


def check(case: str, rate: float, seed: int, rounds: int = ROUNDS) -> Counter[str]:
    """One run at one rate of loss, watched; returns what befell it."""
    log: list[tuple[Report, Report]] = []
    plan = plan_of(rate)
    run = Run(algorithm(case), bowls(seed), seed=seed, faults=plan, evaluate_every=0, engine=partial(Recording, log))
    watch = Watch(run, plan, log)
    run.advance(rounds, [watch])
    return watch.counts


# --- mixing keeps the mean --------------------------------------------------------------------------------------------

SLOPES = torch.randn(CLIENTS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(17))
LR, STEPS = 0.1, 3
ALL = {"steps": STEPS, "local_lr": LR}
MIXED = {
    "ha_fed": lambda: small("ha_fed", reporters=4, **ALL),
    "ha_fed, half active": lambda: small("ha_fed", reporters=4, active=0.5, **ALL),
    "ha_fed, hypercube": lambda: small("ha_fed", reporters=4, topology=hypercube(), **ALL),
    "ha_fed, compressed gossip": lambda: small("ha_fed", reporters=4, gossip_compressor=ternary(), **ALL),
    "cafga": lambda: small("cafga", reporters=4, active=2, **ALL),
    "afga": lambda: small("afga", participation=1.0, active=3, topology=ring(), **ALL),
    **{name: partial(small, name, **ALL) for name in DECENTRALIZED},
}


def slope(strength: float, client: int, x: torch.Tensor) -> torch.Tensor:
    return (SLOPES[client] * x).sum() * strength


def check_mean(case: str, rate: float, seed: int) -> None:
    """On linear losses every step of client i is -lr g_i wherever it stands; so whatever a doubly stochastic W does, a
    cluster's mean moves by -lr/n times the sum of the slopes of those who computed, over those who are left.

    Methods without a server start from different models and have flat losses: then the mean of those left must stay.
    """
    preset = MIXED[case]()
    flat = preset.name in DECENTRALIZED
    task = hansa.training.function(
        partial(slope, 0.0 if flat else 1.0), clients=CLIENTS, x0=torch.zeros(DIM, dtype=torch.float64)
    )
    draw = torch.Generator().manual_seed(seed)
    start = {i: {"local/row": torch.randn(DIM, dtype=torch.float64, generator=draw)} for i in range(CLIENTS)}
    store = ClientStore()
    store._rows.update(start if flat else {})
    log: list[tuple[Report, Report]] = []
    plan = hansa.faults(before=rate)
    run = Run(preset, task, seed=seed, store=store, faults=plan, evaluate_every=0, engine=partial(Recording, log))
    mixing = run.algorithm.local.mixing
    assert mixing is not None
    for round in range(4):
        before = column(run, "local/row")
        run.advance(1)
        for cluster in mixing.cluster_lists():
            left = [client for client in cluster if not plan.draw(run.key, round, client)]
            if not left:
                continue
            if flat:
                near(column(run, "local/row")[left].mean(0), before[left].mean(0))
                mixed = not torch.equal(column(run, "local/row")[left], before[left])
                assert mixed or len(left) == 1 or round > 0  # an idle method would keep the mean too
                continue
            moved = {u.client: u.packets[MODEL].content for report, _ in log for u in Upload.each(report)}
            computed = [c for step in range(STEPS) for c in mixing.active.draw(round, step, left, run.key)]
            mean = torch.stack([moved[client] for client in left]).mean(0)
            near(mean, -LR / len(left) * SLOPES[computed].sum(0) if computed else torch.zeros_like(mean))


def run(count: int, place: Path | None = None, seed: int = 0) -> Counter[str]:
    """Every case at every rate for ``count`` seeds."""
    torch.set_num_threads(1)
    logging.getLogger("hansa").setLevel(logging.ERROR)  # clients are lost by the thousand, and each run would say so
    counts: Counter[str] = Counter()
    for number in range(seed, seed + count):
        for rate in RATES:
            for case in CASES:
                counts += check(case, rate, number)
                counts["runs"] += 1
            for case in MIXED:
                check_mean(case, rate, number)
                counts["mixed runs"] += 1
    return counts
