"""A run: the loop over rounds, with evaluation, metrics and callbacks."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import torch
from torch import nn

from hansa.aggregate import BaseAggregator, mean
from hansa.algorithm import Algorithm
from hansa.core.devices import Device, check_dtype, device_name, resolve_devices, resolve_server_device
from hansa.core.errors import HansaError, check_function, check_integer, check_positive, invalid_argument
from hansa.core.keys import Key
from hansa.core.protocols import with_defaults
from hansa.core.types import BUFFERS, MODEL, State, Vector, Vectors
from hansa.core.vectors.arithmetic import tree_to
from hansa.engine import BaseEngine, Engine, Serial
from hansa.pace import Profile, synchronous
from hansa.pace.events import VirtualClock
from hansa.pace.profiles import require_profile
from hansa.rounds import (
    ClosedRound,
    OpenedRound,
    Outcome,
    ServerState,
    close_round,
    diagnose,
    open_paced_round,
)
from hansa.rounds.faults import faults
from hansa.rounds.ledger import Ledger
from hansa.rounds.measures import Measure, wants_mean
from hansa.rounds.messages import DroppedClient, Report, WorkOrder, joined_orders
from hansa.rounds.round import check_profile
from hansa.runs.client_columns import Array, ClientColumns, encode_clients, join_rounds
from hansa.runs.columns import MetricFacts, RunHistory, main_metric
from hansa.runs.metrics import best, drop_reasons, text_table
from hansa.runs.per_client import (
    ClientEvaluationPlan,
    aggregate_client_metrics,
    client_vectors,
    evaluate_clients,
    has_client_models,
    participation_columns,
    timing_columns,
)
from hansa.runs.store import ClientStore, DiskStore
from hansa.training import TaskLike, personalise, random_state
from hansa.training.evaluation import EvaluationJob
from hansa.training.execution_mode import with_vmap, without_native

if TYPE_CHECKING:
    import pandas

    from hansa.runs.record import RunRecord

Record: TypeAlias = dict[str, Any]
"""The numbers of one round, by the names of `hansa.runs.columns`."""
Callback: TypeAlias = Callable[["Run", Record], bool | None]
"""Called after every round with the run and its newest record; a true result stops the run."""


NO_UPDATE = {"lost", "silent", "quorum"}
"""Drop reasons without a refused update: the client sent nothing, or there were too few clients."""
MAX_DROPPED_IN_CHECKPOINT = 100
"""Maximum number of dropped clients that a checkpoint lists with their reasons; the history has the counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run as one value; `hansa.run` takes and documents each as a keyword argument.

    >>> RunOptions(quorum=2).changed()
    {'quorum': 2}
    """

    dtype: torch.dtype | None = None
    device: Device | None = None
    deterministic: bool | None = None
    server_device: str | torch.device | None = None
    workers: int | None = None
    quorum: int = 1
    keep_params: bool = False
    keep_best: str | None = None
    evaluate_every: int = 1
    callbacks: Sequence[Callback] = ()
    faults: faults | None = None
    max_norm: float = 1e12
    measures: Sequence[Measure] = ()
    per_client: bool | int | None = None
    personalise: personalise | Mapping[str, Any] | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        check_integer("run", "quorum", self.quorum)
        check_positive("run", "max_norm", self.max_norm, "Updates with a larger norm are refused.")
        check_integer("run", "evaluate_every", self.evaluate_every, "0 evaluates after the last round only.", minimum=0)
        if self.dtype not in (None, torch.float32, torch.float64):
            raise invalid_argument("run", "dtype", self.dtype, "torch.float32 or torch.float64")
        if self.deterministic not in (None, False, True):
            raise invalid_argument("run", "deterministic", self.deterministic, "True or False")
        for name, parameters in (("callbacks", ("run", "record")), ("measures", ("probe",))):
            functions = getattr(self, name)
            if not isinstance(functions, Iterable):
                raise invalid_argument("run", name, functions, "a list of functions")
            object.__setattr__(self, name, tuple(functions))
            for function in getattr(self, name):
                check_function("run", name, function, *parameters)
        if not hasattr(self.faults, "apply_to_orders") and self.faults is not None:
            raise invalid_argument("run", "faults", self.faults, "a plan of faults", "hansa.faults(before=0.1) is one.")
        if self.profile is not None:
            require_profile("run", "profile", self.profile)
        object.__setattr__(self, "personalise", _as_personalise(self.personalise))

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value != field.default}

    def resolve_devices(self, task: TaskLike) -> tuple[torch.device, ...]:
        """Return the training devices: those of the options, else of the task, else the CPU."""
        return resolve_devices(self.device if self.device is not None else getattr(task, "device", None) or "cpu")


class RunOptionsDict(TypedDict, total=False):
    """The same options as keyword arguments, for type checkers; `RunOptions` documents them."""

    dtype: torch.dtype | None
    device: Device | None
    deterministic: bool | None
    server_device: str | torch.device | None
    workers: int | None
    quorum: int
    keep_params: bool
    keep_best: str | None
    evaluate_every: int
    callbacks: Sequence[Callback]
    faults: faults | None
    max_norm: float
    measures: Sequence[Measure]
    per_client: bool | int | None
    personalise: personalise | Mapping[str, Any] | None
    profile: Profile | None


def device_names(device: Device) -> str | list[str]:
    """Return devices as a configuration names them.

    >>> device_names(["cpu", "cpu"]), device_names("cpu")
    (['cpu', 'cpu'], 'cpu')
    """
    names = [str(resolved) for resolved in resolve_devices(device)]
    return names if len(names) > 1 else names[0]


class Run:
    """An active or finished run: the server's state, the clients' memory, and the record of every round.

    Args:
        algorithm: A preset or a custom composition.
        task: The model, the loss and the clients' data.
        seed: The seed of all randomness, of the partition too unless the data has a fixed one.
        store: Where client memory is kept; by default in memory, or in a temporary folder if a component requires it.
        engine: Builds the engine that executes client work.
        options: The options of the run.
        changes: Individual options, which override ``options``; see `RunOptions`.

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
        store: ClientStore | None = None,
        engine: Callable[[Algorithm, TaskLike, torch.dtype, torch.device], Engine] = Serial,
        options: RunOptions | None = None,
        **changes: Unpack[RunOptionsDict],
    ) -> None:
        self.options = RunOptions(**changes) if options is None else replace(options, **changes)
        self._undrawn_task, self.key = task, Key(seed)
        self._task: TaskLike | None = None
        self._task = task = self.task
        self.dtype = task.dtype if self.options.dtype is None else self.options.dtype
        self.devices = self.options.resolve_devices(task)
        self.device = self.devices[0]
        self.deterministic = self.options.deterministic is not False
        self.server_device = resolve_server_device(self.options.server_device or "cpu")
        for device in self.devices:
            check_dtype(device, self.dtype)
        check_dtype(self.server_device, self.dtype, argument="server_device")
        labels = getattr(getattr(task, "data", None), "label_counts", None)
        bound = algorithm.bind(task.population.count, self.key, labels).bind_layout(getattr(task, "layout", None))
        start = {name: vector.to("cpu") for name, vector in task.start(self.key, self.dtype).items()}
        self.algorithm = bound.with_buffers(start[BUFFERS].numel()) if BUFFERS in start else bound
        if (check := getattr(self.options.faults, "check", None)) is not None:
            check(self.algorithm, task.population.count)
        state = ServerState.start(self.algorithm, start, task.population.count)
        self.state = state.on_device(self.algorithm, self.server_device)
        self.store: ClientStore = self._default_store() if store is None else store
        self.ledger = Ledger()
        self.clock = self._virtual_clock()
        self.per_client = ClientEvaluationPlan.from_options(task, self.options)
        profile = () if self.options.profile is None else (repr(self.options.profile),)
        self.id = self.key.child("run", repr(algorithm), task.name, *profile).digest(8).hex()
        self.history = RunHistory(facts=MetricFacts.of_task(task))
        self.record: RunRecord | None = None  # set if the run has a folder
        self.best: State = {}  # with keep_best: the round, the value and the vectors of the best model
        self.client_blocks: list[tuple[int, bytes]] = []  # the client record of a run without a folder
        self.dropped_clients: list[tuple[int, DroppedClient]] = []
        self.site_of: Mapping[int, str] = {}  # the site of each client, in a federation
        self.oldest_resumable_round = 0  # sites keep the client memory to resume from here
        self.forgotten_clients: set[int] = set()
        self._trajectory: list[Vector] | None = [] if self.options.keep_params else None
        self._engine = engine
        self._engine_task: TaskLike | None = None
        self.one_by_one = False  # sites of a federation train clients sequentially, whatever the task's execution mode
        self.remote_devices: list[str] = []  # reported by the workers of the engine
        self.recorded_devices: list[str] | None = None  # the remote devices recorded in the checkpoint

    @property
    def engine_task(self) -> TaskLike:
        """The task as the engine needs it: with a plan if clients are trained together (`execution="vmap"`)."""
        if self._engine_task is None:
            task = without_native(self.task, self.algorithm)
            self._engine_task = task if self.one_by_one else with_vmap(task, self.algorithm, self.dtype, self.device)
        return self._engine_task

    def _virtual_clock(self) -> VirtualClock | None:
        """Return the virtual clock; a synchronous pace has one only with a device profile."""
        profile = self.options.profile
        if profile is not None:
            check_profile(self.algorithm)
        elif self.algorithm.pace == synchronous():
            return None
        return VirtualClock(profile, self.task.population.samples, self.key)

    def _default_store(self) -> ClientStore:
        """Return a store in memory, or in a temporary folder if a component requires it."""
        if not requires_disk(self.algorithm):
            return ClientStore()
        files = ExitStack()
        folder = files.enter_context(TemporaryDirectory(prefix="hansa-rows-"))
        store = files.enter_context(DiskStore(folder, durable=False))
        weakref.finalize(self, files.close)
        return store

    @property
    def task(self) -> Any:
        """The task, a `TaskLike`, with the clients that the seed draws."""
        if self._task is not None:
            return self._task
        task = self._undrawn_task
        return task.for_seed(self.key.seed) if hasattr(task, "for_seed") else task

    def release_data(self) -> None:
        """Free the data drawn from the seed, such as validation rows; reading `task` draws them again."""
        self._task = self._engine_task = None

    @property
    def params(self) -> Vector:
        """The model as one flat vector on the CPU; `view` of an entry of `task.layout` reads a parameter."""
        return self.state.vectors[MODEL].cpu()

    @property
    def host_vectors(self) -> Vectors:
        """The server's vectors on the CPU: copies if the server computes on another device."""
        vectors: Vectors = tree_to(self.state.vectors, torch.device("cpu"))
        return vectors

    @property
    def training_devices(self) -> list[str]:
        """The names of the devices on which clients train, for records."""
        return self.remote_devices or sorted({device_name(device) for device in self.devices})

    @property
    def weights_note(self) -> str:
        """A note if FedAvg weights clients of different sizes equally; otherwise ""."""
        channel, sizes = self.algorithm.channels.get(MODEL), self.task.population.samples
        uniform = channel is not None and channel.aggregate == mean("uniform")
        if self.algorithm.name != "fedavg" or not uniform or len(set(sizes)) < 2:
            return ""
        return (
            f"fedavg: clients of {min(sizes)} to {max(sizes)} rows count equally. weights='samples' (server.weights: "
            "samples) weights them by rows."
        )

    @property
    def trajectory(self) -> torch.Tensor:
        """The model after each round, [rounds, d]; requires ``keep_params=True``."""
        if self._trajectory is None:
            raise HansaError("the trajectory was not recorded: run with keep_params=True.")
        if not self._trajectory:
            return torch.empty(0, self.state.vectors[MODEL].numel(), dtype=self.dtype)
        return torch.stack(self._trajectory)

    @property
    def model(self) -> nn.Module:
        """The trained model as a new module: that of the last round, or with ``keep_best`` that of the best one."""
        return self._module(self.best.get("vectors") or self.host_vectors, "run.params")

    def client_model(self, client: int) -> nn.Module:
        """Return a client's model: its own in decentralized runs, otherwise the server's with its private blocks."""
        return self._module(client_vectors(self.algorithm, self.host_vectors, self.store, client), "run.store.read")

    def _module(self, vectors: Vectors, instead: str) -> nn.Module:
        if not hasattr(self.task, "module"):
            raise HansaError(f"{self.task.name} is a function of a flat vector, not a module: use {instead}.")
        module: nn.Module = self.task.module(vectors)
        return module

    def table(self, *columns: str, last: int = 5) -> str:
        """Return the last rounds as text: ``print(run.table("round", "test_accuracy"))``. `frame` has all rounds."""
        return text_table(self.history, columns, last)

    def report(self, path: Path | str = "report.html", title: str | None = None) -> Path:
        """Write a report page with curves, numbers and citations: one HTML file that opens offline."""
        page: Path = _pages().Runs(self.algorithm.name, [self]).report(path, title)
        return page

    def __repr__(self) -> str:
        metric = main_metric({name for record in self.history for name in record}, self.history.facts)
        value = next((record[metric] for record in reversed(self.history) if metric in record), None)
        score = "" if value is None else f", final {metric} {value:.3f}"
        return f"Run({self.algorithm.name} on {self.task.name}, seed {self.key.seed}, {self.state.round} rounds{score})"

    def _repr_html_(self) -> str:
        return str(_pages().run_html(self))

    def frame(self) -> pandas.DataFrame:
        """Return the history as a pandas frame, one row per round."""
        import pandas

        return pandas.DataFrame(list(self.history))

    def clients(self, *columns: str) -> ClientColumns:
        """Return the client record, one row per client and round: all columns, or those named.

        ``run.clients().frame()`` is a pandas frame, ``run.clients().by_client()`` has one row per client.
        """
        names = getattr(getattr(self.task, "data", None), "client_names", ())
        if self.record is not None:
            return self.record.client_columns(*columns).named(names)
        return join_rounds(self.client_blocks, columns).named(names)

    def advance(self, rounds: int, callbacks: Sequence[Callback] = ()) -> Run:
        """Run ``rounds`` more rounds."""
        check_integer("run", "rounds", rounds, minimum=0)
        last_round, self._task = self.state.round + rounds, self.task
        with random_state.fixed_arithmetic((*self.devices, self.server_device), self.deterministic):
            engine = self._engine(self.algorithm, self.engine_task, self.dtype, self.device)
            try:
                while self.state.round < last_round:
                    record = self._round(engine, final=self.state.round + 1 == last_round)
                    self._record_devices(with_defaults(engine, BaseEngine).device_names())
                    stops = [callback(self, record) for callback in callbacks]
                    if any(stops):
                        break
            finally:
                engine.close()
        report_dropped_clients(self.history, self.dropped_clients)
        return self

    def _round(self, engine: Engine, final: bool) -> Record:
        start, traits = time.perf_counter(), with_defaults(engine, BaseEngine)
        machines: Any = engine if self.algorithm.pace.asynchronous and hasattr(engine, "next_arrival") else None
        if machines is not None:
            machines.begin_step(self.state, self._with_memory, self.oldest_resumable_round)
        opened = open_paced_round(
            self.algorithm, self.state, self.task.population, self.id, self.key, self.clock, machines
        )
        if self.server_device not in self.devices:
            opened = opened.on_host()
        if wants_mean(self.options.measures, self.state.round):
            opened = opened._replace(orders=tuple(_with_means(opened.orders)))
        faults, measures = self.options.faults, self.options.measures
        orders, absent = (opened.orders, ()) if faults is None else faults.apply_to_orders(opened.orders)
        traits.round_opened(opened, self.oldest_resumable_round)
        batches = joined_orders(orders) if self.algorithm.pace.asynchronous else orders
        reports: Iterable[Report] = engine.run(batches, self._with_memory)
        if faults is not None:
            reports = faults.apply_to_reports(self.algorithm, orders, reports)
        try:
            closed = close_round(
                self.algorithm,
                opened.state,
                opened.orders,
                reports,
                self.task.population,
                quorum=self.options.quorum,
                rows=self.store,
                unreachable=(*opened.dropped, *absent),
                max_norm=self.options.max_norm,
                keep_updates=bool(measures),
                stage_memory=None if measures else self.store.stage,
                key=self.key,
            )
            diagnostics = self._diagnostics(closed)
        except BaseException:
            self.store.discard()  # an aborted round has no effect
            raise
        if not closed.outcome.applied:
            self.store.discard()
        self.store.commit(self.state.round, closed.memory)
        self.state = closed.state
        self.forgotten_clients.difference_update(closed.outcome.admitted)
        if self._trajectory is not None:
            params = self.params
            self._trajectory.append(params.clone() if params is self.state.vectors[MODEL] else params)
        record = {**self._record(opened, closed), **diagnostics}
        evaluated = final or (self.options.evaluate_every and self.state.round % self.options.evaluate_every == 0)
        if evaluated:
            record.update(engine.evaluate(self.state.vectors))
        client_metrics = self._evaluate_clients(engine) if self.per_client.is_due(self.state.round, final) else {}
        record.update(aggregate_client_metrics(client_metrics, self.history.facts.better))
        work = participation_columns(opened.down_bytes, closed.outcome, opened.timing)
        self.client_blocks.append((self.state.round, encode_clients(work, client_metrics)))
        if traits.has_sites:
            record.update(traits.site_columns())
        record["seconds"] = time.perf_counter() - start
        if self.ledger.links is not None and self.ledger.last is not None:
            record["simulated_seconds"] = self.ledger.last.seconds
        self.history.append(record)
        if evaluated and self.options.keep_best is not None:
            value = best(self.history, self.options.keep_best)
            if value is not None and value != self.best.get("value"):
                self.best = {"round": self.state.round, "value": value, "vectors": self.host_vectors}
        return record

    def _record_devices(self, names: Sequence[str]) -> None:
        """Record the devices of an engine's workers; warn once if a resumed run trains on others."""
        varying = "" if self.deterministic else ", not deterministic"
        names_with_mode = [name if name == "cpu" else f"{name}{varying}" for name in names]
        self.remote_devices = sorted({*self.remote_devices, *names_with_mode})
        recorded, current = self.recorded_devices, self.remote_devices
        if recorded is not None and (not set(current) <= set(recorded) or bool(recorded) != bool(current)):
            logging.getLogger("hansa").warning(
                "clients trained on %s before the resume, now on %s: the result may differ in its last bits from that "
                "of an uninterrupted run", ", ".join(recorded) or "the run's machine", ", ".join(self.training_devices),
            )  # fmt: skip
        self.recorded_devices = None

    def _evaluate_clients(self, engine: Engine) -> dict[str, Array]:
        """Evaluate each client's model on its own test rows; sites do not send these results."""
        if with_defaults(engine, BaseEngine).has_sites:
            return {}
        vectors = self.host_vectors if has_client_models(self.algorithm) else self.state.vectors
        exam = EvaluationJob(vectors, (), self.state.round, self.key, self.per_client.personalise)
        return evaluate_clients(engine, self.algorithm, self.task, exam, self.store)

    def _with_memory(self, order: WorkOrder) -> WorkOrder:
        """Return the order with the memory of its reporters, read just before a worker executes it."""
        memory = self.store.memories(order.reporters, self.forgotten_clients)
        return replace(order, memory=memory) if memory else order

    def forget(self, *clients: int) -> None:
        """Reset the memory of clients: residuals, control variates and the like start as in the first round.

        Use it when a site has lost a client's memory; it is never called automatically. The reset persists across
        checkpoints until the client next participates. Rows that the server keeps for a client, such as FedAWARE's
        momentum, are not reset.
        """
        count = self.task.population.count
        for client in clients:
            if type(client) is not int or not 0 <= client < count:
                raise invalid_argument("forget", "client", client, f"one of the {count} clients, 0 to {count - 1}")
        self.forgotten_clients.update(clients)

    def _diagnostics(self, closed: ClosedRound) -> Record:
        """Return the diagnostics of a closed round, before its memories are committed."""
        if closed.aggregation is None:
            return {"diversity": math.nan, "aggregate_norm": math.nan}
        measures = self.options.measures
        return dict(diagnose(self.algorithm, closed.aggregation, measures, self.store.read, closed.memory, self.key))

    def checkpoint_state(self) -> State:
        """Return the state to checkpoint, without client rows and history."""
        recent = self.dropped_clients[-MAX_DROPPED_IN_CHECKPOINT:]
        return {
            "server": self.state.tree(),
            "ledger": self.ledger.state(),
            "lost": [[round, drop.client, drop.reason, drop.detail] for round, drop in recent],
            "forgotten": sorted(self.forgotten_clients),
            **({"best": self.best} if self.best else {}),
        }

    def restore(self, tree: State, history: Sequence[Record], trajectory: Sequence[Vector] | None = None) -> None:
        """Restore the closed round of a checkpoint; the store must be at the same round.

        Args:
            tree: The state of the checkpoint.
            history: The records of its rounds.
            trajectory: The models of all rounds, which a checkpoint does not have.
        """
        state = ServerState(**tree["server"]).on_device(self.algorithm, self.server_device)
        if self.store.generation != state.round or len(history) != state.round:
            raise HansaError(
                f"the checkpoint is at round {state.round}, client rows at round {self.store.generation}, and the "
                f"history has {len(history)} rounds: these must agree."
            )
        self.state = state
        self.ledger = Ledger.restore(tree["ledger"], self.ledger.links)
        self.dropped_clients = [
            (int(round), DroppedClient(int(client), reason, detail)) for round, client, reason, detail in tree["lost"]
        ]
        self.forgotten_clients = {int(client) for client in tree.get("forgotten", ())}
        self.best = tree.get("best", {})
        self.history = RunHistory(history, self.history.facts)
        if trajectory is not None:
            self._trajectory = list(trajectory)

    def _record(self, opened: OpenedRound, closed: ClosedRound) -> Record:
        outcome: Outcome = closed.outcome
        self.dropped_clients += [(self.state.round, dropped) for dropped in outcome.dropped]
        self.ledger.record(
            self.state.round,
            up=outcome.up_bytes,
            down=opened.down_bytes,
            peer=outcome.peer_bytes,
            exchanges=outcome.exchanges,
        )
        timed = {} if opened.timing is None else timing_columns(self.algorithm, opened, outcome)
        return {
            "round": self.state.round,
            "train_loss": outcome.train_loss,
            "update_norm": outcome.update_norm,
            "participants": len(outcome.admitted),
            "clients": list(outcome.admitted),
            "lost": len(outcome.dropped),
            "reasons": dict(Counter(dropped.reason for dropped in outcome.dropped)),
            "moved": outcome.applied,
            "up_bytes": sum(outcome.up_bytes.values()),
            "down_bytes": sum(opened.down_bytes.values()),
            "peer_bytes": sum(outcome.peer_bytes.values()),
            **outcome.info,
            **timed,
        }


