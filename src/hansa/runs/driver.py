"""The driver: round after round, with evaluation, metrics and callbacks."""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from hansa.aggregate import Aggregator
from hansa.algorithm import Algorithm
from hansa.core.devices import Device, can_hold, devices
from hansa.core.errors import HansaError, check_integer, check_positive, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import declared
from hansa.core.types import BUFFERS, MODEL, State, Vector
from hansa.engine import Engine, Metered, Networked, Serial, choose
from hansa.rounds import (
    ClosedRound,
    OpenedRound,
    Outcome,
    RoundAggregation,
    ServerState,
    diagnose,
    in_cohort_order,
    open_round,
)
from hansa.rounds.faults import faults
from hansa.rounds.ledger import Ledger
from hansa.rounds.measures.base import Measure, want_mean
from hansa.rounds.messages import DroppedClient, WorkOrder
from hansa.runs.client_columns import Array, ClientColumns
from hansa.runs.client_metrics import PerClient, served, tested
from hansa.runs.client_models import own_vectors
from hansa.runs.client_record import ClientRecord
from hansa.runs.dropout_report import refuse_nothing_done, say_who_was_lost
from hansa.runs.participation import participation
from hansa.runs.store import ClientStore, DiskStore, RamStore
from hansa.runs.text_table import text_table
from hansa.training import TaskLike, personalise, random_state
from hansa.training.client_evaluation import Exam

if TYPE_CHECKING:
    import pandas

NEWEST_LOST = 100
"""So many lost clients are named in a checkpoint, each with its reason; how many there were is in the history."""

Record: TypeAlias = dict[str, Any]
Callback: TypeAlias = Callable[["Run", Record], bool | None]
"""Called after every round with the run and its newest record; a true answer stops the run there."""


