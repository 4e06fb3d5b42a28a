"""The mixed local loop: a cohort's clients step on their own data, then X <- W X."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hansa.algorithm import LocalPhase, Mixing
from hansa.compress import Packet, accumulate, sign
from hansa.core.native import abi
from hansa.core.native.cohort_kernel import TURN, Together
from hansa.core.protocols import declared
from hansa.core.types import BUFFERS, MODEL, Vector, Vectors
from hansa.core.vectors import allocator
from hansa.core.vectors.arithmetic import all_finite
from hansa.gossip.activity import Activity, selected
from hansa.gossip.rows import ApartRows, DenseRows, LazyRows, Mixer, Rows, lazy_pays
from hansa.local.descent import BatchRows, LocalStep, Trainer, ahead_gradient
from hansa.local.work import Work
from hansa.rounds.cohort_result import CohortResult, blank, passed_on, share, stacked
from hansa.rounds.lazy_gossip import Walk, march
from hansa.rounds.messages import DroppedClient, LocalUpdate, WorkOrder, scoped
from hansa.rounds.native_schedule import Batches, Program, links_of, program
from hansa.server import ServerTransform


@torch.no_grad()
def train_together(
    phase: LocalPhase, order: WorkOrder, got: Vectors, shell: Trainer, samples: Sequence[int]
) -> CohortResult:
    """Every step: those who are active take a local step, then everyone gossips; or the other way round."""
    assert phase.mixing is not None
    return _Cohort(phase, phase.mixing, order, got, shell, samples).run()


class _Cohort:
    def __init__(
        self, phase: LocalPhase, mixing: Mixing, order: WorkOrder, got: Vectors, shell: Trainer, samples: Sequence[int]
    ) -> None:
        self.phase, self.mixing, self.order, self.shell, self.samples = phase, mixing, order, shell, samples
        self.got = got
        self.clients = order.clients
        self.position = {client: i for i, client in enumerate(self.clients)}
        self.dim = got[MODEL].numel()
        buffers = got.get(BUFFERS)
        self.start = got[MODEL] if buffers is None else torch.cat([got[MODEL], buffers])
        self.mixer = Mixer(mixing.topology, len(self.clients))
        self.mixer.lose(*(self.position[client] for client in order.absent))
        rule = selected() if mixing.reporters_only else mixing.active
        self.active: Activity = declared(rule, Activity, "among")(order.reporters)
        self.drawn: dict[tuple[int, int], list[int]] = {}
        self.rows = self._rows()
        self.begun = not isinstance(self.rows, DenseRows) or mixing.keep_local_models
        self.public: torch.Tensor | None = None
        if mixing.compressor is not None:
            kept = mixing.keep_local_models
            self.public = stacked(self._remembered("local/public")) if kept else blank(len(self.clients), self.start)
        self.shared: tuple[str, ...] = declared(phase.optimizer, ServerTransform, "shared")
        self.together: Together | None = None
        self.descents: dict[int, LocalStep] = {}
        self.batches: dict[int, BatchRows | None] = {}
        self.steps: Counter[int] = Counter()
        self.losses: list[float] = []
        self.mixed = CohortResult()

    def run(self) -> CohortResult:
        if not self.mixing.keep_local_models:
            self.mixed.peer.update(passed_on(self.order, len(self.mixer.positions), Packet.of(self.start).nbytes))
        if not self._march():
            self._walk()
        if self.mixer.positions:
            self._finish()
        return self.mixed

    def _begin(self) -> None:
        """All begin with the model received, where native code did not see to that."""
        if not self.begun and isinstance(self.rows, DenseRows):
            for rows in (self.rows.rows,) if self.public is None else (self.rows.rows, self.public):
                rows.copy_(self.start)
        self.begun = True

    def _walk(self) -> None:
        """Step after step, client after client."""
        self._begin()
        for step in range(self.order.work.steps):
            moves = self._compute(step)
            if not self.mixer.positions:
                return
            if (turn := self._gossips(step)) is not None:
                self._gossip(turn)
            for position, before, after in moves:
                self.rows.shift(position, before, after)

    def _march(self) -> bool:
        """The same natively: all turns in one call, or a call a step where the gossip is not native. False where the
        shell, the rows or the descent have no such form."""
        rows, late = self.rows, self.mixing.order == "combine-then-adapt"
        if isinstance(rows, LazyRows):
            return self._march_lazily(rows, late)
        if not isinstance(rows, DenseRows) or rows.rows.shape[1] != self.dim or (late and not self._mixes_natively()):
            return False
        make = declared(self.shell, Trainer, "together")
        start = None if self.begun or not self.order.work.steps else self.start
        together = make(rows.rows, self._new_descent(self.clients[0]), later=late, start=start)
        if together is None:
            return False
        self.together = together
        if start is None:
            self._begin()
        batches = Batches(len(self.clients), lambda position: self._batches(self.clients[position]))
        first, begun = 0, None
        while first < self.order.work.steps and self.mixer.positions:
            first, begun = self._march_on(together, batches, first, begun)
        return True

    def _march_lazily(self, rows: LazyRows, late: bool) -> bool:
        """The same where idle clients have no models."""
        trail = declared(self.shell, Trainer, "trail")(self.start, self._new_descent(self.clients[0]))
        if trail is None or self.start.numel() != self.dim:
            return False
        counted, steps = [0], self.order.work.steps

        def gossip(step: int) -> bool | None:
            turn = self._gossips(step)
            return None if turn is None else self._averages(turn)

        def lose(position: int, step: int) -> None:
            self._tally(gossip, counted[0], step)
            counted[0] = step
            self._lose(position, step)

        walk = Walk(self._positions, gossip, late)
        batches = Batches(len(self.clients), lambda position: self._batches(self.clients[position]))
        self.losses += march(trail, walk, steps, rows, self.mixer, batches, self._velocities, lose)
        if self.mixer.positions:
            self._tally(gossip, counted[0], steps)
        return True

    def _march_on(
        self, together: Together, batches: Batches, first: int, begun: list[int] | None
    ) -> tuple[int, list[int] | None]:
        """From a step on, of which the rows ``begun`` are still to come, to the end or to where a client is lost, or
        one step where the gossip is not native; gives where to go on."""
        assert isinstance(self.rows, DenseRows)
        native = self._mixes_natively()
        stop = self.order.work.steps if native else first + 1
        taken = batches.taken.copy()

        def active(step: int) -> Any:
            return batches.turns(begun if step == first and begun is not None else self._positions(step))

        plan = program(range(first, stop), active, self._all_do if native else lambda step: None)
        self._equip(together, plan)
        together.rows = self.rows.rows
        losses, done = together.run(plan.turns)
        kept = plan.turns["row"][:done] >= 0
        if together.lost is not None:
            kept[-1] = False
        self.losses += losses[:done][kept].tolist()
        self._count(*plan.exchanges(done))
        if together.lost is not None:
            own = plan.turns["row"][:done]
            batches.rewind(taken, own[own >= 0])
            first = int(plan.steps[done - 1])
            self._lose(together.lost, first)
            begun = plan.rest(done)
            if native or begun:
                return first, begun
        if not native and self.mixer.positions and (turn := self._gossips(first)) is not None:
            self._gossip(turn)
        return stop, None

    def _equip(self, together: Together, plan: Program) -> None:
        """W as it is now, the public copies, and the velocities of those whose turn comes."""
        together.link(links_of(self.mixer, uniform=self.public is not None))
        if self.public is not None:
            together.publish(self.public, self.mixing.consensus_rate)
        if self.phase.momentum:
            together.remember(self._velocities(sorted({int(row) for row in plan.turns["row"] if row >= 0})))

    def _velocities(self, positions: Sequence[int]) -> dict[int, Vector]:
        """Of those whose turn comes, under momentum."""
        if not self.phase.momentum:
            return {}
        return {position: self._descent(self.clients[position]).moving() for position in positions}

    def _mixes_natively(self) -> bool:
        """Whether W has few links, and what is sent a native form."""
        return self._few_links() and (self.mixing.compressor is None or isinstance(self.mixing.compressor, sign))

    def _few_links(self) -> bool:
        """Whether folding over links beats a product of matrices; a mean of all rows is no product."""
        n = len(self.clients)
        if self.mixer.weights is None:
            return self.public is None or n <= 4
        return self.mixer.links <= max(4, n // 2) * n

    def _all_do(self, step: int) -> tuple[int, bool] | None:
        """What native code has all rows do after a step, and whether it is an exact average."""
        turn = self._gossips(step)
        if turn is None:
            return (abi.SETTLE, False) if self.mixing.order == "combine-then-adapt" else None
        if self._averages(turn):
            return abi.AVERAGE, True
        if self.mixing.compressor is not None:
            return abi.SIGNS, False
        return abi.AVERAGE if self.mixer.weights is None else abi.MIX, False

    def _gossips(self, step: int) -> int | None:
        """Which turn of the run a step is, where all gossip after it."""
        turn = self.order.round * self.order.work.steps + step + 1
        return turn if (turn if self.mixing.keep_local_models else step + 1) % self.mixing.gossip_every == 0 else None

    def _averages(self, turn: int) -> bool:
        return self.mixing.average_every is not None and turn % self.mixing.average_every == 0

    def _lose(self, position: int, step: int) -> None:
        """A client's model is no longer finite; the rest go on."""
        detail = f"its model left the numbers at step {step}; its cluster went on without it"
        self.mixed.lost.append(DroppedClient(self.clients[position], "non-finite", detail))
        self.mixer.lose(position)

    def _survivors(self) -> list[int]:
        return [self.clients[i] for i in self.mixer.positions]

    def _active(self, step: int) -> list[int]:
        """Those of the survivors that compute at a step, drawn once."""
        if (step, len(self.mixer.positions)) not in self.drawn:
            drawn = self.active.draw(self.order.round, step, self._survivors(), self.order.key)
            self.drawn[step, len(self.mixer.positions)] = drawn
        return self.drawn[step, len(self.mixer.positions)]

    def _positions(self, step: int) -> list[int]:
        return [self.position[client] for client in self._active(step)]

    def _tally(self, gossip: Callable[[int], bool | None], first: int, stop: int) -> None:
        """Count the exchanges after some steps."""
        kinds = [gossip(step) for step in range(first, stop)]
        self._count(kinds.count(False), kinds.count(True))

    def _rows(self) -> Rows:
        """Rows that are kept, or never mixed; else dense ones, or lazy ones where the cost rule prefers them."""
        n, steps = len(self.clients), self.order.work.steps
        if self.mixing.keep_local_models:
            return DenseRows(stacked(self._remembered("local/row")))
        if self.mixing.compressor is not None:
            return DenseRows(blank(n, self.start))
        if self.mixer.still:
            return ApartRows(self.start)
        active = [len(self._active(step)) for step in range(steps)]
        if lazy_pays(n, active, self.mixing.gossip_every, self.mixer.links, self.start.numel(), self._marches()):
            return LazyRows(self.start, n, sum(active))
        return DenseRows(blank(n, self.start))

    def _marches(self) -> bool:
        """Whether steps and gossip have a native form."""
        trail = declared(self.shell, Trainer, "trail")(self.start, self._new_descent(self.clients[0]))
        return trail is not None and self.start.numel() == self.dim

    def _remembered(self, name: str) -> list[Vector]:
        """A row of every client that outlives the round; the model received where there is none, or none yet."""
        kept = [self.order.memory.get(client, {}).get(name) for client in self.clients]
        return [row if row is not None and self.mixing.keep_local_models else self.start for row in kept]

    def _compute(self, step: int) -> list[tuple[int, Vector, Vector]]:
        """The local steps of those who are active; given back where they are made only after the mixing."""
        active = self._active(step)
        if not active:
            return []
        later: list[tuple[int, Vector, Vector]] = []
        positions = [self.position[client] for client in active]
        inside = isinstance(self.rows, DenseRows) and self.mixing.order != "combine-then-adapt"
        rows = [self.rows.rows[i] for i in positions] if inside else self.rows.read(positions)  # type: ignore[attr-defined]
        for client, position, row in zip(active, positions, rows, strict=True):
            loss, after = self._local_step(client, row, inside)
            if not all_finite(after):
                self._lose(position, step)
                continue
            self.losses.append(loss)
            if self.mixing.order == "combine-then-adapt":
                later.append((position, row, after))
            elif after is not row:
                self.rows.write(position, row, after)
        return later

    def _local_step(self, client: int, row: Vector, inside: bool) -> tuple[float, Vector]:
        """One step of one client, as the plain loop makes it; in the row itself where the shell can and it may."""
        shell, key = self.shell, self.order.key.child("local", self.order.round, client)
        if client not in self.batches:
            self.batches[client] = self._batches(client)
        rows, descent, taken = self.batches[client], self._descent(client), self.steps[client]
        self.steps[client] += 1
        one = None if rows is None else rows[taken : taken + 1]
        if inside and descent.plain and row.numel() == self.dim:
            losses = shell.descend(one, descent, row)
            if losses is not None:
                return float(losses), row
        shell.load(row[: self.dim], row[self.dim :] if row.numel() > self.dim else None)
        losses = shell.descend(one, descent) if descent.plain else None
        if losses is None:
            shell.seed(key.child("noise", taken))
            losses, gradients = ahead_gradient(shell, client, None if rows is None else rows[taken], descent)
            descent.step(shell.y, shell.parameters, gradients)
        buffers = shell.read_buffers()
        return float(losses), shell.y.clone() if buffers is None else torch.cat([shell.y, buffers])

    def _batches(self, client: int) -> Any:
        """A client's batches of the round, each at most of its own samples."""
        work = Work(self.order.work.steps, min(self.order.work.batch_size, self.samples[client]))
        return self.shell.rows(client, work, self.order.key.child("local", self.order.round, client, "batch"))

    def _descent(self, client: int) -> LocalStep:
        if client not in self.descents:
            self.descents[client] = self._new_descent(client)
        return self.descents[client]

    def _new_descent(self, client: int) -> LocalStep:
        memory = self.order.memory.get(client, {})
        correction = self.phase.solver.correction(self.got, scoped(memory, "solver"))
        descent = self.phase.local_step(self.order.round, self.got[MODEL], correction)
        if self.mixing.keep_local_models:
            descent.restore(scoped(memory, "local/optimizer"), self.got[MODEL])
        return descent

    def _gossip(self, turn: int) -> None:
        """Everyone's exchange with its neighbours; ``turn`` counts the steps of the run."""
        averaged = self._averages(turn)
        if self.mixing.compressor is not None and not averaged:
            self._gossip_compressed(turn)
            self.mixed.exchanges += 1
            return
        (self.rows.average if averaged else self.rows.mix)(self.mixer)
        for name in self.shared:
            share([self._descent(client) for client in self._survivors()], name, self.mixer, averaged)
        self._count(int(not averaged), int(averaged))

    def _count(self, gossips: int, averages: int) -> None:
        """So many exchanges, and so many exact averages, as bytes that the survivors sent."""
        if not gossips + averages:
            return
        alive, self.mixed.exchanges = self._survivors(), self.mixed.exchanges + gossips + averages
        size = Packet.of(self.start).nbytes + len(self.shared) * Packet.of(self.got[MODEL]).nbytes
        each = math.ceil(2 * (len(alive) - 1) / len(alive) * size) * averages if averages else 0
        if gossips and self.mixing.compressor is not None:  # of signs, all packets are of one length
            size = self.mixing.compressor.max_nbytes(self.start.numel(), self.start.dtype)
        sent = (self.mixer.degrees * size * gossips + each).tolist()
        self.mixed.peer.update(dict(zip(alive, sent, strict=True)))

    def _gossip_compressed(self, turn: int) -> None:
        """CHOCO: neighbours hear the compressed difference to a public copy, X <- X + gamma (W - I) Xhat."""
        assert isinstance(self.rows, DenseRows)
        assert self.public is not None
        assert self.mixing.compressor is not None
        for degree, position in zip(self.mixer.degrees.tolist(), self.mixer.positions, strict=True):
            client = self.clients[position]
            key = self.order.key.child("gossip", turn, client)
            packet = self.mixing.compressor.encode(self.rows.rows[position] - self.public[position], key)
            accumulate(packet, self.public[position], compressor=self.mixing.compressor)
            self.mixed.peer[client] += degree * packet.nbytes
        if self.together is not None and self._few_links():
            self.together.run(np.array([(abi.PULL, 1, 0)], TURN))
            return
        alive = self.mixer.positions
        public = self.public[alive]
        self.rows.rows[alive] += self.mixing.consensus_rate * (self.rows.matrix(self.mixer) @ public - public)

    def _finish(self) -> None:
        reporters = [client for client in self.order.reporters if self.mixer.alive[self.position[client]]]
        loss = math.fsum(self.losses) / len(self.losses) if self.losses else None
        positions = [self.position[client] for client in reporters]
        moved, spread = self._ended(positions)
        for client, position, change in zip(reporters, positions, moved, strict=True):
            buffers = change[self.dim :] if change.numel() > self.dim else None
            self.mixed.trained[client] = LocalUpdate(change[: self.dim], buffers, loss, self._memory(client, position))
        self.mixed.info["consensus"] = spread
        if self.order.mean:
            self.mixed.mean = self.rows.mean(self.mixer).to(self.start)
            self.mixed.alive = len(self.mixer.positions)

    def _ended(self, positions: Sequence[int]) -> tuple[Sequence[Vector], float]:
        """What some have moved from the model received, and how far all are apart."""
        if isinstance(self.rows, DenseRows):
            return self.rows.ended(self.mixer, self.dim, self.start, positions)
        rows = self.rows.read(positions) if positions else ()
        moved = [torch.sub(row, self.start, out=allocator.like(self.start)) for row in rows]
        return moved, self.rows.spread(self.mixer, self.dim)

    def _memory(self, client: int, position: int) -> Vectors:
        """What a client whose model lives on keeps: the model, its public copy, its optimizer."""
        if not self.mixing.keep_local_models:
            return {}
        kept = self.descents[client].kept() if client in self.descents else {}
        public = {} if self.public is None else {"local/public": self.public[position].clone()}
        optimizer = {f"local/optimizer/{name}": value.clone() for name, value in kept.items()}
        return {"local/row": self.rows.read([position])[0], **public, **optimizer}