def _pages() -> Any:
    """Import the module of report pages, which is in a higher layer."""
    return import_module("hansa.study.report.results")


def _with_means(orders: Sequence[WorkOrder]) -> Iterator[WorkOrder]:
    """Yield the orders with the mean of the local models; orders without a cohort are split by client."""
    for order in orders:
        parts = [order.part([index]) for index in range(len(order.clients))] if order.cohort is None else [order]
        yield from (replace(part, mean=True) for part in parts)


def requires_disk(algorithm: Algorithm) -> bool:
    """Return whether a component requires client memory on disk."""
    aggregators = [with_defaults(channel.aggregate, BaseAggregator) for channel in algorithm.channels.values()]
    return any(aggregator.momentum_storage == "disk" for aggregator in aggregators)


def _as_personalise(value: object) -> personalise | None:
    if value is None or isinstance(value, personalise):
        return value
    if not isinstance(value, Mapping):
        raise invalid_argument(
            "run", "personalise", value, "{'steps': 5, 'lr': 0.01}, or hansa.training.personalise(...)"
        )
    try:
        return personalise(**value)
    except TypeError as error:
        raise invalid_argument("run", "personalise", dict(value), "steps, lr and batch_size") from error


def report_dropped_clients(history: Sequence[Record], dropped: Sequence[tuple[int, DroppedClient]]) -> None:
    """Warn about dropped clients: the number by reason, and the details of the last.

    It is an error if every update of the run was refused for the same reason.
    """
    if not dropped:
        return
    reasons = drop_reasons(history)
    round, example = dropped[-1]
    detail = f"client {example.client} in round {round}"
    if len(reasons) == 1 and not reasons.keys() <= NO_UPDATE and not any(record["participants"] for record in history):
        raise HansaError(
            f"every update of all {len(history)} rounds was refused, so the model never changed ({min(reasons)}; "
            f"{detail}: {example.detail})."
        )
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    rounds = sum(bool(record.get("lost")) for record in history)
    logging.getLogger("hansa").warning("%d client updates were left out of %d rounds (%s); the last: %s, %s",
                reasons.total(), rounds, counts, detail, example.detail)  # fmt: skip
