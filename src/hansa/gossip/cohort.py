"""A gossiping cohort: the schedule of its steps and exchanges, and the state that executors share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from hansa.algorithm import LocalPhase
from hansa.compress import Packet, accumulate
from hansa.core.devices import copy_to_device, index_on_device, on_host
from hansa.core.protocols import with_defaults
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.gossip import BaseActivity, selected
from hansa.gossip.robust import exchange_messages
from hansa.gossip.rows import DenseRows, LazyRows, Mixer, Rows, SeparateRows, lazy_pays
from hansa.local.trainer import LocalStep, Trainer, draw_batches
from hansa.local.work import Work
from hansa.rounds.messages import WorkOrder, scoped
from hansa.server import BaseServerTransform

Exchange: TypeAlias = Literal["gossip", "average"] | None
Storage: TypeAlias = Literal["dense", "lazy", "separate"]


@dataclass(slots=True, eq=False)
class CohortOutcome:
    """The result of a cohort's steps and exchanges: its final rows, losses, dropped clients and traffic."""

    _rows: Rows | None
    public_copies: torch.Tensor | None = None
    losses: list[float] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    """The clients whose models became non-finite, each with the step."""
    peer_bytes: Counter[int] = field(default_factory=Counter)
    exchanges: int = 0
    steps_taken: Counter[int] = field(default_factory=Counter)
    """The steps that each client took."""
    deltas: list[Vector] | None = None
    """The changes of the surviving reporters' rows, in their order; see `finish`."""
    spread: float = 0.0
    """The consensus distance of the survivors."""

    @property
    def rows(self) -> Rows:
        """The final rows, unless they were released."""
        assert self._rows is not None, "the rows of a finished cohort are kept only if it keeps them"
        return self._rows

    def finish(self, cohort: Cohort) -> None:
        """Compute the reporters' changes and the spread, unless native code did, and release unused rows."""
        if not cohort.mixer.positions:
            self.deltas = []
        elif self.deltas is None:
            self.deltas, self.spread = self.rows.deltas(
                cohort.mixer, cohort.dim, cohort.start, cohort.reporting_positions()
            )
        if not cohort.keeps_rows:
            self._rows = self.public_copies = None


