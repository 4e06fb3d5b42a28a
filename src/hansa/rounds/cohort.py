"""The mixed local loop: a cohort's clients step on their own data, then X <- W X."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hansa.algorithm import LocalPhase, Mixing
from hansa.compress import Packet, decode
from hansa.gossip.active import Activity, selected
from hansa.gossip.rows import ApartRows, DenseRows, LazyRows, Mixer, Rows, lazy_pays
from hansa.local.descent import Descent, Drawn, Shell, ahead_gradient
from hansa.local.work import Work
from hansa.protocols import declared
from hansa.rounds.messages import Lost, Order, Trained, scoped
from hansa.server import ServerTransform
from hansa.types import BUFFERS, MODEL, Vector, Vectors
from hansa.vectors.arithmetic import all_finite


@dataclass(slots=True, eq=False)
class Mixed:
    """What a cohort's round came to."""

    trained: dict[int, Trained] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    peer: Counter[int] = field(default_factory=Counter)
    exchanges: int = 0
    info: dict[str, float] = field(default_factory=dict)
    mean: Vector | None = None
    alive: int = 0


@torch.no_grad()
def train_together(phase: LocalPhase, order: Order, got: Vectors, shell: Shell, samples: Sequence[int]) -> Mixed:
    """Every step: those who are active take a local step, then everyone gossips; or the other way round."""
    assert phase.mixing is not None
    return _Cohort(phase, phase.mixing, order, got, shell, samples).run()