class Run:
    """A run, living or finished: the server's state, the clients' memory, and the record of every round.

    >>> import torch
    >>> import hansa
    >>> task = hansa.training.quadratic(torch.eye(2).expand(4, 2, 2), torch.ones(4, 2))
    >>> done = hansa.run(hansa.presets.fedavg(steps=2), task, rounds=3)
    >>> done.state.round, len(done.history)
    (3, 3)
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: TaskLike,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: Device | None = None,
        quorum: int = 1,
        keep_params: bool = False,
        evaluate_every: int = 1,
        store: ClientStore | None = None,
        faults: faults | None = None,
        max_norm: float = 1e12,
        measures: Sequence[Measure] = (),
        per_client: bool | int | None = None,
        personalise: personalise | Mapping[str, Any] | None = None,
        engine: Callable[[Algorithm, TaskLike, torch.dtype, torch.device], Engine] = Serial,
    ) -> None:
        check_integer("run", "quorum", quorum)
        check_positive("run", "max_norm", max_norm, "Updates with a larger norm are refused.")
        check_integer("run", "evaluate_every", evaluate_every, "0 evaluates after the last round only.", minimum=0)
        self.task, self.key = task, Key(seed)
        self.dtype = task.dtype if dtype is None else dtype
        if self.dtype not in (torch.float32, torch.float64):
            raise invalid_argument("run", "dtype", dtype, "torch.float32 or torch.float64")
        self.devices = _devices(task, device)
        self.device = self.devices[0]
        for each in self.devices:
            can_hold(each, self.dtype)
        labels = getattr(getattr(task, "data", None), "label_counts", None)
        bound = algorithm.bind(task.population.count, self.key, labels).placed(getattr(task, "layout", None))
        start = {name: vector.to("cpu") for name, vector in task.start(self.key, self.dtype).items()}
        self.algorithm = bound.with_buffers() if BUFFERS in start else bound
        self.state = ServerState.start(self.algorithm, start, task.population.count)
        self.store: ClientStore = self._own_store() if store is None else store
        self.ledger = Ledger()
        self.quorum, self.evaluate_every = quorum, evaluate_every
        self.faults, self.max_norm, self.measures = faults, max_norm, tuple(measures)
        self.per_client = PerClient.of(task, per_client, personalise, evaluate_every)
        self.id = self.key.child("run", repr(algorithm), task.name).digest(8).hex()
        self.history: list[Record] = []
        self.client_record = ClientRecord()
        self.lost: list[tuple[int, DroppedClient]] = []
        self.oldest = 0  # the oldest round that the run could be taken up from; sites keep what that needs
        self.forgotten: set[int] = set()
        self._kept: list[Vector] | None = [] if keep_params else None
        self._engine = engine

    def _own_store(self) -> ClientStore:
        """Rows in memory, or where a part asks for it in a folder of the run's own that goes with it."""
        aggregators = [channel.aggregate for channel in self.algorithm.channels.values()]
        if all(declared(aggregator, Aggregator, "momentum_storage") != "disk" for aggregator in aggregators):
            return RamStore()
        folder = TemporaryDirectory(prefix="hansa-rows-")
        store = DiskStore(folder.name)
        weakref.finalize(self, _discard, store, folder)
        return store

    @property
    def params(self) -> Vector:
        """The model as one flat vector."""
        return self.state.vectors[MODEL]

    @property
    def trajectory(self) -> torch.Tensor:
        """The model after each round, [rounds, d]; needs ``keep_params=True``."""
        if self._kept is None:
            raise HansaError("the trajectory was not kept: run with keep_params=True.")
        return torch.stack(self._kept) if self._kept else self.params.new_empty(0, self.params.numel())

    @property
    def model(self) -> nn.Module:
        """The trained model as a module of its own."""
        if not hasattr(self.task, "module"):
            raise HansaError(f"{self.task.name} is a function of a flat vector, not a module: use run.params.")
        module: nn.Module = self.task.module(self.state.vectors)
        return module

    def model_of(self, client: int) -> nn.Module:
        """The model that a client has: its own in decentralized runs, otherwise the server's with the client's private
        blocks in it."""
        if not hasattr(self.task, "module"):
            raise HansaError(f"{self.task.name} is a function of a flat vector, not a module: use run.store.read.")
        module: nn.Module = self.task.module(own_vectors(self.algorithm, self.state.vectors, self.store, client))
        return module

    def table(self, *columns: str, last: int = 5) -> str:
        """The last rounds as text: ``print(run.table("round", "test_accuracy"))``. `frame` has all of them."""
        return text_table(self.history, columns, last)

    def report(self, path: Path | str, title: str | None = None) -> Path:
        """Write a page of curves, numbers and citations: one HTML file that opens offline."""
        made: Path = _results().Runs(self.algorithm.name, [self]).report(path, title)
        return made

    def __repr__(self) -> str:
        last = next((record for record in reversed(self.history) if "test_accuracy" in record), {})
        told = f", test_accuracy {last['test_accuracy']:.3f}" if last else ""
        return f"Run({self.algorithm.name} on {self.task.name}, seed {self.key.seed}, {self.state.round} rounds{told})"

    def _repr_html_(self) -> str:
        html: str = _results().run_html(self)
        return html

    def frame(self) -> pandas.DataFrame:
        """The history as a pandas frame, one row a round."""
        try:
            import pandas
        except ImportError as error:
            raise HansaError("run.frame() needs pandas: pip install 'hansa[report]'.") from error
        return pandas.DataFrame(self.history)

    def clients(self, *columns: str) -> ClientColumns:
        """What every client did in every round, in columns: all of them, or those named.

        ``run.clients().frame()`` is a pandas frame of it, ``run.clients().by_client()`` has one row a client.
        """
        return self.client_record.columns(*columns)

    def advance(self, rounds: int, callbacks: Sequence[Callback] = ()) -> Run:
        """Run this many more rounds."""
        check_integer("run", "rounds", rounds, minimum=0)
        last = self.state.round + rounds
        with random_state.exact_arithmetic(self.devices):
            engine = self._engine(self.algorithm, self.task, self.dtype, self.device)
            try:
                while self.state.round < last:
                    record = self._round(engine, final=self.state.round + 1 == last)
                    answers = [callback(self, record) for callback in callbacks]
                    if any(answers):
                        break
            finally:
                engine.close()
        refuse_nothing_done(self.history, self.lost)
        say_who_was_lost(self.history, self.lost)
        return self

    def _round(self, engine: Engine, final: bool) -> Record:
        began = time.perf_counter()
        opened = open_round(self.algorithm, self.state, self.task.population, self.id, self.key)
        if want_mean(self.measures, self.state.round):
            opened = opened._replace(orders=tuple(replace(order, mean=True) for order in opened.orders))
        orders, gone = (opened.orders, ()) if self.faults is None else self.faults.strike_orders(opened.orders)
        if isinstance(engine, Networked):
            engine.opened(opened, self.oldest)
        reports = engine.run(orders, self._recalled)
        if self.faults is not None:
            reports = self.faults.strike_reports(self.algorithm, orders, reports)
        closing = RoundAggregation(
            self.algorithm,
            opened.state,
            opened.orders,
            self.task.population,
            quorum=self.quorum,
            rows=self.store,
            gone=gone,
            max_norm=self.max_norm,
            keep=bool(self.measures),
            stage=None if self.measures else self.store.stage,
        )
        try:
            for report in in_cohort_order(reports, orders):
                closing.add(report)
            closed = closing.close()
            seen = self._observed(closed)
        except BaseException:
            self.store.discard()  # a round that was left in the midst leaves nothing behind
            raise
        if not closed.outcome.applied:
            self.store.discard()
        self.store.commit(self.state.round, closed.memory)
        self.state = closed.state
        self.forgotten.difference_update(closed.outcome.admitted)
        if self._kept is not None:
            self._kept.append(self.params.clone())
        record = {**self._record(opened, closed), **seen}
        if final or (self.evaluate_every and self.state.round % self.evaluate_every == 0):
            record.update(engine.evaluate(self.state.vectors))
        marks = self._tested(engine) if self.per_client.due(self.state.round, final) else {}
        record.update(served(marks))
        self.client_record.add(self.state.round, work=participation(opened.down_bytes, closed.outcome), test=marks)
        if isinstance(engine, Metered):
            record["sites"] = engine.site_bytes()
            self.ledger.record_sites(record["sites"])
        record["seconds"] = time.perf_counter() - began
        self.history.append(record)
        return record

    def _tested(self, engine: Engine) -> dict[str, Array]:
        """Every client that owns test rows, tested with its own model; sites keep theirs to themselves."""
        if isinstance(engine, Metered):
            return {}
        exam = Exam(self.state.vectors, (), self.state.round, self.key, self.per_client.tuned)
        return tested(engine, self.algorithm, self.task, exam, self.store)

    def _recalled(self, order: WorkOrder) -> WorkOrder:
        """The order with what its reporters remember, read when somebody is about to do it."""
        remembered = {c: {} if c in self.forgotten else self.store.read(c) for c in order.reporters}
        return replace(order, memory=remembered) if any(remembered.values()) else order

    def forget(self, *clients: int) -> None:
        """Let clients begin anew, with nothing remembered of them: residuals, control variates and the like start as
        they did in the first round. For an operator whose site has lost a client's memory, never done by itself.

        It holds, also across checkpoints, until the client next takes part; what the server itself keeps of it, such
        as FedAWARE's momentum, stays.
        """
        for client in clients:
            if isinstance(client, bool) or not isinstance(client, int) or not 0 <= client < self.task.population.count:
                count = self.task.population.count
                raise invalid_argument("forget", "client", client, f"one of the {count} clients, 0 to {count - 1}")
        self.forgotten.update(clients)

    def _observed(self, closed: ClosedRound) -> Record:
        """What is seen of a closed round before its memories are committed."""
        if closed.diagnostics is None:
            return {"diversity": math.nan, "aggregate_norm": math.nan}
        return dict(
            diagnose(self.algorithm, closed.diagnostics, self.measures, self.store.read, closed.memory, self.key)
        )

    def tree(self) -> State:
        """All that a checkpoint must hold beside the clients' rows and the history."""
        return {
            "server": self.state.tree(),
            "ledger": self.ledger.state(),
            "lost": [[round, lost.client, lost.reason, lost.detail] for round, lost in self.lost[-NEWEST_LOST:]],
            "forgotten": sorted(self.forgotten),
        }

    def restore(self, tree: State, history: Sequence[Record]) -> None:
        """Go back to the closed round that `tree` was made at; the store must stand at the same round."""
        state = ServerState(**tree["server"])
        if self.store.generation != state.round or len(history) != state.round:
            raise HansaError(
                f"the checkpoint is of round {state.round}, the clients' rows of round {self.store.generation}, the "
                f"history of {len(history)} rounds: these three belong together."
            )
        self.state = state
        self.ledger = Ledger.restore(tree["ledger"], self.ledger.links)
        self.lost = [
            (int(round), DroppedClient(int(client), reason, detail)) for round, client, reason, detail in tree["lost"]
        ]
        self.forgotten = {int(client) for client in tree.get("forgotten", ())}
        self.history = list(history)

    def _record(self, opened: OpenedRound, closed: ClosedRound) -> Record:
        outcome: Outcome = closed.outcome
        self.lost += [(self.state.round, lost) for lost in outcome.dropped]
        self.ledger.record(
            self.state.round,
            up=outcome.up_bytes,
            down=opened.down_bytes,
            peer=outcome.peer_bytes,
            exchanges=outcome.exchanges,
        )
        return {
            "round": self.state.round,
            "train_loss": outcome.train_loss,
            "update_norm": outcome.update_norm,
            "participants": len(outcome.admitted),
            "clients": list(outcome.admitted),
            "lost": len(outcome.dropped),
            "reasons": dict(Counter(lost.reason for lost in outcome.dropped)),
            "moved": outcome.applied,
            "up_bytes": sum(outcome.up_bytes.values()),
            "down_bytes": sum(opened.down_bytes.values()),
            "peer_bytes": sum(outcome.peer_bytes.values()),
            **outcome.info,
        }