class Cohort:
    """A cohort to train: an order, with the vectors that its clients received.

    Who steps and when models are exchanged is a pure function of the order, the mixing and the survivors. ``start`` is
    the received model: ``dim`` parameters, then buffers. Clients are named by their positions in the order. Cohorts
    that start from the same vectors without memory have one common step, in ``common_steps``.
    """

    def __init__(
        self,
        phase: LocalPhase,
        order: WorkOrder,
        received: Vectors,
        trainer: Trainer,
        samples: Sequence[int],
        common_steps: dict[tuple[int, int], LocalStep] | None = None,
    ) -> None:
        assert phase.mixing is not None
        self.phase, self.order, self.mixing, self.clients = phase, order, phase.mixing, order.clients
        self.steps, self.key = order.works[0].steps, order.key.child("local", order.round)
        self.dim, buffers = received[MODEL].numel(), received.get(BUFFERS)
        self.start = received[MODEL] if buffers is None else torch.cat([received[MODEL], buffers])
        self.shared_state = with_defaults(phase.optimizer, BaseServerTransform).shared
        """The optimizer state that is exchanged with the models."""
        self.keeps_rows = order.mean or self.mixing.keep_local_models
        """Whether the final rows are read after the changes of the reporters."""
        self.started = False
        """Whether an executor has begun to run it."""
        self._received, self._trainer, self._samples = received, trainer, samples
        activity = selected() if self.mixing.reporters_only else self.mixing.active
        self._activity = with_defaults(with_defaults(activity, BaseActivity).among(order.reporters), BaseActivity)
        self._position = {client: position for position, client in enumerate(order.clients)}
        self._active: dict[tuple[int, int], list[int]] = {}
        self._steps: dict[int, LocalStep] = {}
        self._common_steps = {} if common_steps is None else common_steps
        self._storage: Storage | None = None
        self.mixer = Mixer(self.mixing.topology.of_cluster(order.cohort or 0), len(order.clients))
        self.mixer.drop(*map(self._position.__getitem__, order.absent))

    @property
    def steps_after_exchange(self) -> bool:
        """Whether steps, taken before an exchange, are added after it (combine-then-adapt)."""
        return self.mixing.order == "combine-then-adapt"

    @property
    def combines_each_message(self) -> bool:
        """Whether messages are combined one by one: there is a mixing rule or an attack. Such exchanges are eager."""
        return self.mixing.robust is not None or self.order.attack is not None

    def reporting_positions(self) -> list[int]:
        """Return the positions of the surviving reporters."""
        positions = [self._position[client] for client in self.order.reporters]
        return [position for position in positions if self.mixer.alive[position]]

    def survivors(self) -> list[int]:
        return [self.clients[position] for position in self.mixer.positions]

    def active(self, step: int) -> list[int]:
        """Return the survivors' positions that take a local step; drawn once, with those of all later steps."""
        count = len(self.mixer.positions)  # survivors only ever get fewer
        if (step, count) not in self._active:
            later = range(step, self.steps)
            drawn = self._activity.draw_steps(self.order.round, later, self.survivors(), self.order.key)
            for later_step, active in zip(later, drawn, strict=True):
                self._active[later_step, count] = [self._position[client] for client in active]
        return self._active[step, count]

    def active_from(self, first: int) -> list[list[int]]:
        """Return `active` of each step from ``first`` on."""
        return [self.active(step) for step in range(first, self.steps)]

    def run_step(self, step: int) -> int:
        """Return the number of a step, counted from 1 over the whole run."""
        return self.order.round * self.steps + step + 1

    def exchange_after(self, step: int) -> Exchange:
        """Return the kind of exchange after a step."""
        count = self.run_step(step)
        if self.mixing.average_every is not None and count % self.mixing.average_every == 0:
            return "average"
        gossips = (count if self.mixing.keep_local_models else step + 1) % self.mixing.gossip_every == 0
        return "gossip" if gossips else None

    def local_step(self, client: int) -> LocalStep:
        """Return a client's local step, one object for the whole round."""
        if client not in self._steps:
            self._steps[client] = self._new_step(client)
        return self._steps[client]

    def has_stepped(self, client: int) -> bool:
        return client in self._steps

    def _new_step(self, client: int) -> LocalStep:
        phase, received, memory = self.phase, self._received, self.memory(client)
        correction = phase.solver.correction(received, scoped(memory, "solver"))
        step = phase.local_step(self.order.round, received[MODEL], correction)
        if self.mixing.keep_local_models:
            step.restore(scoped(memory, "local/optimizer"), received[MODEL])
        return step

    @property
    def common_step(self) -> LocalStep:
        """A step whose numbers are those of all clients; it is not taken."""
        address = self.order.round, id(self if self.order.memory else self._received)
        if address not in self._common_steps:
            self._common_steps[address] = self._new_step(self.clients[0])
        return self._common_steps[address]

    def memory(self, client: int) -> Vectors:
        """Return the memory of a client before the round."""
        return self.order.memory.get(client, {})

    def batch_size(self, client: int) -> int:
        """Return the size of a client's batches: none is larger than its dataset."""
        return min(self.order.works[0].batch_size, self._samples[client])

    def position_memory(self, client: int, steps_taken: int) -> Vectors:
        """Return the memory row of the client's position in its passes, after so many steps."""
        memory = self.memory(client)
        return self.phase.position_memory(self._samples[client], self.batch_size(client), steps_taken, memory)

    def batches(self, client: int) -> Any:
        """Draw a client's batches of the round."""
        phase, work = self.phase, Work(self.steps, self.batch_size(client))
        key, position = self.key.child(client, "batch"), phase.pass_position(self.memory(client))
        samples = self._samples[client]
        return draw_batches(self._trainer, phase.division, client, samples, work, key, self.order.key, position)

    def storage(self, *, native: bool = False) -> Storage:
        """Choose the storage of the rows, once; lazy rows if they may be used and the cost rule prefers them."""
        if self._storage is None:
            mixing, n = self.mixing, len(self.clients)
            self._storage = "dense"
            if mixing.keep_local_models or mixing.compressor is not None:
                return self._storage
            if self.mixer.isolated:
                self._storage = "separate"
            elif not self.combines_each_message:
                active = [len(positions) for positions in self.active_from(0)]
                sizes = (n, active, mixing.gossip_every, self.mixer.nonzero, self.start.numel())
                self._storage = "lazy" if lazy_pays(*sizes, native) else "dense"
        return self._storage

    def new_rows(self) -> CohortOutcome:
        """Allocate the rows: the saved ones, or else the received model."""
        if self.storage() == "separate":
            return CohortOutcome(SeparateRows(self.start))
        if self.storage() == "lazy":
            return CohortOutcome(self.lazy_rows())
        rows, copies = self.dense_rows()
        self.fill(rows, copies)
        return CohortOutcome(DenseRows(rows), copies)

    def lazy_rows(self) -> LazyRows:
        changes = sum(len(positions) for positions in self.active_from(0))
        return LazyRows(self.start, len(self.clients), changes)

    def dense_rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Allocate rows, and public copies for compressed gossip; their contents are undefined unless saved."""
        return self._dense("local/row"), None if self.mixing.compressor is None else self._dense("local/public")

    def fill(self, rows: torch.Tensor, copies: torch.Tensor | None) -> None:
        """Set dense rows and public copies that were not saved to the received model."""
        if not self.mixing.keep_local_models:
            rows.copy_(self.start)
            if copies is not None:
                copies.copy_(self.start)

    def _dense(self, name: str) -> torch.Tensor:
        """Allocate one row per client; rows kept between rounds are the saved ones, or else the received model."""
        n, size = len(self.clients), self.start.numel()
        on_cpu = self.start.device.type == "cpu"
        rows = allocator.empty(n * size, self.start.dtype).view(n, -1) if on_cpu else self.start.new_empty(n, size)
        if self.mixing.keep_local_models:
            for row, client in zip(rows, self.clients, strict=True):
                row.copy_(self.memory(client).get(name, self.start))
        return rows

    def drop(self, outcome: CohortOutcome, position: int, step: int) -> None:
        """Drop a client whose model became non-finite."""
        outcome.dropped.append((self.clients[position], step))
        self.mixer.drop(position)

    def count(self, outcome: CohortOutcome, steps: Iterable[int]) -> None:
        """Count the survivors' exchanges after these steps, and the bytes sent."""
        kinds = [self.exchange_after(step) for step in steps]
        gossips, averages = kinds.count("gossip"), kinds.count("average")
        if not gossips + averages:
            return
        alive = self.survivors()
        outcome.exchanges += gossips + averages
        size = Packet.of(self.start).nbytes + len(self.shared_state) * Packet.of(self.start[: self.dim]).nbytes
        average_bytes = math.ceil(2 * (len(alive) - 1) / len(alive) * size) * averages if averages else 0
        if gossips and self.mixing.compressor is not None:  # sign packets all have the same length
            size = self.mixing.compressor.max_nbytes(self.start.numel(), self.start.dtype)
        size *= gossips
        peer_bytes = outcome.peer_bytes
        for client, degree in zip(alive, self.mixer.degrees.tolist(), strict=True):
            peer_bytes[client] += degree * size + average_bytes

    def exchange(self, outcome: CohortOutcome, step: int, pull: Callable[[], None] | None = None) -> None:
        """Exchange after a step if scheduled; ``pull`` replaces the product of compressed gossip."""
        kind = self.exchange_after(step)
        if kind is None:
            return
        rows = outcome.rows
        if self.mixing.compressor is not None and kind == "gossip":
            self._exchange_compressed(outcome, step, pull)
            return
        if self.combines_each_message and isinstance(rows, DenseRows):
            self._exchange_messages(rows, step, average=kind == "average")
        else:
            (rows.average if kind == "average" else rows.mix)(self.mixer)
        for name in self.shared_state:
            self._exchange_state(name, average=kind == "average")
        self.count(outcome, [step])

    def _exchange_messages(self, rows: DenseRows, step: int, *, average: bool) -> None:
        """Let every survivor combine the messages of its neighbours; malicious ones send false models."""
        positions, count = self.mixer.positions, self.run_step(step)
        models = rows.read(positions)
        sent = models
        if (attack := self.order.attack) is not None:
            sent = models.clone()
            for i, position in enumerate(positions):
                if (client := self.clients[position]) in attack.clients:
                    sent[i] = attack.message(models[i], self.start, self.order.key.child("attack", count, client))
        n = len(positions)
        weights = torch.full((n, n), 1.0 / n, dtype=torch.float64) if average else self.mixer.dense(torch.float64)
        mixed = exchange_messages(models, sent, weights, self.mixing.robust)
        rows.rows[index_on_device(mixed.device, positions)] = mixed

    def _exchange_compressed(self, outcome: CohortOutcome, step: int, pull: Callable[[], None] | None) -> None:
        """CHOCO: clients send the compressed difference to a public copy, then X <- X + gamma (W - I) Xhat."""
        rows, public, compressor = outcome.rows, outcome.public_copies, self.mixing.compressor
        assert isinstance(rows, DenseRows)
        assert public is not None
        assert compressor is not None
        positions, targets = self.mixer.positions, public
        on_device, differences = not on_host(public), list[Vector]()
        if on_device:  # packets are made on the host: all differences go there in one copy, and the packets' sum back
            models = zip(rows.models(positions), positions, strict=True)
            differences = list(torch.stack([row - public[position] for row, position in models]).cpu())
            targets = torch.zeros(len(public), public.shape[1], dtype=public.dtype)
        for index, (degree, position) in enumerate(zip(self.mixer.degrees.tolist(), positions, strict=True)):
            client = self.clients[position]
            difference = differences[index] if on_device else rows.models([position])[0] - public[position]
            packet = compressor.encode(difference, self.order.key.child("gossip", self.run_step(step), client))
            accumulate(packet, targets[position], compressor=compressor)
            outcome.peer_bytes[client] += degree * packet.nbytes
        if on_device:
            public.add_(copy_to_device(targets, public.device))
        if pull is None:
            rows.pull(self.mixer, public, self.mixing.consensus_rate)
        else:
            pull()
        outcome.exchanges += 1

    def _exchange_state(self, name: str, *, average: bool) -> None:
        """Exchange a row of the survivors' optimizer states in the same way as the models."""
        steps = [self.local_step(client) for client in self.survivors()]
        for step in steps:
            step.init_state()
        state_rows = torch.stack([step.state[name] for step in steps])
        if average:
            mixed = state_rows.mean(dim=0).expand_as(state_rows)
        else:
            mixed = copy_to_device(self.mixer.dense(state_rows.dtype), state_rows.device) @ state_rows
        for step, row in zip(steps, mixed, strict=True):
            step.state = {**step.state, name: row}