class _Cohort:
    def __init__(
        self,
        phase: LocalPhase,
        mixing: Mixing,
        order: Order,
        got: Vectors,
        shell: Shell,
        samples: Sequence[int],
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
        rule = selected() if mixing.adapted else mixing.active
        self.active: Activity = declared(rule, Activity, "among")(order.reporters)
        self.rows = self._rows()
        self.public = torch.stack(self._remembered("local/public")) if mixing.compressor is not None else None
        self.shared: tuple[str, ...] = declared(phase.optimizer, ServerTransform, "shared")
        self.descents: dict[int, Descent] = {}
        self.batches: dict[int, Drawn | None] = {}
        self.steps: Counter[int] = Counter()
        self.losses: list[float] = []
        self.mixed = Mixed()

    def run(self) -> Mixed:
        self._pass_on()
        for step in range(self.order.work.steps):
            moves = self._compute(step)
            if not self.mixer.positions:
                return self.mixed
            turn = self.order.round * self.order.work.steps + step + 1
            if (turn if self.mixing.persistent else step + 1) % self.mixing.every == 0:
                self._gossip(turn)
            for position, before, after in moves:
                self.rows.shift(position, before, after)
        self._finish()
        return self.mixed

    def _survivors(self) -> list[int]:
        return [self.clients[i] for i in self.mixer.positions]

    def _active(self, step: int, clients: Sequence[int]) -> list[int]:
        return self.active.draw(self.order.round, step, clients, self.order.key)

    def _rows(self) -> Rows:
        """Rows that are kept, or never mixed; else dense ones, or lazy ones where the cost rule prefers them."""
        n, steps = len(self.clients), self.order.work.steps
        if self.mixing.persistent:
            return DenseRows(torch.stack(self._remembered("local/row")))
        if self.mixing.compressor is not None:
            return DenseRows(self.start.repeat(n, 1))
        if self.mixer.still:
            return ApartRows(self.start)
        active = [len(self._active(step, self.clients)) for step in range(steps)]
        if lazy_pays(n, active, self.mixing.every, self.mixer.links, self.start.numel()):
            return LazyRows(self.start, n, sum(active))
        return DenseRows(self.start.repeat(n, 1))

    def _remembered(self, name: str) -> list[Vector]:
        """A row of every client that outlives the round; the model received where there is none, or none yet."""
        kept = [self.order.memory.get(client, {}).get(name) for client in self.clients]
        return [row if row is not None and self.mixing.persistent else self.start for row in kept]

    def _compute(self, step: int) -> list[tuple[int, Vector, Vector]]:
        """The local steps of those who are active; given back where they are made only after the mixing."""
        active = self._active(step, self._survivors())
        if not active:
            return []
        later: list[tuple[int, Vector, Vector]] = []
        positions = [self.position[client] for client in active]
        inside = isinstance(self.rows, DenseRows) and self.mixing.order != "combine-then-adapt"
        rows = [self.rows.rows[i] for i in positions] if inside else self.rows.read(positions)  # type: ignore[attr-defined]
        for client, position, row in zip(active, positions, rows, strict=True):
            loss, after = self._local_step(client, row, inside)
            if not all_finite(after):
                detail = f"its model left the numbers at step {step}; its cluster went on without it"
                self.mixed.lost.append(Lost(client, "non-finite", detail))
                self.mixer.lose(position)
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
            work = Work(self.order.work.steps, min(self.order.work.batch_size, self.samples[client]))
            self.batches[client] = shell.rows(client, work, key.child("batch"))
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

    def _descent(self, client: int) -> Descent:
        if client not in self.descents:
            memory = self.order.memory.get(client, {})
            correction = self.phase.solver.correction(self.got, scoped(memory, "solver"))
            descent = self.phase.descent(self.order.round, self.got[MODEL], correction)
            if self.mixing.persistent:
                descent.restore(scoped(memory, "local/optimizer"), self.got[MODEL])
            self.descents[client] = descent
        return self.descents[client]

    def _pass_on(self) -> None:
        """The server sends the model to the reporters, who pass it on inside the cluster."""
        if self.mixing.persistent:
            return
        size = Packet.of(self.start).nbytes
        reporters = self.order.reporters
        others = len(self.mixer.positions) - len(reporters)
        for place, client in enumerate(reporters):
            share = others // len(reporters) + (place < others % len(reporters))
            if share:
                self.mixed.peer[client] += share * size

    def _gossip(self, turn: int) -> None:
        """Everyone's exchange with its neighbours; ``turn`` counts the steps of the run."""
        alive = self._survivors()
        averaged = self.mixing.average_every is not None and turn % self.mixing.average_every == 0
        self.mixed.exchanges += 1
        if self.mixing.compressor is not None and not averaged:
            self._gossip_compressed(turn)
            return
        (self.rows.average if averaged else self.rows.mix)(self.mixer)
        for name in self.shared:
            self._share(name, averaged)
        size = Packet.of(self.start).nbytes + len(self.shared) * Packet.of(self.got[MODEL]).nbytes
        if averaged:
            sent = [math.ceil(2 * (len(alive) - 1) / len(alive) * size)] * len(alive)
        else:
            sent = (self.mixer.degrees * size).tolist()
        self.mixed.peer.update(dict(zip(alive, sent, strict=True)))

    def _share(self, name: str, averaged: bool) -> None:
        """A row of the local optimizers that gossips with the models."""
        descents = [self._descent(client) for client in self._survivors()]
        for descent in descents:
            descent.begin()
        rows = torch.stack([descent.state[name] for descent in descents])
        if averaged:
            mixed = rows.mean(dim=0).expand_as(rows)
        else:
            mixed = self.mixer.dense(rows.dtype).to(rows.device) @ rows
        for descent, row in zip(descents, mixed, strict=True):
            descent.state = {**descent.state, name: row}

    def _gossip_compressed(self, turn: int) -> None:
        """CHOCO: neighbours hear the compressed difference to a public copy, X <- X + gamma (W - I) Xhat."""
        assert isinstance(self.rows, DenseRows)
        assert self.public is not None
        assert self.mixing.compressor is not None
        for degree, position in zip(self.mixer.degrees.tolist(), self.mixer.positions, strict=True):
            client = self.clients[position]
            key = self.order.key.child("gossip", turn, client)
            packet = self.mixing.compressor.encode(self.rows.rows[position] - self.public[position], key)
            heard = decode(packet, self.mixing.compressor, dim=self.start.numel())
            self.public[position] += heard.to(self.public.device)
            self.mixed.peer[client] += degree * packet.nbytes
        alive = self.mixer.positions
        public = self.public[alive]
        self.rows.rows[alive] += self.mixing.consensus_rate * (self.rows.matrix(self.mixer) @ public - public)

    def _finish(self) -> None:
        reporters = [client for client in self.order.reporters if self.mixer.alive[self.position[client]]]
        loss = math.fsum(self.losses) / len(self.losses) if self.losses else None
        finals = self.rows.read([self.position[client] for client in reporters]) if reporters else ()
        for client, row in zip(reporters, finals, strict=True):
            moved = row - self.start
            buffers = moved[self.dim :] if row.numel() > self.dim else None
            self.mixed.trained[client] = Trained(moved[: self.dim], buffers, loss, self._memory(client, row))
        self.mixed.info["consensus"] = self.rows.spread(self.mixer, self.dim)
        if self.order.mean:
            self.mixed.mean = self.rows.mean(self.mixer).to(self.start)
            self.mixed.alive = len(self.mixer.positions)

    def _memory(self, client: int, row: Vector) -> Vectors:
        """What a client whose model lives on keeps: the model, its public copy, its optimizer."""
        if not self.mixing.persistent:
            return {}
        kept = self.descents[client].kept() if client in self.descents else {}
        public = {} if self.public is None else {"local/public": self.public[self.position[client]].clone()}
        optimizer = {f"local/optimizer/{name}": value.clone() for name, value in kept.items()}
        return {"local/row": row.clone(), **public, **optimizer}