def run(
    algorithm: Algorithm,
    task: TaskLike,
    *,
    rounds: int,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    workers: int | None = None,
    quorum: int = 1,
    keep_params: bool = False,
    evaluate_every: int = 1,
    callbacks: Sequence[Callback] = (),
    store: ClientStore | None = None,
    faults: faults | None = None,
    max_norm: float = 1e12,
    measures: Sequence[Measure] = (),
    per_client: bool | int | None = None,
    personalise: personalise | Mapping[str, Any] | None = None,
) -> Run:
    """Train ``task`` with ``algorithm`` for ``rounds`` rounds.

    Equal seeds give bit-identical results, whatever the number of ``workers``; None takes all cores when that pays.
    ``dtype`` float64 or float32 runs through everything; clients train on ``device``, or on several in turn. Fewer
    than ``quorum`` surviving updates leave a round without effect, an update longer than ``max_norm`` is refused.
    ``faults`` is a plan of clients that vanish or misbehave. ``measures`` adds numbers to each round's record, such as
    `hansa.measures.compression`. Where test rows have owners, clients are evaluated one by one with each evaluation, or
    every ``per_client`` rounds, as they are and, with ``personalise={"steps": 5, "lr": 0.01}``, after such steps on
    their own rows.
    """
    if not isinstance(algorithm, Algorithm):
        raise invalid_argument("run", "algorithm", algorithm, "an Algorithm", "hansa.presets.fedavg(...) makes one.")
    check_integer("run", "rounds", rounds)
    living = Run(
        algorithm,
        task,
        seed=seed,
        dtype=dtype,
        device=device,
        quorum=quorum,
        keep_params=keep_params,
        evaluate_every=evaluate_every,
        store=store,
        faults=faults,
        max_norm=max_norm,
        measures=measures,
        per_client=per_client,
        personalise=personalise,
        engine=choose(workers, rounds, devices=_devices(task, device)),
    )
    return living.advance(rounds, callbacks)


def _devices(task: TaskLike, asked: Device | None) -> tuple[torch.device, ...]:
    """Where clients train: as the run says, or else the task, or else on the CPU."""
    return devices(asked if asked is not None else getattr(task, "device", None) or "cpu")


def _results() -> Any:
    """The room of reports stands above this one, which knows it by its name alone."""
    return import_module("hansa.study.report.results")


def _discard(store: DiskStore, folder: TemporaryDirectory[str]) -> None:
    store.close()
    folder.cleanup()
